"""Comparison of the results of two runs by their bits, and settings in the message of a refusal."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn


def settings_in(message: str) -> dict[str, Any]:
    """Return the settings of the first ``RelayConfig(...)`` in a message that names some."""
    for arguments in re.findall(r"RelayConfig\(([^()]+)\)", message):
        with suppress(SyntaxError, ValueError):
            call = ast.parse(f"f({arguments.removesuffix(', ...')})", mode="eval").body
            assert isinstance(call, ast.Call)
            return {each.arg: ast.literal_eval(each.value) for each in call.keywords if each.arg}
    return {}


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and buffers."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def plain_values(value: Any) -> Any:
    """Copy tensors in containers, as they may change later."""
    if isinstance(value, torch.Tensor):
        return bits(value).clone()
    if isinstance(value, Mapping):
        return {key: plain_values(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(each) for each in value]
    return copy.copy(value)


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """Return the places at which two trees of values differ."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
        return [] if same else [f"{at} by {distance(one, other):.3g}"]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return [f"{at} has other keys: {sorted(map(str, one.keys() ^ other.keys()))[:3]}"]
        return [each for key in one for each in differences(one[key], other[key], f"{at}.{key}".lstrip("."))]
    if isinstance(one, Sequence) and isinstance(other, Sequence) and not isinstance(one, str):
        if len(one) != len(other):
            return [f"{at} has {len(other)} entries for {len(one)}"]
        pairs = zip(one, other, strict=True)
        return [each for i, (a, b) in enumerate(pairs) for each in differences(a, b, f"{at}.{i}")]
    if isinstance(one, float | int | str | None) or type(one) is not type(other):
        return [] if type(one) is type(other) and (one == other or one != one) else [f"{at} is {other!r} for {one!r}"]
    return []


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a tensor, of which NaN equals NaN."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter)
    plain = tensor.detach() if is_plain or not hasattr(tensor, "block_size") else tensor.dequantize()  # torchao's
    return torch.nan_to_num(plain) if plain.is_floating_point() else plain


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    if one.shape != other.shape or one.is_complex():
        return float("nan")
    return float((bits(one).double() - bits(other).double()).abs().max())
