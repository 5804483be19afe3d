"""What the shell's graph of one micro-batch looks like between the cuts, looked at before any backward runs.

The survey finds parameters that receive gradients in several segments (a tied embedding), whose micro-batches must be
kept apart, and refuses a loss that reads the inside of a layer, which the relay would get wrong without a word.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge

from l2l_core.call import Call
from l2l_core.cut import Segment, trace_segments


def survey(
    calls: Sequence[Call], tail: GradientEdge | None, inside: Mapping[torch.Tensor, str], k: int
) -> tuple[Segment, set[torch.Tensor]]:
    """Walk every segment of a micro-batch's graph.

    Args:
        calls: the calls of the micro-batch in order; their `segment` is set.
        tail: the loss, or None if it does not depend on any parameter.
        inside: parameter -> layer name, for parameters that only a layer uses.
        k: the micro-batch, for messages.

    Returns:
        The segment of the loss, and the parameters that several segments reach.

    Raises:
        RuntimeError: the model reads a tensor from inside a layer.
    """
    segments = trace_segments(
        [[edge for edge, _ in call.behind] for call in calls] + [[tail] if tail else []], [call.mark for call in calls]
    )
    for call, segment in zip(calls, segments, strict=False):
        call.segment = segment
    for leaf in (leaf for segment in segments for leaf in segment.leaves if leaf in inside):
        raise RuntimeError(
            f"micro-batch {k}: the model reads a tensor from inside layer {inside[leaf]} that the layer does not return, so "
            "its gradient would miss the relay. Return it from the layer's forward, or keep it on an attribute of a module "
            "of the layer"
        )
    counts = Counter(leaf for segment in segments for leaf in segment.leaves)
    return segments[-1], {leaf for leaf, count in counts.items() if count > 1}
