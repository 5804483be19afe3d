"""Other tensors in the memory of a weight, which a relay moves, are refused; with the remedy training equals plain training."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import assert_refused, assert_trains, chain_of
from torch import Tensor, nn
from zoo import WIDTH, Chain, Kind, cross_entropy, sequences

from l2l_core import Insert, Relay, RelayConfig

schedules = pytest.mark.parametrize("schedule", ["breadth_first", "depth_first"])


class Layer(nn.Linear):
    """Adds the first weight, which it reads by `first_weight`."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.set_up()

    def set_up(self) -> None: ...

    def first_weight(self) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x)) + self.first_weight()


class MadeAtStart(Layer):
    def set_up(self) -> None:
        self.values = self.weight.data.view(-1)

    def first_weight(self) -> Tensor:
        return self.values[0]


class MadeInForward(Layer):
    values: Tensor | None = None

    def first_weight(self) -> Tensor:
        if self.values is None:
            self.values = self.weight.data.view(-1)
        return self.values[0]


class MadeInEveryForward(Layer):
    def first_weight(self) -> Tensor:
        self.values = self.weight.detach().view(-1)
        return self.values[0]


class InContainer(Layer):
    def set_up(self) -> None:
        self.values: dict[str, Any] = {"weight": []}
        self.values["again"] = self.values

    def first_weight(self) -> Tensor:
        if not self.values["weight"]:
            self.values["weight"].append(self.weight.data)
        return self.values["weight"][0][0, 0]


class Read(Layer):
    """The first remedy."""

    def first_weight(self) -> Tensor:
        values = self.weight.detach().view(-1)
        return values[0]


class Copied(Layer):
    """The second remedy: a value that stays as it was."""

    def set_up(self) -> None:
        self.values = self.weight.detach().clone()

    def first_weight(self) -> Tensor:
        return self.values[0, 0]


class InShell(Chain):
    """The layer of the chain is in its shell, and others are relayed."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__([nn.Linear(WIDTH, WIDTH) for _ in layers])
        self.beside = layers[0]

    def walk(self, h: Tensor) -> Tensor:
        return super().walk(self.beside(h))


@schedules
@pytest.mark.parametrize("shell", [Chain, InShell])
@pytest.mark.parametrize("layer", [MadeAtStart, MadeInForward, MadeInEveryForward, InContainer])
def test_attributes_in_the_memory_of_weights_are_refused(layer: type[Layer], shell: type[Chain], schedule: str) -> None:
    name = "beside.values" if shell is InShell else "layers.0.values"
    config = RelayConfig(micro_batches=2, schedule=schedule, verify="never")
    assert_refused(chain_of(layer, shell), f"attribute {name} is a tensor in the memory of weights", config, steps=1)


@pytest.mark.parametrize("shell", [Chain, InShell])
@pytest.mark.parametrize("layer", [Read, Copied])
def test_the_remedies_train(layer: type[Layer], shell: type[Chain]) -> None:
    assert_trains(chain_of(layer, shell))


class SpectralNorm(nn.Module):
    """PyTorch's older one starts with `weight` in the memory of the parameter, and sets it in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def test_an_attribute_that_is_set_to_other_memory_before_it_is_read_trains() -> None:
    assert_trains(chain_of(SpectralNorm))


def frozen_base() -> nn.Module:
    layer = MadeAtStart()
    layer.weight.requires_grad_(False)
    return layer


def test_an_attribute_in_the_old_memory_of_a_frozen_weight_trains() -> None:
    assert_trains(chain_of(frozen_base))


def test_a_new_layer_in_the_old_memory_of_its_weight_is_refused() -> None:
    """Its trial before the edit has moved the weight once."""
    with Relay(chain_of(Read).make_model(), loss_over="micro-batch", loss=cross_entropy) as relay:
        relay.step(sequences(4, 0))
        relay.apply(Insert(1, module=MadeAtStart()))
        with pytest.raises(ValueError, match="attribute layers.1.values is a tensor in the memory of weights"):
            relay.step(sequences(4, 1))


def test_an_attribute_made_between_steps_goes_with_the_relay_and_not_beyond_it() -> None:
    """It is in the memory of the master, which is left when the relay is closed."""
    model: Any = chain_of(Read).make_model()
    options: dict[str, Any] = {"loss_over": "micro-batch", "loss": cross_entropy}
    with Relay(model, **options) as relay:
        relay.step(sequences(4, 0))
        model.layers[0].values = model.layers[0].weight.data
        relay.step(sequences(4, 1))
        assert torch.equal(model.layers[0].values, model.layers[0].weight)
    with Relay(model, **options) as again, pytest.raises(ValueError, match="attribute layers.0.values"):
        again.step(sequences(4, 2))


def test_a_weight_that_is_thawed_is_watched_from_then_on() -> None:
    model = chain_of(frozen_base).make_model()
    with Relay(model, loss_over="micro-batch", loss=cross_entropy) as relay:
        relay.step(sequences(4, 0))
        for param in model.parameters():
            param.requires_grad_(True)
        with pytest.raises(ValueError, match="attribute layers.0.values"):
            relay.step(sequences(4, 1))


def test_a_state_dict_taken_before_is_warned_of_and_a_copy_is_not() -> None:
    model = chain_of(Read).make_model()
    state = copy.deepcopy(model.state_dict())
    Relay(model).close()
    state = model.state_dict()
    with pytest.warns(UserWarning, match=r"outside of the model is in the memory of parameter .*copy.deepcopy"):
        relay = Relay(model)
    relay.close()
    del state  # as the warning says
    Relay(model).close()
    model.load_state_dict(state_of := copy.deepcopy(model.state_dict()), assign=True)
    with pytest.warns(UserWarning, match="outside of the model"):
        Relay(model).close()
    del state_of
    out = model(*sequences(2, 0)[:-1])  # its graph has views of weights
    Relay(model).close()
    out.sum().backward()


# -- tensors of the model over the same values -------------------------------------------------------------------------


class Two(nn.Module):
    """Two matrices in a row, put together by `join`."""

    def join(self) -> None: ...

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.join()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.b(torch.tanh(self.a(x))))


def two(join: Callable[[Any], Any]) -> Kind:
    return chain_of(type("Two", (Two,), {"join": join}))


def tied_by_data(layer: Two) -> None:
    layer.b.weight.data = layer.a.weight.data


def overlapping(layer: Two) -> None:
    values = torch.randn(WIDTH + 1, WIDTH)
    layer.a.weight.data, layer.b.weight.data = values[1:], values[:-1]


def transposed(layer: Two) -> None:
    layer.b.weight.data = layer.a.weight.data.t()


def buffer_of_weight(layer: Two) -> None:
    layer.register_buffer("mean", layer.a.weight.detach()[0])


@pytest.mark.parametrize(
    ("join", "match"),
    [
        (tied_by_data, "parameter layers.0.a.weight and parameter layers.0.b.weight .* make them one parameter"),
        (overlapping, "parameter layers.0..*.weight and parameter layers.0"),
        (transposed, "weight and parameter"),
        (buffer_of_weight, "buffer layers.0.mean and parameter layers.0.a.weight .* Read the parameter itself"),
    ],
)
def test_tensors_over_the_same_values_are_refused(join: Callable[[Any], Any], match: str) -> None:
    model: Any = two(join).make_model()
    data = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(ValueError, match=match):
        Relay(model)
    assert data == [param.data_ptr() for param in model.parameters()]
    with (
        Relay(chain_of(Two).make_model(), loss_over="micro-batch") as relay,
        pytest.raises(ValueError, match="same values"),
    ):
        relay.apply(Insert(1, model.layers[0]))


def tied(layer: Two) -> None:
    layer.b.weight = layer.a.weight


def copied(layer: Two) -> None:
    layer.b.weight.data = layer.a.weight.data.clone()


def side_by_side(layer: Two) -> None:
    values = torch.randn(2 * WIDTH, WIDTH)
    layer.a.weight.data, layer.b.weight.data = values[:WIDTH], values[WIDTH:]


def interleaved(layer: Two) -> None:
    values = torch.randn(WIDTH, 2 * WIDTH)
    layer.a.weight.data, layer.b.weight.data = values[:, :WIDTH], values[:, WIDTH:]


def frozen(layer: Two) -> None:
    layer.b.weight.data = layer.a.weight.data
    layer.requires_grad_(False)


@pytest.mark.parametrize("join", [tied, copied, side_by_side, interleaved, frozen])
def test_tensors_that_are_one_or_apart_train(join: Callable[[Any], Any]) -> None:
    assert_trains(two(join))
