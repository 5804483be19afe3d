"""Comparison of a step with the same step in core, and settings that train what is refused.

A step that trains other weights than plain training is undone and refused. No check of the model's code
finds all such cases: a layer may read a number that the forward left in a global dictionary, and an optimizer may couple layers
for some gradients only.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from l2l_core._torch import pytree
from l2l_core.config import RelayConfig
from l2l_core.devices import DeviceOutOfMemory
from l2l_core.step import VerifyReport
from l2l_core.trace import StepResult

Compare = Callable[[Any, RelayConfig], VerifyReport]  # trains a batch both ways, undoes it, and returns the report
# Trains a batch both ways, and undoes the step in core; the other one too, if they differ
Train = Callable[[Any, RelayConfig], tuple[StepResult, VerifyReport]]


class UnequalStepError(RuntimeError):
    """A step would train other weights than the same step in core. Nothing was trained.

    Attributes:
        report: the comparison.

    Example:
        >>> from l2l_core import UnequalStepError
        >>> notes = {}
        >>> class Scaled(nn.Sequential):
        ...     def forward(self, x):  # micro-batches take turns, so the note of the last one is read
        ...         notes["scale"] = x.std().item()
        ...         return super().forward(x) * notes["scale"]
        >>> options = {"loss": nn.CrossEntropyLoss(), "loss_over": "micro-batch", "config": RelayConfig(micro_batches=2)}
        >>> with Relay(Scaled(Block(), Block(), nn.Linear(16, 4)), device="cpu", **options) as scaled:
        ...     try:
        ...         result = scaled.step(batch)
        ...     except UnequalStepError as error:
        ...         print(error)
        this step would differ from the same step in core ... RelayConfig(schedule='depth_first') trains it ...
    """

    def __init__(self, message: str, report: VerifyReport) -> None:
        super().__init__(message)
        self.report = report


class InCoreError(Exception):
    """Training in core failed, so that nothing can be compared.

    Attributes:
        error: what it raised.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def in_core_errors() -> Iterator[None]:
    """Raise InCoreError for any exception in the block."""
    try:
        yield
    except Exception as error:
        raise InCoreError(error) from error


class StepCheck:
    """Decides which steps are compared with training in core, and compares them."""

    def __init__(self) -> None:
        self._compared: set[Hashable] = set()

    def is_due(self, config: RelayConfig, kind: Callable[[], Hashable], steps: int) -> bool:
        """Return whether the next step, after `steps` others, is to be compared."""
        if isinstance(config.verify, int):
            return steps % config.verify == 0
        return config.verify == "first" and kind() not in self._compared

    def run(
        self, train: Train, compare: Compare, batch: Any, config: RelayConfig, kind: Hashable, reason: str
    ) -> tuple[StepResult | None, str]:
        """Train on a batch beside training in core, unless there is a reason against it.

        Returns:
            The step, or None if it was not made, and the comparison or the reason in words.

        A kind that cannot be compared is not tried again.

        Raises:
            UnequalStepError: it would differ from training in core.
            Exception: the relay cannot train the batch.
        """
        if reason:
            self._compared.add(kind)
            return None, reason
        began_s = time.perf_counter()
        try:
            result, report = train(batch, config)
        except InCoreError as error:  # a failure of the step itself names the place
            self._compared.add(kind)
            return None, f"not compared with training in core, which failed: {type(error.error).__name__}: {error}"
        except DeviceOutOfMemory:  # the step's own error has advice
            return None, "not compared with training in core: it does not fit the device"
        if not report.equal:
            remedy = _find_remedy(compare, batch, config) or (
                "If the loss or the model counts its calls or keeps other state outside of modules, which a comparison changes, "
                "RelayConfig(verify='never') trains without one; Relay(..., loss_over='micro-batch') tries it on no rows either"
            )
            raise UnequalStepError(f"{_different(report)}. Nothing has been trained. {remedy}", report)
        self._compared.add(kind)
        seconds = time.perf_counter() - began_s - result.seconds
        return result, f"equal to the step in core, to the bit; compared in {seconds:.2g} s"


def remedy_for_error(compare: Compare, batch: Any, config: RelayConfig) -> str:
    """Return settings that train a batch whose step failed, in words; empty if it fails no more."""
    try:
        _compare_quietly(compare, batch, config)
    except InCoreError:
        return ""
    except Exception:
        return _find_remedy(compare, batch, config)
    return ""  # other settings would be no remedy of an error that passed by itself


def _find_remedy(compare: Compare, batch: Any, config: RelayConfig) -> str:
    """Return settings with which the step equals training in core, in words; empty if none are found."""
    for changes in _alternatives(config):
        try:
            report = _compare_quietly(compare, batch, replace(config, **changes))
        except InCoreError:
            return ""
        except Exception:  # of any kind: these settings do not help
            continue
        if report.equal:
            settings = ", ".join(f"{name}={value!r}" for name, value in changes.items())
            return f"RelayConfig({settings}) trains it with the bits of training in core: a trial step was equal"
    return ""


def _compare_quietly(compare: Compare, batch: Any, config: RelayConfig) -> VerifyReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return compare(batch, config)


def kind_of_check(batch: Any, config: RelayConfig, layers: Hashable) -> Hashable:
    """Return the kind of a step that is compared once: settings, layers, and types of the batch without its sizes."""
    leaves, tree = pytree.tree_flatten(batch)
    types = tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, torch.Tensor) else type(leaf) for leaf in leaves)
    return replace(config, seed=0, micro_batches=1, verify="never"), layers, tree, types


def _different(report: VerifyReport) -> str:
    names = [name for row in report.rows for name in row.different]
    parts = (
        [f"{len(names)} weights and buffers (by up to {report.max_abs_diff:.3g}), {names[0]} first"] if names else []
    )
    parts += [f"the optimizer's {', '.join(report.optimizer[:3])}"] if report.optimizer else []
    if report.loss != report.reference_loss:
        parts.append(f"the loss ({report.loss:.9g} for {report.reference_loss:.9g})")
    return f"this step would differ from the same step in core in {'; '.join(parts)}"


def _alternatives(config: RelayConfig) -> Iterator[dict[str, Any]]:
    whole = {"update": "whole"} if config.update != "whole" else {}
    in_core = {"schedule": "depth_first", "stash": "device", "keep": 0} if config.schedule != "depth_first" else {}
    yield from ([whole] if whole else [])
    if in_core:
        shown = {name: value for name, value in in_core.items() if name == "schedule" or getattr(config, name) != value}
        yield shown
        yield from ([shown | whole] if whole else [])
