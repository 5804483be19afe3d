"""Edits of models whose own code uses what layers return, beyond the next layer: equal to lists by hand, or refused."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from beside import DEPTH, Beside, assert_refused, kind_of, parameter, relay_of
from oracle import InCore, adamw, assert_state, copy_state
from torch import Tensor, nn
from zoo import BY_NAME, WIDTH, Chain, ResidualMlp

from l2l_core import Drop, Edit, EmulatedDevice, Insert, Move, Relay, RelayConfig, Swap

ONE = RelayConfig(micro_batches=1)
MOVES: dict[Edit, list[int]] = {
    Drop(1): [0, 2, 3],
    Swap(0, 2): [2, 1, 0, 3],
    Move(0, 3): [1, 2, 3, 0],
    Insert(1, init="copy"): [0, 0, 1, 2, 3],
}


class Summed(Beside):
    """Adds up what all layers return, each with a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = parameter(DEPTH)

    def walk(self, h: Tensor) -> Tensor:
        outputs = list[Tensor]()
        for layer in self.layers:
            h = layer(h)
            outputs.append(h)
        return h + sum(self.weigh(i, output) for i, output in enumerate(outputs))

    def weigh(self, i: int, output: Tensor) -> Tensor:
        return self.weights[i] * output


class SummedByName(Summed):
    def __init__(self) -> None:
        super().__init__()
        self.weights = None
        for i in range(DEPTH):
            setattr(self, f"weight_{i}", parameter(WIDTH))

    def weigh(self, i: int, output: Tensor) -> Tensor:
        return getattr(self, f"weight_{i}") * output


class SummedByFormula(Summed):
    """Deep supervision, the deeper the more."""

    def weigh(self, i: int, output: Tensor) -> Tensor:
        return output * (i + 1) / len(self.layers)


class Written(Summed):
    """Into one tensor, a part for each."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(DEPTH * WIDTH, WIDTH)

    def walk(self, h: Tensor) -> Tensor:
        parts = h.new_zeros(*h.shape[:-1], DEPTH * WIDTH)
        for i, layer in enumerate(self.layers):
            h = layer(h)
            parts[..., i * WIDTH : (i + 1) * WIDTH] = h
        return self.mix(parts)


class SummedAlike(Summed):
    def weigh(self, i: int, output: Tensor) -> Tensor:
        return output * self.weights.sum()


class Weighed(ResidualMlp):
    """The remedy: returns its part of the sum, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = parameter()

    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return h, self.weight * h


class SummedByLayers(Chain):
    def __init__(self) -> None:
        super().__init__([Weighed() for _ in range(DEPTH)])

    def walk(self, h: Tensor) -> Tensor:
        total: Any = 0
        for layer in self.layers:
            h, part = layer(h)
            total = total + part
        return h + total


@pytest.mark.parametrize("model", [Summed, SummedByName, SummedByFormula, Written], ids=lambda model: model.__name__)
def test_outputs_that_are_used_by_position_are_refused(model: type[Beside]) -> None:
    kind = kind_of(model)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        for edit in MOVES:
            assert_refused(relay, edit, "outputs of layers 0, 1, 2 of layers, each in another way.*force=True leaves")
        assert relay.verify(kind.make_batch(4)).equal


@pytest.mark.parametrize("model", [SummedAlike, SummedByLayers], ids=lambda model: model.__name__)
@pytest.mark.parametrize("edit", MOVES, ids=repr)
def test_outputs_that_are_used_alike_follow_and_so_does_the_remedy(model: type[Chain], edit: Edit) -> None:
    assert_equal_to_a_list_by_hand(model, edit, force=False)


class SecondHead(Beside):
    """A second head on the output of one layer in the middle."""

    at_layer = 1

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, WIDTH)

    def walk(self, h: Tensor) -> Tensor:
        outputs = list[Tensor]()
        for layer in self.layers:
            h = layer(h)
            outputs.append(h)
        return h + self.second(outputs[self.at_layer])


class SecondHeadFromTheEnd(SecondHead):
    at_layer = -3


class FusedByLayers(SecondHead):
    """Further layers take the outputs of some layers of the first stack."""

    def __init__(self) -> None:
        super().__init__()
        self.fusions = nn.ModuleList(Fusion() for _ in range(2))

    def walk(self, h: Tensor) -> Tensor:
        outputs = list[Tensor]()
        for layer in self.layers:
            h = layer(h)
            outputs.append(h)
        for fusion, other in zip(self.fusions, (outputs[1], outputs[-1]), strict=True):
            h = fusion(h, other)
        return h


class Fusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, other: Tensor) -> Tensor:
        return h + torch.tanh(self.mix(other))


@pytest.mark.parametrize(
    ("model", "edits", "refused"),
    [
        (
            FusedByLayers,
            [Swap(("layers", 0), ("layers", 2))],
            [Drop(("layers", 1)), Swap(("layers", 1), ("layers", 2))],
        ),
        (SecondHead, [Drop(2), Swap(2, 3), Insert(3, init="copy")], [Drop(1), Drop(0), Swap(1, 2), Move(0, 3)]),
        (
            SecondHeadFromTheEnd,
            [Drop(0), Swap(2, 3), Insert(1, init="copy")],
            [Drop(1), Drop(2), Swap(1, 3), Move(0, 3)],
        ),
    ],
)
def test_one_output_that_is_used_behind_the_last_layer_stays_that_of_its_layer(
    model: type[Beside], edits: list[Edit], refused: list[Edit]
) -> None:
    kind = kind_of(model)
    for edit in edits:
        with relay_of(kind) as relay:
            relay.step(kind.make_batch(4))
            layers = list(relay.model.layers)
            relay.apply(edit)
            moved, tapped = list(relay.model.layers), model.at_layer
            assert moved[tapped] is layers[tapped] and relay.verify(kind.make_batch(4)).equal
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        for edit in refused:
            assert_refused(relay, edit, "uses the output of layers.1, and .* of the same layers.*force=True leaves")
        relay.apply(refused[0], force=True)
        assert model is FusedByLayers or relay.verify(kind.make_batch(4)).equal


@pytest.mark.parametrize("edit", [Drop(1), Swap(0, 2)], ids=repr)
def test_force_leaves_the_weights_at_their_positions(edit: Edit) -> None:
    assert_equal_to_a_list_by_hand(Summed, edit, force=True)


def test_a_pair_of_layers_that_the_model_runs_together_is_changed_together() -> None:
    kind = BY_NAME["reversible"]
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        assert_refused(relay, Drop(0), "own code fails on rows of a batch .*change both of a pair in one apply")
        relay.apply(Drop(0), Drop(0))
        assert len(relay.stack) == 2 and relay.verify(kind.make_batch(4)).equal


class Steered(Chain):
    """A hook of the user changes what one layer returns."""

    def __init__(self) -> None:
        super().__init__([ResidualMlp() for _ in range(DEPTH)])
        self.layers[1].register_forward_hook(lambda _, args, output: output + 0.5)


@pytest.mark.parametrize("edit", MOVES, ids=repr)
def test_a_hook_that_changes_what_one_layer_returns_moves_with_it(edit: Edit) -> None:
    assert_equal_to_a_list_by_hand(Steered, edit, force=False)


def test_an_identity_layer_with_the_hook_of_its_like_is_refused_and_the_remedies_work() -> None:
    kind = kind_of(Steered)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        assert_refused(relay, Insert(2), r"result is [\d.]+ in place of .*hook.*Use init='copy'.*like=")
        loss = relay.evaluate(kind.make_batch(4))
        relay.apply(Insert(2, like=0))
        assert relay.evaluate(kind.make_batch(4)) == loss
        relay.apply(Insert(2, init="copy"))
        assert relay.step(kind.make_batch(4), skip=[0]).loss > 0 and relay.verify(kind.make_batch(4)).equal


def assert_equal_to_a_list_by_hand(made: type[Chain], edit: Edit, force: bool) -> None:
    kind, config = kind_of(made), RelayConfig(micro_batches=2)
    model, plain = kind.make_model(), kind.make_model()
    in_core = InCore(kind, plain, torch.optim.SGD(plain.parameters(), lr=0.1), config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Relay(model, optimizer, EmulatedDevice(), loss=kind.loss, config=config) as relay:
        assert relay.step(kind.make_batch(4)).loss == in_core.step(kind.make_batch(4))
        relay.apply(edit, force=force)
        old, order = list(plain.layers), MOVES[edit]
        plain.layers = nn.ModuleList(copy.deepcopy(old[i]) if i in order[:at] else old[i] for at, i in enumerate(order))
        in_core.optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in (1, 2):
            assert relay.step(kind.make_batch(4, step)).loss == in_core.step(kind.make_batch(4, step))
        assert_state(model, copy_state(plain))


class NormedAfterEach(Beside):
    """An identity layer is followed by the norm once more."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.norm.weight = parameter(WIDTH)

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = self.norm(layer(h))
        return h


def test_an_identity_layer_that_would_change_the_function_is_refused_and_its_remedy_works() -> None:
    kind = kind_of(NormedAfterEach)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        assert_refused(relay, Insert(2), r"result is [\d.]+ in place of .*Use init='copy'")
        relay.apply(Insert(2, init="copy"))
        assert relay.verify(kind.make_batch(4)).equal


class Counted(Beside):
    """Has the number of layers in its code."""

    def walk(self, h: Tensor) -> Tensor:
        for i in range(DEPTH):
            h = self.layers[i](h)
        return h


def test_a_layer_that_would_not_run_is_refused() -> None:
    kind = kind_of(Counted)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        assert_refused(relay, Insert(2, init="copy"), r"would not run layers.4.*for layer in self.layers")
        relay.apply(Swap(0, 2))
        assert relay.verify(kind.make_batch(4)).equal


class ForFive(Beside):
    """Fails in evaluation with the layers that it has."""

    def walk(self, h: Tensor) -> Tensor:
        if not self.training and len(self.layers) < 5:
            raise ValueError("five layers, please")
        for layer in self.layers[:4]:
            h = layer(h)
        return h


@pytest.mark.parametrize("edit", [Insert(2, init="copy"), Drop(1)], ids=repr)
def test_a_model_that_fails_without_the_edits_has_nothing_to_be_compared_with(
    edit: Edit, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own error is logged and not raised."""
    kind = replace(kind_of(ForFive), loss_over="micro-batch")  # the check of the loss runs in evaluation mode, too
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        relay.apply(edit)
        assert "five layers, please" in caplog.text
        assert relay.step(kind.make_batch(4, 1)).loss > 0


class Sliced(Beside):
    """The same, without an error where there are fewer."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers[:DEPTH]:
            h = layer(h)
        return h


class LastThree(Beside):
    """The mean of some outputs, in which no order matters."""

    def walk(self, h: Tensor) -> Tensor:
        outputs = list[Tensor]()
        for layer in self.layers:
            h = layer(h)
            outputs.append(h)
        return torch.stack(outputs[-3:]).mean(0)


class Routed(ResidualMlp):
    """Returns a loss of its router, if it has one."""

    def __init__(self, has_router: bool) -> None:
        super().__init__()
        self.gate = parameter(WIDTH) if has_router else None

    def forward(self, x: Tensor) -> Any:
        h = super().forward(x)
        return h, None if self.gate is None else (h * self.gate).square().mean()


class SomeRouted(Beside):
    """Sparse layers among dense ones, whose losses are added up behind them: these move with their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed(i % 2 == 1) for i in range(DEPTH))

    def walk(self, h: Tensor) -> Tensor:
        losses = list[Tensor]()
        for layer in self.layers:
            h, loss = layer(h)
            losses += [] if loss is None else [loss]
        return h + sum(losses)


class Drawn(Beside):
    """Draws the layers that run, and takes the mean of what they return."""

    def walk(self, h: Tensor) -> Tensor:
        outputs = [h]
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.4:
                outputs.append(layer(outputs[-1]))
        return torch.stack(outputs).mean(0)


@pytest.mark.parametrize(
    ("made", "edits"),
    [
        (LastThree, [Swap(1, 2)]),
        (SomeRouted, [Drop(1), Drop(2), Insert(2, like=1, init="copy"), Swap(1, 3)]),
        (Drawn, [Swap(1, 2), Drop(3)]),
    ],
)
def test_a_use_that_is_no_matter_of_positions_is_no_reason_to_refuse(made: type[Beside], edits: list[Edit]) -> None:
    kind = kind_of(made)
    for edit in edits:
        model = kind.make_model()
        with Relay(
            model, adamw(model), EmulatedDevice(), loss=kind.loss, layers=list(model.layers), config=ONE
        ) as relay:
            relay.step(kind.make_batch(4))
            relay.apply(edit)
            assert len(relay.journal) == 1
            assert relay.verify(kind.make_batch(4)).equal


class ScaledByDepth(Beside):
    """Uses the number of its layers behind them."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return torch.cat([h[..., :1] * len(self.layers), h[..., 1:]], -1)


class Tapped(Beside):
    """Adds the output of the second layer once more."""

    def walk(self, h: Tensor) -> Tensor:
        outputs = [h]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        return outputs[-1] + outputs[2]


@pytest.mark.parametrize(
    ("made", "edit", "match"),
    [
        (Sliced, Insert(2, init="copy"), "would not run layers.4"),
        (ScaledByDepth, Insert(0), "would not keep the model's"),
        (Tapped, Insert(0), "uses the output of layers.1, and"),
    ],
)
def test_edits_that_passed_do_not_vouch_for_others(made: type[Chain], edit: Edit, match: str) -> None:
    kind = kind_of(made)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(4))
        relay.apply(Drop(3))
        relay.undo()
        with pytest.raises(ValueError, match=match):
            relay.apply(edit)


class InTrainingAlone(Beside):
    """Leaves early in evaluation."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers if self.training else self.layers[:2]:
            h = layer(h)
        return h


class PrunedByHand(Beside):
    """Had six layers, as its configuration still says."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_layer=6)

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers[: self.config.n_layer]:
            h = layer(h)
        return h


@pytest.mark.parametrize("made", [InTrainingAlone, PrunedByHand])
def test_all_layers_run_after_edits_in_training(made: type[Chain]) -> None:
    kind = kind_of(made)
    with relay_of(kind) as relay:
        for _ in range(4):
            relay.step(kind.make_batch(4))
            relay.apply(Insert(1, init="copy"))
        before = copy_state(relay.model)
        relay.step(kind.make_batch(4))
        after = dict(relay.model.named_parameters())
        assert all(not torch.equal(value, after[name]) for name, value in before.items() if name.startswith("layers."))
