"""Models that are never whole in memory: made without weights, filled from files, written to files."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_shelf import CONFIG, ROWS, assert_same, buffers_of, empty, relay_on, state_of, weights_of
from oracle import InCore, adamw
from safetensors.torch import load_file, save_file
from torch import nn
from zoo import BY_NAME

from l2l_core.eps.blocks import is_placeholder


def numbered(name: str, into: torch.Tensor) -> None:
    """An initialiser that gives every parameter values of its own."""
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    into.normal_(0.0, 0.2, generator=generator)


def test_parameters_without_weights_keep_ties_and_flags_and_buffers_are_real() -> None:
    for name in ("tied_layers", "batch_norm"):
        made, plain = empty(BY_NAME[name]), BY_NAME[name].make_model()
        assert all(is_placeholder(param) for param in made.parameters())
        shapes = [[(n, p.shape, p.requires_grad) for n, p in model.named_parameters()] for model in (made, plain)]
        assert shapes[0] == shapes[1]
        assert_same(buffers_of(made), buffers_of(plain))
    assert not is_placeholder(next(nn.Linear(1, 1).parameters()))


@pytest.mark.parametrize("name", ["chain", "tied_layers", "batch_norm"])
def test_a_model_made_by_an_initialiser_trains_like_one_in_memory(name: str, folder: Path) -> None:
    kind = BY_NAME[name]
    model = kind.make_model()
    with torch.no_grad():
        for each, param in model.named_parameters():
            numbered(each, param)
    plain = InCore(kind, model, adamw(model), CONFIG)
    with relay_on(folder, kind, adamw, model=empty(kind), weights=numbered) as relay:
        assert all(is_placeholder(param) for param in relay.model.parameters())
        assert_same(weights_of(relay), state_of(model))
        for seed in range(2):
            batch = kind.make_batch(ROWS, seed)
            assert relay.step(batch).loss == plain.step(batch)
        assert_same(weights_of(relay), state_of(model))
        assert all(is_placeholder(param) for param in relay.model.parameters())
    with relay_on(folder, kind, adamw, model=empty(kind), resume=True) as relay:
        assert_same(weights_of(relay), state_of(model))


@pytest.mark.parametrize("name", ["gpt2", "batch_norm"])
def test_shards_are_written_and_read_block_by_block(name: str, folder: Path) -> None:
    kind = BY_NAME[name]
    with relay_on(folder / "a", kind) as relay:
        relay.step(kind.make_batch(ROWS, 0))
        expected = weights_of(relay)
        written = relay.shelf.save_pretrained(folder / "export")
        blocks = len({block for unit in (relay.shell, *relay.stack) for block in unit.blocks})
    index = json.loads((written / "model.safetensors.index.json").read_text())
    files = {file: load_file(written / file) for file in {*index["weight_map"].values()}}
    assert len(files) - blocks in (0, 1)  # buffers that persist have one of their own
    assert index["metadata"]["total_size"] == sum(t.nbytes for file in files.values() for t in file.values())
    assert {n: f for f, held in files.items() for n in held} == index["weight_map"]
    ordinary = kind.make_model()
    ordinary.load_state_dict({n: t for held in files.values() for n, t in held.items()}, strict=name != "gpt2")
    assert_same(state_of(ordinary), expected)
    with relay_on(folder / "b", kind, model=empty(kind), weights=written) as relay:
        assert_same({n: t for n, t in weights_of(relay).items() if not n.startswith("buffer")}, params_of(expected))


def params_of(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if not name.startswith("buffer")}


def test_a_model_of_transformers_comes_and_goes_as_usual(folder: Path) -> None:
    kind = BY_NAME["gpt2"]
    model = kind.make_model()
    expected = state_of(model)
    model.save_pretrained(folder / "theirs")
    with relay_on(folder / "shelf", kind, model=empty(kind), weights=folder / "theirs") as relay:
        assert_same(weights_of(relay), expected)
        loss = relay.evaluate(kind.make_batch(ROWS, 0))
        relay.shelf.save_pretrained(folder / "ours")
        with pytest.raises(RuntimeError, match="in memory they are NaN"):
            relay.model.save_pretrained(folder / "nothing")
    again = type(model).from_pretrained(folder / "ours", attn_implementation=model.config._attn_implementation)
    assert_same(state_of(again), expected)
    with torch.no_grad():
        assert torch.isclose(again.eval()(**kind.make_batch(ROWS, 0)).loss, torch.tensor(loss))


def missing(folder: Path) -> Path:
    held = {n: p.detach().clone() for n, p in BY_NAME["chain"].make_model().named_parameters()}
    held.popitem()
    save_file(held, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def other_shape(folder: Path) -> Path:
    held = {n: torch.zeros(2, 3, 5) for n, _ in BY_NAME["chain"].make_model().named_parameters()}
    save_file(held, folder / "weights.safetensors")
    return folder / "weights.safetensors"


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        (None, "has no values"),
        (missing, "has no weights named"),
        (other_shape, r"has shape \(2, 3, 5\), and .* in the model"),
        (lambda folder: folder / "nothing", "neither model.safetensors.index.json nor"),
        (lambda folder: lambda name, into: None, "sets no values for"),
    ],
)
def test_weights_that_are_not_there(weights: Any, said: str, folder: Path) -> None:
    kind = BY_NAME["chain"]
    with pytest.raises(ValueError, match=said):
        relay_on(folder / "shelf", kind, model=empty(kind), weights=weights and weights(folder))
    with pytest.raises(ValueError, match="no whole step to resume"):  # nothing that could be taken for a step
        relay_on(folder / "shelf", kind, model=empty(kind), resume=True)
    with relay_on(folder / "shelf", kind, model=empty(kind), weights=numbered) as relay:  # and it can be made after all
        assert relay.steps == 0


def test_a_model_on_meta_takes_a_factory(folder: Path) -> None:
    kind = BY_NAME["chain"]
    with torch.device("meta"):
        model = kind.make_model()
    factory = partial(torch.optim.AdamW, lr=1e-3)
    with relay_on(folder, kind, made=factory, model=model, weights=numbered) as relay:
        assert {name: tensor.shape for name, tensor in weights_of(relay).items()} == {
            name: param.shape for name, param in kind.make_model().named_parameters()
        }
        assert relay.step(kind.make_batch(ROWS, 0)).loss > 0


def test_buffers_without_values_are_refused(folder: Path) -> None:
    with torch.device("meta"):
        model = BY_NAME["batch_norm"].make_model()
    with pytest.raises(ValueError, match="buffer .* is on meta"):
        relay_on(folder, BY_NAME["batch_norm"], model=model, weights=numbered)
