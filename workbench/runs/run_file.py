"""Files of recorded runs: search, reading by lines, and the error for a damaged line."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

RUN_FILE_NAMES = ("run.jsonl.gz", "run.jsonl", "rank0.jsonl.gz", "rank0.jsonl")
# Errors raised by a malformed row; rows are not validated field by field.
DAMAGE_ERRORS = (KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError)


def find_run(path: Path) -> Path:
    """Return the file of a recorded run; `path` may be its folder.

    Raises:
        FileNotFoundError: no file exists.
    """
    found = next((path / name for name in RUN_FILE_NAMES if (path / name).is_file()), path)
    if not found.is_file():
        raise FileNotFoundError(
            f"there is no recorded run {path}: record one with Session(..., loggers=[Recorder({str(path)!r})]), "
            "or with `make demo`, which writes out/demo/run.jsonl.gz"
        )
    return found


def other_rank_files(path: Path) -> list[Path]:
    """Return the files of workers 1, 2, ... if `path` is the file of worker 0."""
    if not path.name.startswith("rank0."):
        return []
    ending = path.name.removeprefix("rank0")
    ranks = takewhile(Path.is_file, (path.with_name(f"rank{rank}{ending}") for rank in count(1)))
    return list(ranks)


def read_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Yield each line, and whether it ends with a newline; a compressed file may be truncated anywhere.

    Raises:
        ValueError: the compressed data is damaged.
    """
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while True:
            try:
                line = file.readline()
            except EOFError:
                return
            except (gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{path} is damaged: {error}") from error
            if not line:
                return
            yield line.removesuffix(b"\n"), line.endswith(b"\n")


def damage_error(path: Path, line: int, error: BaseException) -> ValueError:
    """Return the error for a damaged line, with its number."""
    cause = str(error) if isinstance(error, ValueError) else repr(error)
    return ValueError(
        f"{path}, line {line}: this is not what Recorder writes: {cause}; record the run again, or restore a copy"
    )
