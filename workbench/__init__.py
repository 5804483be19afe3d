"""Notebook workbench for `l2l_core`: sessions, pictures, panels and command line. The engine never imports it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from workbench.extras import is_ours, missing

if TYPE_CHECKING:  # for type checkers and editors, which do not run `__getattr__`
    from workbench.app import Workbench as Workbench
    from workbench.fit_bench import Fit as Fit
    from workbench.lab_bench import LabBench as LabBench
    from workbench.panels.plan_view import PlanView as PlanView
    from workbench.panels.ways import Ways as Ways
    from workbench.parallel_bench import Parallel as Parallel
    from workbench.pictures import text_view as text_view
    from workbench.rank_bench import launch as launch
    from workbench.replay_bench import compare as compare
    from workbench.replay_bench import replay as replay
    from workbench.runs import Recorder as Recorder
    from workbench.runs import load_run as load_run
    from workbench.runs import write_player as write_player
    from workbench.session import Autosave as Autosave
    from workbench.session import EarlyStopping as EarlyStopping
    from workbench.session import JsonLines as JsonLines
    from workbench.session import Logger as Logger
    from workbench.session import MLflow as MLflow
    from workbench.session import Session as Session
    from workbench.session import Snapshot as Snapshot
    from workbench.session import TensorBoard as TensorBoard
    from workbench.session import Trackio as Trackio
    from workbench.session import Wandb as Wandb
    from workbench.study import Study as Study
    from workbench.study import Variant as Variant
    from workbench.study import grid as grid

# Names, since imports would need torch and ipywidgets, and `doctor` must run without them.
_MODULE_OF = {
    "Workbench": "workbench.app",
    "Fit": "workbench.fit_bench",
    "LabBench": "workbench.lab_bench",
    "launch": "workbench.rank_bench",
    "Parallel": "workbench.parallel_bench",
    "PlanView": "workbench.panels.plan_view",
    "Ways": "workbench.panels.ways",
    "Autosave": "workbench.session",
    "EarlyStopping": "workbench.session",
    "JsonLines": "workbench.session",
    "Logger": "workbench.session",
    "MLflow": "workbench.session",
    "Session": "workbench.session",
    "Snapshot": "workbench.session",
    "TensorBoard": "workbench.session",
    "Trackio": "workbench.session",
    "Wandb": "workbench.session",
    "Study": "workbench.study",
    "Variant": "workbench.study",
    "grid": "workbench.study",
    "Recorder": "workbench.runs",
    "load_run": "workbench.runs",
    "write_player": "workbench.runs",
    "text_view": "workbench.pictures",
    "replay": "workbench.replay_bench",
    "compare": "workbench.replay_bench",
}


if not TYPE_CHECKING:  # type checkers read the imports above
    __all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `python -m workbench doctor` runs without torch and ipywidgets.

    Raises:
        ModuleNotFoundError: a package of the extra `workbench` is not installed; the message has the install command.
    """
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    try:
        return getattr(import_module(_MODULE_OF[name]), name)
    except ModuleNotFoundError as error:
        if is_ours(error):
            raise
        raise ModuleNotFoundError(f"workbench.{name}: {missing(error.name)}", name=error.name) from error


def __dir__() -> list[str]:
    return [*_MODULE_OF]  # for completion, including names that are not imported yet
