"""Structure of a model's stages: the tensors that cross the boundaries between them, and their bytes.

Tensors have numbers, in the order in which shell code and layers make them; the numbers are the same for every micro-batch
of that form that takes the same path. Tensors that share memory (views) have one storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StageStructure:
    """Stages of a model, for one form of micro-batch. The boundary of a stage is the point before it.

    Example:
        See `StructureTracer`.
    """

    names: tuple[str, ...]  # by stage, the name of its layer; the last is "loss"
    live: tuple[frozenset[int], ...]  # by boundary, the differentiable tensors made before it and read after it
    reads: tuple[frozenset[int], ...]  # by stage, the tensors of its boundary that it reads
    differentiable: frozenset[int]  # all tensors with a gradient
    constants: frozenset[int]  # tensors without one that are read after the stage that makes them
    loss: int
    signature: tuple[tuple[int, str], ...]  # operations of shell code: stage and name
    grad_enabled: tuple[tuple[bool, ...], ...]  # by stage, for each of these, whether gradients were enabled
    storage: dict[int, int | None]  # of every tensor that shares one with a boundary; None for parameters and buffers
    nbytes: dict[int, int]  # by storage
    buffers: tuple[tuple[str, ...], ...]  # by stage, names of the buffers that a rerun must find as the first run did
    buffer_bytes: tuple[int, ...]  # bytes of these, by stage

    @property
    def stages(self) -> int:
        """Number of stages, including the loss."""
        return len(self.names)

    def outputs_of(self, i: int) -> frozenset[int]:
        """Return the tensors that stage i makes for later stages; for the last stage the loss."""
        return self.live[i + 1] - self.live[i] if i < self.stages - 1 else frozenset((self.loss,))

    def storages_of(self, tensors: Iterable[int]) -> set[int]:
        """Return the storages of tensors, without those of weights."""
        return {s for t in tensors if (s := self.storage[t]) is not None}

    def storage_bytes(self, tensors: Iterable[int]) -> int:
        """Return the bytes of `storages_of(tensors)`."""
        return sum(self.nbytes[s] for s in self.storages_of(tensors))

    def movable_storages(self, i: int) -> set[int]:
        """Return the storages that stage i is the last to read; they are offloaded with its record or input."""
        return self.storages_of(self.live[i]) - self.storages_of(self.live[i + 1])
