"""Encoding of plain data as JSON and a dictionary of tensors, for saves; nothing is pickled."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]
TensorReader = Callable[[str, Sequence[int]], torch.Tensor]

_SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    kind.__name__: kind for kind in (tuple, list, set, frozenset, torch.Size)
}
_NAMED = {"dtype": lambda name: getattr(torch, name), "device": torch.device, "bytes": bytes.fromhex}


def encode(value: Any, at: str, tensors: Tensors) -> Any:
    """Encode `value` for JSON; add its tensors to `tensors` under the name `at`, a shared tensor once.

    Raises:
        ValueError: `value` is neither a tensor nor plain data.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value  # JSON keeps the bits of a float: repr
    if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
        name = next((name for name, tensor in tensors.items() if tensor is value), None) or at
        while tensors.get(name, value) is not value:  # different keys of a dictionary may print alike
            name += "'"
        tensors[name] = value
        # Strides of a copy: an expanded tensor or a view is saved alone, not with its whole storage.
        return {"tensor": name, "stride": torch.empty_like(value, device="meta").stride()}
    if type(value).__name__ in _SEQUENCES and type(value) is _SEQUENCES[type(value).__name__]:
        return {type(value).__name__: [encode(v, f"{at}/{i}", tensors) for i, v in enumerate(value)]}
    if type(value) is deque:
        return {"deque": [encode(v, f"{at}/{i}", tensors) for i, v in enumerate(value)], "maxlen": value.maxlen}
    if isinstance(value, dict):
        kind = "OrderedDict" if type(value) is OrderedDict else "dict"
        return {kind: [[encode(k, at, tensors), encode(v, f"{at}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype | torch.device | bytes):
        word = value.hex() if isinstance(value, bytes) else str(value).removeprefix("torch.")
        return {type(value).__name__: word}
    raise ValueError(
        f"{at} is a {type(value).__name__}, which cannot be saved: only tensors and plain data can, since nothing is "
        "pickled. Keep it out of the optimizer's settings and state"
    )


def tensor_copier(tensors: Tensors) -> TensorReader:
    """Return a reader for `decode` that copies each tensor once into new memory."""
    read: Tensors = {}

    def read_tensor(name: str, stride: Sequence[int]) -> torch.Tensor:
        if name not in read:
            saved = tensors[name]
            read[name] = torch.empty_strided(saved.shape, tuple(stride), dtype=saved.dtype).copy_(saved)
        return read[name]

    return read_tensor


def decode(value: Any, read_tensor: TensorReader) -> Any:
    """Rebuild a value that `encode` encoded; `read_tensor` returns a tensor by name, with the given strides."""
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "tensor":
        return read_tensor(content, value["stride"])
    if kind in ("dict", "OrderedDict"):
        pairs = [(decode(k, read_tensor), decode(v, read_tensor)) for k, v in content]
        return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)
    if kind == "complex":
        return complex(*content)
    if kind in _NAMED:
        return _NAMED[kind](content)
    items = [decode(v, read_tensor) for v in content]
    return deque(items, value["maxlen"]) if kind == "deque" else _SEQUENCES[kind](items)
