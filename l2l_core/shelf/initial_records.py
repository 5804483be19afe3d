"""The first records of a model, written block by block from its weights or from an initialiser."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from torch import nn

from l2l_core.eps import Masters
from l2l_core.eps.blocks import Block, is_placeholder
from l2l_core.shelf.buffer_pool import BufferPool
from l2l_core.shelf.direct_io import round_to_pages
from l2l_core.shelf.file_shelf import Initialiser
from l2l_core.shelf.memory_sizes import BlockSize, StateSizes
from l2l_core.shelf.record_layout import RecordLayout
from l2l_core.shelf.record_store import RecordStore

InitialWeights = dict[Block, list[torch.Tensor]]  # parameters of each block before it was offloaded


def refuse_without_weights(model: nn.Module) -> None:
    """Refuse a model with a parameter that has no values.

    Raises:
        ValueError: names the parameter.
    """
    name = next((name for name, param in model.named_parameters() if param.is_meta or is_placeholder(param)), None)
    if name is not None:
        raise ValueError(
            f"parameter {name} has no values (it is on meta, or shows NaN): give FileShelf(weights=...) a function that fills a "
            "parameter, given its name, or safetensors files; or resume=True"
        )


def check_disk_space(folder: Path, blocks: Sequence[Block], state_sizes: StateSizes) -> None:
    """Check that the disk has room for two copies of all blocks and their optimizer state.

    Raises:
        OSError: it has not; gives the bytes needed and free.
    """
    needed = 2 * sum(
        round_to_pages(4 * block.layout.numel) + round_to_pages(state_sizes(block, only_trained=True))
        for block in blocks
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"two copies of {len(blocks)} blocks with their state take {needed:,} bytes, and {free:,} are free there: make room, "
            "give a folder on a larger disk, or an optimizer with less state (in_bf16). Nothing was written",
            str(folder),
        )


def write_initial(
    masters: Masters,
    records: RecordStore,
    pool: BufferPool,
    state_sizes: StateSizes,
    weights: InitialWeights,
    fill: Initialiser | None,
) -> None:
    """Write the first record of every block, and free its weights and optimizer state in memory.

    Args:
        masters: blocks and optimizer.
        records: files of the shelf.
        pool: buffers for records.
        state_sizes: bytes reserved for the optimizer state of each block.
        weights: values to write unless `fill` is given; emptied.
        fill: fills a parameter, given its name.

    Raises:
        ValueError: a parameter has no values.
        OSError: a record cannot be written.
    """
    state = masters.optimizer.state
    for block in masters.blocks:
        params = masters.params_of(block)
        layout, tensors = RecordLayout.of(block.layout, [state.get(param) for param in params])
        buffer = pool.acquire(max(BlockSize.of(block, state_sizes(block)).record, layout.nbytes))
        assert buffer is not None, f"no room for {block.key}, though there is for the largest"
        flat = buffer.flat[: layout.nbytes]
        _fill(block, layout.weights(flat, block.layout).zero_(), weights[block], fill)
        layout.write_states(flat, tensors, layout)
        records.write(block, layout, flat, partial(pool.release, buffer))
        records.wait_for_writes()
        del weights[block]
        for param in params:
            state.pop(param, None)


@torch.no_grad()
def _fill(block: Block, weights: torch.Tensor, values: Sequence[torch.Tensor], fill: Initialiser | None) -> None:
    for name, view, value in zip(block.names, block.layout.views(weights), values, strict=True):
        if fill is None:
            view.copy_(value)
            continue
        view.fill_(torch.nan)
        fill(name, view)
        if bool(view.isnan().any()):
            raise ValueError(f"weights= of the shelf sets no values for {name}, or NaN. Nothing was trained")
