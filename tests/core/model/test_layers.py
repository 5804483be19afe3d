"""What counts as a layer: a table of models and the exact names found in them, and what users get wrong."""

from collections.abc import Callable

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization
from zoo import BY_NAME, BatchNormMlp, Expert, MixtureBlock, ResidualMlp

from l2l_core import Relay
from l2l_core.model.layer_selection import resolve_layers
from l2l_core.model.layers import find_layers

WIDTH = 32


def under(path: str, *slots: int | str) -> list[str]:
    """under("h", 0, 1) == ["h.0", "h.1"]"""
    return [f"{path}.{slot}" for slot in slots]


class Parts(nn.Module):
    """A module with the given children. It is never run: only its tree counts."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self) -> None:
        raise AssertionError("find_layers must not run anything")


class OtherBlock(ResidualMlp):
    pass


class Head(Parts):
    """One attention head: three projections to a fraction of the width."""

    def __init__(self) -> None:
        super().__init__(**{name: nn.Linear(WIDTH, WIDTH // 4) for name in ("query", "key", "value")})


class BlockOfHeads(Parts):
    def __init__(self) -> None:
        attention = Parts(heads=nn.ModuleList(Head() for _ in range(4)), out=nn.Linear(WIDTH, WIDTH))
        super().__init__(attention=attention, mlp=mlp())


class HiddenExperts(Parts):
    """A mixture that calls its experts something else: only the router gives it away."""

    def __init__(self) -> None:
        super().__init__(gate=nn.Linear(WIDTH, 4), branches=nn.ModuleList(Expert() for _ in range(4)))


class NestedMixture(Parts):
    def __init__(self) -> None:
        super().__init__(attention=nn.Linear(WIDTH, WIDTH), mixture=HiddenExperts())


class ConvNorm(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


class LowRank(Parts):
    """A parametrization with weights of its own."""

    def __init__(self) -> None:
        super().__init__(down=nn.Linear(WIDTH, WIDTH), up=nn.Linear(WIDTH, WIDTH))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.up.weight @ self.down.weight


class Stage(Parts):
    def __init__(self, depth: int) -> None:
        super().__init__(shrink=nn.Linear(WIDTH, WIDTH), blocks=nn.ModuleList(blocks(depth)))


class RunningDict(nn.ModuleDict):
    def forward(self) -> None:
        raise AssertionError("find_layers must not run anything")


class Tree(Parts):
    """Blocks at the leaves, and what joins two branches."""

    def __init__(self, levels: int) -> None:
        branches = [mlp_block() if levels == 1 else Tree(levels - 1) for _ in range(2)]
        super().__init__(tree1=branches[0], tree2=branches[1], root=nn.Linear(WIDTH, WIDTH))


def mlp_block() -> nn.Module:
    return Parts(up=nn.Linear(WIDTH, WIDTH), down=nn.Linear(WIDTH, WIDTH))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def low_rank() -> nn.Module:
    return register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", LowRank())


def blocks(count: int, block: Callable[[], nn.Module] = ResidualMlp) -> list[nn.Module]:
    return [block() for _ in range(count)]


def stack(count: int = 3, block: Callable[[], nn.Module] = ResidualMlp) -> nn.ModuleList:
    return nn.ModuleList(blocks(count, block))


# --- the table -----------------------------------------------------------------------------------------------------

FROM_ZOO: dict[str, list[str]] = {
    "chain": under("layers", 0, 1, 2, 3),
    "norm_outside": under("layers", 0, 1, 2, 3),  # the norms own vectors only
    "lstm_stack": under("layers", 0, 1, 2),
    "inplace": ["0", "2", "4", "6"],  # the model is a Sequential; its one Linear is the head
    "mixture": under("layers", 0, 1, 2),
    "unet": [*under("downs", 0, 1), *under("ups", 0, 1)],
    "spectral_norm_old": under("layers", 0, 1, 2),
    "spectral_norm": under("layers", 0, 1, 2),
    "gpt2": under("transformer.h", 0, 1, 2, 3),
    "bert": under("bert.encoder.layer", 0, 1, 2),
    "roberta": under("roberta.encoder.layer", 0, 1, 2),
    "llama": under("model.layers", 0, 1, 2),
    "qwen3": under("model.layers", 0, 1, 2),
    "gemma3": under("model.layers", 0, 1, 2, 3),
    "modernbert": under("model.layers", 0, 1, 2, 3),
    "gpt_neox": under("gpt_neox.layers", 0, 1, 2),
    "opt": under("model.decoder.layers", 0, 1, 2),
    "vit": under("vit.layers", 0, 1, 2),
    "swin": under("swin.encoder.layers", "0.blocks.0", "0.blocks.1", "1.blocks.0", "1.blocks.1"),
    "convnext": under("convnext.encoder.stages", "0.layers.0", "0.layers.1", "1.layers.0", "1.layers.1"),
    "resnet": under("resnet.encoder.stages", "0.layers.0", "0.layers.1", "1.layers.0"),  # stages of 2 and 1
    "t5": [*under("encoder.block", 0, 1), *under("decoder.block", 0, 1)],  # not block.0.layer.0
    "bart": [*under("model.encoder.layers", 0, 1), *under("model.decoder.layers", 0, 1)],
    "whisper": [*under("model.encoder.layers", 0, 1), *under("model.decoder.layers", 0, 1)],
    "mixtral": under("model.layers", 0, 1, 2),
    "qwen3_moe": under("model.layers", 0, 1, 2),
    "albert": ["albert.encoder.albert_layer_groups.0.albert_layers.0"],
}

BY_HAND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    # rule 1: containers and their members
    "sequential": (lambda: nn.Sequential(nn.Embedding(9, WIDTH), *blocks(3), nn.Linear(WIDTH, 9)), ["1", "2", "3"]),
    "pairs of list": (
        lambda: Parts(layers=nn.ModuleList(nn.ModuleList([BatchNormMlp(), ResidualMlp()]) for _ in range(2))),
        under("layers", "0.0", "0.1", "1.0", "1.1"),
    ),
    "pairs of dict": (
        lambda: Parts(layers=nn.ModuleList(nn.ModuleDict({"a": BatchNormMlp(), "b": ResidualMlp()}) for _ in range(2))),
        under("layers", "0.a", "0.b", "1.a", "1.b"),
    ),
    "inside a ModuleDict": (lambda: Parts(parts=nn.ModuleDict({"h": stack()})), under("parts.h", 0, 1, 2)),
    "dict of blocks": (
        lambda: Parts(blocks=nn.ModuleDict({name: ResidualMlp() for name in "abc"}), head=mlp()),
        under("blocks", "a", "b", "c"),
    ),
    "dict of heads": (
        lambda: Parts(layers=stack(2), heads=nn.ModuleDict({name: mlp() for name in "ab"})),
        [*under("layers", 0, 1), *under("heads", "a", "b")],
    ),
    "dict that runs": (
        lambda: Parts(layers=nn.ModuleList(RunningDict({"a": BatchNormMlp(), "b": BatchNormMlp()}) for _ in range(2))),
        under("layers", 0, 1),
    ),
    "slots without parameters": (
        lambda: nn.Sequential(ResidualMlp(), nn.Dropout(), ResidualMlp(), nn.Dropout()),
        ["0", "2"],
    ),
    # rule 2: what is repeated
    "odd one in a list": (
        lambda: Parts(layers=nn.ModuleList([*blocks(2), BatchNormMlp(), *blocks(1)])),
        under("layers", 0, 1, 2, 3),
    ),
    "odd one in a sequential": (lambda: nn.Sequential(*blocks(2), BatchNormMlp()), ["0", "1"]),
    "sub-blocks of different classes": (
        lambda: Parts(h=stack(2, lambda: Parts(layer=nn.ModuleList([BatchNormMlp(), ResidualMlp()])))),
        under("h", 0, 1),
    ),
    "stack of one": (lambda: Parts(layers=stack(1), head=mlp()), ["layers.0"]),
    "decoder of one": (
        lambda: Parts(encoder=stack(2), decoder=stack(1, OtherBlock)),
        ["encoder.0", "encoder.1", "decoder.0"],
    ),
    "definition order": (lambda: Parts(z=stack(2), a=stack(2, OtherBlock)), ["z.0", "z.1", "a.0", "a.1"]),
    # rule 3: rank
    "mlp inside blocks": (lambda: Parts(h=stack(2, lambda: Parts(mlp=mlp(), out=mlp()))), ["h.0", "h.1"]),
    "plain mlp": (mlp, ["0", "2"]),
    "head beside blocks": (lambda: Parts(layers=stack(2), head=mlp()), ["layers.0", "layers.1"]),
    "list of sequentials": (lambda: Parts(layers=stack(2, mlp)), ["layers.0", "layers.1"]),
    "wrapped operations": (lambda: nn.Sequential(ConvNorm(), ConvNorm(), nn.Conv2d(8, 8, 1)), ["0", "1"]),
    "wrapped beside bare": (
        lambda: Parts(body=nn.Sequential(ConvNorm(), ConvNorm()), tail=nn.Sequential(nn.Conv2d(8, 8, 1), *ConvNorm())),
        ["body.0", "body.1"],
    ),
    "bottleneck": (
        lambda: Parts(layers=stack(2, lambda: Parts(layer=nn.Sequential(ConvNorm(), ConvNorm(), ConvNorm())))),
        under("layers", 0, 1),
    ),
    "parametrized operations": (
        lambda: nn.Sequential(*(spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(3))),
        ["0", "1", "2"],
    ),
    "parametrizations that learn": (lambda: nn.Sequential(low_rank(), low_rank()), ["0", "1"]),
    # rule 4: stages
    "stages": (
        lambda: Parts(stages=nn.ModuleList(Stage(depth) for depth in (3, 1))),
        under("stages", "0.blocks.0", "0.blocks.1", "0.blocks.2", "1.blocks.0"),
    ),
    "stages of one block": (
        lambda: Parts(stages=nn.ModuleList(Parts(blocks=stack(1), score=nn.Linear(WIDTH, 1)) for _ in range(2))),
        under("stages", "0.blocks.0", "1.blocks.0"),
    ),
    "stage without blocks": (
        lambda: Parts(stages=nn.ModuleList([Stage(2), BatchNormMlp(), Stage(2)])),
        under("stages", "0.blocks.0", "0.blocks.1", "1", "2.blocks.0", "2.blocks.1"),
    ),
    "whole models in a list": (
        lambda: Parts(members=stack(2, lambda: Parts(body=Parts(h=stack(2)), head=nn.Linear(WIDTH, 9)))),
        under("members", "0.body.h.0", "0.body.h.1", "1.body.h.0", "1.body.h.1"),
    ),
    "attention heads": (lambda: nn.Sequential(BlockOfHeads(), BlockOfHeads()), ["0", "1"]),
    # rule 5: experts
    "experts in the layer": (lambda: Parts(layers=stack(2, MixtureBlock)), ["layers.0", "layers.1"]),
    "experts by router": (lambda: Parts(layers=stack(2, HiddenExperts)), ["layers.0", "layers.1"]),
    "experts by name": (
        lambda: Parts(layers=stack(2, lambda: Parts(experts=stack(4, Expert)))),  # routed by a hash: no router
        ["layers.0", "layers.1"],
    ),
    "experts below the layer": (lambda: Parts(layers=stack(2, NestedMixture)), ["layers.0", "layers.1"]),
    # rule 6: attributes
    "blocks as attributes": (
        lambda: Parts(stem=ConvNorm(), a=ResidualMlp(), b=BatchNormMlp(), c=ResidualMlp(), fc=nn.Linear(WIDTH, 2)),
        ["a", "b", "c"],
    ),
    "stages as attributes": (
        lambda: Parts(stem=nn.Linear(WIDTH, WIDTH), **{f"s{i}": Parts(b1=mlp_block(), b2=mlp_block()) for i in (1, 2)}),
        ["s1.b1", "s1.b2", "s2.b1", "s2.b2"],
    ),
    "tree": (
        lambda: Parts(level0=mlp_block(), level1=Tree(1), level2=Tree(2)),
        [
            "level0",
            *under("level1", "tree1", "tree2"),
            *under("level2.tree1", "tree1", "tree2"),
            *under("level2.tree2", "tree1", "tree2"),
        ],
    ),
    "attributes beside a list": (
        lambda: Parts(layers=stack(2), a=BatchNormMlp(), b=BatchNormMlp()),
        under("layers", 0, 1),
    ),
    "sequential of sequentials": (
        lambda: nn.Sequential(ConvNorm(), nn.Sequential(*blocks(2)), nn.Sequential(*blocks(2)), nn.Linear(WIDTH, 3)),
        ["1.0", "1.1", "2.0", "2.1"],
    ),
    "experts in a single layer": (lambda: Parts(layers=stack(1, NestedMixture)), ["layers.0"]),
    "as many classes as layers": (lambda: Parts(layers=stack(3), head=nn.Linear(WIDTH, 3)), under("layers", 0, 1, 2)),
}


@pytest.mark.parametrize("name", FROM_ZOO)
def test_layers_of_a_zoo_model(name: str) -> None:
    assert list(find_layers(BY_NAME[name].make_model())) == FROM_ZOO[name]


@pytest.mark.parametrize("name", BY_HAND)
def test_layers_of_a_model_by_hand(name: str) -> None:
    make_model, expected = BY_HAND[name]
    assert list(find_layers(make_model())) == expected


def test_what_was_chosen_among_attributes_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "l2l_core"):
        find_layers(Parts(layers=stack(2)))
        assert not caplog.messages
        find_layers(Parts(a=ResidualMlp(), b=ResidualMlp()))
    assert "these 2 of its modules: a, b" in caplog.text and "layers=" in caplog.text


def test_depth_one() -> None:
    config = hf.T5Config(vocab_size=9, d_model=WIDTH, d_kv=8, d_ff=WIDTH, num_layers=1, num_heads=2)
    assert list(find_layers(hf.T5Model(config))) == ["encoder.block.0", "decoder.block.0"]


def test_depth_one_beside_embeddings() -> None:
    """Two embeddings are repeated in the ModuleDict; the block in its list of one ranks above them."""

    def model_of(depth: int) -> nn.Module:
        blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(depth))
        parts = {"wte": nn.Embedding(9, 8), "wpe": nn.Embedding(4, 8), "h": blocks, "ln": nn.LayerNorm(8)}
        return nn.ModuleDict({"transformer": nn.ModuleDict(parts), "head": nn.Linear(8, 9)})

    assert list(find_layers(model_of(1))) == ["transformer.h.0"]
    assert list(find_layers(model_of(2))) == ["transformer.h.0", "transformer.h.1"]


def test_values_are_the_modules_of_the_model() -> None:
    model = BY_NAME["swin"].make_model()
    assert all(model.get_submodule(name) is layer for name, layer in find_layers(model).items())


def test_meta_model() -> None:
    with torch.device("meta"):
        assert len(find_layers(hf.BertModel(hf.BertConfig()))) == 12


def test_shared_layer_appears_once() -> None:
    shared, other = ResidualMlp(), ResidualMlp()
    assert list(find_layers(Parts(layers=nn.ModuleList([shared, other, shared, shared])))) == ["layers.0", "layers.1"]


def test_shared_stack_appears_once() -> None:
    shared = stack(2)
    assert list(find_layers(Parts(encoder=shared, decoder=shared))) == ["encoder.0", "encoder.1"]


def test_layers_do_not_overlap() -> None:
    for kind in BY_NAME.values():
        model = kind.make_model()
        assert resolve_layers(model, list(resolve_layers(model, kind.layers)))


def test_nothing_found() -> None:
    model = Parts(first=nn.Linear(2, 2), second=nn.LSTM(2, 2), act=nn.ReLU())
    with pytest.raises(ValueError, match=r"no layers in Parts: it has no .*layers=\['first', 'second'\]"):
        find_layers(model)


def test_nothing_found_in_one_module() -> None:
    with pytest.raises(ValueError, match=r"give nn.Sequential\(model\), layers=\['0'\]"):
        find_layers(nn.Linear(2, 2))
    assert list(resolve_layers(nn.Sequential(nn.Linear(2, 2)), ["0"])) == ["0"]


def test_nothing_found_without_parameters() -> None:
    with pytest.raises(ValueError, match="no layers in Sequential"):
        find_layers(nn.Sequential(nn.ReLU(), nn.ReLU()))


# --- resolve_layers ------------------------------------------------------------------------------------------------


@pytest.fixture
def model() -> nn.Module:
    return Parts(embed=nn.Linear(WIDTH, WIDTH), layers=stack(3), head=mlp())


def test_none_finds_layers(model: nn.Module) -> None:
    assert resolve_layers(model, None) == find_layers(model)


def test_modules_and_names_in_the_given_order(model: nn.Module) -> None:
    layers = resolve_layers(model, ["layers.2", model.embed, model.layers[0], "head"])
    assert list(layers) == ["layers.2", "embed", "layers.0", "head"]
    assert layers["embed"] is model.embed and layers["layers.2"] is model.layers[2]


def test_any_iterable(model: nn.Module) -> None:
    expected = ["layers.0", "layers.1", "layers.2"]
    assert list(resolve_layers(model, model.layers)) == expected
    assert list(resolve_layers(model, find_layers(model))) == expected
    assert list(resolve_layers(model, (layer for layer in model.layers))) == expected


def test_second_name_of_a_shared_module(model: nn.Module) -> None:
    model.again = model.layers[1]
    assert list(resolve_layers(model, ["again"])) == ["layers.1"]


WRONG: dict[str, tuple[Callable[[nn.Module], object], type[Exception], str]] = {
    "misspelt": (lambda m: ["layer.1"], ValueError, r"'layer\.1', but Parts has no module .* close ones: 'layers\.1'"),
    "unknown": (lambda m: ["qqq"], ValueError, "'qqq', but Parts has no module of that name; close ones: 'embed'"),
    "foreign": (lambda m: [ResidualMlp()], ValueError, r"ResidualMlp\(\.\.\.\), which is not part of the model; pass"),
    "twice": (lambda m: ["layers.1", m.layers[1]], ValueError, r"'layers\.1' twice \(now as ResidualMlp\(\.\.\.\)\)"),
    "nested": (
        lambda m: ["layers.1.fc1", "layers.1"],
        ValueError,
        r"'layers\.1\.fc1', which lies inside .*'layers\.1'",
    ),
    "the model": (lambda m: [m], ValueError, "the model itself; list modules inside it"),
    "the model by name": (lambda m: [""], ValueError, "the model itself; list modules inside it"),
    "without forward": (lambda m: ["layers"], ValueError, "'layers', a ModuleList without a forward .* its members"),
    "empty": (lambda m: [], ValueError, "names no layer; list at least one, or pass layers=None"),
    "a name alone": (lambda m: "layers.1", TypeError, r"'layers\.1' is one value; pass a sequence: layers=\['layers"),
    "a module alone": (lambda m: m.embed, TypeError, r"Linear\(\.\.\.\) is one value; pass a sequence"),
    "a number": (lambda m: [1], TypeError, "layers contains 1; pass modules or dotted names"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_layers(model: nn.Module, name: str) -> None:
    make_layers, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        resolve_layers(model, make_layers(model))


def test_layers_of_the_example_are_side_by_side_and_train() -> None:
    """The remedy that the message names can be taken as it is."""

    class Unlike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)})
            self.whole = nn.Sequential(nn.Sequential(inner["up"], nn.Tanh()), nn.LayerNorm(8), inner["down"])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.whole(x)

    with pytest.raises(ValueError, match=r"layers=\['whole.0', 'whole.1', 'whole.2'\]") as caught:
        find_layers(Unlike())
    named = eval(str(caught.value).partition("layers=")[2].partition("]")[0] + "]")
    model = Unlike()
    loss = lambda y, batch: y.square().mean()  # noqa: E731
    with Relay(model, torch.optim.SGD(model.parameters(), 0.1), layers=named, loss=loss) as relay:
        assert relay.step((torch.ones(2, 4),)).loss > 0
