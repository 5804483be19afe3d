"""A plan that is edited action by action or as text, with undo, and the rule that it breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from l2l_core import PlanError, StepPlan
from l2l_core.plan import SHELL, Action, check_plan

BAR = "|"  # the word of the action that begins a visit
_VISIT = "VE"  # kinds of the begin and the end of a visit, which is a line of the text


@dataclass(frozen=True)
class PlanLine:
    """A line of a plan's text.

    Attributes:
        number: of the visit, with ' in backward; "-" outside of visits.
        layer: key of the layer; "-" outside of visits.
        words: position in `StepPlan.actions` and text of each action, the bar included.
        end: position at which another action would be appended to the line; in a visit, that of its end.
    """

    number: str
    layer: str
    words: tuple[tuple[int, str], ...]
    end: int

    @property
    def last(self) -> int:
        """Position of the line's last action, the end of its visit included."""
        return self.end - (self.number == "-")


def lines_of(plan: StepPlan) -> Iterator[PlanLine]:
    """Yield the lines of a plan's text, in which the end of a visit has no word."""
    index = 0
    for line in str(plan).splitlines()[1:]:
        number, layer, *words = line.split()
        end = index + len(words)
        yield PlanLine(number, layer, tuple(enumerate(words, index)), end)
        index = end + (number != "-")


@dataclass(frozen=True)
class _Version:
    plan: StepPlan
    selected: int = -1  # position of the selected action, -1 for none


class PlanDraft:
    """A plan under edit.

    A change that has no effect returns False, as a move beyond the last action.

    Args:
        plan: the plan to begin with.

    Attributes:
        error: the first rule that the plan breaks; None if it can run.
    """

    def __init__(self, plan: StepPlan) -> None:
        self._done, self._undone = [_Version(plan)], list[_Version]()
        self._typing = False  # the last change was made in the text as a whole
        self.error: PlanError | None = None
        self._check()

    @property
    def plan(self) -> StepPlan:
        """The plan as edited; it may break rules."""
        return self._done[-1].plan

    @property
    def lines(self) -> list[PlanLine]:
        """The lines of its text."""
        return list(lines_of(self.plan))

    @property
    def selected(self) -> int:
        """Position of the selected action; -1 for none."""
        return self._done[-1].selected

    @property
    def selected_action(self) -> Action | None:
        """The selected action."""
        return self.plan.actions[self.selected] if self.selected >= 0 else None

    def select(self, index: int) -> None:
        """Select an action; another position, as that of the end of a visit, selects none."""
        is_action = 0 <= index < len(self.plan.actions) and self.plan.actions[index].kind not in _VISIT
        self._done[-1] = replace(self._done[-1], selected=index if is_action else -1)

    # -- actions -------------------------------------------------------------------------------------------------------

    def move(self, index: int, before: int) -> bool:
        """Move an action to the place before that of position `before`."""
        actions = list(self.plan.actions)
        if not (0 <= index < len(actions) and 0 <= before <= len(actions)) or actions[index].kind in _VISIT:
            return False
        place = before - (before > index)  # without the action that moves
        if place == index:
            return False
        action = actions.pop(index)
        actions.insert(place, action)
        return self._add(actions, place)

    def shift(self, by: int) -> bool:
        """Move the selected action one place earlier (-1) or later (1) in the order of issue."""
        return self.selected >= 0 and self.move(self.selected, self.selected + (by if by < 0 else 2))

    def shift_line(self, by: int) -> bool:
        """Move the selected action into the line before (-1) or after (1), on the same side of the bar."""
        lines, index = self.lines, self.selected
        row = next((i for i, line in enumerate(lines) if any(at == index for at, _ in line.words)), -1)
        if index < 0 or not 0 <= row + by < len(lines):
            return False
        bar, other = _bar_of(lines[row]), _bar_of(lines[row + by])
        is_before_bar = bar is not None and index < bar
        return self.move(index, other if is_before_bar and other is not None else lines[row + by].end)

    def remove(self) -> bool:
        """Remove the selected action; the one after it is selected."""
        if self.selected < 0:
            return False
        actions, index = list(self.plan.actions), self.selected
        del actions[index]
        return self._add(actions, next((i for i in (index, index - 1) if _is_word(actions, i)), -1))

    def write(self, index: int, word: str) -> bool:
        """Replace the word of an action.

        Raises:
            ValueError: the word cannot be read.
        """
        return self._put(index, word, keep=False)

    def insert(self, index: int, word: str) -> bool:
        """Add an action after the one at `index`.

        Raises:
            ValueError: the word cannot be read.
        """
        return self._put(index, word, keep=True)

    def _put(self, index: int, word: str, keep: bool) -> bool:
        if len(word.split()) != 1:
            raise ValueError(f"{word!r} is not one action: write a word such as `L:L002>0` or `F0`")
        lines = [str(self.plan).splitlines()[0]]
        for line in self.lines:
            words: list[str] = []
            for at, old in line.words:
                words += [old] if keep or at != index else []
                words += [word] if at == index else []
            lines.append(" ".join([line.number, line.layer, *words]))
        return self._add(parse_plan("\n".join(lines)).actions, index + keep)

    # -- the whole plan ------------------------------------------------------------------------------------------------

    def set_text(self, text: str) -> bool:
        """Take the plan of a text; changes of the text in a row are undone together.

        Raises:
            ValueError: the text cannot be read; the plan stays.
        """
        plan = parse_plan(text)
        if plan == self.plan:
            return False
        if self._typing:
            self._done.pop()
        return self._push(_Version(plan), typing=True)

    def set_plan(self, plan: StepPlan) -> bool:
        """Replace the plan, as by a preset."""
        return plan != self.plan and self._push(_Version(plan))

    def undo(self) -> bool:
        """Take back the last change."""
        return self._step(self._done, self._undone, len(self._done) > 1)

    def redo(self) -> bool:
        """Make the change again that was undone last."""
        return self._step(self._undone, self._done, bool(self._undone))

    @property
    def can_undo(self) -> bool:
        """Whether there is a change to take back."""
        return len(self._done) > 1

    @property
    def can_redo(self) -> bool:
        """Whether a change was undone."""
        return bool(self._undone)

    def _step(self, source: list[_Version], target: list[_Version], can: bool) -> bool:
        if can:
            target.append(source.pop())
            self._typing = False
            self._check()
        return can

    def _add(self, actions: Sequence[Action], selected: int) -> bool:
        plan = replace(self.plan, actions=tuple(actions))
        return plan != self.plan and self._push(_Version(plan, selected))

    def _push(self, version: _Version, typing: bool = False) -> bool:
        self._done.append(version)
        self._undone.clear()
        self._typing = typing
        self._check()
        return True

    def _check(self) -> None:
        try:
            check_plan(self.plan)
            self.error = None
        except PlanError as error:
            self.error = error


def parse_plan(text: str) -> StepPlan:
    """Parse the text of a plan; see `StepPlan.parse`.

    Raises:
        ValueError: with the line and the word that cannot be read.
    """
    if not text.strip():
        raise ValueError("the text is empty: Undo brings the plan back")
    return StepPlan.parse(text)


def _bar_of(line: PlanLine) -> int | None:
    """Return the position of the line's bar."""
    return next((index for index, word in line.words if word == BAR), None)


def _is_word(actions: Sequence[Action], index: int) -> bool:
    return 0 <= index < len(actions) and actions[index].kind not in _VISIT


def describe(action: Action) -> str:
    """Return in words what an action does."""
    layer = "the shell" if action.layer == SHELL else f"layer {action.layer}"
    turn = f"micro-batch {action.k}" if action.k >= 0 else "the batch"
    where = f", visit {action.visit}{' in backward' if action.is_backward else ''}" if action.visit >= 0 else ""
    kept = {"input": "", "turn": "; its graph stays until the turn ends", "graph": "; its graph stays until backward"}
    words = {
        "A": f"announce that {', '.join(action.layers) or 'no layers'} will be loaded",
        "L": f"load the weights of {layer} into slot {action.slot}",
        "V": f"{layer} begins{where}",
        "E": f"{layer} ends{where}",
        "I": f"start {turn}: the code before the first layer",
        "W": f"wait until the tensors of {turn} are on the device",
        "G": f"start to fetch the tensors of {turn} for {layer}{where}",
        "H": "announce the turns whose tensors are fetched later",
        "F": f"forward of {layer} on {turn}{where}{kept[action.keep]}",
        "X": f"loss of {turn}",
        "B": f"backward of {layer} on {turn}{where}",
        "D": f"drop the graph of {layer} on {turn}",
        "S": f"end of the turn of {turn}: its tensors may leave the device",
        "P": f"push the gradient of {layer} to the host",
        "U": f"reduce the gradient of {layer} and update its weights",
        "T": "backward begins",
    }
    return words[action.kind]
