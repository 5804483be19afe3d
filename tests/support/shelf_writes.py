"""Everything that a shelf writes, seen before it is written: for crashes and errors at any of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from l2l_core.shelf import direct_io, shelf_manifest


class Cut(Exception):
    """What the tests inject."""


@contextmanager
def at_every_write(monkeypatch: pytest.MonkeyPatch, happens: Callable[[str], None]) -> Iterator[None]:
    """Call `happens` before everything that changes a folder, with a word for it; of a record half is written by then."""

    def before(owner: Any, name: str, word: str) -> None:
        real = getattr(owner, name)

        def wrapped(*args: Any) -> Any:
            happens(word)
            return real(*args)

        patch.setattr(owner, name, wrapped)

    write = direct_io.DirectFiles.write

    def write_in_two(self: direct_io.DirectFiles, path: Path, source: torch.Tensor) -> None:
        happens("record")
        garbled = direct_io.page_aligned(torch.empty(len(source) + direct_io.PAGE, dtype=torch.uint8), len(source))
        write(self, path, garbled.copy_(source).bitwise_not_())
        happens("half a record")
        write(self, path, source)

    with monkeypatch.context() as patch:
        patch.setattr(direct_io.DirectFiles, "write", write_in_two)
        for name in ("write_tensors", "write_bytes", "sync"):
            before(shelf_manifest, name, name)
        before(shelf_manifest.os, "replace", "replace")
        before(Path, "unlink", "unlink")
        yield
