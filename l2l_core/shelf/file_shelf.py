"""What a user says of a shelf."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from l2l_core.config import parse_bytes

Initialiser = Callable[[str, torch.Tensor], None]


@dataclass(frozen=True, kw_only=True)
class FileShelf:
    """Keep weights and optimizer state in files, for models that do not fit in memory: ``Relay(..., shelf=FileShelf(...))``.

    Two halves of every layer are kept, so that a crash at any moment leaves the last whole step: twice the bytes of weights and
    state on the disk, 24 per parameter with AdamW. See `docs/CAPACITY.md`.

    Args:
        folder: of its own; on a local disk.
        memory_bytes: host memory that weights and state may pass through, as a number or as text: ``"2 GB"``.
        weights: of a model that has none (see `empty_weights`): a function that fills the parameter of a name, or a safetensors
            file, or a folder of such as ``save_pretrained`` writes it. None: those that the model has.
        resume: go on from the last whole step or edit that the folder has, whatever weights the model has. The model has the
            layers that the edits have left, in their order; their keys, and what is trained of them, are those of the folder.

    Raises:
        ValueError: bytes that there cannot be, or both `weights` and `resume`.
    """

    folder: str | Path
    memory_bytes: int | str
    weights: Initialiser | str | Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.memory_bytes, bool) or not isinstance(self.memory_bytes, int | str) or self.nbytes <= 0:
            raise ValueError(
                f'memory_bytes={self.memory_bytes!r}: must be a positive number of bytes, or text as "2 GB"'
            )
        if self.resume and self.weights is not None:
            raise ValueError(
                "resume=True goes on with the weights that the folder has, and weights= gives others: leave out one of them"
            )

    @property
    def nbytes(self) -> int:
        """`memory_bytes` as a number."""
        return (
            parse_bytes(self.memory_bytes, "memory_bytes") if isinstance(self.memory_bytes, str) else self.memory_bytes
        )
