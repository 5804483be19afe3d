"""A folder for shelves: in memory where the system has one, since every write waits for its disk."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder, gone after the test."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path
        return
    made = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        yield made
    finally:
        shutil.rmtree(made)
