"""What worker processes of `crew.py` do in tests. Every function gets the worker's rank and the number of workers first."""

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from norms import ByNorms
from oracle import InCore, adamw, differences, micro_batches_of
from torch import nn
from torch.optim import Optimizer
from zoo import BY_NAME, Batch

from l2l_core import Drop, Duplicate, Edit, Freeze, Insert, Loops, Relay, RelayConfig, Unroll, Workers, in_bf16


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def fused(model: nn.Module) -> Optimizer:
    return adamw(model, fused=True)


def adafactor(model: nn.Module) -> Optimizer:
    """Looks at rows and columns of a matrix: whole parameters have one owner."""
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def in_bf16_by_norms(model: nn.Module) -> Optimizer:
    """Looks at norms of parameters, and draws random numbers for each of their elements."""
    return in_bf16(ByNorms)(model.parameters(), lr=1e-2)


@dataclass(frozen=True)
class Case:
    """A kind of the zoo, and how it is trained by several workers and in core."""

    def __str__(self) -> str:
        made = {"": self.optimizer.__name__, "micro_batches": self.micro_batches} | dict(self.config)
        return f"{self.kind} {' '.join(f'{name}={value}'.lstrip('=') for name, value in made.items())}"

    kind: str
    micro_batches: int = 2
    config: Mapping[str, Any] = field(default_factory=dict)
    reduce: Any = "ordered"
    optimizer: Callable[[nn.Module], Optimizer] = adamw
    rows: tuple[int, ...] = (4, 5, 3, 6)  # of each worker
    steps: int = 3
    skips: tuple[tuple[str, ...], ...] = ((), (), ())  # layers that sit a step out, by step

    @property
    def settings(self) -> RelayConfig:
        return RelayConfig(seed=0, micro_batches=self.micro_batches, **self.config)

    def rows_of(self, rank: int, step: int) -> Batch:
        return BY_NAME[self.kind].make_batch(self.rows[rank], 10 * step + rank)


def relay_of(case: Case, rank: int, **options: Any) -> Relay:
    """Make a worker's relay; only worker 0 has the weights that all are to begin with."""
    kind = BY_NAME[case.kind]
    model = kind.make_model()
    if rank:
        with torch.no_grad():
            for param in model.parameters():
                param.add_(1)
                if (state := getattr(param, "quant_state", None)) is not None:
                    state.absmax.add_(1)
    settings = {
        "loss": kind.loss,
        "loss_over": kind.loss_over,
        "layers": kind.layers,
        "workers": Workers(reduce=case.reduce),
    } | options
    return Relay(model, case.optimizer(model), config=case.settings, **settings)


def unlike_state(one: Optimizer, other: Optimizer) -> list[str]:
    """List what optimizers keep otherwise than one another."""
    ours, theirs = one.state_dict()["state"], other.state_dict()["state"]
    if ours.keys() != theirs.keys():
        return [f"other parameters have state: {sorted(ours.keys() ^ theirs.keys())}"]
    pairs = [(f"{i} {name}", value, theirs[i].get(name)) for i, known in ours.items() for name, value in known.items()]
    return [name for name, a, b in pairs if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)]


def train_beside_plain(rank: int, count: int, case: Case) -> dict[str, Any]:
    """Train together, then in core on the same micro-batches: what differs, and what was seen on the way."""
    relay = relay_of(case, rank)
    with relay:
        losses = []
        for step in range(case.steps):
            losses.append(relay.step(case.rows_of(rank, step), skip=case.skips[step]).loss)
        sharded = [param for b in relay.store.masters.blocks if not b.in_bytes for param in b.params if param.numel()]
        between = [bool(torch.isnan(param).all()) for param in sharded]
        weights = relay.host.by_owner("weights")
        held = sum(size for owner, size in weights.items() if owner != "gathered")
        seen = {
            "losses": losses,
            "nan": all(between),
            "held": held,
            "state": relay.host.by_category().get("optimizer", 0),
        }
        with relay.gathered() as model:
            whole = {name: param.detach().clone() for name, param in model.named_parameters()}
            twin, optimizer, expected = plain(case, count)
            seen |= {"expected": expected, "differences": differences(model, twin)}
            seen["state differs in"] = unlike_state(relay.optimizer, optimizer)
    # Closed, the model is an ordinary one
    left = dict(relay.model.named_parameters())
    seen["left whole"] = all(torch.equal(left[name], value) for name, value in whole.items())
    return seen


def train_quantised_beside_plain(rank: int, count: int, family: str, kind: str, bits: int) -> dict[str, Any]:
    """Train adapters of peft on a base of bitsandbytes, which must both be installed."""
    from quantised import adamw as trained_adamw
    from quantised import adapted

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of both libraries
        made = adapted(family, kind, bits)
        with patch.dict(BY_NAME, {made.name: made}):
            return train_beside_plain(rank, count, Case(made.name, config={"stash": "host"}, optimizer=trained_adamw))


def plain(case: Case, count: int) -> tuple[nn.Module, Optimizer, list[float]]:
    """Train in core over the micro-batches of all workers, worker 0's first."""
    kind = BY_NAME[case.kind]
    model = kind.make_model()
    optimizer = case.optimizer(model)
    in_core = InCore(kind, model, optimizer, case.settings)
    losses = []
    for step in range(case.steps):
        every = [micro_batches_of(case.rows_of(rank, step), case.micro_batches) for rank in range(count)]
        losses.append(in_core.step_on([part for parts in every for part in parts]))
    return model, optimizer, losses


def train_beside_alone(rank: int, count: int, case: Case) -> dict[str, Any]:
    """Train together, then on one worker with the whole batch, which all micro-batches share equally."""
    kind = BY_NAME[case.kind]
    with relay_of(case, rank) as relay:
        pairs = enumerate(case.skips)
        losses = [relay.step(case.rows_of(rank, step), skip=skip).loss for step, skip in pairs]
        nan = [bool(torch.isnan(param).all()) for param in relay.model.parameters()]
    model, settings = kind.make_model(), replace(case.settings, micro_batches=count * case.micro_batches)
    with Relay(
        model, case.optimizer(model), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, config=settings
    ) as alone:
        batches = [together([case.rows_of(worker, step) for worker in range(count)]) for step in range(case.steps)]
        expected = [alone.step(batch, skip=skip).loss for batch, skip in zip(batches, case.skips, strict=True)]
    return _found(losses, expected, relay, alone, nan)


def _found(losses: list[float], expected: list[float], relay: Relay, alone: Relay, nan: list[bool]) -> dict[str, Any]:
    """What a test reads of workers and of one alone, both closed."""
    return {
        "losses": losses,
        "expected": expected,
        "differences": differences(relay.model, alone.model),
        "state differs in": unlike_state(relay.optimizer, alone.optimizer),
        "nan": all(nan),
        "left whole": True,
    }


def together(batches: list[Batch]) -> Batch:
    """Put the rows of several batches of one kind into one."""
    if isinstance(batches[0], dict):
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    return tuple(torch.cat(each) for each in zip(*batches, strict=True))


def bytes_held(rank: int, count: int, reduce: str) -> dict[str, int]:
    """Count what a worker holds of a model, and what one alone does."""
    case = Case("swin", reduce=reduce, steps=1, config={"update": "deferred"})
    with relay_of(case, rank) as relay:
        relay.step(case.rows_of(rank, 0))
        mine = relay.host.by_owner("weights")
        seen = {"gathered": mine.pop("gathered"), "weights": sum(mine.values())}
        seen |= {"optimizer": relay.host.by_category()["optimizer"]}
        layer, shell = (
            max(unit.slot_numel(torch.float32) for unit in relay.stack),
            relay.shell.slot_numel(torch.float32),
        )
        seen |= {"largest layer": 4 * layer, "shell": 4 * shell}
    with relay_of(case, 0, workers=None) as alone:
        alone.step(case.rows_of(rank, 0))
        seen |= {"weights alone": sum(alone.host.by_owner("weights").values())}
        seen |= {"optimizer alone": alone.host.by_category()["optimizer"]}
    return seen


EDITS: list[Edit | str | None] = [
    None,
    Drop(1),
    Duplicate(0),
    "undo",
    "redo",
    "undo",
    Insert(at=1, like=0, init="identity"),
    Freeze(0),
]


def edit(relay: Relay, what: Edit | str | None) -> None:
    """Make an edit, or go back and forth."""
    if isinstance(what, Edit):
        relay.apply(what)
    elif what is not None:
        relay.undo() if what == "undo" else relay.redo()


LOOP_EDITS: list[Edit | str | None] = [None, Loops(3), "undo", "redo", Unroll(), "undo", Loops(1)]


def edit_beside_alone(rank: int, count: int, edits: list[Edit | str | None], name: str = "gpt2") -> dict[str, Any]:
    """Edit and train together, then on one worker; each edit is followed by a step."""
    case = Case(name, rows=(4, 4))
    kind, losses = BY_NAME[case.kind], []
    with relay_of(case, rank) as relay:
        for step, what in enumerate(edits):
            edit(relay, what)
            losses.append(relay.step(case.rows_of(rank, step)).loss)
        nan = [bool(torch.isnan(param).all()) for param in relay.model.parameters()]
        keys = [unit.key for unit in relay.stack]
    model, settings = kind.make_model(), replace(case.settings, micro_batches=count * case.micro_batches)
    with Relay(
        model, case.optimizer(model), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, config=settings
    ) as alone:
        expected = []
        for step, what in enumerate(edits):
            edit(alone, what)
            batch = together([case.rows_of(worker, step) for worker in range(count)])
            expected.append(alone.step(batch).loss)
        assert [unit.key for unit in alone.stack] == keys
    return _found(losses, expected, relay, alone, nan)


def look_at_batches(rank: int, count: int, name: str) -> dict[str, Any]:
    """Evaluate and run forward together, and alone on the whole batch; nothing is trained."""
    case, kind = Case(name, rows=(4, 4)), BY_NAME[name]
    mine, whole = case.rows_of(rank, 0), together([case.rows_of(worker, 0) for worker in range(count)])
    with relay_of(case, rank) as relay:
        seen = {"loss": relay.evaluate(mine), "outputs": relay.forward(mine)}
        assert relay.steps == 0
    settings = replace(case.settings, micro_batches=count * case.micro_batches)
    with Relay(
        kind.make_model(), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, config=settings
    ) as alone:
        seen |= {"expected": alone.evaluate(whole), "alone": alone.forward(whole)}
    return {name: value.logits if hasattr(value, "logits") else value for name, value in seen.items()}


LATE_S, SLOW_S = 0.3, 0.3


def traced(rank: int, count: int) -> dict[str, Any]:
    """Make steps, the last of which worker 1 begins late, and in which it is slow; give all that was seen of it."""
    case = Case("chain", reduce="sum")
    with relay_of(case, rank) as relay:
        relay.step(case.rows_of(rank, 0))
        numel = {unit.key: sum(param.numel() for param in unit.params) for unit in relay.stack}
        if rank == 1:
            relay.stack[1].module.register_forward_pre_hook(lambda *_: time.sleep(SLOW_S / case.micro_batches))
        relay.step(case.rows_of(rank, 1))
        if rank == 1:
            time.sleep(LATE_S)
        relay.step(case.rows_of(rank, 1))
        traces = relay.traces()
    with relay_of(case, rank, workers=None) as relay:
        alone = relay.step(case.rows_of(rank, 0)).trace
    return {"traces": traces, "numel": numel, "alone": alone}
