"""A measured step as questions about other steps need it: its costs, and what is read off them once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cached_property

from l2l_core import Profile, Trace
from l2l_core.forecast import MemoryTimeline
from l2l_core.schedule_rules import kept_layer_count, weight_size_ratio
from l2l_core.simulator import SHELL
from workbench.what_if.kept_graphs import with_kept_graphs


class DepthFirstStep(ValueError):
    """A step that ran depth first, or will, has no slots and no turns of micro-batches that a what-if could ask about."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} runs depth first: every layer stays on the device, and micro-batches pass one after another, so its costs "
            "say nothing of slots or of micro-batches that share a visit. Questions about these need a step with "
            "schedule='breadth_first', as after session.reconfigure(schedule='breadth_first')"
        )


class MeasuredStep:
    """The costs of a step, its trace if it was one that ran, and what it is called."""

    def __init__(self, profile: Profile, trace: Trace | None = None, name: str = "a profile") -> None:
        self.profile, self.trace, self.name = profile, trace, name

    @staticmethod
    def of(step: Trace | Profile | MeasuredStep, name: str = "") -> MeasuredStep:
        """Make one of whatever is known of a step; a trace is called by its number unless it has a name.

        Raises:
            TypeError: `step` is nothing of a step.
            ValueError: the trace holds no whole training step, or (`DepthFirstStep`) one that ran depth first.
        """
        if isinstance(step, MeasuredStep):
            return step
        if isinstance(step, Trace):
            name = name or f"step {step.step + 1}"
            if step.settings.get("schedule") == "depth_first":
                raise DepthFirstStep(name)
            return MeasuredStep(Profile.of(step), step, name)
        if isinstance(step, Profile):
            return MeasuredStep(step)
        raise TypeError(f"{step!r} is not a step: give the Trace of a finished one (StepResult.trace), or a Profile")

    @cached_property
    def keys(self) -> list[str]:
        """Keys of the layers, in order of the stack."""
        return [key for key in self.profile.layers if key != SHELL]

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def micro_batches(self) -> int:
        """How many the step had, also where they are taken together."""
        return self.profile.settings.get("micro_batches") or self.profile.micro_batches

    @cached_property
    def merged(self) -> MeasuredStep:
        """The same step with the micro-batches of a stay taken together."""
        return MeasuredStep(self.profile.aggregated(), self.trace, self.name)

    @cached_property
    def num_kept_graphs(self) -> int:
        """Layers that were not recomputed."""
        return kept_layer_count(self.profile.settings, self.depth)

    @cached_property
    def without_kept_graphs(self) -> MeasuredStep:
        """The same step as it would be if no graph but the last layer's were kept, by formula."""
        if self.num_kept_graphs == 1:
            return self
        profile = with_kept_graphs(self.profile, self.num_kept_graphs, 1)
        return MeasuredStep(replace(profile, settings={**profile.settings, "keep": 0}), self.trace, self.name)

    def weight_bytes(self, key: str) -> float:
        """Return the bytes that the weights of a layer or the shell take in float32, in which their masters are."""
        layer = self.profile.layers.get(key)
        precision = self.profile.settings.get("precision", "fp32")
        return layer.load_bytes / weight_size_ratio(precision) if layer else 0.0

    @cached_property
    def largest_bytes(self) -> float:
        """Bytes that the largest layer takes in float32: a slot has room for it."""
        return max(map(self.weight_bytes, self.keys), default=0.0)

    def gradient_bytes(self, key: str) -> float:
        """Return the bytes that are trained of a layer or the shell, in float32, as far as the step has shown it."""
        layer = self.profile.layers.get(key)
        return (layer.block_bytes if layer and layer.push_bytes else 0.0) + sum(
            self._per_micro_batch_bytes.get(key, {}).values()
        )

    @cached_property
    def _per_micro_batch_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of the gradients that leave micro-batch by micro-batch, by layer and by the name that the EPS has for them."""
        found: dict[str, dict[str, int]] = {}
        for part in (part for turn in self.profile.turns for op in turn.ops for part in op.gradient_parts):
            found.setdefault(part.layer, {})[part.block] = part.block_bytes  # once, however many parts it comes in
        return found

    @cached_property
    def largest_gradient_bytes(self) -> float:
        """Bytes that are trained of the layer that trains most, in float32: a gradient slot has room for them."""
        return max(map(self.gradient_bytes, self.keys), default=0.0)

    @cached_property
    def walk(self) -> MemoryTimeline:
        """What fills the memories before and after every turn."""
        return MemoryTimeline(self.profile)

    @cached_property
    def boundary_bytes(self) -> float:
        """Bytes that one layer hands to the next, per micro-batch."""
        forward = [turn for stay in self.profile.stays if stay.has("forward") for turn in stay.turns]
        # taken together, a turn stands for all micro-batches, and its stash is theirs
        count = len(forward) * self.micro_batches / self.profile.micro_batches or 1
        if self.profile.settings.get("stash") == "host":
            return sum(turn.stash_bytes for turn in forward) / count
        samples = [held for turn in self.profile.turns for op in turn.ops for p, held in op.memory if p == "device"]
        return max(held.get("stash", 0) for held in (self.walk.initial["device"], *samples)) / count

    @cached_property
    def largest_transfer_bytes(self) -> int:
        """The most bytes that left or arrived at one turn."""
        turns = [turn for stay in self.profile.stays for turn in stay.turns]
        return max((max(turn.stash_bytes, turn.fetch_bytes) for turn in turns), default=0)

    @cached_property
    def first_backward_layer(self) -> str:
        """The layer that back-propagates first."""
        return next(stay.layer for stay in self.profile.stays if stay.is_backward)

    @cached_property
    def representative_layers(self) -> list[str]:
        """Layers that stand for further ones: those of the most frequent size, but for the ends if there are others."""
        others = [key for key in self.keys if key != self.first_backward_layer]
        inner = others[1:] or others or [self.first_backward_layer]
        size = Counter(map(self.weight_bytes, inner)).most_common(1)[0][0]
        return [key for key in inner if self.weight_bytes(key) == size]
