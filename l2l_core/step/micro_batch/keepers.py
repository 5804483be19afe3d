"""What becomes of the graph that a layer's first run has made, until backward comes to it."""

from __future__ import annotations

from typing import Protocol

from l2l_core.step.micro_batch.shared import Pass


class Graphed(Protocol):
    """A call, as far as a keeper knows it."""

    def has_changed_buffers(self, run: Pass) -> bool:
        """Whether the layer's buffers are not those any more that the graph may have saved."""

    def drop_graph(self, run: Pass) -> None:
        """Let the graph go; backward will recompute it."""


class Keeper(Protocol):
    """Decides on the graphs of the calls of a visit.

    Attributes:
        keeps: whether it outlives the run. Then no layer may come to lie where this one's weights are while it is there.
    """

    @property
    def keeps(self) -> bool: ...

    def gives_way(self, call: Graphed, run: Pass) -> None:
        """The call's micro-batch goes on to another layer, or waits, or the layer's weights go."""


class _Recompute:
    """The graph goes at once: backward runs the layer again."""

    keeps = False

    def gives_way(self, call: Graphed, run: Pass) -> None:
        pass


class _KeepAtTheTurn:
    """The graph stays while its micro-batch is at work: where that was the last layer, backward comes to it at once."""

    keeps = True

    def gives_way(self, call: Graphed, run: Pass) -> None:
        call.drop_graph(run)


class _Keep:
    """The graph stays until backward, for as long as the layer's weights stay on the device."""

    keeps = True

    def gives_way(self, call: Graphed, run: Pass) -> None:
        if call.has_changed_buffers(run):  # plain training back-propagates before the next micro-batch changes them
            call.drop_graph(run)


RECOMPUTE, KEEP_AT_THE_TURN, KEEP = _Recompute(), _KeepAtTheTurn(), _Keep()
