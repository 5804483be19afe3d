"""What is learned of a model's stages from one forward: which tensors cross the cuts between them, and how large they are.

Tensors have numbers, in the order in which shell code and layers make them: the same for every micro-batch of that form
that takes the same way. Tensors that share memory (views) are one storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class StageStructure:
    """Stages of a model, for one form of micro-batch.

    Attributes:
        names: of every stage, its layer's; the last is "loss".
        live: for every cut, from before stage 0 on, the differentiable tensors made before it and read after it.
        reads: for every stage, which of the tensors at the cut before it are read in it.
        differentiable: all tensors with a gradient.
        constants: tensors without one that are read after the stage that makes them.
        loss: number of the loss.
        signature: the shell's operations, with their stages.
        grads_on: of these, for every stage, whether gradients were enabled.
        storage: of every tensor that shares one with a tensor at a cut; None where it is a parameter's or a buffer's.
        nbytes: of every storage.
        buffers: for every stage, dotted names of buffers that its re-run must find as its first run did.
        buffer_bytes: of these, for every stage.
    """

    names: tuple[str, ...]
    live: tuple[frozenset[int], ...]
    reads: tuple[frozenset[int], ...]
    differentiable: frozenset[int]
    constants: frozenset[int]
    loss: int
    signature: tuple[tuple[int, str], ...]
    grad_enabled: tuple[tuple[bool, ...], ...]
    storage: dict[int, int | None]
    nbytes: dict[int, int]
    buffers: tuple[tuple[str, ...], ...]
    buffer_bytes: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Number of stages, that of the loss included."""
        return len(self.names)

    def outputs_of(self, i: int) -> frozenset[int]:
        """Return the tensors that stage i makes for later ones; the loss, of the last stage."""
        return self.live[i + 1] - self.live[i] if i < self.stages - 1 else frozenset((self.loss,))

    def storages_of(self, tensors: Iterable[int]) -> set[int]:
        """Return where tensors lie, without what are weights."""
        return {s for t in tensors if (s := self.storage[t]) is not None}

    def movable_storages(self, i: int) -> set[int]:
        """Return the storages that stage i is the last to read: they go to the host with what it keeps."""
        return self.storages_of(self.live[i]) - self.storages_of(self.live[i + 1])
