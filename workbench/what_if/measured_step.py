"""Costs of a measured step, and quantities derived from them."""

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
    """The step is depth first, so it has no slots or shared visits, and cannot be simulated with other settings."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} runs depth first: every layer stays on the device, and the micro-batches run one after another, so its "
            "costs do not include slots or visits shared by micro-batches. Simulations of other settings need a step with "
            "schedule='breadth_first', as after session.reconfigure(schedule='breadth_first')"
        )


class MeasuredStep:
    """The costs of a step, its name, and its trace if the step ran."""

    def __init__(self, profile: Profile, trace: Trace | None = None, name: str = "a profile") -> None:
        self.profile, self.trace, self.name = profile, trace, name

    @staticmethod
    def of(step: Trace | Profile | MeasuredStep, name: str = "") -> MeasuredStep:
        """Convert a trace or profile; the default name of a trace is the number of its step.

        Raises:
            TypeError: `step` is not a trace or profile.
            ValueError: the trace is not a complete training step.
            DepthFirstStep: the step ran depth first.
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
        raise TypeError(f"{step!r} is not a step: pass the Trace of a finished step (StepResult.trace) or a Profile")

    @cached_property
    def keys(self) -> list[str]:
        """Keys of the layers in order."""
        return [key for key in self.profile.layers if key != SHELL]

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.keys)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches of the step, before merging."""
        return self.profile.settings.get("micro_batches") or self.profile.micro_batches

    @cached_property
    def merged(self) -> MeasuredStep:
        """The same step with all micro-batches of a stay merged into one turn."""
        return MeasuredStep(self.profile.aggregated(), self.trace, self.name)

    @cached_property
    def num_kept_graphs(self) -> int:
        """Number of layers that were not recomputed."""
        return kept_layer_count(self.profile.settings, self.depth)

    @cached_property
    def without_kept_graphs(self) -> MeasuredStep:
        """The same step by formula if only the graph of the last layer were kept."""
        if self.num_kept_graphs == 1:
            return self
        profile = with_kept_graphs(self.profile, self.num_kept_graphs, 1)
        return MeasuredStep(replace(profile, settings={**profile.settings, "keep": 0}), self.trace, self.name)

    def weight_bytes(self, key: str) -> float:
        """Return the float32 bytes of the weights of a layer or the shell."""
        layer = self.profile.layers.get(key)
        precision = self.profile.settings.get("precision", "fp32")
        return layer.load_bytes / weight_size_ratio(precision) if layer else 0.0

    @cached_property
    def largest_bytes(self) -> float:
        """Float32 bytes of the largest layer, which is the size of a slot."""
        return max(map(self.weight_bytes, self.keys), default=0.0)

    def gradient_bytes(self, key: str) -> float:
        """Return the float32 bytes of the gradients of a layer or the shell that the step pushed."""
        layer = self.profile.layers.get(key)
        return (layer.block_bytes if layer and layer.push_bytes else 0.0) + sum(
            self._per_micro_batch_bytes.get(key, {}).values()
        )

    @cached_property
    def _per_micro_batch_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of the gradients that are pushed per micro-batch, by layer and block."""
        found: dict[str, dict[str, int]] = {}
        for part in (part for turn in self.profile.turns for op in turn.ops for part in op.gradient_parts):
            found.setdefault(part.layer, {})[part.block] = part.block_bytes  # the same for each part of a block
        return found

    @cached_property
    def largest_gradient_bytes(self) -> float:
        """Float32 bytes of the largest gradient of a layer, which is the size of a gradient slot."""
        return max(map(self.gradient_bytes, self.keys), default=0.0)

    @cached_property
    def walk(self) -> MemoryTimeline:
        """Memory contents before and after every turn."""
        return MemoryTimeline(self.profile)

    @cached_property
    def boundary_bytes(self) -> float:
        """Bytes that one layer passes to the next, per micro-batch."""
        forward = [turn for stay in self.profile.stays if stay.has("forward") for turn in stay.turns]
        # A merged turn has the stash of all micro-batches.
        count = len(forward) * self.micro_batches / self.profile.micro_batches or 1
        if self.profile.settings.get("stash") == "host":
            return sum(turn.stash_bytes for turn in forward) / count
        samples = [held for turn in self.profile.turns for op in turn.ops for p, held in op.memory if p == "device"]
        return max(held.get("stash", 0) for held in (self.walk.initial["device"], *samples)) / count

    @cached_property
    def largest_transfer_bytes(self) -> int:
        """Largest number of bytes offloaded or fetched in one turn."""
        turns = [turn for stay in self.profile.stays for turn in stay.turns]
        return max((max(turn.stash_bytes, turn.fetch_bytes) for turn in turns), default=0)

    @cached_property
    def first_backward_layer(self) -> str:
        """Key of the layer whose backward runs first."""
        return next(stay.layer for stay in self.profile.stays if stay.is_backward)

    @cached_property
    def representative_layers(self) -> list[str]:
        """Keys of the layers that represent inserted layers: those of the most frequent size, except both ends if possible."""
        others = [key for key in self.keys if key != self.first_backward_layer]
        inner = others[1:] or others or [self.first_backward_layer]
        size = Counter(map(self.weight_bytes, inner)).most_common(1)[0][0]
        return [key for key in inner if self.weight_bytes(key) == size]
