"""Steps without some layers, of models that read things by the position of a layer, against loops by hand in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import InCore, adamw, assert_state, copy_state, has_gradient, micro_batches_of
from torch import Tensor, nn
from zoo import BY_NAME, ByDepth, Chain, DepthBlock, Kind, Mlp, ResidualMlp, sequences, tokens

from l2l_core import Drop, Duplicate, EmulatedDevice, Insert, LayerDrop, Relay, RelayConfig, Replace

SKIPS: list[Collection[int]] = [(1,), (), (0, 3), (0, 1, 2, 3), (2,), (1, 2, 3)]
CONFIG = RelayConfig(micro_batches=3)


class PlainByDepth(ByDepth):
    """The loop of a user who leaves layers out: whatever does not run keeps its number."""

    skip: Collection[int] = ()

    def walk(self, x: Tensor, input_ids: Tensor) -> Tensor:
        x0 = x
        for i, layer in enumerate(self.layers):
            x = self.mix(i, x, x0)
            if i in self.skip:
                continue
            x = self.call(i, layer, x, input_ids)
        return x


class ScaledBlock(DepthBlock):
    """Takes its number as an argument, and returns a tuple."""

    def forward(self, x: Tensor, scale: Tensor, window: int, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(x, x * scale, window), None, mask


class Scaled(ByDepth):
    """Everything that belongs to a layer is an argument of its call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledBlock(i) for i in range(4))
        del self.value_embeds, self.x0_lambdas

    def walk(self, x: Tensor, input_ids: Tensor) -> Tensor:
        mask = input_ids > 3
        for i, layer in enumerate(self.layers):
            x, _, mask = layer(x, self.resid_lambdas[i], window=self.windows[i], mask=mask)
        return x * mask[..., None]


class PlainScaled(Scaled):
    skip: Collection[int] = ()

    def walk(self, x: Tensor, input_ids: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i in self.skip:
                continue
            x = layer(x, self.resid_lambdas[i], window=self.windows[i])[0]
        return x * (input_ids > 3)[..., None]


def kind_of(model: type[nn.Module], batch: Callable[..., Any] = tokens, **fields: Any) -> Kind:
    def make_model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return model().train()

    return Kind(model.__name__, make_model, batch, **fields)


def assert_equal_with_skips(
    model: type[nn.Module], plain: type[nn.Module], config: RelayConfig = CONFIG, skips: Any = SKIPS, **options: Any
) -> None:
    """Train by relay with `skip`, and the plain model with the same numbers left out of its loop."""
    kind, by_hand = kind_of(model), kind_of(plain).make_model()
    relayed, in_core = kind.make_model(), InCore(kind, by_hand, adamw(by_hand), config)
    with Relay(relayed, adamw(relayed), EmulatedDevice(), config=config, **options) as relay:
        for step, skip in enumerate(skips):
            by_hand.skip = skip
            expected = in_core.step(kind.make_batch(7, step))
            assert relay.step(kind.make_batch(7, step), skip=skip).loss == expected, f"loss of step {step}"
            assert_state(relayed, copy_state(by_hand))
        for one, other in zip(relayed.parameters(), by_hand.parameters(), strict=True):
            ours, theirs = relay.optimizer.state.get(one, {}), in_core.optimizer.state.get(other, {})
            assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
        by_hand.skip = ()
        assert relay.verify(kind.make_batch(7, 99)).equal


@pytest.mark.parametrize(
    "settings",
    [{}, {"stash": "host"}, {"ahead": 0, "update": "deferred", "max_grad_norm": 0.5}, {"schedule": "depth_first"}],
)
def test_layers_keep_what_is_read_by_their_position(settings: dict[str, Any]) -> None:
    assert_equal_with_skips(ByDepth, PlainByDepth, RelayConfig(micro_batches=3, **settings))


def test_a_number_that_is_an_argument_stays_with_its_layer() -> None:
    assert_equal_with_skips(Scaled, PlainScaled)


def test_layers_that_never_run_have_neither_gradient_nor_state() -> None:
    kind = BY_NAME["by_depth"]
    model = kind.make_model()
    before = copy_state(model)
    with Relay(model, adamw(model), EmulatedDevice()) as relay:
        for step in range(2):
            relay.step(kind.make_batch(4, step), skip=[1, 3])
        for i, layer in enumerate(model.layers):
            for name, param in layer.named_parameters():
                ran = i not in (1, 3)
                assert (param in relay.optimizer.state) is ran and not has_gradient(param)
                assert torch.equal(param, before[f"layers.{i}.{name}"]) is not ran


def test_layer_drop_leaves_all_numbers_in_place() -> None:
    kind, by_hand, config = BY_NAME["by_depth"], PlainByDepth, RelayConfig(micro_batches=2)
    model, plain = kind.make_model(), kind_of(by_hand).make_model()
    in_core, schedule = InCore(kind, plain, adamw(plain), config), LayerDrop(0.5)
    with Relay(model, adamw(model), EmulatedDevice(), config=config) as relay:
        for step in range(4):
            plain.skip = [int(key[1:]) for key in schedule.skip(relay)]
            assert schedule.step(relay, kind.make_batch(6, step)).loss == in_core.step(kind.make_batch(6, step))
        assert_state(model, copy_state(plain))


def test_all_layers_of_an_ordinary_model_can_sit_out() -> None:
    """Growth from no layer: the later layers keep the values with which they were made."""
    kind, config = BY_NAME["gpt2"], RelayConfig(micro_batches=2)
    model, plain = kind.make_model(), kind.make_model()
    in_core = InCore(kind, plain, adamw(plain), config)
    layers, plain.transformer.h = plain.transformer.h, nn.ModuleList()
    with Relay(model, adamw(model), EmulatedDevice(), config=config) as relay:
        for step in range(3):
            assert relay.step(kind.make_batch(4, step), skip=range(4)).loss == in_core.step(kind.make_batch(4, step))
        plain.transformer.h = layers
        assert_state(model, copy_state(plain))
        assert relay.step(kind.make_batch(4, 3)).loss == in_core.step(kind.make_batch(4, 3))
        assert_state(model, copy_state(plain))


def test_the_model_is_the_same_after_a_step_that_fails() -> None:
    kind = BY_NAME["by_depth"]
    model = kind.make_model()
    with Relay(model, adamw(model), EmulatedDevice()) as relay:
        layers, held, before = list(model.layers), dict(vars(model)), copy_state(model)
        with pytest.raises(IndexError):
            relay.step({name: torch.full((4, 12), 100) for name in ("input_ids", "labels")}, skip=[1])
        assert list(model.layers) == layers and vars(model) == held and type(model.windows) is list
        assert_state(model, before)
        assert relay.verify(kind.make_batch(4)).equal


def test_evidence_is_taken_once_and_leaves_no_trace() -> None:
    kind = BY_NAME["by_depth"]
    model = kind.make_model()
    runs: list[int] = []
    model.register_forward_pre_hook(lambda *_: runs.append(1))
    with Relay(model, adamw(model), EmulatedDevice()) as relay:
        torch.manual_seed(3)
        random = torch.get_rng_state()
        relay.step(kind.make_batch(4), skip=[1])
        assert torch.equal(torch.get_rng_state(), random)
        runs.clear()
        relay.step(kind.make_batch(4), skip=[2])
        assert len(runs) == 1, "one micro-batch, and nothing else"
        assert not any(module._forward_pre_hooks for module in model.value_embeds.modules())


# -- models that have nothing by depth ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "chain",
        "residual_outside",
        "transposed",
        "reversible",
        "coupling",
        "lstm_stack",
        "gpt2",
        "llama",
        "gemma3",
        "mixture",
    ],
)
def test_other_models_train_as_without_the_layers_in_their_lists(name: str) -> None:
    kind, config = BY_NAME[name], RelayConfig(micro_batches=2, seed=0)
    skip = [0, 1] if name == "reversible" else [1]
    model, plain = kind.make_model(), kind.make_model()
    in_core = InCore(kind, plain, adamw(plain), config)
    at = "h" if name == "gpt2" else "layers"
    holder = next(module for module in plain.modules() if at in module._modules)
    whole = getattr(holder, at)
    with Relay(model, adamw(model), EmulatedDevice(), loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:
        setattr(holder, at, nn.ModuleList(layer for i, layer in enumerate(whole) if i not in skip))
        if hasattr(plain, "config"):
            plain.config.num_hidden_layers -= 1  # Llama runs as many layers as its configuration has
        if name == "gemma3":
            del plain.config.layer_types[1]  # the kinds of layers, in order
        for step in range(2):
            batch = kind.make_batch(4, step)
            assert relay.step(batch, skip=skip).loss == in_core.step(batch)
        setattr(holder, at, whole)
        assert_state(model, copy_state(plain))


class PassedOn:
    """Mixed into the class of a layer, whose entry among the hidden states transformers then collects."""

    def forward(self, hidden_states: Any, *_: Any, **__: Any) -> Any:
        return hidden_states


def collecting(key: str) -> Callable[[nn.Module, Any], torch.Tensor]:
    """Return an objective that trains the hidden states, or the attention maps, with the loss."""

    def objective(model: nn.Module, part: Any) -> torch.Tensor:
        out = model(**part, use_cache=False, **{f"output_{key}": True})
        return out.loss + sum(i * each.square().mean() for i, each in enumerate(getattr(out, key), 1))

    return objective


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
@pytest.mark.parametrize("first", [[1], []], ids=["skipped first", "whole first"])
def test_hidden_states_have_an_entry_for_every_layer(name: str, first: list[int]) -> None:
    """As of the plain model with layers that return their input; also where the first forward that collects has skips."""
    kind, config, objective = BY_NAME[name], RelayConfig(micro_batches=2, seed=0), collecting("hidden_states")
    model, plain = kind.make_model(), kind.make_model()
    in_core = InCore(kind, plain, adamw(plain), config, objective=objective)
    at = "h" if name == "gpt2" else "layer" if name == "bert" else "layers"
    whole = next(module for module in plain.modules() if at in module._modules)._modules[at]
    assert isinstance(whole, nn.ModuleList)
    with Relay(model, adamw(model), EmulatedDevice(), objective=objective, config=config) as relay:
        for step, skip in enumerate([first, [0, 1], [], [len(whole) - 1]]):
            layers = [*whole]
            for i in skip:
                whole[i] = copy.copy(layers[i])
                whole[i].__class__ = type("PassedOn", (PassedOn, type(layers[i])), {})
                whole[i].__dict__ |= {"_parameters": {}, "_modules": {}, "_buffers": {}}
            for module in plain.modules():  # else transformers would not see layers that were put in
                vars(module).pop("_output_capturing_hooks_installed", None)
                module._forward_hooks.clear()
            batch = {"input_ids": (drawn := kind.make_batch(4, step)["input_ids"]), "labels": drawn}
            expected = in_core.step(batch)
            for i in skip:
                whole[i] = layers[i]
            assert relay.step(batch, skip=skip).loss == expected
            assert_state(model, copy_state(plain))
        assert relay.verify(batch).equal


def test_layers_that_edits_put_in_have_entries_among_the_hidden_states() -> None:
    counts = list[int]()

    def objective(model: nn.Module, part: Any) -> torch.Tensor:
        out = model(**part, use_cache=False, output_hidden_states=True)
        counts.append(len(out.hidden_states) - 1)
        return out.loss

    kind = BY_NAME["gpt2"]
    model = kind.make_model()
    with Relay(
        model, adamw(model), EmulatedDevice(), objective=objective, config=RelayConfig(micro_batches=2)
    ) as relay:
        fresh = type(relay.stack[0].module)(model.config, layer_idx=0)
        for edit in (None, Insert(1), Replace(0, fresh), Duplicate(0), Drop(0)):
            if edit is not None:
                relay.apply(edit)
            relay.step(kind.make_batch(4))
            counts.clear()
            relay.evaluate(kind.make_batch(4))
            assert {*counts} == {len(relay.stack)}, edit
        relay.undo()
        counts.clear()
        relay.evaluate(kind.make_batch(4), skip=[1])
        assert {*counts} == {len(relay.stack)}


def test_hooks_of_the_user_keep_their_order_behind_those_that_collect() -> None:
    """A hook that steers a layer does not change the hidden state that was collected before it."""
    kind, config, objective = BY_NAME["gpt2"], RelayConfig(micro_batches=2, seed=0), collecting("hidden_states")
    model, plain = kind.make_model(), kind.make_model()
    for each in (model, plain):
        with torch.no_grad():
            each.eval()(**kind.make_batch(4), output_hidden_states=True)
        each.train().transformer.h[1].register_forward_hook(lambda *call: 2 * call[2])
    in_core = InCore(kind, plain, adamw(plain), config, objective=objective)
    with Relay(model, adamw(model), EmulatedDevice(), objective=objective, config=config) as relay:
        for step in range(2):
            relay.evaluate(kind.make_batch(4), skip=[3])
            assert relay.step(kind.make_batch(4, step)).loss == in_core.step(kind.make_batch(4, step))
            assert_state(model, copy_state(plain))


def test_a_routers_loss_is_that_of_the_layers_that_run() -> None:
    kind = BY_NAME["mixtral"]
    model, plain = kind.make_model(), kind.make_model()
    config = RelayConfig(micro_batches=1, seed=0)
    batch = {**kind.make_batch(4), "output_router_logits": True}
    in_core = InCore(kind, plain, adamw(plain), config)
    layers = plain.model.layers
    plain.model.layers = nn.ModuleList([layers[0], *layers[2:]])
    with Relay(model, adamw(model), EmulatedDevice(), loss_over="micro-batch", config=config) as relay:
        assert relay.step(batch, skip=[1]).loss == in_core.step(batch)
        plain.model.layers = layers
        assert_state(model, copy_state(plain))


def test_attention_maps_without_those_of_a_skipped_layer_are_refused_and_the_remedies_work() -> None:
    kind, config = BY_NAME["gpt2"], RelayConfig(micro_batches=2)
    model = kind.make_model()
    model.set_attn_implementation("eager")
    with Relay(model, adamw(model), EmulatedDevice(), objective=collecting("attentions"), config=config) as relay:
        relay.step(kind.make_batch(4))
        before = copy_state(model)
        with pytest.raises(RuntimeError, match="has no attentions.*run all layers.*leave_out"):
            relay.step(kind.make_batch(4), skip=[1])
        assert_state(model, before)
        assert relay.step(kind.make_batch(4)).loss > 0 and relay.verify(kind.make_batch(4)).equal
    with Relay(model, adamw(model), EmulatedDevice(), config=config) as relay:
        inside = relay.look(kind.make_batch(4), attention=True, leave_out=[1])
        assert "L001" not in inside.keys and all(each.attention for each in inside.passings)
        assert relay.step(kind.make_batch(4), skip=[1]).loss > 0


class Counting(DepthBlock):
    """Returns the number of rows and a mask, which may be None."""

    def forward(self, x: Tensor, rows: int, mask: Tensor | None) -> Any:  # type: ignore[override]
        x = super().forward(x, None, 3) * (rows / len(x))
        return x if mask is None else x * mask, len(x), mask


class Counts(ByDepth):
    """Hands on what its layers return beside the hidden state."""

    masked, skip = False, ()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting(i) for i in range(4))

    def walk(self, x: Tensor, input_ids: Tensor) -> Tensor:
        rows, mask = len(x), (input_ids > 3)[..., None] if self.masked else None
        for i, layer in enumerate(self.layers):
            if i not in self.skip or type(self) is Counts:
                x, rows, mask = layer(x, rows, mask)
        return x


class PlainCounts(Counts):
    pass


def test_numbers_that_a_layer_returns_are_not_those_of_another_batch() -> None:
    kind, by_hand = kind_of(Counts), kind_of(PlainCounts).make_model()
    model, in_core = kind.make_model(), InCore(kind, by_hand, adamw(by_hand), RelayConfig())
    with Relay(model, adamw(model), EmulatedDevice()) as relay:
        by_hand.skip = (1,)
        assert relay.step(kind.make_batch(7), skip=[1]).loss == in_core.step(kind.make_batch(7))


class Masked(PlainByDepth):
    """A mask that not every batch has, and that layers return."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MaskedBlock(i) for i in range(4))

    def forward(self, input_ids: Tensor, labels: Tensor, mask: Tensor | None = None) -> Any:
        self.mask = mask
        return super().forward(input_ids, labels)

    def walk(self, x: Tensor, input_ids: Tensor) -> Tensor:
        mask = self.mask
        for i, layer in enumerate(self.layers):
            if i not in self.skip:
                x, mask = layer(x, mask)
        return x


class MaskedBlock(DepthBlock):
    def forward(self, x: Tensor, mask: Tensor | None) -> Any:  # type: ignore[override]
        x = super().forward(x, None, 3)
        return (x if mask is None else x * mask[..., None]), mask


def test_an_argument_that_was_none_is_refused_and_the_remedy_works() -> None:
    kind = kind_of(Masked)
    without, ones = (
        kind.make_batch(4),
        {**kind.make_batch(4), "mask": torch.ones(4, kind.make_batch(4)["labels"].shape[1])},
    )
    with Relay(model := kind.make_model(), adamw(model), EmulatedDevice()) as relay:
        relay.step(without, skip=[1])
        with pytest.raises(RuntimeError, match="gives it argument 1 now, which was None .* in every batch"):
            relay.step(ones, skip=[1])
        assert relay.steps == 1
    by_hand = kind.make_model()
    in_core, by_hand.skip = InCore(kind, by_hand, adamw(by_hand), RelayConfig()), (1,)
    with Relay(model := kind.make_model(), adamw(model), EmulatedDevice()) as relay:
        for mask in (ones["mask"], (ones["mask"].cumsum(1) < 9).float()):
            batch = {**without, "mask": mask}
            assert relay.step(batch, skip=[1]).loss == in_core.step(batch)


# -- refusals ----------------------------------------------------------------------------------------------------------


class ScaledOutside(Chain):
    """A number per layer, multiplied by what the layer returns: without a layer nothing is added."""

    def __init__(self) -> None:
        super().__init__([Mlp() for _ in range(4)])
        self.scales = nn.Parameter(torch.linspace(0.5, 1.0, 4))

    def walk(self, h: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            h = h + self.scales[i] * layer(h)
        return h


class ScaledMlp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * super().forward(x)


def relay_of(model: nn.Module) -> Relay:
    loss = lambda outputs, batch: F.cross_entropy(outputs, batch[-1])  # noqa: E731
    return Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), loss=loss)


def test_a_layer_whose_place_cannot_be_kept_is_refused_and_the_remedy_works() -> None:
    batch = sequences(4)
    with relay_of(ScaledOutside()) as relay:
        before = copy_state(relay.model)
        with pytest.raises(ValueError, match=r"parameter 'scales' \(entry 0 for layer 0; 1 .*own entry as a member"):
            relay.step(batch, skip=[1])
        assert relay.steps == 0
        assert_state(relay.model, before)
        relay.step(batch, skip=[1], force=True)
    with relay_of(Chain([ScaledMlp() for _ in range(4)])) as relay:
        relay.step(batch, skip=[1])
        relay.apply(Drop(0))
        assert relay.verify(batch).equal


class ReadsWeights(Chain):
    """Adds a weight of a layer in its own code."""

    def walk(self, h: Tensor) -> Tensor:
        return super().walk(h) + self.layers[1].fc2.bias


def test_a_weight_that_others_read_is_refused() -> None:
    with relay_of(ReadsWeights([ResidualMlp() for _ in range(3)])) as relay:
        with pytest.raises(RuntimeError, match=r"reads fc2 of layer layers.1, which sits this step out"):
            relay.step(sequences(4), skip=[1])
        assert relay.steps == 0 and type(relay.model.layers[1]) is ResidualMlp


class OtherArguments(Chain):
    """Calls a layer in another way once it is told to."""

    by_name = False

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(x=h) if self.by_name else layer(h)
        return h


def test_a_layer_that_is_called_otherwise_is_refused() -> None:
    with relay_of(OtherArguments([ResidualMlp() for _ in range(3)])) as relay:
        relay.step(sequences(4), skip=[1])
        relay.model.by_name = True
        with pytest.raises(RuntimeError, match="layer layers.1 sits out, and the model calls it with other arguments"):
            relay.step(sequences(4), skip=[1])
        assert relay.steps == 1


def test_a_look_leaves_layers_out_in_the_same_way() -> None:
    kind = BY_NAME["by_depth"]
    model, plain = kind.make_model(), kind_of(PlainByDepth).make_model()
    with Relay(model, adamw(model), EmulatedDevice()) as relay:
        seen = relay.look(kind.make_batch(4), lens=True, leave_out=[1])
        for one, skip in zip(seen.depths, ([1, 2, 3], [1, 3], [1]), strict=True):
            plain.skip = skip
            with torch.no_grad():
                assert one.loss == plain.eval()(**micro_batches_of(kind.make_batch(4), 1)[0]).loss.item()
