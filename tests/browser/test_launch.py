"""Several workers in a notebook: started, watched side by side, steered as one, and gone with the kernel."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import rank_training
from lab import Lab, Notebook, keep, until

pytestmark = pytest.mark.browser

MODULE = Path(rank_training.__file__).read_text(encoding="utf-8")
LAUNCH = "import workbench\nfrom my_train import train\n\nbench = workbench.launch(train, workers=2)\nbench"


def ranks_of(lab: Lab) -> list[psutil.Process]:
    """The processes that ranks run in."""
    below = [process for kernel in lab.kernels() for process in kernel.children(recursive=True)]
    return [process for process in below if "spawn_main" in " ".join(process.cmdline())]


@pytest.mark.slow
def test_two_workers_are_seen_side_by_side_and_steered_as_one(open_notebook: Callable[..., Notebook], lab: Lab) -> None:
    pids = "print(*(one.process.pid for one in bench.session.ranks))"
    notebook = open_notebook(f"%%writefile my_train.py\n{MODULE}", LAUNCH, pids, "print(6 * 7)")
    notebook.run_cell(0)
    notebook.run_cell(1)
    bench, page = notebook.bench(1), notebook.page
    assert bench.state == "idle" and "2 workers, " in bench.title
    pictures = bench.root.locator(".l2l-rank svg.l2l[aria-label=Relay]")
    assert pictures.count() == 2
    left, right = (pictures.nth(rank).bounding_box() for rank in (0, 1))
    assert left and right and left["y"] == right["y"] and left["x"] + left["width"] <= right["x"], "side by side"

    bench.press("Run")
    bench.wait_for_step(2)
    assert bench.root.locator("svg.l2l[aria-label=Loss]").count() == 1, "one loss"
    moments = {rank: set() for rank in (0, 1)}

    def both_move() -> bool:
        for rank, seen in moments.items():
            seen.add(pictures.nth(rank).text_content())
        return all(len(seen) > 3 for seen in moments.values())

    until(both_move, page, "both relays to move")
    keep(page, "launch_running")
    bench.press("Edits")
    bench.press("Apply")
    until(
        lambda: "5 layers" in bench.root.inner_text() or bench.button("Undo").is_enabled(),
        page,
        "an edit on all workers",
    )
    bench.press("Pause")
    bench.wait_for_state("paused")
    bench.press("Waits")
    table = bench.root.locator("svg.l2l[aria-label^='Who waits for whom in step']")
    until(lambda: table.count() == 1, page, "who waits for whom")
    keep(page, "launch_waits")
    bench.press("Relays")

    victim = int(notebook.run_cell(2).split()[1])
    os.kill(victim, signal.SIGKILL)
    bench.press("Run")
    bench.wait_for_state("failed")
    assert "worker 1 is gone: its process was ended by SIGKILL" in bench.root.inner_text()
    until(
        lambda: re.search("Worker 1: its process was ended", bench.root.inner_text()),
        page,
        "who died, beside its picture",
    )
    keep(page, "launch_killed")
    assert notebook.run_cell(3) == "42", "the notebook goes on"
    assert len(ranks_of(lab)) == 1
    left_over = ranks_of(lab)
    lab.shut_down_kernels()
    assert not psutil.wait_procs(left_over, 20)[1], "the kernel has gone, and its workers with it"
