"""Scale the memory samples of a measured step to other settings, turn by turn.

Slots and gradient buffers follow from the settings, which is exact. With the stash on the host, other device bytes do not
accumulate, so each turn has the measured bytes, scaled. With the stash on the device they accumulate: each turn adds, and in
backward releases, the measured change, scaled. If the stash changes its place, each turn is assumed to stash the output of a
layer, and the first turn of a micro-batch also the tensors that the shell keeps; with the new stash on the host, the device has
a ring for two transfers, and an input with its gradient.
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
    """Scales the memory samples of a step; turns must be passed in order of time.

    Args:
        base: the measured step.
        question: the new settings.
        weight_bytes: float32 bytes of the new model.

    Attributes:
        weight_factor: bytes of a weight on the device, relative to the measured step.
        transfer_factor: bytes that a micro-batch offloads or fetches, relative to the measured step.
        first: the samples before the first turn.
    """

    def __init__(self, base: MeasuredStep, question: Question, weight_bytes: float) -> None:
        settings = base.profile.settings
        precision, ahead = settings.get("precision", question.precision), settings.get("ahead", 1)
        resident = settings.get("resident", 0)
        self._base, self._question, rows = base, question, question.rows_factor(base)
        self._on_host, self._new_on_host = settings.get("stash", question.stash) == "host", question.stash == "host"
        self.weight_factor = weight_size_ratio(question.precision) / weight_size_ratio(precision)
        self.transfer_factor = rows * question.width * self.weight_factor
        # Graphs change by less than weights because some of their tensors keep their type, see BF16_FACTOR.
        graph = {0.5: 1 / BF16_FACTOR, 2.0: BF16_FACTOR}.get(self.weight_factor, 1.0)
        self._growth = {"activations": rows * question.width * graph, "stash": self.transfer_factor, "other": rows}
        weights = base.weight_bytes(SHELL), base.largest_bytes
        gradients = base.gradient_bytes(SHELL), base.largest_gradient_bytes
        before = sum(map(base.weight_bytes, base.profile.layers))
        self._model_growth = weight_bytes / before if before else 1.0
        # (old, new) device bytes
        self._weights = (
            weight_size_ratio(precision) * _slot_bytes(weights, weight_slots(ahead, resident), 1),
            weight_size_ratio(question.precision)
            * _slot_bytes(weights, weight_slots(question.ahead, question.resident), question.width),
        )
        self._gradients = (
            _slot_bytes(gradients, gradient_slots(ahead), 1) + residual_bytes(base, 1, 1),
            _slot_bytes(gradients, gradient_slots(question.ahead), question.width)
            + residual_bytes(base, self._model_growth, question.width),
        )
        self._transfer_bytes = base.boundary_bytes * self.transfer_factor
        self._first_transfer = self._first_transfer_bytes()
        # Only a step with ahead > 0 has a ring, so the factor is 1, -1 or 0.
        self._ring_bytes = 2 * base.largest_transfer_bytes * self.transfer_factor * ((question.ahead > 0) - (ahead > 0))
        self._state = {place: dict.fromkeys(CATEGORIES, 0.0) | dict(held) for place, held in base.walk.initial.items()}
        self.first: MemorySamples = tuple(
            (place, self._sample(place, held, held)) for place, held in base.profile.memory
        )

    def moved_bytes(self, turn: TurnCost, is_start: bool) -> tuple[float, float]:
        """Return the bytes fetched before a turn and offloaded after it, per layer and micro-batch."""
        if not self._new_on_host:
            return 0.0, 0.0
        if self._on_host:
            return turn.fetch_bytes * self.transfer_factor, turn.stash_bytes * self.transfer_factor
        if is_start:
            return 0.0, self._first_transfer
        # Backward fetches the input of the layer and the gradient of its output.
        return self._transfer_bytes * (2 if _direction(turn) < 0 else 1), self._transfer_bytes

    def scale_turn(self, index: int, turn: TurnCost, count: float) -> list[MemorySamples]:
        """Return the samples of a turn, by operation; `count` layers and micro-batches are merged in it."""
        memory = self._base.walk.turns[index, turn.k]
        found: list[list[tuple[str, Mapping[str, int]]]] = []
        for op, deltas in zip(turn.ops, memory.sample_deltas, strict=True):
            samples: list[tuple[str, Mapping[str, int]]] = []
            for (place, held), (_, more) in zip(op.memory, deltas, strict=True):
                scale = self._device_bytes if place == "device" else self._host_bytes
                samples.append((place, self._sample(place, held, scale(held, more, memory, count))))
            found.append(samples)
        self._advance(memory, count, is_start=index == BEFORE_FIRST_STAY)
        if self._new_on_host and not self._on_host and found:  # the measured turns have no host samples
            first = self._base.walk.initial["host"]
            scaled = {**first, "stash": self._state["host"]["stash"]}
            found[-1].append(("host", self._sample("host", first, scaled)))
        return [tuple(samples) for samples in found]

    def _device_bytes(self, held: Bytes, more: Bytes, memory: TurnMemory, count: float) -> Bytes:
        """Scale a device sample: `held` bytes, `more` than before the turn."""
        scaled, state = dict(held), self._state["device"]
        before, added = memory.before["device"], memory.net_change["device"]
        for name, growth in self._growth.items():
            if self._on_host:
                scaled[name] = held.get(name, 0) * growth
            elif self._new_on_host:
                # The stash of earlier turns is offloaded; the share of one micro-batch stays.
                scaled[name] = max(0.0, more.get(name, 0) + before.get(name, 0) / self._base.micro_batches) * growth
            else:
                merged = (count - 1) * max(0.0, added.get(name, 0))
                scaled[name] = state[name] + (more.get(name, 0) + merged) * growth
        if self._on_host and self._new_on_host:
            scaled["stash"] += self._ring_bytes if held.get("stash") else 0.0
        elif self._on_host:
            scaled["stash"] = state["stash"]
        elif self._new_on_host:
            ring = 2 * max(self._first_transfer, self._transfer_bytes) if self._question.ahead else 0.0
            scaled["stash"] = ring + 2 * self._transfer_bytes
        return scaled

    def _host_bytes(self, held: Bytes, more: Bytes, memory: TurnMemory, count: float) -> Bytes:
        merged = (count - 1) * max(0.0, memory.net_change["host"].get("stash", 0))
        stash = self._state["host"]["stash"] + (more.get("stash", 0) + merged) * self._growth["stash"]
        return {**held, "stash": stash if self._new_on_host else 0.0}

    def _advance(self, memory: TurnMemory, count: float, is_start: bool) -> None:
        """Add the net change of a turn to the accumulated bytes."""
        stash = {place: held["stash"] for place, held in self._state.items()}
        for place, state in self._state.items():
            for name, growth in self._growth.items():
                state[name] += count * memory.net_change[place].get(name, 0) * growth
        if self._on_host != self._new_on_host:
            if self._on_host:
                transfer = memory.turn.stash_bytes * self.transfer_factor
            else:
                transfer = self._first_transfer if is_start else self._transfer_bytes
            change = count * transfer * (1 if is_start else _direction(memory.turn))
            self._state["device"]["stash"] = max(0.0, stash["device"] + change)
            self._state["host"]["stash"] = stash["host"] + max(0.0, change)

    def _first_transfer_bytes(self) -> float:
        """Return the bytes that the first turn of a micro-batch leaves on the device."""
        changes = [
            self._base.walk.turns[BEFORE_FIRST_STAY, turn.k].net_change["device"] for turn in self._base.profile.start
        ]
        kept = [change.get(name, 0) * growth for change in changes for name, growth in self._growth.items()]
        return sum(kept) / self._base.micro_batches

    def _sample(self, place: str, old: Bytes, scaled: Bytes) -> dict[str, int]:
        """Complete a sample with the categories that do not depend on turns: slots and buffers, or the model."""
        weights, gradients, optimizer = (old.get(name, 0) for name in ("weights", "gradients", "optimizer"))
        sample = dict(scaled)
        if place == "device":
            sample["weights"] = _shifted(weights, *self._weights)
            sample["gradients"] = _shifted(gradients, *self._gradients)
        else:
            sample["weights"], sample["optimizer"] = weights * self._model_growth, optimizer * self._model_growth
            sample["gradients"] = gradients * self._question.width**2
        return {name: nbytes for name in CATEGORIES if (nbytes := round(sample.get(name, 0))) > 0}


def _slot_bytes(nbytes: tuple[float, float], count: int, width: float) -> float:
    """Return the bytes of the shell and of `count` slots at a relative width."""
    shell, largest = nbytes
    return width * shell + width**2 * largest * count


def residual_bytes(base: MeasuredStep, growth: float, width: float) -> float:
    """Return the bytes of the residuals of compressed gradients, including the backups for undoing an update.

    Args:
        base: the measured step.
        growth: weights of the new model relative to the measured one.
        width: width of the new model relative to the measured one.
    """
    settings = base.profile.settings
    compress = Compress.of(settings.get("compress"))
    if compress is None or not compress.feedback:
        return 0.0
    layers = base.profile.layers
    sizes = sorted((base.gradient_bytes(key) for key in layers if layers[key].push_bytes), reverse=True)
    backups = residual_backups(settings.get("update", "eager"), settings.get("rollback", False))
    return growth * sum(sizes) + (growth * sum(sizes) if backups is None else width**2 * sum(sizes[:backups]))


def _shifted(held: float, old: float, new: float) -> float:
    """Replace `old` bytes by `new` in `held`; in proportion while fewer than `old` are allocated."""
    return new + held - old if held >= old else held * new / old


def _direction(turn: TurnCost) -> int:
    """Return 1 for forward, -1 for backward, 0 for both or neither."""
    kinds = {op.kind for op in turn.ops}
    return ("forward" in kinds) - ("backward" in kinds)
