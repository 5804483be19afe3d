"""Training text from the sources of Python's standard library, as bytes.

Files are read in the order of their paths, and a checksum of the path decides whether a file is held out, so runs with the
same Python use the same text. Tests and installed packages are left out.
"""

import math
import os
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
HELD_OUT_EVERY = 10  # one file in so many is held out


@dataclass(frozen=True)
class Corpus:
    """Training text and held-out text, from different files.

    Attributes:
        train, held_out: bytes, shape (n,), uint8.
        files: number of files read.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    files: int

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, which are its bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; a byte that is no character is shown as a replacement character."""
        return bytes(tokens).decode("utf-8", errors="replace")


def find_sources(folder: Path) -> list[str]:
    """Return the sorted paths of the Python files below `folder`, relative to it and with forward slashes."""
    found = []
    for where, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if name not in EXCLUDED_FOLDERS]  # skips most files
        # _sysconfigdata_*.py holds the settings with which this Python was built, no text to learn from
        wanted = (name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata"))
        found += [Path(where, name).relative_to(folder).as_posix() for name in wanted]
    return sorted(found)


def is_held_out(path: str) -> bool:
    """Return True if the file with this path is held out."""
    return zlib.crc32(path.encode()) % HELD_OUT_EVERY == 0


def load_corpus(folder: Path | None = None) -> Corpus:
    """Read the standard library of this Python, or another folder of Python files.

    Raises:
        FileNotFoundError: no files, or too few to hold some out (some distributions ship the library compiled).
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    paths = find_sources(folder)
    held_out = [path for path in paths if is_held_out(path)]
    train = [path for path in paths if not is_held_out(path)]
    if not held_out or not train:
        raise FileNotFoundError(
            f"{folder} has {len(paths)} Python source file(s), {len(held_out)} of them held out: this Python has no sources "
            "of its standard library. Use one that includes them, such as a Python from python.org, conda or a Linux package"
        )
    return Corpus(_read_bytes(folder, train), _read_bytes(folder, held_out), len(paths))


def _read_bytes(folder: Path, paths: list[str]) -> torch.Tensor:
    joined = bytearray().join((folder / path).read_bytes() for path in paths)
    return torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)


def draw_windows(text: torch.Tensor, rows: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """Draw random windows of a text.

    Args:
        text: (n,), uint8.
        rows: number of windows.
        context: length of each.
        generator: source of the random positions.

    Returns:
        (rows, context), int64.

    Raises:
        ValueError: the text is shorter than a window.
    """
    if len(text) < context:
        raise ValueError(f"the text has {len(text)} bytes, a window {context}: use a smaller context or more text")
    starts = torch.randint(len(text) - context + 1, (rows, 1), generator=generator)  # (rows, 1)
    return text[starts + torch.arange(context)].long()


def byte_entropy(text: torch.Tensor) -> float:
    """Return the entropy of the single bytes of a text, (n,) uint8, in nats per byte.

    It is the loss of the best model that predicts each byte from the frequencies of bytes alone, without context.
    """
    counts = torch.bincount(text.long(), minlength=256).double()
    shares = counts[counts > 0] / len(text)
    return math.fsum((-shares * shares.log()).tolist())
