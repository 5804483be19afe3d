"""What fills device and host in a step with other settings, turn by turn, from what filled them in a measured one.

Slots and gradient buffers are as large and as many as the settings say: that is exact. With the stash on the host nothing else
adds up on the device, so every turn has the levels that were measured, scaled. With the stash on the device images add up:
every turn adds, and in backward takes away, what it did when it was measured. Where the stash changes its place an image is taken
for what one layer hands to the next, the first one for all that the model's own code keeps; on the way to the host there are
on the device room for one that leaves and one that arrives, and an input with its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

from l2l_core import Compress
from l2l_core.forecast import TurnMemory
from l2l_core.schedule_rules import gradient_slots, residual_backups, weight_size_ratio, weight_slots
from l2l_core.simulator import BEFORE_FIRST_STAY, SHELL, MemorySamples, TurnCost
from l2l_core.trace import CATEGORIES
from workbench.readings import BF16_FACTOR
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import Question

Bytes = Mapping[str, float]  # by category


class MemoryScaler:
    """The samples of a scaled step; turns are asked for in order.

    Args:
        base: the measured step.
        question: its new settings.
        weight_bytes: of the new model, in float32.

    Attributes:
        item: bytes of a weight on the device, over those before.
        moves: bytes of what a micro-batch moves, over those before.
        first: the samples before the first turn.
    """

    def __init__(self, base: MeasuredStep, question: Question, weight_bytes: float) -> None:
        settings = base.profile.settings
        was, ahead = settings.get("precision", question.precision), settings.get("ahead", 1)
        resident = settings.get("resident", 0)
        self._base, self._question, rows = base, question, question.rows_factor(base)
        self._on_host, self._new_on_host = settings.get("stash", question.stash) == "host", question.stash == "host"
        self.weight_factor = weight_size_ratio(question.precision) / weight_size_ratio(was)
        self.transfer_factor = rows * question.width * self.weight_factor
        # By less than the weights: part of a graph keeps its type, see BF16_FACTOR.
        graph = {0.5: 1 / BF16_FACTOR, 2.0: BF16_FACTOR}.get(self.weight_factor, 1.0)
        self._growth = {"activations": rows * question.width * graph, "stash": self.transfer_factor, "other": rows}
        weights = base.weight_bytes(SHELL), base.largest_bytes
        gradients = base.gradient_bytes(SHELL), base.largest_gradient_bytes
        self._weights = (
            weight_size_ratio(was) * _slot_bytes(weights, weight_slots(ahead, resident), 1),
            weight_size_ratio(question.precision)
            * _slot_bytes(weights, weight_slots(question.ahead, question.resident), question.width),
        )
        self._gradients = (
            _slot_bytes(gradients, gradient_slots(ahead), 1),
            _slot_bytes(gradients, gradient_slots(question.ahead), question.width),
        )
        before = sum(map(base.weight_bytes, base.profile.layers))
        self._model_growth = weight_bytes / before if before else 1.0
        left_out = residual_bytes(base, 1, 1), residual_bytes(base, self._model_growth, question.width)
        self._gradients = self._gradients[0] + left_out[0], self._gradients[1] + left_out[1]
        self._transfer_bytes = base.boundary_bytes * self.transfer_factor
        self._first_transfer = self._first_transfer_bytes()
        # Only a step with overlap reserves a ring: 1, -1 or 0 times that.
        self._ring_bytes = 2 * base.largest_transfer_bytes * self.transfer_factor * ((question.ahead > 0) - (ahead > 0))
        self._state = {place: dict.fromkeys(CATEGORIES, 0.0) | dict(held) for place, held in base.walk.initial.items()}
        self.first: MemorySamples = tuple(
            (place, self._sample(place, held, held)) for place, held in base.profile.memory
        )

    def moved_bytes(self, turn: TurnCost, is_start: bool) -> tuple[float, float]:
        """Return the bytes of one layer and micro-batch that arrive before a turn, and that leave after it."""
        if not self._new_on_host:
            return 0.0, 0.0
        if self._on_host:
            return turn.fetch_bytes * self.transfer_factor, turn.stash_bytes * self.transfer_factor
        if is_start:
            return 0.0, self._first_transfer
        # In backward the layer's input arrives, and the gradient of its output.
        return self._transfer_bytes * (2 if _direction(turn) < 0 else 1), self._transfer_bytes

    def scale_turn(self, index: int, turn: TurnCost, count: float) -> list[MemorySamples]:
        """Make the samples of a turn by operation; `many` layers and micro-batches are taken together."""
        walked = self._base.walk.turns[index, turn.k]
        found: list[list[tuple[str, Mapping[str, int]]]] = []
        for op, steps in zip(turn.ops, walked.sample_deltas, strict=True):
            samples: list[tuple[str, Mapping[str, int]]] = []
            for (place, held), (_, more) in zip(op.memory, steps, strict=True):
                made = self._device_bytes if place == "device" else self._host_bytes
                samples.append((place, self._sample(place, held, made(held, more, walked, count))))
            found.append(samples)
        self._advance(walked, count, is_start=index == BEFORE_FIRST_STAY)
        if self._new_on_host and not self._on_host and found:  # nothing told of the host's memory when it was measured
            first = self._base.walk.initial["host"]
            standing = {**first, "stash": self._state["host"]["stash"]}
            found[-1].append(("host", self._sample("host", first, standing)))
        return [tuple(samples) for samples in found]

    def _device_bytes(self, held: Bytes, more: Bytes, walked: TurnMemory, count: float) -> Bytes:
        """What there is on the device where there was `held`, `more` than before the turn."""
        made, state = dict(held), self._state["device"]
        before, added = walked.before["device"], walked.net_change["device"]
        for name, grow in self._growth.items():
            if self._on_host:
                made[name] = held.get(name, 0) * grow
            elif self._new_on_host:
                # images of the turns before have left: of what was there before, one micro-batch's share stays
                made[name] = max(0.0, more.get(name, 0) + before.get(name, 0) / self._base.micro_batches) * grow
            else:
                further = (count - 1) * max(0.0, added.get(name, 0))
                made[name] = state[name] + (more.get(name, 0) + further) * grow
        if self._on_host and self._new_on_host:
            made["stash"] += self._ring_bytes if held.get("stash") else 0.0
        elif self._on_host:
            made["stash"] = state["stash"]
        elif self._new_on_host:
            ring = 2 * max(self._first_transfer, self._transfer_bytes) if self._question.ahead else 0.0
            made["stash"] = ring + 2 * self._transfer_bytes
        return made

    def _host_bytes(self, held: Bytes, more: Bytes, walked: TurnMemory, count: float) -> Bytes:
        further = (count - 1) * max(0.0, walked.net_change["host"].get("stash", 0))
        stash = self._state["host"]["stash"] + (more.get("stash", 0) + further) * self._growth["stash"]
        return {**held, "stash": stash if self._new_on_host else 0.0}

    def _advance(self, walked: TurnMemory, count: float, is_start: bool) -> None:
        """From a turn to the next one."""
        stash = {place: held["stash"] for place, held in self._state.items()}
        for place, state in self._state.items():
            for name, grow in self._growth.items():
                state[name] += count * walked.net_change[place].get(name, 0) * grow
        if self._on_host != self._new_on_host:
            turn = walked.turn
            kept = (
                turn.stash_bytes * self.transfer_factor
                if self._on_host
                else self._first_transfer
                if is_start
                else self._transfer_bytes
            )
            change = count * kept * (1 if is_start else _direction(turn))
            self._state["device"]["stash"] = max(0.0, stash["device"] + change)
            self._state["host"]["stash"] = stash["host"] + max(0.0, change)

    def _first_transfer_bytes(self) -> float:
        """What the first turn of a micro-batch leaves on the device."""
        walked = [
            self._base.walk.turns[BEFORE_FIRST_STAY, turn.k].net_change["device"] for turn in self._base.profile.start
        ]
        kept = [added.get(name, 0) * grow for added in walked for name, grow in self._growth.items()]
        return sum(kept) / self._base.micro_batches

    def _sample(self, place: str, old: Bytes, made: Bytes) -> dict[str, int]:
        """A sample with what does not depend on turns: slots and buffers on the device, the model on the host."""
        weights, gradients, optimizer = (old.get(name, 0) for name in ("weights", "gradients", "optimizer"))
        level = dict(made)
        if place == "device":
            level["weights"] = _shifted(weights, *self._weights)
            level["gradients"] = _shifted(gradients, *self._gradients)
        else:
            level["weights"], level["optimizer"] = weights * self._model_growth, optimizer * self._model_growth
            level["gradients"] = gradients * self._question.width**2
        return {name: nbytes for name in CATEGORIES if (nbytes := round(level.get(name, 0))) > 0}


def _slot_bytes(nbytes: tuple[float, float], count: int, width: float) -> float:
    """Bytes of the shell and of so many buffers for the largest layer, given those of both, where the model is wider."""
    shell, largest = nbytes
    return width * shell + width**2 * largest * count


def residual_bytes(base: MeasuredStep, grow: float, width: float) -> float:
    """Bytes of what compression leaves out of gradients, and of what a step keeps of it meanwhile, if it is taken back.

    Args:
        base: the measured step.
        grow: weights of the new model over those of the old one.
        width: of the new model over that of the old one.
    """
    settings = base.profile.settings
    compress = Compress.of(settings.get("compress"))
    if compress is None or not compress.feedback:
        return 0.0
    layers = base.profile.layers
    held = sorted((base.gradient_bytes(key) for key in layers if layers[key].push_bytes), reverse=True)
    spares = residual_backups(settings.get("update", "eager"), settings.get("rollback", False))
    kept = grow * sum(held) if spares is None else width**2 * sum(held[:spares])
    return grow * sum(held) + kept


def _shifted(old: float, was: float, now: float) -> float:
    """What was there with what has changed; before everything was there, in proportion."""
    return now + old - was if old >= was else old * now / was


def _direction(turn: TurnCost) -> int:
    """1 in forward, -1 in backward, 0 where both are, or neither."""
    kinds = {op.kind for op in turn.ops}
    return ("forward" in kinds) - ("backward" in kinds)
