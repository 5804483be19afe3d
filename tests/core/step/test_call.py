"""Layer calls: grad mode, side outputs, what hides in arguments, inputs that are changed, checkpoints.
R11 is rule 11 of the design's paused-forwards.md.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_refused, assert_refused_or_trains, assert_trains, chain_of, kind_of, stashes, with_charge
from oracle import assert_state, both, copy_state
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from zoo import Chain, Mlp, ResidualMlp

from l2l_core import RelayConfig


def test_first_forward_runs_in_grad_mode() -> None:
    """R11: an LSTM takes another path, with other bits, under no_grad."""
    modes: list[bool] = []

    class Asks(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            modes.append(torch.is_grad_enabled())
            return super().forward(x)

    kind = chain_of(Asks)
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        pair.step(kind.make_batch(4, 0))
        assert modes and all(modes)
        modes.clear()
        pair.relay.evaluate(kind.make_batch(4, 0))
        assert modes and not any(modes)


# --- R12: side outputs -----------------------------------------------------------------------------------------------


class KeepsCharge(ResidualMlp):
    """Leaves an auxiliary loss, that depends on its input and weights, on a submodule and on itself."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.fc1.charge = y.square().mean() + self.fc1.weight.square().mean()
        self.charge = y.abs().mean()
        return y


class AddsCharges(Chain):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y, torch.stack([layer.fc1.charge + layer.charge for layer in self.layers]).sum()


class AddsChargesAtOnce(AddsCharges):
    """Reads each charge right after its layer."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h, charges = self.embed(x), []
        for layer in self.layers:
            h = layer(h)
            charges.append(layer.fc1.charge + layer.charge)
        return self.head(h.mean(1)), torch.stack(charges).sum()


@pytest.mark.parametrize("shell", [AddsCharges, AddsChargesAtOnce])
@pytest.mark.parametrize("micro_batches", [1, 3])
@stashes
def test_auxiliary_loss_on_an_attribute(stash: str, micro_batches: int, shell: type[Chain]) -> None:
    """R12: the outer model adds it to the loss, after each layer or at the end; each micro-batch meets its own."""
    kind = kind_of(lambda: shell([KeepsCharge() for _ in range(3)]), loss=with_charge)
    assert_trains(kind, stash, micro_batches)


def test_tensor_from_inside_a_layer_is_refused() -> None:
    """R12: what hides in a list outside of the model is not found again in the recompute."""
    hidden: list[Tensor] = []

    class Hides(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            hidden.append((y * self.fc1.weight.mean()).mean())
            return y

    class Finds(Chain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden.clear()
            return super().forward(x), torch.stack(hidden[-3:]).sum()

    kind = kind_of(lambda: Finds([Hides() for _ in range(3)]), loss=with_charge)
    with both(kind, RelayConfig()) as pair:
        before = copy_state(pair.relay.model)
        with pytest.raises(RuntimeError, match="inside layer layers.*Return it"):
            pair.relay.step(kind.make_batch(4, 0))
        assert_state(pair.relay.model, before)


def test_side_output_that_is_a_view() -> None:
    """R12: never a silent difference."""

    class KeepsView(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.charge = (y * 2)[:, 0].T
            return y

    class AddsViews(Chain):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h, charge = self.embed(x), torch.zeros(())
            for layer in self.layers:
                h = layer(h)
                charge = charge + layer.charge.square().mean()
            return self.head(h.mean(1)), charge

    kind = kind_of(lambda: AddsViews([KeepsView() for _ in range(3)]), loss=with_charge)
    assert_refused_or_trains(kind, "view", "host", micro_batches=1)


# --- R15: what is refused --------------------------------------------------------------------------------------------


class Boxed:
    """No pytree."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Deep:
    def __init__(self, tensor: Tensor) -> None:
        self.content = {"tensors": [tensor]}

    @property
    def tensor(self) -> Tensor:
        return self.content["tensors"][0]


class TakesBox(ResidualMlp):
    def forward(self, box: Any) -> Tensor:
        return super().forward(box.tensor)


class GivesBox(ResidualMlp):
    def forward(self, x: Tensor) -> Any:
        return self.box(super().forward(x))


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("box", [Boxed, Slotted, Deep])
@stashes
def test_hidden_tensors_in_arguments_are_refused(box: type, stash: str, micro_batches: int) -> None:
    """R15: a clear error that names the layer."""

    class Boxes(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(box(h * 2))
            return h

    assert_refused(chain_of(TakesBox, Boxes), "layers.0|L000", RelayConfig(micro_batches=micro_batches, stash=stash))


@pytest.mark.parametrize("box", [Boxed, Slotted, Deep])
def test_hidden_tensors_in_outputs_are_refused(box: type) -> None:
    """R15"""

    class Unboxes(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = layer(h).tensor
            return h

    class Gives(GivesBox):
        pass

    Gives.box = box
    assert_refused(chain_of(Gives, Unboxes), "layers.[02]", RelayConfig(micro_batches=2))


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_layers_is_refused(reentrant: bool) -> None:
    class Checkpoints(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = checkpoint(layer, h, use_reentrant=reentrant)
            return h

    assert_refused(chain_of(ResidualMlp, Checkpoints), "checkpoint", RelayConfig(micro_batches=2))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_checkpoint_around_one_layer_is_refused_before_anything_is_trained(which: int, reentrant: bool) -> None:
    """Behind it others have been updated when it would run again."""

    class Checkpoints(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for index, layer in enumerate(self.layers):
                h = checkpoint(layer, h, use_reentrant=reentrant) if index == which else layer(h)
            return h

    assert_refused(chain_of(ResidualMlp, Checkpoints), "checkpoint", RelayConfig(micro_batches=2))


def test_checkpoint_inside_a_layer() -> None:
    """That is the layer's own affair; and so it is with the shell's own code."""

    class Inside(ResidualMlp):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    class Between(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                h = checkpoint(lambda y: y.tanh() * y, layer(h), use_reentrant=False)
            return h

    assert_trains(chain_of(Inside, Between))


# --- changes in place ------------------------------------------------------------------------------------------------


class AddsFirst(ResidualMlp):
    """Does not save its inputs, so that plain training allows to change them afterwards."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x + (1 if mask is None else mask))


class ChangesInput(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(h)
            h += y
        return h


class ChangesMask(Chain):
    def walk(self, h: Tensor) -> Tensor:
        mask = torch.ones(h.shape[:2] + (1,))
        for layer in self.layers:
            h = layer(h, mask)
            mask *= 0.5
        return h


class ChangesOwnInput(ResidualMlp):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


class Copies(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h * 1)
        return h


@pytest.mark.parametrize(
    ("layer", "shell"),
    [(AddsFirst, ChangesInput), (AddsFirst, ChangesMask), (ChangesOwnInput, Copies)],
    ids=["input", "mask", "by the layer"],
)
def test_layer_input_changed_in_place_is_refused(layer: type, shell: type[Chain]) -> None:
    """The recompute would start from other values. The message names the layer and the remedy; nothing has changed."""
    assert_refused(chain_of(layer, shell), r"(?=.*layer layers\.\d).*in place", RelayConfig(micro_batches=2))


@stashes
def test_layer_output_changed_in_place(stash: str) -> None:
    """An output is the shell's own, as long as no layer has taken it."""

    class ChangesOutput(Chain):
        def walk(self, h: Tensor) -> Tensor:
            for layer in self.layers:
                y = layer(h)
                y += h
                y[:, 0] *= 2
                h = F.relu_(y)
            return h

    assert_trains(chain_of(Mlp, ChangesOutput), stash)
