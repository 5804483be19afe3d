"""Edits by workers whose own rows tell them different things about the model, for tests. As in `crew_cases.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from beside import Beside, kind_of
from crew_cases import sgd
from oracle import InCore, differences
from torch import Tensor, nn
from zoo import Batch, Kind

from l2l_core import Drop, Edit, Insert, Relay, RelayConfig, Swap, Workers
from l2l_core.edits import Editor

CONFIG = RelayConfig(seed=0, micro_batches=2)
EDITS: dict[Edit, list[int]] = {Drop(1): [0, 2, 3], Swap(0, 2): [2, 1, 0, 3], Insert(1, init="copy"): [0, 0, 1, 2, 3]}


class Routed(Beside):
    """Fades layers by their position, on rows above 0 alone."""

    def forward(self, x: Tensor) -> Tensor:
        is_high, h = bool(x.mean() > 0), self.embed(x)
        for i, layer in enumerate(self.layers):
            h = layer(h * (1 - i / 8) if is_high else h)
        return self.head(h.mean(1))


@dataclass(frozen=True)
class FailsOnOne(Drop):
    """Drops a layer, and then fails on worker 1."""

    def execute(self, editor: Editor, run: Any) -> None:
        super().execute(editor, run)
        if dist.get_rank() == 1:
            raise MemoryError("worker 1 has no room")


def rows_of(kind: Kind, rank: int, step: int, high: int) -> Batch:
    """Rows above 0 for the worker `high`, below it for others."""
    x, labels = kind.make_batch(4, 10 * step + rank)
    return x + (5 if rank == high else -5), labels


def edit_on_unlike_rows(rank: int, count: int, edit: Edit, high: int) -> dict[str, Any]:
    """Edit and train together, then in core with the list edited by hand; a refused edit changes nothing."""
    kind, losses, refusal = kind_of(Routed), [], ""
    model = kind.make_model()
    with Relay(model, sgd(model), loss=kind.loss, config=CONFIG, workers=Workers(reduce="ordered")) as relay:
        losses += [relay.step(rows_of(kind, rank, 0, high), skip=[2]).loss]
        losses += [relay.step(rows_of(kind, rank, 1, high)).loss]
        try:
            relay.apply(edit)
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        losses += [relay.step(rows_of(kind, rank, 2, high)).loss]
    plain = kind.make_model()
    in_core, layers = InCore(kind, plain, sgd(plain), CONFIG), list(plain.layers)

    def step(number: int) -> float:
        rows = [rows_of(kind, worker, number, high) for worker in range(count)]
        return in_core.step_on([part for x, y in rows for part in zip(x.chunk(2), y.chunk(2), strict=True)])

    plain.layers = nn.ModuleList([layers[0], layers[1], nn.Identity(), layers[3]])
    expected = [step(0)]
    plain.layers = nn.ModuleList(layers)
    expected += [step(1)]
    if not refusal:
        order = EDITS[edit]
        copies = [copied(in_core, layers[i]) if i in order[:at] else layers[i] for at, i in enumerate(order)]
        plain.layers = nn.ModuleList(copies)
    expected += [step(2)]
    return {"refusal": refusal, "losses": losses, "expected": expected, "differences": differences(model, plain)}


def copied(in_core: InCore, layer: nn.Module) -> nn.Module:
    """Copy a layer by hand, into the optimizer too."""
    twin = kind_of(Routed).make_model().layers[0]
    twin.load_state_dict(layer.state_dict())
    in_core.optimizer.param_groups[0]["params"] += [*twin.parameters()]
    return twin


def fail_on_one(rank: int, count: int) -> dict[str, Any]:
    """Make an edit that fails on one worker, and a step after it."""
    kind = kind_of(Routed)
    model, plain = kind.make_model(), kind.make_model()
    with Relay(model, sgd(model), loss=kind.loss, config=CONFIG, workers=Workers(reduce="ordered")) as relay:
        error: BaseException | None = None
        try:
            relay.apply(FailsOnOne(1))
        except BaseException as raised:
            error = raised
        keys, journal = [unit.key for unit in relay.stack], len(relay.journal)
        loss = relay.step(rows_of(kind, rank, 0, high=0)).loss
    in_core = InCore(kind, plain, sgd(plain), CONFIG)
    rows = [rows_of(kind, worker, 0, high=0) for worker in range(count)]
    expected = in_core.step_on([part for x, y in rows for part in zip(x.chunk(2), y.chunk(2), strict=True)])
    same = torch.equal(torch.tensor(loss), torch.tensor(expected)) and not differences(model, plain)
    return {"error": f"{type(error).__name__}: {error}", "keys": keys, "journal": journal, "same": same}
