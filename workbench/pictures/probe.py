"""What the probe is and what it costs, in a line."""

from __future__ import annotations

from workbench.pictures.scale import format_seconds
from workbench.session import ProbeRow


def describe_probe(probe: ProbeRow) -> str:
    """Say it as "4 batches, 0.8 s per measurement: training batches from step 1 on; give probe=[...] for held-out ones"."""
    cost = "cost not known yet" if probe.seconds is None else f"{format_seconds(probe.seconds)} per measurement"
    count = f"up to {probe.most}" if probe.batches is None else str(probe.batches)
    return f"{count} batch{'' if probe.batches == 1 else 'es'}, {cost}: {_describe_source(probe)}"


def _describe_source(probe: ProbeRow) -> str:
    if probe.is_given:
        return "those that were given as probe=[...]"
    since = "the next step" if probe.first_step is None else f"step {probe.first_step}"
    return f"the training batches from {since} on; give probe=[...] for held-out ones"
