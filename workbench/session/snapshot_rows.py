"""Conversion of the engine's units, results and errors to the values of a snapshot."""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, StepResult, TornStep, Trace
from l2l_core.batches import Batch
from l2l_core.eps.blocks import Unit
from l2l_core.plan import schedule_name
from l2l_core.trace import format_bytes
from workbench.readings import Columns, summarize_timeline
from workbench.session.snapshot import Snapshot
from workbench.session.snapshot_values import Activity, Failure, LayerRow, Remedy, ShownStep, StepRow
from workbench.session.statistics import StatisticsLog
from workbench.session.step_estimates import count_tokens, estimate_flop

BANDWIDTHS = ("h2d_bytes_per_s", "d2h_bytes_per_s")


def layer_rows(relay: Relay) -> tuple[LayerRow, ...]:
    """Return the rows of a relay's layers, in order."""
    places: dict[Unit, tuple[str, int]] = {}
    for name, units in relay.stacks.items():
        for i, unit in enumerate(units):
            places.setdefault(unit, (name, i))  # the first stack, for a layer that is in several
    return tuple(
        LayerRow(
            key=unit.key,
            name=unit.name,
            num_params=unit.num_params,
            nbytes=unit.nbytes,
            version=unit.version,
            frozen=unit.frozen,
            grad_norm=unit.stats.get("grad_norm"),
            update_ratio=unit.stats.get("update_ratio"),
            stack=places.get(unit, (None, -1))[0],
            position=places.get(unit, (None, -1))[1],
            influence=unit.stats.get("influence"),
            num_trained=unit.num_trained,
        )
        for unit in relay.stack
    )


def changed_layers(before: Sequence[LayerRow], after: Sequence[LayerRow]) -> frozenset[str]:
    """Return the keys of layers that are new, moved past others, frozen or unfrozen."""
    frozen = {row.key: row.frozen for row in before}
    remaining = {row.key for row in after}
    old = [row.key for row in before if row.key in remaining]
    new = [row.key for row in after if row.key in frozen]
    blocks = SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    stayed = {key for block in blocks for key in new[block.b : block.b + block.size]}
    return frozenset(row.key for row in after if row.key not in stayed or row.frozen != frozen[row.key])


def count_params(relay: Relay) -> int:
    """Return the number of weights of the model; shared ones count once."""
    return sum(param.numel() for param in relay.model.parameters())


def step_row(relay: Relay, result: StepResult, batch: Batch = None, epoch: int | None = None) -> StepRow:
    """Make the row of the relay's last step, before a scheduler changes the learning rate.

    Args:
        relay, result: the relay and its step.
        batch: batch of the step, to count its tokens and operations.
        epoch: epoch of the batch.
    """
    rate = relay.optimizer.param_groups[0].get("lr")
    return StepRow(
        step=relay.steps,
        loss=result.loss,
        seconds=result.seconds,
        samples=result.samples,
        peak_device_bytes=result.peak_device_bytes,
        bytes_loaded=result.bytes_loaded,
        bytes_pushed=result.bytes_pushed,
        overlap=summarize_timeline(Columns.of(result.trace)).overlap,
        branch=relay.branch,
        objective=result.objective,
        lr=None if rate is None else float(rate),
        layers=len(relay.stack),
        epoch=epoch,
        tokens=0 if batch is None else count_tokens(batch, result.samples),
        flop=0 if batch is None else estimate_flop(relay, batch, result.trace, result.samples),
    )


def snapshot_of(relay: Relay, steps: Sequence[StepRow], in_core_bytes: int | None = None) -> Snapshot:
    """Make a snapshot of a relay between two steps, for a program that trains without a session.

    Args:
        relay: the relay that made the steps.
        steps: its finished steps.
        in_core_bytes: device bytes that in-core training would need.
    """
    return Snapshot(
        number=len(steps),
        state="idle",
        model=type(relay.model).__name__,
        num_params=count_params(relay),
        device=relay.device.name,
        figures=relay.device.figures(),
        config=relay.config,
        step=relay.steps,
        done=len(steps),
        target=len(steps),
        steps=tuple(steps),
        layers=layer_rows(relay),
        statistics=StatisticsLog().view(),
        shell_params=relay.shell.num_params,
        shell_trained=relay.shell.num_trained,
        shown=_shown_step(relay, in_core_bytes) if steps else None,
        journal=relay.journal,
        can_undo=relay.can_undo,
        can_redo=relay.can_redo,
        branch=relay.branch,
        branches=relay.branches,
    )


def _shown_step(relay: Relay, in_core_bytes: int | None) -> ShownStep | None:
    trace = relay.trace
    if trace is None:
        return None
    return ShownStep(relay.branch, relay.steps, trace, layer_rows(relay), relay.journal, in_core_bytes)


def make_failure(error: BaseException, during: Activity, relay: Relay, trace: Trace | None = None) -> Failure:
    """Make the failure to show for an error of a relay; `trace` is the trace of the failed step."""
    number = relay.steps + (during in ("batch", "step"))  # a step that is still tried is not counted yet
    printed = "".join(traceback.format_exception(error))
    message = "\n".join([_message_of(error) or "no message", *getattr(error, "__notes__", ())])
    after, remedy = _state_after(error, during), _find_remedy(error, relay)
    return Failure(number, during, type(error).__name__, message, printed, after, trace, relay.branch, remedy)


def _find_remedy(error: BaseException, relay: Relay) -> Remedy | None:
    """Return the remedy that the relay found for a full device; None if it found none."""
    full = error if isinstance(error, DeviceOutOfMemory) else error.__cause__  # the cause of a TornStep
    if not isinstance(full, DeviceOutOfMemory) or full.least_bytes is None:
        return None
    return Remedy(dict(full.settings), full.least_bytes, _larger_device_code(relay, full.least_bytes))


def _larger_device_code(relay: Relay, nbytes: int) -> str:
    """Return code for an emulated device like the relay's with more memory; "" for a real device."""
    if not isinstance(relay.device, EmulatedDevice):
        return ""
    figures = {**relay.device.figures(), "memory_bytes": nbytes}
    arguments = ", ".join(f"{name}={value!r}" for name, value in figures.items() if value)
    return f"device = EmulatedDevice({arguments})"


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # an error class of the user may fail to print, and must not end the thread
        return f"its message cannot be read: {second!r}"


def _state_after(error: BaseException, during: Activity) -> str:
    if isinstance(error, TornStep):
        return "Some layers hold new weights and the batch counts as used: Run continues with the next one."
    return {
        "batch": "The source of batches failed before anything was computed: Run tries it again.",
        "step": "Weights and optimizer are as they were before this step: Run tries the same batch again, Skip leaves it out.",
        "edit": "The effect of the change before its error remains: Run continues from here.",
        "refused": "Nothing was changed.",
        "scheduler": "The step itself is done and counted: Run continues.",
        "save": "The session is not saved; its earlier saves are as they were, and training has not changed: Run continues.",
        "resume": "The session was not resumed.",
        "measurement": (
            "Training is as before the measurement, which is not repeated: Run continues without it. Call it again once "
            "its cause is removed."
        ),
        "logger": "The step or change itself is done and counted, but may not be logged: Run continues.",
    }[during]


def describe_settings_change(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Describe a change of settings, such as "micro_batches 4 → 8"; equal changes of both bandwidths are one "link"."""
    names = [name for name in new if new[name] != old.get(name)]
    values = {name: f"{format_setting(name, old.get(name))} → {format_setting(name, new[name])}" for name in names}
    if len({values.get(name) for name in BANDWIDTHS}) == 1 and BANDWIDTHS[0] in values:
        values = {"link" if name == BANDWIDTHS[0] else name: v for name, v in values.items() if name != BANDWIDTHS[1]}
    return ", ".join(f"{name} {value}" for name, value in values.items())


def format_setting(name: str, value: Any) -> str:
    """Format the value of a setting."""
    if name.endswith("_bytes_per_s"):
        return "unlimited" if value is None else f"{format_bytes(value)}/s"
    return f"{value:g}" if isinstance(value, float) else schedule_name(value) if name == "schedule" else str(value)
