"""The progress bar of whoever waits for a session."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from tqdm.auto import tqdm

from workbench.session.snapshot import Snapshot


def progress_bar(enabled: bool) -> AbstractContextManager[tqdm | None]:
    """Make a bar that counts steps and is closed at the end of a block, or none."""
    return tqdm(unit="step") if enabled else nullcontext()


def update_bar(bar: tqdm | None, snapshot: Snapshot) -> None:
    """Show how far the run has come, if somebody wants to see it."""
    if bar is None:
        return
    bar.total, bar.n = snapshot.target, snapshot.done
    if snapshot.steps:
        bar.set_postfix_str(f"loss {snapshot.steps[-1].loss:.4g}", refresh=False)
    bar.refresh()
