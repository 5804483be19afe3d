"""Check of a plan: the rules of a training step, and the first action that breaks one.

The rules are those of a regular model, in which all micro-batches call the layers in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import NoReturn

from l2l_core.plan.actions import KINDS, SHELL, Action
from l2l_core.plan.step_plan import PlanError, StepPlan


def check_plan(plan: StepPlan) -> None:
    """Check the plan of a training step.

    Raises:
        PlanError: it names the first action that breaks a rule, the rule, and a remedy.
    """
    _Check(plan).run()


_OF_MICRO_BATCH, _OF_VISIT = "IWGFXBDS", "WGFBDSPE"


class _Check:
    """State of the device and of the micro-batches between two actions."""

    def __init__(self, plan: StepPlan) -> None:
        self._plan, self._settings = plan, plan.settings
        # The layer of each visit, by number.
        self._layers = {a.visit: a.layer for a in plan.actions if a.kind == "V" and not a.is_backward}
        self._slots: list[str | None] = [None] * plan.settings.slots
        self._open: Action | None = None  # the `V` of the visit that has begun
        self._index = 0
        self._visits: list[int] = []
        self._undone_visits: list[int] = []
        self._begun: set[int] = set()
        self._position: dict[int, int] = {}  # next visit of each micro-batch
        self._away: set[int] = set()  # micro-batches whose tensors may be offloaded
        self._lost: list[int] = []  # micro-batches whose loss has run
        self._undone: dict[int, list[int]] = defaultdict(list)  # back-propagated micro-batches, by visit
        self._pushed: set[int] = set()
        self._updated: set[str] = set()
        self._is_backward = self._has_ended = False

    def run(self) -> None:
        methods: dict[str, Callable[[Action], None]] = {
            "L": self._load,
            "V": self._begin_visit,
            "I": self._start,
            "W": self._wait,
            "F": self._forward,
            "X": self._loss,
            "B": self._backward,
            "D": self._require_open,
            "S": self._end_turn,
            "P": self._push,
            "U": self._finish,
            "E": self._end_visit,
            "T": self._begin_backward,
        }
        for index, action in enumerate(self._plan.actions):
            self._index = index
            if self._has_ended:
                self._refuse(action, "the push of the shell ends the step", "remove it, or move it before P:shell")
            self._require(action.kind in KINDS, action, "there is no such kind of action", f"write a letter of {KINDS}")
            self._check_names(action)
            if action.kind in methods:
                methods[action.kind](action)
        self._index = len(self._plan.actions)
        if not self._has_ended:
            self._refuse(None, "the shell's gradient is pushed at the end of a step", "append P:shell")

    def _refuse(self, action: Action | None, rule: str, remedy: str) -> NoReturn:
        if action is None:
            raise PlanError(self._index, f"at the end of the plan: {rule}. Remedy: {remedy}")
        micro_batch = f", micro-batch {action.k}" if action.k >= 0 else ""
        visit = f", visit {action.visit}{' in backward' if action.is_backward else ''}" if action.visit >= 0 else ""
        layer = f" of {action.layer}" if action.layer else ""
        kind = {"V": "|", "E": "end"}.get(action.kind, action.kind)  # as in the text
        text = f"action {self._index} ({kind}{layer}{micro_batch}{visit})"
        raise PlanError(self._index, f"{text}: {rule}. Remedy: {remedy}")

    def _require(self, holds: bool, action: Action, rule: str, remedy: str) -> None:
        if not holds:
            self._refuse(action, rule, remedy)

    def _check_names(self, action: Action) -> None:
        """Check that micro-batch, visit and layer exist and belong together."""
        count = self._settings.micro_batches
        named = [action] if action.kind in _OF_MICRO_BATCH else [*action.turns]
        is_known = all(0 <= each.k < count for each in named) or (action.kind == "X" and action.k == -1)
        self._require(is_known, action, f"there are {count} micro-batches", f"name one from 0 to {count - 1}")
        if (action.kind in _OF_VISIT and action.layer != SHELL) or action.kind == "U":
            layer = self._layers.get(action.visit)
            self._require(
                action.layer == layer,
                action,
                f"visit {action.visit} is {f'of {layer}' if layer else 'none of the plan'}",
                f"write {layer or 'a visit of forward'}",
            )

    # -- weights -------------------------------------------------------------------------------------------------------

    def _load(self, action: Action) -> None:
        slots, visited = self._settings.slots, self._open.layer if self._open else None
        self._require(
            0 <= action.slot < slots, action, f"there are {slots} weight slots", f"name a slot from 0 to {slots - 1}"
        )
        self._require(
            action.layer in self._layers.values(), action, "no visit of that layer follows", "load a layer of the plan"
        )
        held = self._slots[action.slot]
        self._require(
            visited is None or held != visited,
            action,
            f"slot {action.slot} holds {held}, whose visit has not ended",
            "load into another slot, or after the visit",
        )
        self._require(
            action.layer not in self._slots,
            action,
            f"{action.layer} is in a slot already",
            "remove the load",
        )
        self._slots[action.slot] = action.layer

    def _begin_visit(self, action: Action) -> None:
        self._require(self._open is None, action, "another visit has not ended", "end that visit first")
        self._require(
            action.layer in self._slots, action, "its weights are in no slot", f"load it before: L:{action.layer}>SLOT"
        )
        self._require(
            action.is_backward == self._is_backward,
            action,
            "visits of forward come before T, visits of backward after it",
            "move the visit",
        )
        numbers = self._undone_visits if action.is_backward else self._visits
        self._require(action.visit not in numbers, action, "this visit has been", "join the two lines")
        numbers.append(action.visit)
        self._require(
            action.is_backward or action.visit == len(numbers) - 1,
            action,
            f"visits of forward are numbered in their order, and {len(numbers) - 1} is next",
            f"write {len(numbers) - 1}",
        )
        if action.is_backward:
            self._require(action.visit in self._layers, action, "forward has no such visit", "name a visit of forward")
            layer = self._layers[action.visit]
            self._require(layer == action.layer, action, f"visit {action.visit} is of {layer}", f"write {layer}")
        self._open = action

    def _end_visit(self, action: Action) -> None:
        self._require_open(action)
        if action.is_backward and action.visit not in self._pushed:
            self._refuse(action, "the visit's gradient was not pushed", "add P before the end of the visit")
        self._open = None

    # -- turns ---------------------------------------------------------------------------------------------------------

    def _start(self, action: Action) -> None:
        self._require(action.k not in self._begun, action, "this micro-batch was started before", "remove the action")
        self._begun.add(action.k)
        self._position[action.k] = 0

    def _wait(self, action: Action) -> None:
        self._away.discard(action.k)

    def _end_turn(self, action: Action) -> None:
        if self._settings.offloads:
            self._away.add(action.k)

    def _require_open(self, action: Action) -> None:
        opened, own = self._open, (action.layer, action.visit, action.is_backward)
        here = opened is not None and (opened.layer, opened.visit, opened.is_backward) == own
        self._require(here, action, "its visit is not open", "move it into the line of its visit, behind the bar")

    def _require_arrived(self, action: Action) -> None:
        self._require(
            action.k not in self._away, action, "its tensors may be offloaded", f"wait for them before: W{action.k}"
        )

    def _forward(self, action: Action) -> None:
        self._require_open(action)
        self._require(not self._is_backward, action, "backward has begun", "move it before T")
        self._require(
            action.k in self._begun, action, "the micro-batch was not started", f"start it before: I{action.k}"
        )
        expected = self._position[action.k]
        self._require(
            action.visit == expected,
            action,
            f"the next visit of the micro-batch is {expected}, since layers run in their order",
            f"run it in visit {expected}",
        )
        earlier = [k for k, position in self._position.items() if k < action.k and position <= action.visit]
        self._require(
            not earlier,
            action,
            "micro-batches run in ascending order, since buffers change with each",
            f"move it behind F{max(earlier, default=0)}",
        )
        self._require_arrived(action)
        self._position[action.k] += 1

    def _loss(self, action: Action) -> None:
        missing = [k for k in range(self._settings.micro_batches) if self._position.get(k, -1) < len(self._layers)]
        if not self._settings.loss_per_micro_batch:
            self._require(action.k < 0, action, "the loss is one of the whole batch", "write X")
            self._require(
                not missing, action, f"the forward of micro-batch {missing[:1]} is not finished", "move it back"
            )
            self._lost = list(range(self._settings.micro_batches))
            return
        self._require(action.k not in missing, action, "its forward is not finished", "move it behind the last layer")
        self._require(
            action.k == len(self._lost),
            action,
            f"losses run in ascending order, and that of micro-batch {len(self._lost)} is next",
            f"write X{len(self._lost)}",
        )
        self._lost.append(action.k)

    def _begin_backward(self, action: Action) -> None:
        self._require(len(self._lost) == self._settings.micro_batches, action, "a loss is missing", "move it behind X")
        self._is_backward = True

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, action: Action) -> None:
        self._require_open(action)
        self._require(action.k in self._lost, action, "its loss has not run", f"run X{action.k} before")
        above, done = action.visit + 1, self._undone[action.visit]
        self._require(
            above not in self._layers or action.k in self._undone[above],
            action,
            f"it needs the gradient of visit {above}, which was not back-propagated",
            f"move it behind B{action.k} of visit {above}",
        )
        self._require(
            action.k == len(done),
            action,
            f"gradients are added in ascending order, and micro-batch {len(done)} is next",
            f"write B{len(done)}",
        )
        if action.is_backward:
            self._require_arrived(action)
        done.append(action.k)

    def _push(self, action: Action) -> None:
        if action.layer == SHELL:
            self._require(
                self._open is None, action, "a visit has not ended", "move it behind the end of the last visit"
            )
            missing = [visit for visit in self._layers if visit not in self._pushed]
            if missing:
                self._refuse(action, f"the gradient of visit {missing[0]} was not pushed", "add its backward and P")
            self._has_ended = True
            return
        self._require_open(action)
        count, done = self._settings.micro_batches, len(self._undone[action.visit])
        self._require(
            done == count,
            action,
            f"{done} of {count} micro-batches were back-propagated",
            f"move it behind B{count - 1}",
        )
        self._require(action.visit not in self._pushed, action, "the gradient was pushed before", "remove the action")
        self._pushed.add(action.visit)

    def _finish(self, action: Action) -> None:
        self._require(action.visit in self._pushed, action, "the gradient was not pushed", "move it behind P")
        later = [visit for visit, layer in self._layers.items() if layer == action.layer and visit not in self._pushed]
        self._require(not later, action, f"visit {later[:1]} of the layer still adds to the gradient", "move it there")
        self._require(action.layer not in self._updated, action, "the layer was updated before", "remove the action")
        self._updated.add(action.layer)
