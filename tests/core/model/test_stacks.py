"""Which stacks a model has, and which layer a position, key or name means."""

import re

import pytest
import torch
import transformers as hf
from torch import nn
from zoo import BY_NAME, ResidualMlp

from l2l_core.model.layer_selection import resolve_layers
from l2l_core.model.layer_stacks import LayerResolver, find_stacks

STACKS = {
    "gpt2": {"transformer.h": 4},
    "bert": {"bert.encoder.layer": 3},
    "t5": {"encoder.block": 2, "decoder.block": 2},
    "bart": {"model.encoder.layers": 2, "model.decoder.layers": 2},
    "swin": {"swin.encoder.layers.0.blocks": 2, "swin.encoder.layers.1.blocks": 2},
    "resnet": {"resnet.encoder.stages.0.layers": 2, "resnet.encoder.stages.1.layers": 1},
    "unet": {"downs": 2, "ups": 2},
    "unlike": {},
    "inplace": {"": 4},
}


def make(model: nn.Module, names: list[str] | None = None) -> LayerResolver:
    layers = resolve_layers(model, names)
    keys = {layer: f"L{i:03d}" for i, layer in enumerate(layers.values())}
    return LayerResolver(
        find_stacks(model, list(layers.values())), keys, {layer: name for name, layer in layers.items()}
    )


@pytest.fixture
def one() -> tuple[nn.Module, LayerResolver]:
    model = hf.GPT2LMHeadModel(
        hf.GPT2Config(n_layer=6, n_embd=8, n_head=1, vocab_size=9, bos_token_id=1, eos_token_id=1)
    )
    return model, make(model)


@pytest.fixture
def two() -> tuple[nn.Module, LayerResolver]:
    model = nn.Module()
    model.encoder, model.decoder, model.bridge = nn.Module(), nn.Module(), ResidualMlp()
    for part in (model.encoder, model.decoder):
        part.block = nn.ModuleList(ResidualMlp() for _ in range(6))
    names = [f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(6)]
    return model, make(model, [*names, "bridge"])


@pytest.mark.parametrize("name", STACKS)
def test_finds_the_stacks_of_the_zoo(name: str) -> None:
    kind = BY_NAME[name]
    model = kind.make_model()
    layers = list(resolve_layers(model, kind.layers).values())
    stacks = find_stacks(model, layers)
    assert {stack.name: len(stack) for stack in stacks} == STACKS[name]
    for stack in stacks:
        assert stack.container is model.get_submodule(stack.name)
        assert all(any(layer is child for child in stack.container) for layer in stack.layers)


def test_a_sequential_holds_other_members_too() -> None:
    model = nn.Sequential(nn.Embedding(9, 32), ResidualMlp(), ResidualMlp(), nn.Linear(32, 9))
    (stack,) = find_stacks(model, [model[1], model[2]])
    assert stack.layers == (model[1], model[2]) and stack.container is model and stack.title == "Sequential"


def test_stacks_come_in_the_order_of_the_layers(two: tuple[nn.Module, LayerResolver]) -> None:
    model, _ = two
    layers = [*model.decoder.block, *model.encoder.block]
    assert [stack.name for stack in find_stacks(model, layers)] == ["decoder.block", "encoder.block"]
    assert find_stacks(model, [model.bridge]) == ()


def test_layers_by_position_key_name_and_module(one: tuple[nn.Module, LayerResolver]) -> None:
    model, find = one
    layers = model.transformer.h
    same = [3, -3, torch.tensor(3), "L003", "transformer.h.3", ("transformer.h", 3), ("transformer.h", -3), layers[3]]
    assert all(find.layer(where) is layers[3] for where in same)


def test_layers_of_several_stacks(two: tuple[nn.Module, LayerResolver]) -> None:
    model, find = two
    assert find.layer(("decoder.block", -1)) is model.decoder.block[5] is find.layer("L011")
    assert find.layer("bridge") is model.bridge is find.layer("L012")


def test_places(one: tuple[nn.Module, LayerResolver]) -> None:
    _, find = one
    indices = [find.insertion_point(where)[1] for where in (0, 5, 6, -1, -6, "L002", ("transformer.h", 6))]
    assert indices == [0, 5, 6, 5, 0, 2, 6]
    with pytest.raises(ValueError, match="position 6 is out of range: transformer.h has 6 layers, 0 to 5$"):
        find.position_of(6)
    with pytest.raises(ValueError, match=r"position 7 is out of range: .* 6 layers, 0 to 6 \(6 is after the last\)"):
        find.insertion_point(7)


def test_spans(two: tuple[nn.Module, LayerResolver]) -> None:
    model, find = two
    decoder = find_stacks(model, list(model.decoder.block))[0]
    assert find.span("L007") == (decoder, range(1, 2))
    assert find.span("L007", "L009") == (decoder, range(1, 4))
    assert find.span(("L007", "L009")) == (decoder, range(1, 4))
    assert find.span(("decoder.block", 1), ("decoder.block", 3)) == (decoder, range(1, 4))
    assert find.span(("decoder.block", slice(1, 4))) == (decoder, range(1, 4))
    assert find.span(("decoder.block", range(1, 4))) == (decoder, range(1, 4))
    assert find.span(("decoder.block", slice(None, -2))) == (decoder, range(0, 4))


def test_spans_with_one_stack(one: tuple[nn.Module, LayerResolver]) -> None:
    _, find = one
    assert find.span(2)[1] == range(2, 3)
    assert find.span(2, -1)[1] == range(2, 6)
    assert find.span(slice(0, 3))[1] == range(0, 3)


WRONG_ONE = {
    "position 12 is out of range: transformer.h has 6 layers, 0 to 5": lambda find: find.layer(12),
    "position -7 is out of range: transformer.h has 6 layers, 0 to 5": lambda find: find.layer(-7),
    "no layer 'L099'; there are L000 to L005": lambda find: find.layer("L099"),
    "no layer 'transformer.h.6'; there are transformer.h.0 to transformer.h.5": lambda find: find.layer("transformer.h.6"),
    "'transformer.h' is a stack of 6 layers, not a layer; pass ('transformer.h', 0)": lambda find: find.layer("transformer.h"),
    "no stack 'h'; there are transformer.h (6 layers)": lambda find: find.layer(("h", 0)),
    "A copy of a layer is another module": lambda find: find.layer(ResidualMlp()),
    "empty: position 1 is before 4": lambda find: find.span(4, 1),
    "the span 3 to 3 of transformer.h is empty; it has 6 layers": lambda find: find.span(slice(3, 3)),
    "position 9 is out of range": lambda find: find.span(slice(0, 9)),
    "step 2 does not work: a span has no gaps": lambda find: find.span(slice(0, 4, 2)),
    "not both": lambda find: find.span(slice(0, 4), 5),
}  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize("message", WRONG_ONE)
def test_what_does_not_exist(one: tuple[nn.Module, LayerResolver], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        WRONG_ONE[message](one[1])


@pytest.mark.all_cases
@pytest.mark.parametrize("where", [1.5, True, None, ("transformer.h", "0"), ("transformer.h", 0, 1), (0, 1)], ids=repr)
def test_what_is_no_name_at_all(one: tuple[nn.Module, LayerResolver], where: object) -> None:
    with pytest.raises(TypeError, match="names no layer"):
        one[1].layer(where)


WRONG_TWO = {
    "3 is ambiguous: there are stacks encoder.block (6 layers) and decoder.block (6 layers); "
    "pass ('encoder.block', 3) or a key": lambda find: find.layer(3),
    "no layer 'L099'; there are L000 to L012": lambda find: find.layer("L099"),
    "a span lies in one stack": lambda find: find.span("L000", "L007"),
    "layer L012 (bridge) is an attribute of a module": lambda find: find.position_of("bridge"),
}


@pytest.mark.all_cases
@pytest.mark.parametrize("message", WRONG_TWO)
def test_what_could_mean_several(two: tuple[nn.Module, LayerResolver], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        WRONG_TWO[message](two[1])


def test_a_model_without_stacks() -> None:
    kind = BY_NAME["unlike"]
    find = make(kind.make_model(), kind.layers)
    with pytest.raises(ValueError, match="position 0 does not name a layer.*there are L000 to L003"):
        find.layer(0)
    assert isinstance(find.layer("L001"), ResidualMlp)
