"""The seams of a step, each with a kind of its own: the loop does not care, and the bits do not either.

What a plan decides, where weights are, how blocks are updated and what becomes of gradients are values and protocols;
these doubles stand where a disk, a quantized optimizer or other workers would.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import chain_of
from oracle import assert_equal, both
from torch import nn
from zoo import BY_NAME, Kind, ResidualMlp

from l2l_core import Relay, RelayConfig, Trace
from l2l_core.devices import Ticket
from l2l_core.eps import (
    EPSClock,
    GradientBuffers,
    Masters,
    Reducer,
    Updater,
    WeightSource,
)
from l2l_core.eps.blocks import Block, BlockGradient, Unit
from l2l_core.plan import RelaySchedule
from l2l_core.step.micro_batch import LayerCall, StepContext

KINDS = ["chain", "gpt2", "bert"]
CONFIG = RelayConfig(micro_batches=3, stash="host", ahead=1)


def events(relay: Relay, kind: str) -> list[str]:
    assert relay.trace is not None
    return [event.layer for event in relay.trace.events if event.kind == kind]


def train(
    kind: Kind, prepare: Callable[[Relay], None], config: RelayConfig = CONFIG, steps: int = 3, **made: Any
) -> Relay:
    """Three steps beside plain training, with the relay prepared; equal to the bit."""
    with both(kind, config, **made) as pair:
        prepare(pair.relay)
        assert_equal([pair.step(kind.make_batch(7, seed)) for seed in range(steps)])
        return pair.relay


# --- a plan: what becomes of weights and graphs ---------------------------------------------------------------------


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Makes schedules keep other activations in all visits."""
    return lambda keep: monkeypatch.setattr(RelaySchedule, "_keep", lambda schedule, visit: keep)


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("name", KINDS)
def test_every_layer_recomputed(name: str, stash: Any, planned: Callable[[Any], None]) -> None:
    """The last layer's graph goes too: it runs forward once more, and the bits are the same."""
    planned("input")
    relay = train(BY_NAME[name], lambda relay: None, replace(CONFIG, stash=stash))
    turn = len(relay.stack) - 1
    visits = [e.visit for e in relay.trace.events if e.kind == "backward" and e.layer == relay.stack[turn].key]
    assert visits == [turn + 1] * CONFIG.micro_batches  # after the turn, and not at once


@pytest.mark.parametrize("name", KINDS)
def test_a_graph_kept_until_suspended_is_dropped_at_every_turn(
    name: str, planned: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped: Counter[str] = Counter()
    drop_graph = LayerCall.drop_graph

    def counted(call: LayerCall, ctx: StepContext) -> None:
        dropped[call.unit.key] += call.kept_graph is not None
        drop_graph(call, ctx)

    monkeypatch.setattr(LayerCall, "drop_graph", counted)
    planned("turn")
    relay = train(BY_NAME[name], lambda relay: None, steps=2)
    assert set(dropped) >= {unit.key for unit in relay.stack[:-1]}  # the last one was back-propagated at once
    assert not dropped[relay.stack[-1].key]


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("resident", [0, 1, 2])
def test_a_graph_whose_weights_have_left_is_not_used(resident: int, stash: Any, planned: Callable[[Any], None]) -> None:
    """Two to four slots, and six layers keep their graphs: those that lost their slots are recomputed, and the bits are right."""
    planned("graph")
    train(chain_of(ResidualMlp, count=6), lambda relay: None, replace(CONFIG, stash=stash, resident=resident))


# --- a place: where weights are -------------------------------------------------------------------------------------


class Elsewhere(WeightSource):
    """Lends copies, as a disk would, and spoils them as soon as they are taken back."""

    def __init__(self, inner: WeightSource) -> None:
        self._inner, self._lent = inner, dict[Block, list[torch.Tensor]]()
        self.most, self.count = 0, 0

    def begin(self, units: Sequence[Unit], dtype: torch.dtype, trace: Trace) -> None:
        self._inner.begin(units, dtype, trace)

    def prefetch(self, units: Sequence[Unit]) -> None:
        self._inner.prefetch(units)

    def acquire(self, block: Block) -> torch.Tensor:
        copy = self._inner.acquire(block).clone()
        self._lent.setdefault(block, []).append(copy)
        self.count += 1
        self.most = max(self.most, sum(map(len, self._lent.values())))
        return copy

    def release(self, block: Block, load: Ticket | None) -> None:
        self._lent[block].pop(0).fill_(torch.nan)
        self._inner.release(block, load)

    def end(self) -> None:
        assert not any(self._lent.values()), "somebody has not given back what was lent"
        self._inner.end()

    def close(self) -> None:
        self._inner.close()


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_weights_from_elsewhere(name: str, ahead: int) -> None:
    place: Elsewhere

    def prepare(relay: Relay) -> None:
        nonlocal place
        place = Elsewhere(WeightSource(relay.device, relay.host))
        relay._runner.parts = replace(relay._runner.parts, weight_source=place)

    relay = train(BY_NAME[name], prepare, replace(CONFIG, ahead=ahead))
    blocks = max(len(unit.blocks) for unit in relay.stack)
    assert place.count >= 3 * (2 * len(relay.stack) - 1 - ahead)
    assert place.most <= (ahead + 1) * blocks + len(relay.shell.blocks)


def test_a_failed_step_gives_back_what_was_lent() -> None:
    kind = BY_NAME["chain"]
    with both(
        kind, CONFIG, loss_over="micro-batch"
    ) as pair:  # the step fails, not an evaluation of a few rows before it
        place = Elsewhere(WeightSource(pair.relay.device, pair.relay.host))
        pair.relay._runner.parts = replace(pair.relay._runner.parts, weight_source=place)
        batch = kind.make_batch(7, 0)
        pair.relay.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.relay.step(batch)  # `end` has looked


# --- an update: how weights follow from gradients -------------------------------------------------------------------


class Descent(Updater):
    """Gradient descent written by hand, with an undo log."""

    def __init__(self, masters: Masters, lr: float) -> None:
        super().__init__(masters)
        self._lr, self._log, self._logged = lr, list[tuple[Block, torch.Tensor]](), False

    def begin(self, config: RelayConfig, clock: EPSClock) -> None:
        self.updated, self._log, self._logged = [], [], config.rollback or config.update != "eager"

    def gradients_complete(self, gradients: dict[Block, BlockGradient]) -> None:
        pass

    def update(self, block: Block, gradient: BlockGradient) -> Mapping[str, float]:
        if self._logged:
            self._log.append((block, block.master.clone()))
        self._masters.before_write(block)
        self.updated.append(block)
        for index, part in gradient.views().items():
            block.views[index].add_(part, alpha=-self._lr)
        block.version += 1
        return {"update_ratio": 0.5}

    def finish(self, gradients: dict[Block, BlockGradient]) -> None:
        self._log = []

    def undo(self) -> None:
        for block, master in reversed(self._log):
            block.master.copy_(master)
            block.version -= 1
        self.updated = [] if self._logged else self.updated

    def state_of(self, block: Block) -> list[dict[str, Any]]:
        return [{} for _ in block.params]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def let_descend(relay: Relay) -> None:
    updater: Updater = Descent(relay.store.masters, 0.01)
    relay.store.updater = updater


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("name", KINDS)
def test_another_update(name: str, update: Any) -> None:
    relay = train(BY_NAME[name], let_descend, replace(CONFIG, update=update), optimizer=sgd)
    assert {unit.stats["update_ratio"] for unit in relay.stack} == {0.5}


def test_another_update_is_rolled_back() -> None:
    kind = BY_NAME["chain"]
    with both(kind, replace(CONFIG, rollback=True), sgd) as pair:
        let_descend(pair.relay)
        assert_equal([pair.step(kind.make_batch(7, 0))])
        before = [param.detach().clone() for param in pair.relay.model.parameters()]
        handle = pair.relay.model.layers[0].register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            pair.relay.step(kind.make_batch(7, 1))
        handle.remove()
        assert all(map(torch.equal, before, pair.relay.model.parameters()))
        assert_equal([pair.step(kind.make_batch(7, 1))])


def test_branches_outlive_another_update() -> None:
    """Blocks are copied on write, whoever writes."""
    kind = BY_NAME["chain"]
    with both(kind, CONFIG, sgd) as pair:
        let_descend(pair.relay)
        assert_equal([pair.step(kind.make_batch(7, 0))])
        before = [param.detach().clone() for param in pair.relay.model.parameters()]
        pair.relay.fork("other")
        pair.relay.step(kind.make_batch(7, 1))
        assert not all(map(torch.equal, before, pair.relay.model.parameters()))
        pair.relay.switch("main")
        assert all(map(torch.equal, before, pair.relay.model.parameters()))


# --- a reducer: other workers ---------------------------------------------------------------------------------------


class TwoAlike(Reducer):
    """Two workers with the same rows: the mean of their gradients is either's."""

    def __init__(self) -> None:
        self.reduced: list[str] = []
        self.finished = 0

    def reduce(
        self, block: Block, parts: Mapping[int, BlockGradient], gradients: GradientBuffers
    ) -> BlockGradient | None:
        piece = super().reduce(block, parts, gradients)
        assert piece is not None
        self.reduced.append(block.key)
        other = piece.flat.clone()
        for view in piece.views().values():
            view.zero_()
        for half in (0.5 * other, 0.5 * other):  # exact: halves of floats
            for view, given in zip(piece.views().values(), replace(piece, flat=half).views().values(), strict=True):
                view.add_(given)
        return piece

    def finish(self) -> None:
        self.finished += 1


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_two_workers(name: str) -> None:
    reducer = TwoAlike()

    def prepare(relay: Relay) -> None:
        checked: Reducer = reducer
        relay.store.reducer = checked

    relay = train(BY_NAME[name], prepare, replace(CONFIG, verify="never"), steps=1)
    trained = {block.key for unit in (relay.shell, *relay.stack) for block in unit.blocks}
    assert Counter(reducer.reduced) == dict.fromkeys(trained, 1) and reducer.finished == 1


class Separately(Reducer):
    """Wants every micro-batch's gradient by itself, as workers do who add them up in the order of one worker."""

    per_micro_batch = True

    def __init__(self) -> None:
        self.parts: dict[str, list[int]] = {}

    def reduce(
        self, block: Block, parts: Mapping[int, BlockGradient], gradients: GradientBuffers
    ) -> BlockGradient | None:
        if parts:  # a frozen block has none
            self.parts[block.key] = sorted(parts)
        return super().reduce(block, parts, gradients)


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("name", [*KINDS, "frozen_layer", "t5", "albert"])
def test_gradients_of_every_micro_batch_apart(name: str, update: Any) -> None:
    reducer = Separately()

    def prepare(relay: Relay) -> None:
        relay.store.reducer = reducer

    relay = train(BY_NAME[name], prepare, replace(CONFIG, update=update), steps=2)
    trained = {b.key for unit in (relay.shell, *relay.stack) for b in unit.blocks if b.trained.indices}
    assert reducer.parts == dict.fromkeys(trained, [0, 1, 2])
