"""The file of a recorded run: where it is, its lines, and the error that names a line which is not as it was written."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from itertools import count, takewhile
from pathlib import Path

RUN_FILE_NAMES = ("run.jsonl.gz", "run.jsonl", "rank0.jsonl.gz", "rank0.jsonl")
# What values of another form raise where they are used: lines are read as they come, and not checked field by field.
DAMAGE_ERRORS = (KeyError, IndexError, TypeError, ValueError, AttributeError, AssertionError)


def find_run(path: Path) -> Path:
    """Find the file of a recorded run, which may be in a folder.

    Raises:
        FileNotFoundError: there is none.
    """
    found = next((path / name for name in RUN_FILE_NAMES if (path / name).is_file()), path)
    if not found.is_file():
        raise FileNotFoundError(
            f"there is no recorded run {path}: record one with Session(..., loggers=[Recorder({str(path)!r})]), "
            "or with `make demo`, which makes out/demo/run.jsonl.gz"
        )
    return found


def other_rank_files(path: Path) -> list[Path]:
    """Find the files of the other workers of a run, by rank, where `path` is that of worker 0 and there are any."""
    if not path.name.startswith("rank0."):
        return []
    ending = path.name.removeprefix("rank0")
    ranks = takewhile(Path.is_file, (path.with_name(f"rank{rank}{ending}") for rank in count(1)))
    return list(ranks)


def read_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Go through the lines, and say whether they end; a compressed file may stop anywhere.

    Raises:
        ValueError: it is damaged.
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
    """Make the error that names a damaged line."""
    said = str(error) if isinstance(error, ValueError) else repr(error)
    return ValueError(f"{path}, line {line}: this is not what Recorder writes: {said}")
