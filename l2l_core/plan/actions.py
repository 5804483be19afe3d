"""Actions of a pass: one value for each operation that a schedule issues, and the result of running it.

kind  lane     operation
A     h2d      announce layers whose loads follow, to a store that reads ahead (disk, other workers)
L     h2d      load the weights of a layer into a weight slot
V     compute  begin a visit: wait for the weights, point the layer's parameters to the slot
I     compute  start the forward of a micro-batch: run the shell up to the first layer call
W     h2d      wait for the tensors that a turn reads (the stash is on the host or on disk)
G     h2d      start to fetch the tensors of a later turn
H     host     announce still later turns to a stash store that reads ahead
F     compute  run the layer forward on a micro-batch, and the shell up to its next layer call
X     compute  loss of a micro-batch, or of the batch (k = -1), and backward through the shell behind the last layer
B     compute  recompute if the graph was not kept, then backward through the layer and the shell before it
D     compute  drop the graph of the forward that just ran
S     d2h      end of a turn: drop graphs that are not kept, and start to offload the micro-batch's tensors
P     d2h      push the gradient of the layer, or of the shell
U     eps      the gradient of the layer is complete: reduce it, and update the layer unless updates are deferred
E     compute  end a visit: the slot may be loaded anew
T     compute  begin backward

Actions are listed in the order of issue. Each lane works in that order. A turn is one micro-batch in one visit.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Literal, NamedTuple

KINDS = "ALVIWGHFXBDSPUET"
SHELL = "shell"
Keep = Literal["input", "turn", "graph"]


class Turn(NamedTuple):
    """A micro-batch in a visit."""

    k: int
    layer: str
    visit: int  # the forward visit; its number in backward is 2V - 1 - visit, with V visits in all
    is_backward: bool = False


class Action(NamedTuple):
    """One operation of a pass.

    Attributes:
        kind: a letter of `KINDS`.
        layer: key of the layer, or "shell".
        k: micro-batch; -1 if the action concerns the whole layer or batch.
        visit: number of the forward visit, also for the actions of backward that undo it; -1 outside of visits.
        is_backward: whether the action belongs to backward, after `T`.
        slot: weight slot of `L`.
        keep: activations that `F` keeps: the layer's input alone; its graph until the end of the turn; or until backward.
        layers: of `A`.
        turns: of `H`.
    """

    kind: str
    layer: str = ""
    k: int = -1
    visit: int = -1
    is_backward: bool = False
    slot: int = -1
    keep: Keep = "input"
    layers: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()

    @property
    def turn(self) -> Turn:
        """The turn of an action that concerns one."""
        return Turn(self.k, self.layer, self.visit, self.is_backward)


class ActionResult(NamedTuple):
    """Result of `I`, `F` or `X`, on which the order of the following actions depends.

    Attributes:
        waits_for: key of the layer that the micro-batch calls next (after `I` and `F`); None if its forward is finished.
        needs_backward: whether the call that ran takes part in backward (after `F`).
        has_graph: whether the micro-batch's last layer still has its graph in this visit (after `X`).
    """

    waits_for: str | None = None
    needs_backward: bool = False
    has_graph: bool = False


Actions = Generator[Action, ActionResult | None, None]
