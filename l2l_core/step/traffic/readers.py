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

_READERS = ("tolist", "numpy", "__array__", "__dlpack__", "data_ptr")
_lock = threading.Lock()
_listeners: list[Callable[[torch.Tensor], None]] = []
_own: dict[str, Any] = {}  # what torch.Tensor itself defines; the rest it inherits


@contextmanager
def before_reads(listener: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `listener` with every tensor that is about to be read in such a way, in any thread."""
    with _lock:
        _listeners.append(listener)
        if len(_listeners) == 1:
            _wrap()
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                _unwrap()


def _wrap() -> None:
    for name in _READERS:
        if name in vars(torch.Tensor):
            _own[name] = vars(torch.Tensor)[name]
        setattr(torch.Tensor, name, _telling(getattr(torch.Tensor, name)))


def _unwrap() -> None:
    for name in _READERS:
        if name in _own:
            setattr(torch.Tensor, name, _own.pop(name))
        else:
            delattr(torch.Tensor, name)


def _telling(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def reader(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for listener in tuple(_listeners):  # a copy: passes in other threads come and go
            listener(tensor)
        return read(tensor, *args, **kwargs)

    return reader
