"""What a metered step has shown of a model is relied on by later ones; a model that then does otherwise is trained right."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import chain_of, stashes, with_charge
from oracle import Compared, assert_equal, both
from torch import Tensor, nn
from zoo import Chain, Kind, ResidualMlp

from l2l_core import RelayConfig


class Layer(ResidualMlp):
    """Does something besides, once it is told to."""

    late = False

    def forward(self, x: Tensor) -> Tensor:
        return self.besides(x, super().forward(x)) if self.late else super().forward(x)

    def besides(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


class DrawsPython(Layer):
    def besides(self, x: Tensor, y: Tensor) -> Tensor:
        return y * (1 + random.random())


class DrawsTorch(Layer):
    def besides(self, x: Tensor, y: Tensor) -> Tensor:
        return y * (1 + torch.rand(()))


class DrawsBoth(Layer):
    def besides(self, x: Tensor, y: Tensor) -> Tensor:
        return y * (1 + torch.rand(()) + random.random())


class ReturnsMore(Layer):
    """Another structure: the shell below takes the first of what it gets."""

    def besides(self, x: Tensor, y: Tensor) -> Any:
        return {"hidden": (y, x), "note": "late"}


class LeavesCharge(Layer):
    """Leaves a loss of its own on an attribute."""

    charge: Any = 0.0

    def besides(self, x: Tensor, y: Tensor) -> Tensor:
        self.charge = y.square().mean()
        return y


class SkipsPart(ResidualMlp):
    """Only some micro-batches touch `extra`: not the first one, once it is told to."""

    late = False

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        touches = x.shape[0] == 3 if not self.late else x.shape[0] != 3
        return super().forward(x) * self.extra if touches else super().forward(x)


class Shell(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            out = layer(h)
            h = out["hidden"][0] if isinstance(out, dict) else out
        return h


class Charged(Chain):
    """Gives out what its layers charge."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), sum(layer.charge for layer in self.layers)


class Hooked(Chain):
    """Keeps what a part of each layer gives out, as routers are recorded, once it is told to."""

    late = False

    def __init__(self, layers: Any) -> None:
        super().__init__(layers)
        self.seen: list[Tensor] = []
        for layer in self.layers:
            next(m for m in layer.modules() if isinstance(m, nn.Linear)).register_forward_hook(self._record)

    def _record(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.late:
            self.seen.append(output)

    def forward(self, x: Tensor) -> Any:
        self.seen = []
        return super().forward(x), sum((each.square().mean() for each in self.seen), torch.zeros(()))


class ShellDraws(Chain):
    late = False

    def walk(self, h: Tensor) -> Tensor:
        return super().walk(h) * (1 + random.random() if self.late else 1)


def charged(kind: Kind) -> Kind:
    return replace(kind, loss=with_charge)


class KeepsInput(ResidualMlp):
    """Keeps what it is given: a tensor with a history, but nothing that the layer gives out."""

    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return super().forward(x)


@stashes
def test_what_a_layer_keeps_of_its_input_is_no_new_habit(stash: Any) -> None:
    kind = chain_of(KeepsInput)
    with both(kind, RelayConfig(micro_batches=3, stash=stash)) as pair:
        steps = [pair.step(kind.make_batch(7, seed)) for seed in range(3)]
        assert_equal(steps)
        assert [is_metered(step) for step in steps] == [True, False, False]


KINDS: dict[str, Callable[[], Kind]] = {
    "python's random numbers": lambda: chain_of(DrawsPython),
    "torch's random numbers": lambda: chain_of(DrawsTorch),
    "both": lambda: chain_of(DrawsBoth),
    "in the shell": lambda: chain_of(ResidualMlp, ShellDraws),
    "another structure": lambda: chain_of(ReturnsMore, Shell),
    "a charge on an attribute": lambda: charged(chain_of(LeavesCharge, Charged)),
    "a hook records": lambda: charged(chain_of(ResidualMlp, Hooked)),
    "a weight touched later": lambda: chain_of(SkipsPart),
}


NEW = ("a charge on an attribute", "a hook records")  # which no later step looks for


def is_metered(step: Compared) -> bool:
    return bool(step.result.trace.settings["metered"])


@stashes
@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_changes_its_habits_is_trained_right(name: str, stash: Any) -> None:
    """At once; or it is refused before anything is trained, and trained right when the step is made again."""
    kind = KINDS[name]()
    with both(kind, RelayConfig(micro_batches=3, stash=stash)) as pair:
        steps = [pair.step(kind.make_batch(7, seed)) for seed in range(2)]
        assert not is_metered(steps[-1])
        for model in (pair.relay.model, pair.in_core.model):
            for module in model.modules():
                if hasattr(module, "late"):
                    module.late = True
        if name in NEW:
            with pytest.raises(RuntimeError, match="repeat this step"):
                pair.relay.step(kind.make_batch(7, 2))
        steps += [pair.step(kind.make_batch(7, seed)) for seed in range(2, 5)]
        assert_equal(steps)
        assert [is_metered(step) for step in steps] == [True, False, name in NEW, False, False]


def test_a_new_habit_in_a_step_without_some_layers_is_learned_once() -> None:
    kind = KINDS["a charge on an attribute"]()
    with both(kind, RelayConfig(micro_batches=3)) as pair:
        relay = pair.relay
        metered = [relay.step(kind.make_batch(7, seed), skip=[0]).trace.settings["metered"] for seed in range(3)]
        for layer in relay.model.layers:
            layer.late = True
        with pytest.raises(RuntimeError, match="repeat this step"):
            relay.step(kind.make_batch(7, 3), skip=[0])
        metered += [relay.step(kind.make_batch(7, seed), skip=[0]).trace.settings["metered"] for seed in range(3, 6)]
        assert metered == [True, False, False, True, False, False]


class ReadsState(ResidualMlp):
    """Draws, and leaves the generators where they stood: what it draws is a matter of the stream all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        state = random.getstate()
        with torch.random.fork_rng(devices=[]):
            y = self.lin(x) * (1 + torch.rand(()) + random.random())
        random.setstate(state)
        return y


@stashes
def test_a_model_that_puts_generators_back_draws_from_its_own_streams(stash: Any) -> None:
    kind = chain_of(ReadsState)
    with both(kind, RelayConfig(micro_batches=3, stash=stash)) as pair:
        assert_equal([pair.step(kind.make_batch(7, seed)) for seed in range(3)])


def test_the_caller_s_random_numbers_stand_where_they_stood() -> None:
    kind = chain_of(ResidualMlp)
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        for seed in range(3):
            random.seed(seed), torch.manual_seed(seed)
            before = random.getstate(), torch.get_rng_state()
            pair.relay.step(kind.make_batch(4, seed))
            assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_numbers_drawn_in_backward_do_not_repeat() -> None:
    """A model that draws nothing in its forward: what its hooks draw goes on from turn to turn, and from layer to layer."""
    kind = chain_of(lambda: nn.Linear(32, 32))
    drawn: list[float] = []
    with both(kind, RelayConfig(micro_batches=2, verify="never")) as pair:
        for layer in pair.relay.model.layers:
            layer.weight.register_hook(lambda grad: drawn.append(float(torch.rand(()))))
        for seed in range(3):
            drawn.clear()
            pair.relay.step(kind.make_batch(4, seed))
            assert len(drawn) == 2 * len(pair.relay.stack) and len(set(drawn)) == len(drawn)
