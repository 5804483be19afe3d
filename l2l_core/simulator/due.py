"""When the EPS has all gradients of a block: what follows from the stays of a profile alone."""

from __future__ import annotations

from collections import defaultdict

from l2l_core.config import RelayConfig
from l2l_core.simulator.costs import Job
from l2l_core.simulator.profile import Profile


def trained(profile: Profile) -> set[str]:
    """Layers that gradients come from."""
    apart = {part.layer for turn in profile.turns for op in turn.ops for part in op.parts}
    return apart | {key for key, layer in profile.layers.items() if layer.push_bytes}


def when_due(profile: Profile, config: RelayConfig) -> tuple[dict[int, list[Job]], list[Job]]:
    """Say after which stay the EPS has all gradients of a block that come by micro-batch, and what waits for the end of the step.

    With eager updates a layer's own gradients are whole after its last stay; those of the shell, and of what layers share, are
    not before all are.
    """
    last = {stay.layer: index for index, stay in enumerate(profile.stays) if stay.is_backward}
    due: dict[int, list[Job]] = defaultdict(list)
    closing = []
    for job in profile.closing:
        early = config.update == "eager" and job.layer in last and job.kind in ("reduce", "update")
        (due[last[job.layer]] if early else closing).append(job)
    return due, closing
