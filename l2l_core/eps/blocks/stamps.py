"""Weights that nobody may write to while they are on the device, and how a write shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from l2l_core._torch import data_ptr

Stamp = tuple[int, int]  # of a parameter: changes when it is written to, or gets other data


def stamps_of(params: Iterable[torch.Tensor]) -> list[Stamp]:
    """Marks by which `check_stamps` recognises that nobody has changed these weights."""
    return [(param._version, data_ptr(param)) for param in params]


def check_stamps(params: Sequence[torch.Tensor], stamps: Sequence[Stamp], who: str) -> None:
    """Refuse weights that a forward has changed: those on the device are copies.

    Raises:
        RuntimeError: names who did it, and the remedy.
    """
    now = stamps_of(params)
    if now != stamps:
        raise RuntimeError(
            weights_changed_message(who, next(p for p, a, b in zip(params, stamps, now, strict=True) if a != b))
        )


def weights_changed_message(who: str, weight: torch.Tensor) -> str:
    """The message about weights that somebody has changed during a step."""
    return (
        f"{who} changes a weight of shape {tuple(weight.shape)} in its forward: what is on the device is a copy, and the change "
        "would be lost. Change weights between steps, under torch.no_grad(), or keep what changes in a buffer"
    )
