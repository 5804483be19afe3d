"""What becomes of the graph that a layer's first run has made, until backward comes to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from l2l_core.step.micro_batch.shared import Pass


class Graphed(Protocol):
    """A call, as far as a keeper knows it."""

    kept: Any  # its graph, if that is there

    def has_changed_buffers(self, run: Pass) -> bool:
        """Whether the layer's buffers are not those any more that the graph may have saved."""

    def gives_way(self, run: Pass) -> None:
        """Ask its keeper."""

    def drop_graph(self, run: Pass) -> None:
        """Let the graph go; backward will recompute it."""


class Keeper(Protocol):
    """Decides on the graphs of the calls of a visit.

    Attributes:
        keeps: whether it outlives the run. Then no layer may come to lie where this one's weights are while it is there.
    """

    @property
    def keeps(self) -> bool: ...

    @property
    def outlasts(self) -> bool:
        """Whether it is kept while other micro-batches are at work: then nothing recomputes the layer, and nothing compares."""

    def gives_way(self, call: Graphed, run: Pass) -> None:
        """The call's micro-batch goes on to another layer, or waits, or the layer's weights go."""


class _Recompute:
    """The graph goes at once: backward runs the layer again."""

    keeps = outlasts = False

    def gives_way(self, call: Graphed, run: Pass) -> None:
        pass


class _KeepAtTheTurn:
    """The graph stays while its micro-batch is at work: where that was the last layer, backward comes to it at once."""

    keeps, outlasts = True, False

    def gives_way(self, call: Graphed, run: Pass) -> None:
        call.drop_graph(run)


class _Keep:
    """The graph stays until backward, for as long as the layer's weights stay on the device."""

    keeps = outlasts = True

    def gives_way(self, call: Graphed, run: Pass) -> None:
        pass


RECOMPUTE, KEEP_AT_THE_TURN, KEEP = _Recompute(), _KeepAtTheTurn(), _Keep()


def all_give_way(calls: Sequence[Graphed], run: Pass) -> None:
    """The layer's weights go: what its calls keep goes too, or stays with them."""
    kept = [call for call in calls if call.kept is not None]
    # Plain training back-propagates before the next micro-batch changes a buffer; and a recompute writes old values into it.
    if kept and any([call.has_changed_buffers(run) for call in calls]):
        for call in kept:
            call.drop_graph(run)
    for call in calls:
        call.gives_way(run)
