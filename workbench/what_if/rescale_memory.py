"""What fills device and host in a step with other settings, turn by turn, from what filled them in a measured one.

Slots and gradient buffers are as large and as many as the settings say: that is exact. With the stash on the host nothing else
adds up on the device, so every turn has the levels that were measured, scaled. With the stash on the device images add up:
every turn adds, and in backward takes away, what it did when it was measured. Where the stash changes its place an image is taken
for what one layer hands to the next, the first one for all that the model's own code keeps; on the way to the host there are
on the device room for one that leaves and one that arrives, and an input with its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from l2l_core.forecast import SHELL, Memory, TurnCost
from l2l_core.rules import gradient_slots, weight_share, weight_slots
from l2l_core.trace import CATEGORIES
from workbench.readings import BF16_FACTOR
from workbench.what_if.base import START, STASH, Base, Level, Levels, Target, level_of

WEIGHTS, GRADIENTS, ACTIVATIONS, OPTIMIZER, OTHER = map(
    CATEGORIES.index, ("weights", "gradients", "activations", "optimizer", "other")
)


class Memories:
    """The samples of a scaled step; turns are asked for in order.

    Args:
        base: the measured step.
        target: its new settings.
        weight_bytes: of the new model, in float32.

    Attributes:
        item: bytes of a weight on the device, over those before.
        moves: bytes of what a micro-batch moves, over those before.
        first: the samples before the first turn.
    """

    def __init__(self, base: Base, target: Target, weight_bytes: float) -> None:
        settings = base.profile.settings
        was, ahead = settings.get("precision", target.precision), settings.get("ahead", 1)
        self._base, self._target = base, target
        self._on_host, self._now_on_host = settings.get("stash", target.stash) == "host", target.stash == "host"
        self.item = weight_share(target.precision) / weight_share(was)
        self.moves = target.rows * target.width * self.item
        graph = {0.5: 1 / BF16_FACTOR, 2.0: BF16_FACTOR}.get(self.item, 1.0)
        self._grow = {ACTIVATIONS: target.rows * target.width * graph, STASH: self.moves, OTHER: target.rows}
        weights = base.weight_bytes(SHELL), base.largest_bytes
        gradients = base.gradient_bytes(SHELL), base.largest_gradient_bytes
        self._weights = (
            weight_share(was) * _slots(weights, weight_slots(ahead), 1),
            weight_share(target.precision) * _slots(weights, weight_slots(target.ahead), target.width),
        )
        self._gradients = (
            _slots(gradients, gradient_slots(ahead), 1),
            _slots(gradients, gradient_slots(target.ahead), target.width),
        )
        before = sum(map(base.weight_bytes, base.profile.layers))
        self._model = weight_bytes / before if before else 1.0
        self._image = base.boundary_bytes * self.moves
        self._first_image = self._kept_at_first()
        self._ring = 2 * base.largest_image_bytes * self.moves * ((target.ahead > 0) - (ahead > 0))
        self._state = {place: list(level) for place, level in base.first.items()}
        self.first: Memory = tuple(
            (place, self._sample(place, level_of(held), level_of(held))) for place, held in base.profile.memory
        )

    def moved(self, turn: TurnCost, is_start: bool) -> tuple[float, float]:
        """Bytes of one layer and micro-batch that arrive before a turn, and that leave after it."""
        if not self._now_on_host:
            return 0.0, 0.0
        if self._on_host:
            return turn.fetch_bytes * self.moves, turn.stash_bytes * self.moves
        if is_start:
            return 0.0, self._first_image
        return self._image * (2 if _direction(turn) < 0 else 1), self._image

    def turn(self, index: int, position: int, turn: TurnCost, many: float) -> list[Memory]:
        """Samples by operation; `many` layers and micro-batches are taken together."""
        before, after = self._base.levels[index, position]
        found: list[list[tuple[str, Mapping[str, int]]]] = []
        for op in turn.ops:
            samples: list[tuple[str, Mapping[str, int]]] = []
            for place, held in op.memory:
                level = level_of(held)
                made = self._on_device if place == "device" else self._at_host
                samples.append((place, self._sample(place, level, made(level, before[place], after[place], many))))
            found.append(samples)
        self._go_on(before, after, turn, many, is_start=index == START)
        if self._now_on_host and not self._on_host and found:  # nothing told of the host's memory when it was measured
            standing = list(self._base.first["host"])
            standing[STASH] = self._state["host"][STASH]
            found[-1].append(("host", self._sample("host", self._base.first["host"], standing)))
        return [tuple(samples) for samples in found]

    def _on_device(self, level: Level, before: Level, after: Level, many: float) -> Sequence[float]:
        made, state = list(level), self._state["device"]
        for c, grow in self._grow.items():
            if self._on_host:
                made[c] = level[c] * grow
            elif self._now_on_host:
                made[c] = max(0.0, level[c] - before[c] + before[c] / self._base.micro_batches) * grow
            else:
                further = (many - 1) * max(0.0, after[c] - before[c])
                made[c] = state[c] + (level[c] - before[c] + further) * grow
        if self._on_host and self._now_on_host:
            made[STASH] += self._ring if level[STASH] else 0.0
        elif self._on_host:
            made[STASH] = state[STASH]
        elif self._now_on_host:
            ring = 2 * max(self._first_image, self._image) if self._target.ahead else 0.0
            made[STASH] = ring + 2 * self._image
        return made

    def _at_host(self, level: Level, before: Level, after: Level, many: float) -> Sequence[float]:
        made = list(level)
        further = (many - 1) * max(0.0, after[STASH] - before[STASH])
        more = (level[STASH] - before[STASH] + further) * self._grow[STASH]
        made[STASH] = self._state["host"][STASH] + more if self._now_on_host else 0.0
        return made

    def _go_on(self, before: Levels, after: Levels, turn: TurnCost, many: float, is_start: bool) -> None:
        """From a turn to the next one."""
        stash = {place: level[STASH] for place, level in self._state.items()}
        for place, state in self._state.items():
            for c, grow in self._grow.items():
                state[c] += many * (after[place][c] - before[place][c]) * grow
        if self._on_host != self._now_on_host:
            kept = turn.stash_bytes * self.moves if self._on_host else self._first_image if is_start else self._image
            change = many * kept * (1 if is_start else _direction(turn))
            self._state["device"][STASH] = max(0.0, stash["device"] + change)
            self._state["host"][STASH] = stash["host"] + max(0.0, change)

    def _kept_at_first(self) -> float:
        """What the first turn of a micro-batch leaves on the device."""
        turns = [self._base.levels[START, i] for i, _ in enumerate(self._base.profile.start)]
        kept = [
            (after["device"][c] - before["device"][c]) * grow
            for before, after in turns
            for c, grow in self._grow.items()
        ]
        return sum(kept) / self._base.micro_batches

    def _sample(self, place: str, old: Level, made: Sequence[float]) -> dict[str, int]:
        """A level with what does not depend on turns: slots and buffers on the device, the model on the host."""
        level = list(made)
        if place == "device":
            level[WEIGHTS] = _moved_on(old[WEIGHTS], *self._weights)
            level[GRADIENTS] = _moved_on(old[GRADIENTS], *self._gradients)
        else:
            level[WEIGHTS], level[OPTIMIZER] = old[WEIGHTS] * self._model, old[OPTIMIZER] * self._model
            level[GRADIENTS] = old[GRADIENTS] * self._target.width**2
        return {name: nbytes for name, n in zip(CATEGORIES, level, strict=True) if (nbytes := round(n)) > 0}


def _slots(nbytes: tuple[float, float], count: int, width: float) -> float:
    """Bytes of the shell and of so many buffers for the largest layer, given those of both, where the model is wider."""
    shell, largest = nbytes
    return width * shell + width**2 * largest * count


def _moved_on(old: float, was: float, now: float) -> float:
    """What was there with what has changed; before everything was there, in proportion."""
    return now + old - was if old >= was else old * now / was


def _direction(turn: TurnCost) -> int:
    """1 in forward, -1 in backward, 0 where both are, or neither."""
    kinds = {op.kind for op in turn.ops}
    return ("forward" in kinds) - ("backward" in kinds)
