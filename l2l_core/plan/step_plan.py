"""The actions of a step as a list, with a text form that can be read, edited and parsed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import cast, get_args

from l2l_core.plan.actions import KINDS, SHELL, Action, ActionResult, Actions, Keep, Turn
from l2l_core.plan.relay_schedule import RelaySchedule, ScheduleSettings

_OF_SHELL = "IX"  # kinds that concern the shell
_OF_NO_VISIT = "ALHT"
_WORD = re.compile(
    r"(?P<kind>[A-Z])(?P<k>\d*)(:(?P<layer>[^@>/\s]+))?(@(?P<visit>\d+)(?P<backward>'?))?(>(?P<slot>\d+))?(/(?P<keep>\w+))?"
)
ScheduleFunction = Callable[[ScheduleSettings, Sequence[str]], Iterable[Action]]
_TURN = re.compile(r"(?P<k>\d+)\.(?P<layer>[^@,]+)@(?P<visit>\d+)(?P<backward>'?)")


class PlanError(ValueError):
    """A plan that would compute something else than a training step, or that cannot run.

    Attributes:
        index: position of the action in `StepPlan.actions`; their number if an action is missing at the end.

    Example:
        >>> from l2l_core import PlanError, StepPlan
        >>> text = str(relay.plan(batch)).replace("L:L002>0", "")  # layer 2 is never loaded
        >>> try:
        ...     result = relay.step(batch, plan=StepPlan.parse(text))
        ... except PlanError as error:
        ...     relay.steps  # nothing has changed
        0
    """

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


@dataclass(frozen=True, repr=False)
class StepPlan:
    """The actions of one pass, in the order of issue.

    `str(plan)` has a line per visit: its number (with ' in backward), the layer, the loads before it, a bar where the
    layer begins, and its turns; `l2l_core/plan/relay_schedule.py` has an example. A line with a dash is outside of visits.
    `StepPlan.parse` reads that text.

    See `l2l_core/plan/actions.py` for the letters. A number after a letter is the micro-batch, `:` a layer, `>` a weight slot,
    `/` the activations that a forward keeps, `@` another visit than that of the line.

    Attributes:
        settings: of the schedule.
        actions: in the order of issue.
        name: of the function that made it; "plan" for others.

    Example:
        >>> from l2l_core import StepPlan
        >>> plan = relay.plan(batch)
        >>> StepPlan.parse(str(plan)) == plan
        True
        >>> result = relay.step(batch, plan=plan)
    """

    settings: ScheduleSettings
    actions: tuple[Action, ...]
    name: str = field(default="plan", compare=False)

    @staticmethod
    def of(schedule: ScheduleFunction, settings: ScheduleSettings, visits: Sequence[str]) -> StepPlan:
        """Return the actions of a function ``schedule(settings, visits)`` as a plan, not yet checked.

        Raises:
            TypeError: the function yields something else than actions.
        """
        name, made = schedule_name(schedule), schedule(settings, tuple(visits))
        if not isinstance(made, Iterable):
            raise TypeError(
                f"schedule={name} returned {made!r}: write it with `yield`, or return a list of actions of l2l_core.plan"
            )
        actions: list[Action] = []
        for action in made:
            if not isinstance(action, Action):
                raise TypeError(
                    f"schedule={name} yielded {action!r} after {len(actions)} actions, which is no action: yield values of "
                    "l2l_core.plan.Action, and write `yield from` before a function that yields several"
                )
            actions.append(action)
        return StepPlan(settings, tuple(actions), name)

    @staticmethod
    def expected(settings: ScheduleSettings, layers: Sequence[str], visits: Sequence[str]) -> StepPlan:
        """Return the plan of a training step in which every micro-batch calls the layers in the order `visits`."""
        position = [0] * settings.micro_batches
        kept = [False] * settings.micro_batches

        def expected_result(action: Action) -> ActionResult | None:
            if action.kind in "IF":
                k = action.k
                position[k] += action.kind == "F"
                kept[k] = action.keep != "input"
                return ActionResult(visits[position[k]] if position[k] < len(visits) else None, action.kind == "F")
            return ActionResult(has_graph=kept[action.k]) if action.kind == "X" else None

        return StepPlan(settings, tuple(run_schedule(RelaySchedule(settings, layers, visits).train(), expected_result)))

    def train(self) -> Actions:
        """Yield the actions of a training step, as `RelaySchedule.train`.

        Raises:
            PlanError: the model calls other layers than the plan visits. No layer has been trained then: a gradient is pushed
                when all forwards are finished.
        """
        calls: dict[int, list[str]] = {}
        for action in self.actions:
            if action.kind == "F":
                calls.setdefault(action.k, []).append(action.layer)
        position = dict.fromkeys(range(self.settings.micro_batches), 0)
        for index, action in enumerate(self.actions):
            result = yield action
            if result is None or action.kind not in "IF":
                continue
            k = action.k
            position[k] += action.kind == "F"
            planned = calls.get(k, [])[position[k] :][:1]
            if [result.waits_for] != (planned or [None]):
                raise PlanError(
                    index,
                    f"micro-batch {k} calls {result.waits_for or 'no further layer'}, where the plan has "
                    f"{planned[0] if planned else 'none'}. Nothing was trained. Run a step with "
                    "RelayConfig(schedule='breadth_first'), which follows the model: a function gets its order of layers in the "
                    "next step, and relay.step(batch).plan is a plan to edit",
                )
            if action.kind == "F" and not result.needs_backward:
                raise PlanError(
                    index,
                    f"layer {action.layer} needs no backward (frozen, before every trained parameter?), and the plan has one. "
                    "Nothing was trained. Run the step without a plan, with RelayConfig(schedule='breadth_first')",
                )

    @property
    def loads(self) -> list[str]:
        """The layers in the order of their loads."""
        return [action.layer for action in self.actions if action.kind == "L"]

    def __str__(self) -> str:
        return "\n".join(
            [f"plan {_settings_text(self.settings)}", *(f"{head} {text}" for head, text in _lines(self.actions))]
        )

    __repr__ = __str__  # a notebook shows it

    @staticmethod
    def parse(text: str) -> StepPlan:
        """Parse the text form.

        Raises:
            ValueError: with the line and the word that cannot be read.
        """
        head, *lines = [line for line in text.splitlines() if line.strip()]
        actions: list[Action] = []
        for line in lines:
            actions += _parse_line(line)
        return StepPlan(_parse_settings(head), tuple(actions))


def run_schedule(actions: Actions, result_of: Callable[[Action], ActionResult | None]) -> Iterator[Action]:
    """Yield the actions of a schedule that gets these results."""
    action = next(actions)
    while True:
        yield action
        try:
            action = actions.send(result_of(action))
        except StopIteration:
            return


def schedule_name(schedule: object) -> str:
    """Return the name of a schedule of `RelayConfig`: of a function its own, of a `StepPlan` that of its maker."""
    if isinstance(schedule, str):
        return schedule
    if isinstance(schedule, StepPlan):
        return schedule.name
    if isinstance(schedule, partial):
        return schedule_name(schedule.func)
    return getattr(schedule, "__name__", type(schedule).__name__)


# -- text ----------------------------------------------------------------------------------------------------------------


def _settings_text(settings: ScheduleSettings) -> str:
    default = ScheduleSettings()
    always = ("micro_batches", "ahead", "slots")
    values = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return " ".join(f"{k}={v}" for k, v in values.items() if k in always or v != getattr(default, k))


def _lines(actions: Sequence[Action]) -> Iterator[tuple[str, str]]:
    """Yield head and words of each line."""
    words: list[Action] = []
    visit: Action | None = None
    for action in actions:
        if visit is None and action.kind not in "ALV" and words and words[-1].kind in "AL":
            yield _line(None, words)  # loads that no visit follows
            words = []
        if visit is None and action.kind in "ALV" and words and words[-1].kind not in "AL":
            yield _line(None, words)
            words = []
        words.append(action)
        if action.kind == "V":
            visit = action
        elif action.kind == "E":
            yield _line(visit, words[:-1])
            words, visit = [], None
    if words:
        yield _line(visit, words)


def _line(visit: Action | None, words: Sequence[Action]) -> tuple[str, str]:
    number = "-" if visit is None else f"{visit.visit}{_prime(visit.is_backward)}"
    layer = "-" if visit is None else visit.layer
    return f"{number:<4}{layer:<5}", " ".join(_word(action, visit) for action in words)


def _prime(is_backward: bool) -> str:
    return "'" if is_backward else ""


def _word(action: Action, visit: Action | None) -> str:
    kind, layer, k, number, is_backward, slot, keep, layers, turns = action
    if action == visit:
        return "|"
    text = kind + (str(k) if k >= 0 else "")
    if kind == "A":
        return f"{text}:{','.join(layers) or '-'}"
    if kind == "H":
        named = ",".join(f"{turn.k}.{turn.layer}@{turn.visit}{_prime(turn.is_backward)}" for turn in turns)
        return f"{text}:{named or '-'}"
    if kind == "L":
        return f"{text}:{layer}>{slot}"
    if kind in _OF_SHELL or kind == "T":
        return text
    if visit is None or layer != visit.layer:
        text += f":{layer}"
    if layer != SHELL and (visit is None or (number, is_backward) != (visit.visit, visit.is_backward)):
        text += f"@{number}{_prime(is_backward)}"
    return text + (f"/{keep}" if keep != "input" else "")


def _parse_settings(head: str) -> ScheduleSettings:
    name, *pairs = head.split()
    if name != "plan":
        raise ValueError(
            f"{head!r}: the first line of a plan is `plan` and its settings, as in `plan micro_batches=2 ahead=1`"
        )
    default = ScheduleSettings()
    known = {each.name: type(getattr(default, each.name)) for each in fields(default)}
    values: dict[str, int | bool] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        if key not in known:
            raise ValueError(f"{pair!r} is no setting of a plan: use {', '.join(known)}")
        values[key] = value == "True" if known[key] is bool else int(value)
    return replace(default, **values)


def _parse_line(line: str) -> list[Action]:
    number, layer, *words = line.split()
    if number == "-":
        return [_parse_word(word, line, None) for word in words]
    match = re.fullmatch(r"(\d+)('?)", number)
    if match is None:
        raise ValueError(f"{line!r}: a line begins with the number of a visit, as in `0` or `0'`, or with `-`")
    visit = Action("V", layer, visit=int(match[1]), is_backward=bool(match[2]))
    if words.count("|") != 1:
        raise ValueError(f"{line!r}: the line of a visit has one `|`, where the layer begins")
    actions = [visit if word == "|" else _parse_word(word, line, visit) for word in words]
    return [*actions, visit._replace(kind="E")]


def _parse_word(word: str, line: str, visit: Action | None) -> Action:
    if word.startswith("H:"):
        return Action("H", turns=_parse_turns(word))
    match = _WORD.fullmatch(word)
    if match is None or match["kind"] not in KINDS or match["kind"] in "VE":
        raise ValueError(
            f"{word!r} in {line!r} is no action: write a letter of {KINDS} and its micro-batch, as in `F0`"
        )
    kind, k = match["kind"], int(match["k"] or -1)
    if (form := _missing_part(match, visit)) is not None:
        raise ValueError(f"{word!r} in {line!r} lacks its layer, slot or visit: write it as in `{form}`")
    if kind == "A":
        return Action(kind, layers=tuple(each for each in match["layer"].split(",") if each != "-"))
    if kind in _OF_NO_VISIT:
        return Action(kind, match["layer"] or "", slot=int(match["slot"] or -1))
    if kind in _OF_SHELL:
        return Action(kind, SHELL, k)
    own_layer, own_visit, own_backward = (visit.layer, visit.visit, visit.is_backward) if visit else ("", -1, False)
    layer = match["layer"] or own_layer
    if layer == SHELL:
        return Action(kind, SHELL, k)
    if match["visit"] is not None:
        own_visit, own_backward = int(match["visit"]), bool(match["backward"])
    keep = match["keep"] or "input"
    if keep not in get_args(Keep):
        raise ValueError(f"{word!r} in {line!r}: a forward keeps its input, or `turn` or `graph`")
    return Action(kind, layer, k, own_visit, own_backward, keep=cast(Keep, keep))


def _missing_part(match: re.Match[str], visit: Action | None) -> str | None:
    """Return how a word is written in full if it lacks a part that its line does not have either."""
    kind, layer = match["kind"], match["layer"]
    if kind == "A" and not layer:
        return "A:L001,L002"
    if kind == "L" and not (layer and match["slot"]):
        return "L:L001>0"
    of_visit = kind not in _OF_NO_VISIT + _OF_SHELL and layer != SHELL
    if of_visit and visit is None and not (layer and match["visit"]):
        return f"{kind}{match['k']}:L001@1"
    return None


def _parse_turns(word: str) -> tuple[Turn, ...]:
    named = word.partition(":")[2]
    matches = [_TURN.fullmatch(each) for each in named.split(",") if each != "-"]
    if not all(matches):
        raise ValueError(f"{word!r}: turns are written as in `H:0.L001@1,1.L001@1'`")
    return tuple(Turn(int(m["k"]), m["layer"], int(m["visit"]), bool(m["backward"])) for m in matches if m)
