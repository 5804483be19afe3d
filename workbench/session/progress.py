"""The progress bar of whoever waits for a session."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tqdm.auto import tqdm

from workbench.session.snapshot import Snapshot


def steps_bar(wanted: bool) -> AbstractContextManager[tqdm | None]:
    """Make a bar that counts steps and is closed at the end of a block, or none."""
    return tqdm(unit="step") if wanted else nullcontext()


def advance(bar: tqdm | None, now: Snapshot) -> None:
    """Show how far the run has come, if somebody wants to see it."""
    if bar is None:
        return
    bar.total, bar.n = now.target, now.done
    if now.steps:
        bar.set_postfix_str(f"loss {now.steps[-1].loss:.4g}", refresh=False)
    bar.refresh()
