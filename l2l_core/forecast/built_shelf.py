"""The shelf of a relay as forecasts know shelves: its files as they are, and its pool."""

from __future__ import annotations

from dataclasses import replace

from l2l_core.config import RelayConfig
from l2l_core.eps.blocks import Block
from l2l_core.forecast.from_costs import Costs
from l2l_core.forecast.planned_shelf import BlockCosts, ShelfCosts
from l2l_core.shelf import Disk, OnFiles, pages
from l2l_core.simulator import Filed


def on_shelf(shelf: ShelfCosts, costs: Costs) -> Costs:
    """Put files under the costs of a step, which say what it takes but for them."""
    host = {name: nbytes for name, nbytes in costs.host.items() if name not in ("weights", "optimizer")}
    return replace(costs, host=host, layer_host_bytes=dict.fromkeys(costs.layer_host_bytes, 0), shelf=shelf)


def built_shelf(shelf: OnFiles, config: RelayConfig, disk: Disk) -> ShelfCosts:
    """Say what the files of a relay are to a step.

    Args:
        shelf: the relay's.
        config: of the step.
        disk: its figures; what is free of it does not count, since the files are there.

    Raises:
        ValueError: layers share weights, or the pool has no room for as many layers ahead.
    """
    room = shelf.room
    several = [block.key for block in room.blocks if block.shared]
    if several:
        raise ValueError(
            f"forecast: {several[0]} is in several layers, and the order in which a shelf reads such blocks is not planned yet. "
            "Make a step and read its trace"
        )
    sizes, asked = room.sizes(room.ahead), room.sizes(config.ahead)
    loads, _ = sizes.shared_out(room.memory_bytes)
    if asked.loads > loads:
        raise ValueError(
            f"forecast: ahead={config.ahead} takes {asked.loads:,} bytes of buffers for weights, and the shelf has {loads:,}, "
            f"shared out with ahead={room.ahead}: make the relay with that config, or give the shelf more memory_bytes"
        )
    casts = room.casts and config.precision == "bf16"
    blocks = {block.key: _planned(block, shelf, casts) for block in room.blocks}
    return ShelfCosts(replace(disk, free_bytes=None), room.memory_bytes, sizes, blocks)


def _planned(block: Block, shelf: OnFiles, casts: bool) -> BlockCosts:
    size, trained = shelf.room.blocks[block], any(block.trained.flags)
    record = shelf.record_bytes(block)
    if trained and not block.version:  # its state is yet to come
        record = max(record, size.record)
    cast = pages(2 * size.numel) if casts else 0
    return BlockCosts(Filed(size.weights, cast, record, size.record), size, size.state, trained)
