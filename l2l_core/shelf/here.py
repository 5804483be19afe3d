"""A block that is away, seen in a record that is in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from l2l_core.eps import Masters
from l2l_core.eps.blocks import Block
from l2l_core.shelf.record_layout import RecordLayout


@contextmanager
def bind_record(
    masters: Masters, block: Block, layout: RecordLayout, flat: torch.Tensor
) -> Iterator[list[Mapping[str, Any] | None]]:
    """Let a block and its state be what a record in memory has of them, in a block of code.

    Yields:
        A list that is filled at the end, with what the optimizer then knows of each parameter.
    """
    twins, state = masters.params_of(block), masters.optimizer.state
    known: list[Mapping[str, Any] | None] = []
    block.bind(layout.weights(flat, block.layout), twins)
    state.update((p, each) for p, each in zip(twins, layout.read_states(flat), strict=True) if each is not None)
    try:
        yield known
    finally:
        block.unbind(twins)
        known += [state.pop(param, None) for param in twins]
