"""Forwards that pause: each keeps its own context, orders and errors end them as they would end plain training. R1 is
rule 1 of the design's paused-forwards.md, and so on; the zoo alone does not show these.
"""

import contextvars
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_trains, assert_unshadowed, chain_of, stashes
from oracle import assert_equal, assert_state, both, copy_state
from patience import wait_until
from torch import Tensor, nn
from zoo import Chain, Kind, ResidualMlp, cross_entropy

from l2l_core import Relay, RelayConfig, TornStep

scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class ScaledByContext(ResidualMlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * scale.get())


class SetsContext(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            token = scale.set(1.0 + float(h.detach().abs().mean()))  # another value for every micro-batch and layer
            h = layer(h)
            scale.reset(token)
        return h


@stashes
def test_context_variables(stash: str) -> None:
    """R2: each micro-batch has its own, in the recompute too."""
    assert_trains(chain_of(ScaledByContext, SetsContext), stash)
    assert scale.get() == 1.0


class Swallows(Chain):
    """Catches everything, its own end included, and goes on."""

    def walk(self, h: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            try:
                h = layer(h)
            except BaseException:  # noqa: B036
                h = h * 1
            if index == 0 and self.armed:
                self.armed = False
                raise ValueError("boom")
        return h

    armed = True


def test_forward_that_survives_its_end_is_an_error() -> None:
    """R3: micro-batch 0 fails, the others are thrown out of layer 0 and must not call layer 1."""
    kind = chain_of(ResidualMlp, Swallows)
    model = kind.make_model()
    with Relay(model, loss=kind.loss, loss_over=kind.loss_over, config=RelayConfig(micro_batches=3)) as relay:
        before = copy_state(model)
        with pytest.raises(RuntimeError, match="micro-batch 1 caught GreenletExit"):
            relay.step(kind.make_batch(6, 0))
        assert_state(model, before)
        assert_unshadowed(model)


# --- R4: the order of layers -----------------------------------------------------------------------------------------


class Reordering(Chain):
    """Another order per step and, with `alone`, per micro-batch: layers may come twice or not at all."""

    order = [0, 1, 2]
    alone = False

    def walk(self, h: Tensor) -> Tensor:
        for index in torch.randint(3, (4,)).tolist() if self.alone else self.order:
            h = self.layers[index](h)
        return h


@stashes
def test_order_that_changes(stash: str) -> None:
    """R4: predicted from the last step, corrected when a micro-batch asks for another layer."""
    kind = chain_of(ResidualMlp, Reordering)
    with both(kind, RelayConfig(micro_batches=3, stash=stash)) as pair:
        keys = {f"layers.{i}": layer.key for i, layer in enumerate(pair.relay.stack)}
        for step, order in enumerate([[2, 0, 1], [0, 1, 2], [1], [1, 2, 1, 0], [0, 1, 2]]):
            pair.relay.model.order = pair.in_core.model.order = order
            compared = pair.step(kind.make_batch(7, step))
            assert_equal([compared])
            forwards = [e.layer for e in compared.result.trace.events if e.kind == "forward" and e.k == 0]
            assert forwards[: len(order)] == [keys[f"layers.{i}"] for i in order]


@stashes
def test_every_micro_batch_its_own_order(stash: str) -> None:
    class Alone(Reordering):
        alone = True

    assert_trains(chain_of(ResidualMlp, Alone), stash, steps=6)


class SamplesFirst(Chain):
    """Runs its layers a random number of times without gradients, as to sample from itself, and then with them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            for _ in range(int(torch.randint(3, ()))):
                super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)


@stashes
def test_every_micro_batch_runs_as_often_as_it_samples(stash: str) -> None:
    """Without gradients, too, a call delays its micro-batch, and so the order in which gradients arrive."""
    assert_trains(chain_of(ResidualMlp, SamplesFirst), stash, steps=6)


# --- R5: exceptions --------------------------------------------------------------------------------------------------


class Fuse:
    """Burns through at the `left`-th call from now, when what it waits for is so."""

    left, error = -1, ValueError("boom")

    def __init__(self) -> None:
        self.until: Callable[[], Any] = lambda: True

    def __call__(self) -> None:
        self.left -= 1
        if self.left == 0:
            wait_until(self.until)
            raise self.error


class FusedLayer(ResidualMlp):
    def __init__(self) -> None:
        super().__init__()
        self.fuse = Fuse()

    def forward(self, x: Tensor) -> Tensor:
        self.fuse()
        return super().forward(x)


class FusedShell(Chain):
    """Burns between the layers, and counts forwards in a buffer."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.fuse = Fuse()
        self.register_buffer("count", torch.zeros(()))

    def walk(self, h: Tensor) -> Tensor:
        self.count += 1
        for layer in self.layers:
            self.fuse()
            h = layer(h)
        return h


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("call", [1, 2, 3])  # in forward, of each micro-batch
def test_exception_in_a_layer(call: int, error: BaseException) -> None:
    """R5: nothing has changed, and the same relay trains on."""
    kind = chain_of(FusedLayer, FusedShell)
    with both(kind, RelayConfig(micro_batches=3, stash="host")) as pair:
        assert_equal([pair.step(kind.make_batch(7, 0))])
        assert_step_fails(pair.relay, kind, pair.relay.model.layers[1].fuse, call, error)
        assert_equal([pair.step(kind.make_batch(7, 1))])


@pytest.mark.parametrize("call", [1, 2, 5, 9])
def test_exception_in_the_shell(call: int) -> None:
    """R5: before the first layer of the first micro-batch, of the second, and between layers."""
    kind = chain_of(FusedLayer, FusedShell)
    with both(kind, RelayConfig(micro_batches=3, stash="host")) as pair:
        assert_equal([pair.step(kind.make_batch(7, 0))])
        assert_step_fails(pair.relay, kind, pair.relay.model.fuse, call, ValueError("boom"))
        assert_equal([pair.step(kind.make_batch(7, 1))])


def assert_step_fails(relay: Relay, kind: Kind, fuse: Fuse, call: int, error: BaseException) -> None:
    """Let `fuse` burn at its `call`-th call from now: an error that leaves no trace."""
    before, random_state = copy_state(relay.model), torch.get_rng_state()
    versions = [unit.version for unit in relay.stack]
    fuse.left, fuse.error = call, error
    with pytest.raises(type(error)) as caught:
        relay.step(kind.make_batch(7, 1))
    assert not isinstance(caught.value, TornStep)
    assert_state(relay.model, before)
    assert_unshadowed(relay.model)
    assert [unit.version for unit in relay.stack] == versions
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(p.grad is None for p in relay.model.parameters())
    assert relay.device.ledger.total == 0, relay.device.ledger.by_category()


def test_exception_in_the_loss() -> None:
    """R5: at micro-batch 0, when others still stand in their last layer, and at the last one with a deferred update."""
    burns_at, seen = [-1], [0]

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        seen[0] += 1
        if seen[0] == burns_at[0]:
            raise ValueError("boom")
        return cross_entropy(outputs, batch)

    kind = chain_of(ResidualMlp)
    with both(kind, RelayConfig(micro_batches=3, update="deferred", verify="never"), loss=loss) as pair:
        pair.in_core.objective = lambda model, part: cross_entropy(model(part[0]), part)
        for step, call in enumerate([1, 3]):
            before, burns_at[0] = copy_state(pair.relay.model), seen[0] + call
            with pytest.raises(ValueError, match="boom"):
                pair.relay.step(kind.make_batch(7, step))
            assert_state(pair.relay.model, before)
            assert_unshadowed(pair.relay.model)
            assert_equal([pair.step(kind.make_batch(7, step))])


def test_exception_in_the_recompute() -> None:
    """R5 and invariant 6: the step is torn, and says so, or it is not."""
    kind = chain_of(FusedLayer, FusedShell)
    for config, torn in [
        (RelayConfig(micro_batches=2), True),
        (RelayConfig(micro_batches=2, update="deferred"), False),
        (RelayConfig(micro_batches=2, rollback=True), False),
    ]:
        with both(kind, config) as pair:
            assert_equal([pair.step(kind.make_batch(6, 0))])
            before = copy_state(pair.relay.model)
            pair.relay.model.layers[0].fuse.left = 4
            if torn:  # only after an update, however late the EPS is
                pair.relay.model.layers[0].fuse.until = lambda store=pair.relay.store: store.updated
            with pytest.raises(TornStep if torn else ValueError) as caught:
                pair.relay.step(kind.make_batch(6, 1))
            if torn:
                assert caught.value.updated and pair.relay.stack[0].key not in caught.value.updated
            else:
                assert_state(pair.relay.model, before)
                assert_equal([pair.step(kind.make_batch(6, 1))])
            assert_unshadowed(pair.relay.model)


def test_forward_of_an_instance_comes_back() -> None:
    """R1, R5: layers are shadowed during a step only; a forward that somebody else has set is called and restored."""
    kind = chain_of(ResidualMlp)
    calls: list[int] = []

    def scaled(module: nn.Module) -> Callable[[Tensor], Tensor]:
        real = module.forward
        return lambda x: calls.append(1) or real(x) * 1.5

    with both(kind, RelayConfig(micro_batches=3)) as pair:
        for model in (pair.relay.model, pair.in_core.model):
            model.layers[1].forward = scaled(model.layers[1])
        own = pair.relay.model.layers[1].forward
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2)])
        assert pair.relay.model.layers[1].forward is own and calls
        del pair.relay.model.layers[1].forward
        assert_unshadowed(pair.relay.model)


# --- outputs of inference --------------------------------------------------------------------------------------------


def test_forward_gives_no_single_part_silently() -> None:
    """Outputs that are no pytree cannot be concatenated: an error, not the first micro-batch's part."""

    class Namespaced(Chain):
        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=super().forward(x))

    kind = chain_of(ResidualMlp, Namespaced)
    with (
        Relay(kind.make_model(), loss=lambda outputs, batch: F.cross_entropy(outputs.logits, batch[-1])) as relay,
        pytest.raises((TypeError, ValueError), match="SimpleNamespace"),
    ):
        relay.config = RelayConfig(micro_batches=2)
        relay.forward(kind.make_batch(4, 0))


def test_a_function_runs_in_place_of_the_model() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    batch = (torch.randn(6, 4), torch.randn(6, 4))

    def distance(model: nn.Module, part: Any) -> dict[str, Tensor]:
        return {"distance": (model(part[0]) - part[1]).square().sum(-1), "rows": part[0]}

    with Relay(
        model, device="cpu", objective=lambda m, part: m(part[0]).sum(), config=RelayConfig(micro_batches=3)
    ) as relay:
        result = relay.forward(batch, distance)
        assert not relay.is_closed
    assert relay.is_closed
    with torch.no_grad():
        expected = torch.cat(
            [distance(model, part)["distance"] for part in zip(*(t.chunk(3) for t in batch), strict=True)]
        )
    assert torch.equal(result["distance"], expected) and torch.equal(result["rows"], batch[0])
