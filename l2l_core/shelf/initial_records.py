"""A model's first records: its weights move to files block by block, or come there from elsewhere, never whole in memory."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Sequence
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

InitialWeights = dict[Block, list[torch.Tensor]]  # what the parameters of blocks were before these went away


def refuse_without_weights(model: nn.Module) -> None:
    """Refuse a model that has no weights to begin with.

    Raises:
        ValueError: names a parameter.
    """
    name = next((name for name, param in model.named_parameters() if param.is_meta or is_placeholder(param)), None)
    if name is not None:
        raise ValueError(
            f"parameter {name} has no weights here: give FileShelf(weights=...) a function that fills a parameter of a name, or "
            "safetensors files; or resume=True"
        )


def check_disk_space(folder: Path, blocks: Sequence[Block], state_sizes: StateSizes) -> None:
    """See whether two halves of all blocks and their state have room.

    Raises:
        OSError: they have not; says how much is needed, and free.
    """
    needed = 2 * sum(
        round_to_pages(4 * block.layout.numel) + round_to_pages(state_sizes(block, only_trained=True))
        for block in blocks
    )
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise OSError(
            errno.ENOSPC,
            f"two halves of {len(blocks)} blocks with their state take {needed:,} bytes, and {free:,} are free there: make room, "
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
    """Write the first record of every block, one after another; what was given of it is let go of.

    Args:
        masters: the optimizer's side; what it knows of a block goes into the record.
        pool: of buffers for records.
        room: for the state to come.
        given: what to write, unless `fill` says what.
        fill: gives a parameter of a name its values.

    Raises:
        ValueError: a parameter has been left without values.
        OSError: the disk refuses.
    """
    state = masters.optimizer.state
    for block in masters.blocks:
        twins = masters.params_of(block)
        form, tensors = RecordLayout.of(block.layout, [state[twin] if twin in state else None for twin in twins])
        buffer = pool.acquire(max(BlockSize.of(block, state_sizes(block)).record, form.nbytes))
        assert buffer is not None, f"no room for {block.key}, though there is for the largest"
        flat = buffer.flat[: form.nbytes]
        _fill(block, form.weights(flat, block.layout).zero_(), weights[block], fill)
        form.write_states(flat, tensors, form)
        records.write(block, form, flat, lambda buffer=buffer: pool.release(buffer))  # type: ignore[misc]
        records.wait_for_writes()
        del weights[block]
        for twin in twins:
            state.pop(twin, None)


@torch.no_grad()
def _fill(block: Block, weights: torch.Tensor, values: Sequence[torch.Tensor], fill: Initialiser | None) -> None:
    for name, view, value in zip(block.names, block.layout.views(weights), values, strict=True):
        if fill is None:
            view.copy_(value)
            continue
        view.fill_(torch.nan)
        fill(name, view)
        if bool(view.isnan().any()):
            raise ValueError(
                f"weights= of the shelf leaves {name} without values, or gives it NaN. Nothing was trained"
            )
