"""How many graphs fit into so many bytes: for `RelayConfig(keep="500 MB")`."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace

from l2l_core.batches import Batch
from l2l_core.config import RelayConfig
from l2l_core.devices import free_bytes
from l2l_core.forecast.prices import Prices
from l2l_core.forecast.rehearsal import Rehearsal
from l2l_core.rules import weight_slots


def layers_within(rehearsal: Rehearsal, batch: Batch, config: RelayConfig, nbytes: int) -> int:
    """Count the last layers whose kept graphs make a step on this batch take at most `nbytes` more of the device.

    A step that keeps none is rehearsed, and one that keeps as many as the settings have slots for weights; those that keep
    some follow from the two.

    Raises:
        Whatever the model raises on the batch.
    """
    device = rehearsal.parts.device
    prices = Prices(rehearsal, batch, device.figures(), free_bytes(device))
    none = prices(replace(config, keep=0))
    if none is None:
        raise prices.errors[0]
    without = none.device_bytes

    def graph_bytes(keep: int) -> float:
        step = prices(replace(config, keep=keep))
        return math.inf if step is None else step.device_bytes - without

    # Each graph more takes more. The last layer's is there whatever is kept, so keeping one is keeping none.
    keeps = range(2, 1 + min(prices.visits, weight_slots(config.ahead, config.resident)))
    within = bisect_right(keeps, nbytes, key=graph_bytes)
    return keeps[within - 1] if within else 0
