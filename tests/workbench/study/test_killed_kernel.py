"""A study in a real kernel that is killed with SIGKILL and started anew: 3 variants, 3 seeds, the demo's model."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from patience import HANG_S

STUDY = """
import os, torch
from functools import partial
from dataclasses import replace
from pathlib import Path
from l2l_core import Depth, EmulatedDevice, Relay, RelayConfig
from workbench import Study
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model
from workbench.lessons.demo_values import FULL

settings, corpus = replace(FULL, layers=12), load_corpus()
held_out = [draw_batch(corpus.held_out, settings, torch.Generator().manual_seed(9))]

def make_relay(seed):
    adam = partial(torch.optim.AdamW, lr=settings.learning_rate)
    return Relay(make_model(replace(settings, seed=seed)), adam, EmulatedDevice(), config=RelayConfig(micro_batches=2))

def batches(seed):
    drawn = torch.Generator().manual_seed(seed)
    for step in range(100):
        if seed == 1 and step == 6:
            Path(f"{folder}.reached").touch()
        yield draw_batch(corpus.train, settings, drawn)

variants = {"12 layers": Depth(12), "copies": Depth({0: 3, 5: 12}, grow="top", shrink="top"),
            "identity": Depth({0: 3, 5: 12}, grow="identity", shrink="top")}
study = Study(make_relay, variants, seeds=range(3), steps=9, batches=batches, held_out=held_out, folder=folder,
              evaluate_every=3, autosave_s=0.2)
study.run(report=None)
Path(f"{folder}.csv").write_text(study.frame(seconds=False).to_csv())
Path(f"{folder}.txt").write_text(str(study.table()))
study.save(f"{folder}.pdf")
"""


@contextmanager
def kernel(folder: Path) -> Iterator[tuple[BlockingKernelClient, int]]:
    """Start a kernel in `folder`; yield its client and its process number."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(folder), env={**os.environ, "OMP_NUM_THREADS": "1"})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=HANG_S)
        printed: list[str] = []
        client.execute_interactive(
            "import os; print(os.getpid())",
            timeout=HANG_S,
            output_hook=lambda message: printed.append(message["content"].get("text", "")),
        )
        yield client, int("".join(printed))
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def run_study(client: BlockingKernelClient, name: str) -> None:
    reply = client.execute_interactive(f"folder = {name!r}\n{STUDY}", timeout=10 * HANG_S, output_hook=lambda _: None)
    assert reply["content"]["status"] == "ok", "\n".join(reply["content"].get("traceback", ()))


@pytest.mark.slow
def test_a_study_whose_kernel_was_killed_gives_the_same_frame_table_and_figure(tmp_path: Path) -> None:
    with kernel(tmp_path) as (client, pid):
        client.execute(f"folder = 'killed'\n{STUDY}")
        end = time.monotonic() + 10 * HANG_S
        while not (tmp_path / "killed.reached").exists():
            assert time.monotonic() < end, "the study never came to its second seed"
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
    assert not (tmp_path / "killed.csv").exists()
    with kernel(tmp_path) as (client, _):
        run_study(client, "killed")
        run_study(client, "undisturbed")
    for ending in ("csv", "txt", "pdf"):
        killed, undisturbed = ((tmp_path / f"{name}.{ending}").read_bytes() for name in ("killed", "undisturbed"))
        assert killed == undisturbed, ending
    rows = (tmp_path / "killed.csv").read_text().splitlines()
    assert len(rows) - 1 >= 3 * 3 * 9, "a row for every step of nine runs"
