"""What becomes of the graph that a layer's first run has made, until backward comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from l2l_core.step.micro_batch.step_context import StepContext


class GraphOwner(Protocol):
    """A call, as far as a keeper knows it."""

    kept_graph: Any  # its graph, if that is there

    def has_changed_buffers(self, ctx: StepContext) -> bool:
        """Whether the layer's buffers are not those any more that the graph may have saved."""

    def suspend(self, ctx: StepContext) -> None:
        """Ask its keeper."""

    def drop_graph(self, ctx: StepContext) -> None:
        """Let the graph go; backward will recompute it."""


class ActivationPolicy(Protocol):
    """Decides on the graphs of the calls of a visit.

    Attributes:
        keeps: whether it outlives the run. Then no layer may come to lie where this one's weights are while it is there.
    """

    @property
    def keeps_graph(self) -> bool: ...

    @property
    def outlives_turn(self) -> bool:
        """Whether it is kept while other micro-batches are at work: then nothing recomputes the layer, and nothing compares."""

    def on_suspend(self, call: GraphOwner, ctx: StepContext) -> None:
        """The call's micro-batch goes on to another layer, or waits, or the layer's weights go."""


class _Recompute:
    """The graph goes at once: backward runs the layer again."""

    keeps_graph = outlives_turn = False

    def on_suspend(self, call: GraphOwner, ctx: StepContext) -> None:
        pass


class _KeepUntilSuspended:
    """The graph stays while its micro-batch is at work: where that was the last layer, backward comes to it at once."""

    keeps_graph, outlives_turn = True, False

    def on_suspend(self, call: GraphOwner, ctx: StepContext) -> None:
        call.drop_graph(ctx)


class _Keep:
    """The graph stays until backward, for as long as the layer's weights stay on the device."""

    keeps_graph = outlives_turn = True

    def on_suspend(self, call: GraphOwner, ctx: StepContext) -> None:
        pass


RECOMPUTE, KEEP_UNTIL_SUSPENDED, KEEP = _Recompute(), _KeepUntilSuspended(), _Keep()


def suspend_all(calls: Sequence[GraphOwner], ctx: StepContext) -> None:
    """The layer's weights go: what its calls keep goes too, or stays with them."""
    kept = [call for call in calls if call.kept_graph is not None]
    # Plain training back-propagates before the next micro-batch changes a buffer; and a recompute writes old values into it.
    if kept and any([call.has_changed_buffers(ctx) for call in calls]):
        for call in kept:
            call.drop_graph(ctx)
    for call in calls:
        call.suspend(ctx)
