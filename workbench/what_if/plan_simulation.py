"""Steps by plans, simulated with the costs of one step: figures, picture, and the events of each action."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

from l2l_core import Device, Profile, Relay, RelayConfig, StepPlan, simulate
from l2l_core.batches import Batch
from l2l_core.plan import SHELL, Action
from l2l_core.trace import LANES, Event, StepResult, format_bytes
from workbench.pictures import Table, round_up
from workbench.what_if.answer import TracedStep
from workbench.what_if.differences import describe_change
from workbench.what_if.forecast_margin import DEVICE, HIDDEN, SECONDS, Figure
from workbench.what_if.what_if_picture import LEFT, RIGHT, PicturedStep, draw_lanes, lower_lane

_EventKey = tuple[str | int, ...]
_LAYER_EVENTS = {"L": "load", "P": "push", "U": "update"}
_TURN_EVENTS = {"F": "forward", "B": "backward", "G": "fetch", "W": "fetch", "S": "stash"}
Span = tuple[int, float, float, float, float]  # action; left, right, top and bottom in px of the picture


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedStep(TracedStep):
    """Figures of a step by a plan, simulated or measured."""

    plan: StepPlan

    @staticmethod
    def measured(result: StepResult) -> PlannedStep:
        """Return the figures of a step that has run."""
        assert result.plan is not None, "a step with schedule='depth_first' has no plan"
        return PlannedStep(plan=result.plan, trace=result.trace, basis=f"step {result.trace.step + 1}, measured")


class PlanSimulator:
    """Simulates steps by plans.

    Args:
        profile: costs of a step of the relay.
        config: settings of that step.
        device: the relay's device, whose link is assumed.
        basis: description of the source of the costs.
    """

    def __init__(self, profile: Profile, config: RelayConfig, device: Device, basis: str = "") -> None:
        self._profile, self._config, self._device, self.basis = profile, config, device, basis

    @staticmethod
    def of(relay: Relay, batch: Batch) -> PlanSimulator:
        """Take the costs of a forecast of the next step, which trains nothing.

        Raises:
            ValueError, TypeError: the relay cannot train this batch, or its steps cannot be simulated.
        """
        forecast = relay.forecast(batch, replace(relay.config, schedule="breadth_first"))
        settings = forecast.trace.settings
        config = RelayConfig(**{f.name: settings[f.name] for f in fields(RelayConfig) if f.name in settings})
        return PlanSimulator(Profile.of(forecast.trace), config, relay.device, forecast.basis)

    def run(self, plan: StepPlan) -> PlannedStep:
        """Simulate a step by a plan that keeps the rules.

        Raises:
            ValueError: the plan is not one of a step with these costs.
        """
        trace = simulate(self._profile, self._config, self._device, plan=plan)
        return PlannedStep(plan=plan, trace=trace, basis=self.basis)


# -- figures ---------------------------------------------------------------------------------------------------------


def _num_loads(step: TracedStep) -> float:
    """Return the number of loads of layers; a load in pieces counts once."""
    return sum(e.kind == "load" and e.layer != SHELL and e.piece == 0 for e in step.trace.events)


def _lane_bytes(lane: str, step: TracedStep) -> float:
    return int(step.columns.nbytes[step.columns.events_on(lane)].sum())


def _one(_: TracedStep) -> float:
    return 1.0


_FIGURES: Sequence[Figure] = (
    SECONDS,
    HIDDEN,
    Figure("loads of layers", _num_loads, "{:.0f}".format, _one),
    Figure("bytes to the device", partial(_lane_bytes, "h2d"), format_bytes, _one),
    Figure("bytes to the host", partial(_lane_bytes, "d2h"), format_bytes, _one),
    DEVICE,
)


def plans_table(own: PlannedStep, edited: PlannedStep, measured: PlannedStep | None = None) -> Table:
    """Return the figures of two simulated steps, and of one that ran by the edited plan.

    Args:
        own: by the relay's own plan, simulated.
        edited: by the edited plan, simulated with the same costs.
        measured: by the edited plan, if it has run.
    """
    header = ["", "own plan, simulated", "this plan, simulated", "change"]
    rows, has_memory = [], bool(edited.device_bytes)
    for figure in _FIGURES:
        old, new = figure.read(own), figure.read(edited)
        cells = [figure.name, figure.format(old), figure.format(new), describe_change(figure, old, new)]
        if figure is DEVICE and not has_memory:
            cells[2:] = ["–", ""]
        rows.append(cells if measured is None else [*cells, figure.format(figure.read(measured))])
    note = f"Both simulations have the same costs: {edited.basis}."
    if not has_memory:
        note += (
            " This plan has other graphs or another order of compute, whose memory is not simulated: Apply measures it."
        )
    if measured is not None:
        header.append(f"this plan, {measured.basis}")
        note += " A measured step differs from its simulation as steps differ from each other; compare simulated with simulated."
    return Table("The plan beside the relay's own, in figures", header, rows, note)


def draw_plans(own: PlannedStep, edited: PlannedStep, span_s: float) -> str:
    """Draw both simulated steps, the relay's own plan above, on a time axis that ends at `span_s`."""
    return draw_lanes(
        _pictured(own, "relay's own plan, simulated", False),
        _pictured(edited, "this plan, simulated", True),
        span_s,
        "Plan: two simulated steps, the relay's own plan above",
    )


def common_axis(own: PlannedStep, edited: PlannedStep, span_s: float = 0.0) -> float:
    """Return the end of a time axis for both steps: `span_s`, if they fill enough of it."""
    end_s = max(own.columns.end_s, edited.columns.end_s)
    return span_s if end_s <= span_s <= 2.5 * end_s else round_up(1.05 * end_s)


def _pictured(step: PlannedStep, title: str, framed: bool) -> PicturedStep:
    figures = f"{SECONDS.format(step.seconds)} · {HIDDEN.format(step.overlap)} of copies hidden"
    return PicturedStep(step.columns, title, figures, framed, step.trace.settings.get("memory_bytes"))


# -- actions ---------------------------------------------------------------------------------------------------------


def spans_of(step: PlannedStep, span_s: float) -> list[Span]:
    """Return where the events of each action are in the lower row of the picture that `draw_plans` makes."""
    found = []
    for event, action in zip(step.trace.events, actions_of(step.plan, step.trace.events), strict=True):
        if action >= 0 and event.lane in LANES:
            left, right = (
                LEFT + (RIGHT - LEFT) * min(1.0, time_s / span_s) for time_s in (event.start_s, event.stop_s)
            )
            top, bottom = lower_lane(event.lane)
            found.append((action, round(left, 1), round(max(right, left + 0.5), 1), top, bottom))
    return found


def actions_of(plan: StepPlan, events: Sequence[Event]) -> list[int]:
    """Return for each event the position of its action in the plan, -1 for an event without one."""
    visits = sum(action.kind == "V" and not action.is_backward for action in plan.actions)
    waiting = _actions_by_event(plan, visits)
    current: dict[int, int] = {}  # the compute action of each micro-batch
    last: dict[_EventKey, int] = {}  # for the pieces of a copy, and other later events of an action
    found = [-1] * len(events)
    for at in sorted(range(len(events)), key=lambda i: events[i].start_s):
        event = events[at]
        key = _key_of(event, visits)
        if waiting[key] and event.piece == 0:
            last[key] = waiting[key].popleft()
        found[at] = last.get(key, current.get(event.k, -1))
        if event.lane == "compute":
            current[event.k] = found[at]
    return found


def _actions_by_event(plan: StepPlan, visits: int) -> defaultdict[_EventKey, deque[int]]:
    """Return the positions of the actions that cause events, by the key of these events."""
    found: defaultdict[_EventKey, deque[int]] = defaultdict(deque)
    fetched = {_turn_of(action, visits) for action in plan.actions if action.kind == "G"}
    for at, action in enumerate(plan.actions):
        # a copy belongs to the action that starts it: `W` only where no `G` did
        if action.kind != "W" or _turn_of(action, visits) not in fetched:
            key = _key_of_action(action, visits)
            found[key].append(at)
    return found


def _turn_of(action: Action, visits: int) -> tuple[int, int]:
    """Return micro-batch and visit of an action, numbered as in events."""
    undoes = action.is_backward or action.kind == "B"
    return action.k, 2 * visits - 1 - action.visit if undoes and action.visit >= 0 else action.visit


def _key_of_action(action: Action, visits: int) -> _EventKey:
    kind, layer, k, *_ = action
    if kind == "P" and layer == SHELL:
        return "update", layer  # its push and its update are one action
    if kind in _LAYER_EVENTS:
        return _LAYER_EVENTS[kind], layer
    if kind in _TURN_EVENTS:
        return _TURN_EVENTS[kind], *_turn_of(action, visits)
    return {"I": "start", "X": "loss"}.get(kind, "none"), k


def _key_of(event: Event, visits: int) -> _EventKey:
    kind, layer, k = event.kind, event.layer, event.k
    if kind in ("push", "reduce", "update") and layer == SHELL:
        return "update", layer
    if kind in ("load", "push"):
        return kind, layer
    if kind in ("reduce", "update"):
        return "update", layer
    if kind == "batch" or (kind == "shell" and event.stay < 0):
        return "start", k
    if kind in ("forward", "backward", "fetch", "stash"):
        recomputes = kind == "forward" and event.visit >= visits
        return "backward" if recomputes else kind, k, event.visit
    return kind, k
