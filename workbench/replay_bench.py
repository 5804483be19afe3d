"""Widgets for recorded runs: the panels of the workbench without controls and without a model, and comparisons."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Widget that shows a recorded run as in the workbench, at any step that was recorded with its trace.

    ``workbench.replay(path)`` at the end of a cell shows it. Nothing is trained and no model is built.

    Args:
        run: the run, see `load_run`.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.session = RunCursor(run)  # panels read this attribute
        views = {
            "relay": (RecordedRelayPanel,),
            "time": (TimelinePanel, BoundsPanel, ExplorePanel, ExportPanel),
            "memory": (MemoryPanel, ExportPanel),
            "layers": (LayersPanel,),
            "edits": (JournalPanel,),
            "loss": (LossPanel,),
            "figures": (HeatPanel,),
            # A replay cannot start these, so the views are omitted if none was recorded.
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
    """Comparison of recorded runs at the end of a cell, as pictures and tables that need no kernel.

    Attributes:
        comparison: the data of the comparison.
    """

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def pictures(self) -> Sequence[Picture | Table]:
        """Return the pictures and tables, from the top."""
        steps = [picture for one in self.comparison.steps for picture in (one.timeline, one.memory)]
        return [self.comparison.table, self.comparison.loss, *steps]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        bundle = bundle_of(self.pictures())
        paragraphs = [f"<p>{escape(sentence)}</p>" for sentence in self.comparison.said]
        return {**bundle, "text/html": "".join(paragraphs) + bundle["text/html"]}


def replay(path: str | Path) -> ReplayBench:
    """Open a recorded run from a file of `Recorder` or the folder of a demo.

    Raises:
        FileNotFoundError, ValueError: see `load_run`.

    Example:
        >>> from workbench import Recorder, Session, replay
        >>> with Recorder("run.jsonl") as recorder, Session(relay, lambda: batch, loggers=[recorder]) as session:
        ...     session.run(2)
        ...     state = session.wait()
        >>> bench = replay("run.jsonl")  # at the end of a cell, `bench` shows it
        >>> bench.slider.options
        (('1', 0), ('2', 1))
        >>> bench.close()
    """
    return ReplayBench(load_run(path))


def compare(*paths: str | Path) -> RunComparison:
    """Show two recorded runs or more side by side.

    Raises:
        ValueError: fewer than two runs; or see `load_run`.
        FileNotFoundError: see `load_run`.

    Example:
        >>> from workbench import Recorder, Session, compare
        >>> for path, rate in (("slow.jsonl", 1e-3), ("fast.jsonl", 1e-2)):
        ...     relay.optimizer.param_groups[0]["lr"] = rate
        ...     with Recorder(path) as recorder, Session(relay, lambda: batch, loggers=[recorder]) as session:
        ...         session.run(2)
        ...         state = session.wait()
        >>> both = compare("slow.jsonl", "fast.jsonl")  # at the end of a cell, `both` shows them
        >>> len(both.pictures()) > 2
        True
    """
    if len(paths) < 2:
        raise ValueError(f"compare takes two recorded runs or more, not {len(paths)}; replay(path) shows one")
    runs = [load_run(path) for path in paths]
    return RunComparison(
        compare_runs([NamedRun(name, run.snapshot(), run) for name, run in zip(name_runs(runs), runs, strict=True)])
    )


def _traced_moments(run: RecordedRun) -> list[tuple[str, int]]:
    """Return (slider label, moment) for steps recorded with their trace, and for the end of the run."""
    moments: dict[str, int] = {}
    for number in sorted({*run.traced, len(run.moments) - 1}):
        snapshot = run.snapshot(number)
        label = str(snapshot.step) if len(snapshot.branches) < 2 else f"{snapshot.step} of {snapshot.branch}"
        # The end of the run may show the same step again, after an edit.
        moments[label if label not in moments else f"{label}, changed"] = number
    return list(moments.items())


def _describe(run: RecordedRun) -> Iterator[str]:
    # Titles, names and facts are the user's text, so they are escaped.
    yield f"<strong>{escape(run.title)}</strong>, recorded {escape(run.began)}: a replay, nothing is trained here. "
    yield "" if run.complete else "The recording was cut short. "
    yield "".join(f"<br>{escape(name)}: {escape(words)}" for name, words in run.facts.items())
