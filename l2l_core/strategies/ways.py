"""The ways that a table has when nobody names others: one of each kind."""

from __future__ import annotations

from l2l_core.strategies.policies import Combined, Full, Karma, Offload, Periodic, Plain, RelayPolicy, Rotor
from l2l_core.strategies.selective_checkpoint import SelectiveCheckpoint
from l2l_core.strategies.strategy_table import Strategy


def default_strategies(layers: int) -> list[Strategy]:
    """List them for a model of so many layers."""
    combined = (
        [Combined()] if layers <= Combined().max_layers else []
    )  # above, it would not be sure to find the fastest
    recompute = [Plain(), Full(), Periodic(), Rotor(), SelectiveCheckpoint()]
    return [*recompute, Offload(), *combined, Karma(), RelayPolicy()]
