"""Loggers for W&B, trackio and MLflow, each with the package's own run.

They log the figures of every step (loss, learning rate, depth, times, bytes), edits and other changes as texts at their step with
the held-out loss after them, and the settings of the relay once.
"""

from __future__ import annotations

import importlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from workbench.session.loggers import scalars_of, scalars_of_change, scalars_of_held_out, tag_of, text_of
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_values import Change, HeldOutRow, StepRow


class _ExperimentLogger(ABC):
    """A logger to a package for experiments.

    Raises:
        ModuleNotFoundError: the package is not installed.
    """

    package: str
    has_settings = False

    def _import(self) -> Any:
        try:
            return importlib.import_module(self.package)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{type(self).__name__} needs a package that is not installed: pip install {self.package}",
                name=error.name,
            ) from error

    @abstractmethod
    def _log(self, values: Mapping[str, float], step: int) -> None:
        """Log figures at a step."""

    @abstractmethod
    def _log_text(self, text: str, step: int, branch: str) -> None:
        """Log a change of a branch at a step."""

    @abstractmethod
    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        """Log model, device and settings of the relay."""

    @abstractmethod
    def close(self) -> None:
        """End the run, if this logger began it; may be called twice."""

    def log_step(self, row: StepRow) -> None:
        """Log the figures of a step."""
        self._log(scalars_of(row), row.step)

    def log_change(self, change: Change) -> None:
        """Log a change as text, and for a measured edit the held-out loss."""
        self._log_text(text_of(change), change.step, change.branch)
        if values := scalars_of_change(change):
            self._log(values, change.step)

    def log_held_out(self, row: HeldOutRow) -> None:
        """Log the values of a measurement on held-out data."""
        self._log(scalars_of_held_out(row), row.step)

    def watch(self, now: Snapshot) -> None:
        """Log model, device and settings, once."""
        if not self.has_settings:
            self.has_settings = True
            facts = {"model": now.model, "weights": now.num_params, "device": now.device, "depth": len(now.layers)}
            self._log_settings(facts | now.config.to_plain())


class Wandb(_ExperimentLogger):
    """Logger to Weights & Biases, offline too (``WANDB_MODE=offline``).

    A change is logged under "change", and in the run's summary. Names of values of a branch other than "main" end with its
    name, as ``loss/slim``. W&B drops rows with a lower step than the last one, so those of a branch that is behind another.

    Args:
        run: a run of ``wandb.init``, which stays open when the logger is closed; by default a new one.
        options: of ``wandb.init``, such as project and name.

    Example:
        See `JsonLines`; ``Wandb(project="depth")`` takes its place in `loggers`.
    """

    package = "wandb"

    def __init__(self, run: Any = None, **options: Any) -> None:
        self._owns_run = run is None
        self.run = self._import().init(**options) if run is None else run

    def _log(self, values: Mapping[str, float], step: int) -> None:
        self.run.log(dict(values), step=step)

    def _log_text(self, text: str, step: int, branch: str) -> None:
        self.run.log({tag_of("change", branch): text}, step=step)

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        self.run.config.update(dict(settings), allow_val_change=True)

    def close(self) -> None:
        """Finish the run, if this logger began it."""
        if self._owns_run:
            self.run.finish()


class Trackio(Wandb):
    """Logger to trackio, which keeps runs in a local database; names of branches as in `Wandb`.

    Args:
        run: a run of ``trackio.init``, which stays open when the logger is closed; by default a new one.
        options: of ``trackio.init``, such as project and name.

    Example:
        See `JsonLines`; ``Trackio(project="depth")`` takes its place in `loggers`.
    """

    package = "trackio"

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        self.run.config.update(settings)


class MLflow(_ExperimentLogger):
    """Logger to MLflow: metrics, parameters, and changes in ``changes.txt`` among the artifacts.

    Names of metrics of a branch other than "main" end with its name, as ``loss/slim``.

    Args:
        run_id: a run to which it logs, and which it does not end; by default it begins one.
        tracking_uri: where runs are kept; by default MLflow's own setting.
        experiment: name of the experiment of a new run.

    Example:
        See `JsonLines`; ``MLflow(experiment="depth")`` takes its place in `loggers`.
    """

    package = "mlflow"

    def __init__(self, run_id: str | None = None, tracking_uri: str | None = None, experiment: str = "Default") -> None:
        tracking = self._import().tracking
        self._client: Any = tracking.MlflowClient(tracking_uri)
        self._owns_run = run_id is None
        self.run_id = self._begin(experiment) if run_id is None else run_id
        self._changes: list[str] = []

    def _begin(self, experiment: str) -> str:
        found = self._client.get_experiment_by_name(experiment)
        number = self._client.create_experiment(experiment) if found is None else found.experiment_id
        return self._client.create_run(number).info.run_id

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            if math.isfinite(value):  # its stores refuse others, and names with other characters
                self._client.log_metric(self.run_id, re.sub(r"[^/\w.\- ]", "_", name), value, step=step)

    def _log_text(self, text: str, step: int, branch: str) -> None:
        self._changes.append(f"{tag_of(f'step {step}', branch)}: {text}")
        self._client.log_text(self.run_id, "\n".join(self._changes), "changes.txt")

    def _log_settings(self, settings: Mapping[str, Any]) -> None:
        for name, value in settings.items():
            self._client.log_param(self.run_id, name, value)

    def close(self) -> None:
        """End the run, if this logger began it."""
        if self._owns_run:
            self._client.set_terminated(self.run_id)
