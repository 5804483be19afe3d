"""A program as a user would write it, started by torchrun: `docs/STRATEGIES.md` shows its lines."""

import sys
from functools import partial

import torch
from torch import nn

from l2l_core.parallel import Pipeline, PipelineJob, launched_rank, run_parallel, run_pipeline
from l2l_core.pipelines import one_forward_one_backward

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(8, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)), nn.Linear(16, 2)
)
batch = torch.randn(8, 8), torch.randn(8, 2)
job = PipelineJob.of(model, batch, 4, loss=nn.MSELoss(), layers=["1", "2", "3", "4"])

with launched_rank() as (rank, count):
    # as in a notebook: on copies, and every rank gets all results
    run = run_pipeline(job, one_forward_one_backward(count, 4), steps=3, optimizer=partial(torch.optim.AdamW, lr=1e-2))
    zero = run_parallel("ZeRO 3")
    print(f"rank {rank}: losses {run.losses}, ZeRO 3 sent {zero.sent_bytes} bytes", flush=True)

    # or step by step, this rank's part of the model itself
    pipeline = Pipeline(job, one_forward_one_backward(count, 4))
    optimizer = torch.optim.AdamW(list(pipeline.parameters().values()), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        loss = pipeline.step()
        optimizer.step()
        if loss is not None:
            print(f"loss {loss:.4f}", flush=True)
    print(f"rank {rank} sent {pipeline.report.sent_bytes} bytes", flush=True)
    assert count == len(run.ranks) == len(zero.ranks)
    if rank == 0 and len(sys.argv) > 1:
        torch.save({"losses": run.losses, "state": run.state, "ranks": run.ranks, "zero": zero}, sys.argv[1])
