"""A recorded run in the workbench again: the same panels without the buttons, and no model anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from workbench.panels.dashboard import Dashboard
from workbench.panels.display import Bundle
from workbench.panels.explore_panel import ExplorePanel
from workbench.panels.export_panel import ExportPanel
from workbench.panels.heat_panel import HeatPanel
from workbench.panels.layers_panel import LayersPanel
from workbench.panels.loss_panel import LossPanel
from workbench.panels.memory_panel import MemoryPanel
from workbench.panels.recorded_run_panels import (
    FactsPanel,
    JournalPanel,
    RecordedInsidePanel,
    RecordedRacePanel,
    RecordedRelayPanel,
)
from workbench.panels.timeline_panel import TimelinePanel
from workbench.panels.verdict_panel import BoundsPanel, VerdictPanel
from workbench.panels.waits_panel import RecordedWaitsPanel
from workbench.pictures import Picture, Table, bundle_of
from workbench.runs import Comparison, NamedRun, RecordedRun, RunCursor, compare_runs, load_run, name_runs


class ReplayBench(Dashboard):
    """See a recorded run as it looked in the workbench, at any step that was recorded whole.

    ``workbench.replay(path)`` at the end of a cell shows it. Nothing is trained and no model is built.

    Args:
        run: from `load_run`.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.session = RunCursor(run)  # by this name panels find it
        views = {
            "relay": (RecordedRelayPanel,),
            "time": (TimelinePanel, BoundsPanel, ExplorePanel, ExportPanel),
            "memory": (MemoryPanel, ExportPanel),
            "layers": (LayersPanel,),
            "edits": (JournalPanel,),
            "loss": (LossPanel,),
            "figures": (HeatPanel,),
            # nothing can be begun here, so where none was recorded these views would stay empty
            **({"waits": (RecordedWaitsPanel,)} if run.others else {}),
            **({"race": (RecordedRacePanel,)} if run.races else {}),
            **({"inside": (RecordedInsidePanel,)} if run.looks else {}),
        }
        about = ipywidgets.HTML("".join(_describe(run)))
        self.slider = ipywidgets.SelectionSlider(
            options=_traced_moments(run),
            value=self.session.number,
            description="after step",
            style={"description_width": "76px"},
            layout={"width": "520px"},
        )
        self.slider.observe(lambda change: self.session.select(change["new"]), "value")
        super().__init__(self.session, (FactsPanel, VerdictPanel), views, header_widgets=(about, self.slider))


class RunComparison:
    """Recorded runs compared, at the end of a cell: pictures and tables, which need no kernel.

    Attributes:
        comparison: what there is to see.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def pictures(self) -> Sequence[Picture | Table]:
        """List everything that is shown, from the top."""
        steps = [picture for one in self.comparison.steps for picture in (one.timeline, one.memory)]
        return [self.comparison.table, self.comparison.loss, *steps]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        bundle = bundle_of(self.pictures())
        heads = [f"<p>{escape(sentence)}</p>" for sentence in self.comparison.said]
        return {**bundle, "text/html": "".join(heads) + bundle["text/html"]}


def replay(path: str | Path) -> ReplayBench:
    """Open a recorded run, a file of `Recorder` or the demo's folder.

    Raises:
        FileNotFoundError, ValueError: as of `load_run`.
    """
    return ReplayBench(load_run(path))


def compare(*paths: str | Path) -> RunComparison:
    """Show two recorded runs or more side by side.

    Raises:
        ValueError: fewer than two; or as of `load_run`.
        FileNotFoundError: as of `load_run`.
    """
    if len(paths) < 2:
        raise ValueError(f"compare takes two recorded runs or more, not {len(paths)}; replay(path) shows one")
    runs = [load_run(path) for path in paths]
    return RunComparison(
        compare_runs([NamedRun(name, run.snapshot(), run) for name, run in zip(name_runs(runs), runs, strict=True)])
    )


def _traced_moments(run: RecordedRun) -> list[tuple[str, int]]:
    """Steps that were recorded whole, by the words of the slider; the end of the run is always among them."""
    words: dict[str, int] = {}
    for number in sorted({*run.traced, len(run.moments) - 1}):
        snapshot = run.snapshot(number)
        said = str(snapshot.step) if len(snapshot.branches) < 2 else f"{snapshot.step} of {snapshot.branch}"
        # The end of the run may show the same step once more, after an edit.
        words[said if said not in words else f"{said}, changed"] = number
    return list(words.items())


def _describe(run: RecordedRun) -> Sequence[str]:
    # Titles, names and facts are the user's, so they are escaped.
    yield f"<strong>{escape(run.title)}</strong>, recorded {escape(run.began)}: a replay, nothing is trained here. "
    yield "" if run.complete else "The recording was cut short. "
    yield "".join(f"<br>{escape(name)}: {escape(words)}" for name, words in run.facts.items())
