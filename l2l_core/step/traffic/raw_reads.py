"""Notice reads of a tensor that bypass PyTorch's dispatcher: Python numbers and NumPy views.

A dispatch mode does not see `tolist` or `numpy`, and a function mode would: but code that looks for function modes
(nn.TransformerEncoder) takes another path under one, with other bits. So the methods themselves are wrapped, as long as
anybody wants to know.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_RAW_READS = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")
_lock = threading.Lock()
_hooks: list[Callable[[torch.Tensor], None]] = []
_originals: dict[str, Any] = {}  # what torch.Tensor itself defines; the rest it inherits


@contextmanager
def raw_read_hook(hook: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `listener` with every tensor that is about to be read in such a way, in any thread."""
    with _lock:
        _hooks.append(hook)
        if len(_hooks) == 1:
            _wrap()
    try:
        yield
    finally:
        with _lock:
            _hooks.remove(hook)
            if not _hooks:
                _unwrap()


def _wrap() -> None:
    for name in _RAW_READS:
        if name in vars(torch.Tensor):
            _originals[name] = vars(torch.Tensor)[name]
        setattr(torch.Tensor, name, _hooked(getattr(torch.Tensor, name)))


def _unwrap() -> None:
    for name in _RAW_READS:
        if name in _originals:
            setattr(torch.Tensor, name, _originals.pop(name))
        else:
            delattr(torch.Tensor, name)


def _hooked(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def reader(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for listener in tuple(_hooks):  # a copy: passes in other threads come and go
            listener(tensor)
        return read(tensor, *args, **kwargs)

    return reader
