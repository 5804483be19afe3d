"""Notification of tensor reads that bypass PyTorch's dispatcher: Python numbers and NumPy views.

A dispatch mode does not intercept `tolist` or `numpy`. A function mode does, but under one nn.TransformerEncoder takes another
path, with other bits. So the methods themselves are wrapped while a hook is registered.
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
_originals: dict[str, Any] = {}  # methods that torch.Tensor itself defines; it inherits the rest


@contextmanager
def raw_read_hook(hook: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call `hook` with every tensor about to be read in such a way, in any thread, within the block."""
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
    def hooked_read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for hook in tuple(_hooks):  # a copy: other threads add and remove hooks
            hook(tensor)
        return read(tensor, *args, **kwargs)

    return hooked_read
