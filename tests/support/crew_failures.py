"""Workers of `crew.py` that fail, differ or die."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from crew_cases import Case, plain, relay_of
from oracle import differences
from torch import nn
from zoo import BY_NAME

from l2l_core import Relay, RelayConfig, TornStep, WorkerError, WorkerLostError, Workers


def told(error: BaseException) -> dict[str, Any]:
    """What a test wants to know of an error."""
    return {"type": type(error).__name__, "text": str(error), "updated": getattr(error, "updated", None)}


def disagree(rank: int, count: int, how: str) -> dict[str, Any]:
    """One worker is about to do something else: both are told, and the steps after that are as if nothing had been."""
    case = Case("chain", steps=2, rows=(4, 4))
    relay, batch = relay_of(case, rank), case.rows_of(rank, 0)
    odd = rank == 1
    with relay:
        normal, hook = relay.config, None
        try:
            if how == "hook" and odd:
                hook = relay.optimizer.register_step_post_hook(lambda *_: None)
            if how == "settings" and odd:
                relay.config = RelayConfig(seed=0, micro_batches=2, ahead=2)
            if how == "seed" and odd:
                relay.config = RelayConfig(micro_batches=2, seed=1)
            if how == "rate" and odd:
                relay.optimizer.param_groups[0]["lr"] = 0.5
            if how == "frozen" and odd:
                relay.model.layers[0].requires_grad_(False)
            if how == "mode" and odd:
                relay.model.eval()
            if how == "verb" and odd:
                relay.evaluate(batch)
            elif how == "batch" and odd:
                relay.step(tuple(each.double() for each in batch))
            elif how == "rows" and odd:
                relay.step(tuple(each[:1] for each in batch))
            elif how == "skip" and odd:
                relay.step(batch, skip=[1])
            else:
                relay.step(batch)
            seen = {"type": None}
        except (WorkerError, ValueError) as error:
            seen = told(error)
        if hook is not None:
            hook.remove()
        relay.config = normal
        relay.optimizer.param_groups[0]["lr"] = 1e-3
        relay.model.layers[0].requires_grad_(True)
        relay.model.train()
        seen["losses"] = [relay.step(case.rows_of(rank, step)).loss for step in range(2)]
        seen["expected"] = plain(case, count)[2]
    return seen


@contextmanager
def failing(relay: Relay, where: str) -> Iterator[None]:
    """Let something raise in this worker, in a block."""
    layer, update, calls = relay.model.layers[1], relay.store.updater, []

    def broken(*_: Any, **__: Any) -> Any:
        calls.append(None)
        raise ArithmeticError("broken here")

    if where == "forward":
        handle = layer.register_forward_hook(broken)
    elif where == "backward":
        handle = layer.register_full_backward_hook(broken)
    else:
        inner = update.update
        update.update = lambda block, piece: broken() if block.key == "L001" else inner(block, piece)
    try:
        yield
    finally:
        if where == "update":
            del update.update
        else:
            handle.remove()


def one_raises(rank: int, count: int, where: str, config: dict[str, Any]) -> dict[str, Any]:
    """One worker raises in its step. What both raise, whether they have the old step, and how they go on."""
    case = Case("chain", steps=2, rows=(4, 5), config=config)
    with relay_of(case, rank) as relay:
        losses = [relay.step(case.rows_of(rank, 0)).loss]
        old = [block.values.clone() for block in relay.store.masters.blocks]
        with failing(relay, where) if rank == 1 else nullcontext():
            try:
                relay.step(case.rows_of(rank, 1))
                seen: dict[str, Any] = {"type": None}
            except (WorkerError, ArithmeticError, TornStep) as error:
                seen = told(error)
        now = [block.values for block in relay.store.masters.blocks]
        seen["old"] = all(map(torch.equal, old, now))
        losses.append(relay.step(case.rows_of(rank, 1)).loss)
        with relay.gathered() as model:
            twin, _, expected = plain(case, count)
            seen["equal"] = losses == expected and not differences(model, twin)
    return seen


def one_dies(rank: int, count: int, phase: str, who: int) -> dict[str, Any]:
    """A worker kills itself in the middle of a step: what the others raise, and after how long."""
    case = Case("chain", steps=1)
    relay = relay_of(case, rank, workers=Workers(reduce="ordered", timeout_s=20.0))
    relay.step(case.rows_of(rank, 0))
    if rank == who:
        _let_die(relay, phase)
    began_s = time.monotonic()
    try:
        relay.step(case.rows_of(rank, 1))
        seen: dict[str, Any] = {"type": None}
    except (WorkerLostError, TornStep) as error:
        seen = told(error) | {"cause": type(error.__cause__).__name__}
    seen["seconds"] = time.monotonic() - began_s
    try:
        relay.step(case.rows_of(rank, 1))
    except WorkerLostError as error:
        seen["again"] = str(error)
    began_s = time.monotonic()
    relay.close()
    return seen | {"closing_s": time.monotonic() - began_s}


def _let_die(relay: Relay, phase: str) -> None:
    """Die in the middle of the step that comes."""

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    reducer, crew = relay.store.reducer, relay._backend._group
    if phase == "compute":
        relay.model.layers[2].register_forward_hook(die)
    elif phase == "gather":
        _when(crew.gathers, "all_gather", 5, die)
    elif phase == "reduce":
        _when(crew.reduces, "all_to_all", 6, die)
    elif phase == "update":
        _when(relay.store.updater, "update", 2, die)
    elif phase == "end":
        reducer.finish = die


def _when(owner: Any, name: str, count: int, then: Callable[[], None]) -> None:
    """Call `then` ahead of the call with this number, from 1 on, of a method."""
    method, calls = getattr(owner, name), []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == count:
            then()
        return method(*args, **kwargs)

    setattr(owner, name, counted)


def refused(rank: int, count: int, what: str) -> dict[str, Any]:
    """What several workers are refused: the error, and whether the model is as it was."""
    kind = BY_NAME[what if what in ("batch_norm", "spectral_norm") else "chain"]
    model = kind.make_model()
    if what == "bfloat16":
        model.bfloat16()
    if what == "depth" and rank == 1:
        model.layers = nn.ModuleList(list(model.layers)[:-1])
    old = [param.detach().clone() for param in model.parameters()]
    try:
        relay = Relay(
            model, loss=kind.loss, loss_over=kind.loss_over, workers="auto", config=RelayConfig(seed=0, micro_batches=2)
        )
    except (ValueError, WorkerError) as error:
        return told(error) | {"as it was": all(map(torch.equal, old, model.parameters()))}
    with relay:
        try:
            if what == "hook":
                relay.optimizer.register_step_post_hook(lambda *_: None)
            relay.step(kind.make_batch(4, 0))
            seen: dict[str, Any] = {"type": None}
        except (ValueError, WorkerError) as error:
            seen = told(error)
    return seen | {"as it was": all(map(torch.equal, old, model.parameters()))}
