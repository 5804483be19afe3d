"""Ways to train one model in less device memory, each set up as in its documentation, for peers.py.

A way is a function that makes a `Peer` for a model and a batch. All have the same GPT-2 without dropout, the same
micro-batches, `AdamW(fused=True)` and the global gradient norm clipped to 1, unless the peer's note states otherwise.
Packages are imported where they are used, so that one that is missing or does not run here fails alone, with its own
message.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from _common import cut, make_gpt2
from torch import nn
from transformers import GPT2LMHeadModel

from l2l_core import Relay, RelayConfig
from workbench.lessons.plain_training import StorageMeter

Batch = dict[str, torch.Tensor]
MAX_NORM = 1.0

make_optimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)


@dataclass(frozen=True)
class Shape:
    """Model, batch and device of a comparison."""

    layers: int
    width: int
    length: int
    rows: int
    micro_batches: int
    keep: int
    device: str

    @property
    def on_cuda(self) -> bool:
        """True for a device with a separate allocator."""
        return self.device.startswith("cuda")

    def model(self) -> GPT2LMHeadModel:
        """Make the model on the host, every time with the same weights."""
        return make_gpt2(self.layers, self.width, self.length, dropout=0.0, tie_word_embeddings=False, use_cache=False)


@dataclass
class Peer:
    """One way that is ready to train.

    Attributes:
        step: makes a whole step; gives its loss.
        metered_step: makes a step; gives the most bytes of an emulated device during it. None: the way has no device here.
        host_bytes: what of the host a way books itself; None: it does not.
        folder: where it keeps files.
        note: in what it differs from the others.
        trains: False: `step` is a forward, which is all that the way is for.
    """

    step: Callable[[], float]
    metered_step: Callable[[], int] | None = None
    host_bytes: Callable[[], int] | None = None
    folder: Path | None = None
    note: str = ""
    trains: bool = True

    def disk_bytes(self) -> int:
        """Bytes of its files."""
        return sum(file.stat().st_size for file in self.folder.rglob("*") if file.is_file()) if self.folder else 0


Way = Callable[[Shape, Batch, ExitStack], Peer]


# -- all on the device -------------------------------------------------------------------------------------------------


def in_core(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Everything on the device."""
    return _plain(shape, shape.model().to(shape.device), batch)


def in_core_recompute(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Only inputs of layers are kept for backward: torch.utils.checkpoint, not reentrant, around every block."""
    model = shape.model().to(shape.device)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return _plain(shape, model, batch)


def _plain(shape: Shape, model: nn.Module, batch: Batch) -> Peer:
    optimizer = make_optimizer(model.parameters())
    step = partial(_accumulate, model, optimizer, _parts(shape, batch))

    def metered_step() -> int:
        held = [*model.parameters(), *model.buffers(), *batch.values(), *_state_tensors(optimizer)]
        with StorageMeter(held) as meter:
            step()
        return meter.peak

    return Peer(step, metered_step, host_bytes=lambda: 0)


# -- PyTorch's own -----------------------------------------------------------------------------------------------------


def save_on_cpu(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Activations wait on the host: torch.autograd.graph.save_on_cpu."""
    model = shape.model().to(shape.device)
    optimizer = make_optimizer(model.parameters())
    saving = partial(torch.autograd.graph.save_on_cpu, pin_memory=shape.on_cuda)
    note = "" if shape.on_cuda else "on the CPU it moves nothing"
    return Peer(partial(_accumulate, model, optimizer, _parts(shape, batch), saving), note=note)


def fsdp2(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Weights, gradients and state on the host, a block at a time on the device: fully_shard with CPUOffloadPolicy."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model, mesh = shape.model(), init_device_mesh(shape.device.split(":")[0], (1,))
    for block in (*model.transformer.h, model):
        fully_shard(block, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=shape.on_cuda))
    optimizer = make_optimizer(model.parameters())
    return Peer(partial(_accumulate, model, optimizer, _parts(shape, batch)))


# -- packages ----------------------------------------------------------------------------------------------------------


def torchao_offload(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Optimizer state and updates on the host: torchao's CPUOffloadOptimizer."""
    from torchao.optim import CPUOffloadOptimizer

    model = shape.model().to(shape.device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)
    step = partial(_accumulate, model, optimizer, _parts(shape, batch), max_norm=math.inf)
    return Peer(step, note="does not clip: gradients leave for the host during backward")


def accelerate_cpu(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Weights on the host, a module at a time on the device: accelerate.cpu_offload."""
    from accelerate import cpu_offload

    return _inference(shape, cpu_offload(shape.model(), execution_device=torch.device(shape.device)), batch)


def accelerate_disk(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Weights in files: accelerate.disk_offload."""
    from accelerate import disk_offload

    folder = stack.enter_context(TemporaryDirectory())
    model = disk_offload(shape.model(), folder, execution_device=torch.device(shape.device))
    return _inference(shape, model, batch, Path(folder))


def _inference(shape: Shape, model: nn.Module, batch: Batch, folder: Path | None = None) -> Peer:
    """Forward of all micro-batches: gradients of these weights are lost in backward, so they cannot be trained."""
    parts = _parts(shape, batch)

    @torch.no_grad()
    def forward() -> float:
        return float(sum(model(**part).loss / len(parts) for part in parts))

    return Peer(forward, folder=folder, trains=False, note="inference only: a forward")


def zero_offload(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Gradients, optimizer state and updates on the host: DeepSpeed, ZeRO stage 2."""
    return _deepspeed(shape, batch, {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": shape.on_cuda}})


def zero_infinity_cpu(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Weights too: DeepSpeed, ZeRO stage 3."""
    place = {"device": "cpu", "pin_memory": shape.on_cuda}
    return _deepspeed(shape, batch, {"stage": 3, "offload_optimizer": place, "offload_param": place})


def zero_infinity_nvme(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """All of it in files: DeepSpeed, ZeRO-Infinity."""
    folder = stack.enter_context(TemporaryDirectory())
    place = {"device": "nvme", "nvme_path": folder, "pin_memory": shape.on_cuda}
    zero = {"stage": 3, "offload_optimizer": place, "offload_param": place}
    return _deepspeed(shape, batch, zero, Path(folder))


def _deepspeed(shape: Shape, batch: Batch, zero: dict[str, Any], folder: Path | None = None) -> Peer:
    os.environ.setdefault("LOCAL_RANK", "0")  # the variables that its launcher sets
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": shape.rows,
        "gradient_accumulation_steps": shape.micro_batches,
        "gradient_clipping": MAX_NORM,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # the kernel of all others, not DeepSpeed's own
        "zero_allow_untested_optimizer": True,
    }
    model = shape.model()
    # Stage 3 takes the optimizer's parameters apart in place, so it has to be of the very model that is handed over.
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model.parameters()), config=config)
    parts = _parts(shape, batch)

    def step() -> float:
        losses = []
        for part in parts:
            loss = engine(**part).loss
            engine.backward(loss)
            engine.step()  # updates once per gradient_accumulation_steps
            losses.append(loss.detach() / len(parts))
        return float(sum(losses))

    return Peer(step, folder=folder)


def roundpipe(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """Weights and state on the host, blocks stream through the device: RoundPipe, with updates that are waited for."""
    from roundpipe import OptimizerCtx, RoundPipeRunConfig, wrap_model_to_roundpipe

    config = RoundPipeRunConfig(num_microbatch=shape.micro_batches)
    model = wrap_model_to_roundpipe(shape.model(), use_sequential_preset=False, model_run_config=config)
    with OptimizerCtx():
        optimizer = make_optimizer(model.parameters())

    def update() -> None:
        nn.utils.clip_grad_norm_((param for group in optimizer.param_groups for param in group["params"]), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        model.step(update, is_async=False)  # its own default trains on weights that are one step old
        return float(loss.detach())

    return Peer(step)


# -- the relay ---------------------------------------------------------------------------------------------------------


def relay(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """One layer at a time; activations wait on the host."""
    return _relay(shape, batch, stack, keep=0)


def relay_keeping(shape: Shape, batch: Batch, stack: ExitStack) -> Peer:
    """The last layers keep weights and graphs on the device, and are not recomputed."""
    keep = min(shape.keep, shape.layers)
    return _relay(shape, batch, stack, keep=keep, note=f"graphs of {keep} layers stay")


def _relay(shape: Shape, batch: Batch, stack: ExitStack, keep: int, note: str = "") -> Peer:
    config = RelayConfig(
        micro_batches=shape.micro_batches,
        stash="host",
        resident=keep,
        keep=keep,
        update="deferred",
        max_grad_norm=MAX_NORM,
    )
    one = stack.enter_context(Relay(shape.model(), make_optimizer, shape.device, config=config))
    return Peer(
        lambda: one.step(batch).loss,
        metered_step=lambda: one.step(batch).peak_device_bytes,
        host_bytes=lambda: one.host.peak,
        note=note,
    )


WAYS: dict[str, Way] = {
    "in core": in_core,
    "in core, recompute": in_core_recompute,
    "save_on_cpu": save_on_cpu,
    "torchao CPUOffloadOptimizer": torchao_offload,
    "FSDP2, CPU offload": fsdp2,
    "accelerate, CPU offload": accelerate_cpu,
    "accelerate, disk offload": accelerate_disk,
    "DeepSpeed ZeRO-Offload": zero_offload,
    "DeepSpeed ZeRO-Infinity, host": zero_infinity_cpu,
    "DeepSpeed ZeRO-Infinity, disk": zero_infinity_nvme,
    "RoundPipe": roundpipe,
    "relay": relay,
    "relay, keeps graphs": relay_keeping,
}


# -- what they share ---------------------------------------------------------------------------------------------------


def _parts(shape: Shape, batch: Batch) -> list[Batch]:
    on_device = {name: value.to(shape.device) for name, value in batch.items()}
    return cut(on_device, shape.micro_batches)


def _accumulate(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: list[Batch],
    around: Callable[[], Any] = nullcontext,
    max_norm: float = MAX_NORM,
) -> float:
    """One step of gradient accumulation; `around` every forward is what the way does with its activations."""
    losses = []
    for part in parts:
        with around():
            loss = model(**part).loss / len(parts)
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return float(sum(losses))


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    values = (value for state in optimizer.state.values() for value in state.values())
    return (value for value in values if isinstance(value, torch.Tensor))
