"""Other layers in a model, and it stays an ordinary model: configuration, positions, saving, generation, undo."""

import copy
import gc
import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from patience import sampled
from torch import Tensor, nn
from zoo import (
    BY_NAME,
    VOCAB,
    WIDTH,
    Batch,
    MixtureBlock,
    NormOutside,
    ResidualMlp,
    _bert_like,
    _llama_like,
    classified_images,
    masked_tokens,
    tokens,
)

from l2l_core.model.layer_stacks import Stack, find_stacks
from l2l_core.model.layers import find_layers
from l2l_core.surgery.layer_replacement import replace_layers

Layers = tuple[nn.Module, ...]


# --- the models ----------------------------------------------------------------------------------------------------


def _gpt_neo() -> nn.Module:
    sizes = dict(vocab_size=VOCAB, hidden_size=WIDTH, num_layers=4, num_heads=2, max_position_embeddings=32)
    kinds = dict(attention_types=[[["global", "local"], 2]], window_size=4)
    return hf.GPTNeoForCausalLM(hf.GPTNeoConfig(**sizes, **kinds, bos_token_id=2, eos_token_id=2))


def _distilbert() -> nn.Module:
    sizes = dict(vocab_size=VOCAB, dim=WIDTH, n_layers=3, n_heads=2, hidden_dim=64, max_position_embeddings=32)
    return hf.DistilBertForMaskedLM(hf.DistilBertConfig(**sizes))


_SIZES = dict(hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64)


def _clip() -> nn.Module:
    text = dict(_SIZES, vocab_size=VOCAB, max_position_embeddings=32, bos_token_id=0, eos_token_id=2, pad_token_id=1)
    vision = dict(_SIZES, image_size=16, patch_size=4)
    return hf.CLIPModel(hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))


def _vision_encoder_decoder() -> nn.Module:
    vision = hf.ViTConfig(**_SIZES, image_size=16, patch_size=4)
    text = dict(vocab_size=VOCAB, n_embd=WIDTH, n_layer=3, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=2)
    joint = hf.VisionEncoderDecoderConfig.from_encoder_decoder_configs(vision, hf.GPT2Config(**text))
    return hf.VisionEncoderDecoderModel(joint)


_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH)


def _qwen3_moe() -> nn.Module:
    """Layers 0 and 2 have no experts."""
    config = _llama_like(hf.Qwen3MoeConfig, num_hidden_layers=4, mlp_only_layers=[0, 2], **_EXPERTS)
    return hf.Qwen3MoeForCausalLM(config)


def _qwen3_next() -> nn.Module:
    """Every second layer is linear attention; layer 1 has no experts."""
    linear = dict(linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=16, linear_value_head_dim=16)
    kinds = dict(layer_types=["linear_attention", "full_attention"] * 2, mlp_only_layers=[1])
    sizes = dict(num_hidden_layers=4, shared_expert_intermediate_size=WIDTH)
    return hf.Qwen3NextForCausalLM(_llama_like(hf.Qwen3NextConfig, **sizes, **kinds, **linear, **_EXPERTS))


def _t5() -> nn.Module:
    """transformers 5.23 makes no cache for a T5 whose decoder is deeper than its encoder, edited or not."""
    sizes = dict(vocab_size=VOCAB, d_model=WIDTH, d_kv=16, d_ff=64, num_layers=4, num_decoder_layers=3, num_heads=2)
    ids = dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=1)
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, relative_attention_num_buckets=8, **ids))


def _swin() -> nn.Module:
    """Every second layer of a stage shifts its windows; images are so large that those of the last stage do, too."""
    sizes = dict(image_size=64, patch_size=4, embed_dim=WIDTH, depths=[4, 4], num_heads=[2, 4], window_size=4)
    return hf.SwinForImageClassification(hf.SwinConfig(**sizes))


def _both() -> Batch:
    return {"input_ids": tokens()["input_ids"], "pixel_values": classified_images()["pixel_values"]}


def _captions() -> Batch:
    return {"decoder_input_ids": tokens()["input_ids"], "pixel_values": classified_images()["pixel_values"]}


@dataclass
class _Config:
    width: int = WIDTH
    num_layers: int = 4
    layer_kinds: list[str] = field(default_factory=lambda: ["a", "b", "a", "b"])


class _Numbered(ResidualMlp):
    def __init__(self, config: _Config, layer_number: int) -> None:
        super().__init__(config.width)
        self.layer_number = layer_number  # counts from 1
        self.config = config
        self.kind = config.layer_kinds[layer_number - 1]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * (2.0 if self.kind == "a" else 0.5))


class _Custom(nn.Module):
    """A model by hand, with a dataclass as configuration, a list of its own and a depth of its own."""

    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.config, self.num_layers = config, config.num_layers
        self.blocks = nn.ModuleList(_Numbered(config, i + 1) for i in range(config.num_layers))
        self.in_order = list(self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.in_order[: self.num_layers]:
            x = layer(x)
        return x


def _vectors() -> Batch:
    return {"x": torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))}


@dataclass(frozen=True)
class Case:
    """A model, its input, and which edits its stacks refuse, by part of the message."""

    build: Callable[[], nn.Module]
    make_batch: Callable[[], Batch]
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def model(self) -> nn.Module:
        return copy.deepcopy(_built(self.build))


@cache
def _built(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def of_zoo(name: str, **fields: Any) -> Case:
    return Case(BY_NAME[name].make_model, BY_NAME[name].make_batch, **fields)


_FIRST = {edit: "relative_attention_bias" for edit in ("reverse", "front", "middle", "double")}
_SHIFTED = dict.fromkeys(("reverse", "drop", "copy", "front", "middle"), "shift_size")
CASES = {
    "gpt2": of_zoo("gpt2"),
    "llama": of_zoo("llama"),
    "bert": of_zoo("bert"),
    "vit": of_zoo("vit"),
    "t5": Case(_t5, BY_NAME["t5"].make_batch, refused=_FIRST),
    "bart": of_zoo("bart"),
    "whisper": of_zoo("whisper"),
    "gpt_neo": Case(_gpt_neo, tokens),
    "qwen3_moe": Case(_qwen3_moe, tokens),
    "qwen3_next": Case(_qwen3_next, tokens),
    "gemma3": of_zoo("gemma3"),
    "modernbert": of_zoo("modernbert", refused=dict.fromkeys(("reverse", "front", "middle", "double"), "attn_norm")),
    "mixtral": of_zoo("mixtral"),
    "distilbert": Case(_distilbert, masked_tokens),
    "clip": Case(_clip, _both),
    "vision_encoder_decoder": Case(_vision_encoder_decoder, _captions),
    "swin": Case(
        _swin, lambda: classified_images(size=64), refused=_SHIFTED
    ),
    "convnext": of_zoo("convnext"),
    "custom": Case(lambda: _Custom(_Config()), _vectors),
}  # fmt: skip
FAMILIES = [name for name in CASES if name != "custom"]


def fresh(layer: nn.Module) -> nn.Module:
    made = copy.deepcopy(layer)
    for param in made.parameters():
        nn.init.normal_(param, std=0.1)
    return made


EDITS: dict[str, Callable[[Layers], Layers]] = {
    "reverse": lambda old: old[::-1],
    "drop": lambda old: old[: len(old) // 2] + old[len(old) // 2 + 1 :],
    "drop last": lambda old: old[:-1],
    "copy": lambda old: (*old, copy.deepcopy(old[-1])),
    "front": lambda old: (fresh(old[0]), *old),
    "middle": lambda old: (old[0], fresh(old[0]), *old[1:]),
    "double": lambda old: old + tuple(map(copy.deepcopy, old)),
}


# --- what the tests look at ----------------------------------------------------------------------------------------


def stacks_of(model: nn.Module) -> tuple[Stack, ...]:
    return find_stacks(model, list(find_layers(model).values()))


def logits(model: nn.Module, batch: Batch) -> Tensor:
    # Labels stand for the decoder's input here; elsewhere a forward would write what it makes of them to the configuration.
    is_translated = getattr(model.config, "is_encoder_decoder", False)
    with torch.no_grad():
        outputs = model(**{name: value for name, value in batch.items() if name != "labels" or is_translated})
    if isinstance(outputs, Tensor):
        return outputs
    return outputs.logits_per_image if "logits_per_image" in outputs else outputs.logits


def picture(model: nn.Module) -> list[Any]:
    """Every module and attribute, objects by identity."""
    plain = (int, float, str, type(None))
    return [
        (
            name,
            id(module),
            [(key, value if isinstance(value, plain) else id(value)) for key, value in sorted(vars(module).items())],
            [(key, id(child)) for key, child in module._modules.items()],
        )
        for name, module in model.named_modules()
    ]


def settings(config: Any) -> dict[str, Any]:
    return config.to_dict() if hasattr(config, "to_dict") else copy.deepcopy(vars(config))


def rebuilt(model: nn.Module) -> nn.Module:
    """A model made anew from the configuration, with the state of this one."""
    made = type(model)(copy.deepcopy(model.config)).eval()
    made.load_state_dict(model.state_dict())
    return made


# --- any model, any edit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("name", sampled(CASES))
def test_is_what_its_configuration_builds(name: str, edit: str) -> None:
    case, batch = CASES[name], CASES[name].make_batch()
    for at in range(len(stacks_of(case.model))):
        model = case.model
        stack = stacks_of(model)[at]
        if len(stack) == 1 and "drop" in edit:
            continue
        old = logits(model, batch)  # the first forward of some models adds hooks
        before, config = picture(model), settings(model.config)
        new = EDITS[edit](stack.layers)
        undone = picture(model)
        if edit in case.refused:
            with pytest.raises(ValueError, match=case.refused[edit]):
                replace_layers(model, stack, new)
            assert picture(model) == undone and settings(model.config) == config
            continue
        undo = replace_layers(model, stack, new)
        assert tuple(stack.container) == new
        result = logits(model, batch)
        assert torch.equal(logits(rebuilt(model), batch), result)
        assert torch.equal(logits(copy.deepcopy(model), batch), result)
        undo()
        assert picture(model) == before and settings(model.config) == config
        assert torch.equal(logits(model, batch), old)


@pytest.mark.parametrize("name", FAMILIES)
def test_saves_and_loads(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model, batch = case.model, case.make_batch()
    for stack in stacks_of(model):
        new = stack.layers[:-1] if name in ("swin", "modernbert") else (*stack.layers, copy.deepcopy(stack.layers[-1]))
        replace_layers(model, stack, new)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    assert len(find_layers(loaded)) == len(find_layers(model))
    assert torch.equal(logits(loaded, batch), logits(model, batch))


@pytest.mark.parametrize("edit", sampled(["reverse", "drop", "copy", "front", "middle"]))
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "t5", "bart", "gpt_neo", "gemma3", "qwen3_moe", "vision_encoder_decoder"]
)
def test_generates_with_a_cache(name: str, edit: str) -> None:
    case = CASES[name]
    model, batch = case.model, dict(case.make_batch())
    if edit in case.refused:
        edit = "copy"
    for stack in stacks_of(model):
        replace_layers(model, stack, EDITS[edit](stack.layers))
    batch.pop("labels", None)
    batch.pop("decoder_input_ids", None)
    batch.pop("attention_mask", None)  # padding is on the right here
    ids = dict(pad_token_id=1, bos_token_id=2, decoder_start_token_id=1, eos_token_id=None)
    options = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, **ids)
    with torch.no_grad():
        cached = model.generate(**batch, use_cache=True, **options)
        plain = model.generate(**batch, use_cache=False, **options)
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("seed", sampled(range(4), 2))
@pytest.mark.parametrize("name", ["gpt2", "gemma3", "gpt_neo", "bart", "qwen3_next", "custom"])
def test_many_edits_and_back(name: str, seed: int) -> None:
    case = CASES[name]
    model, batch = case.model, case.make_batch()
    before, config = picture(model), settings(model.config)
    dice, undos = torch.Generator().manual_seed(seed), []
    for _ in range(12):
        stacks = stacks_of(model)
        stack = stacks[int(torch.randint(len(stacks), (), generator=dice))]
        new = [stack.layers[i] for i in torch.randperm(len(stack), generator=dice)]
        if torch.rand((), generator=dice) < 0.5:
            new.insert(1, copy.deepcopy(new[-1]))
        elif len(new) > 2:
            del new[1]
        undos.append(replace_layers(model, stack, new))
    assert torch.equal(logits(rebuilt(model), batch), logits(model, batch))
    for undo in reversed(undos):
        undo()
    assert picture(model) == before and settings(model.config) == config


# --- what follows --------------------------------------------------------------------------------------------------


def test_depth_of_encoder_and_decoder() -> None:
    model = CASES["t5"].model
    encoder, decoder = stacks_of(model)
    replace_layers(model, encoder, (*encoder.layers, copy.deepcopy(encoder.layers[-1])))
    assert (model.config.num_layers, model.config.num_decoder_layers) == (5, 3)
    replace_layers(model, decoder, decoder.layers[:2])
    assert (model.config.num_layers, model.config.num_decoder_layers) == (5, 2)
    assert (model.encoder.config.num_layers, model.decoder.config.num_layers) == (5, 2)


def test_depth_of_encoder_and_decoder_in_one_configuration() -> None:
    model = CASES["bart"].model
    encoder, decoder = stacks_of(model)
    replace_layers(model, decoder, decoder.layers[:1])
    assert (model.config.encoder_layers, model.config.decoder_layers) == (2, 1)
    replace_layers(model, encoder, (*encoder.layers, copy.deepcopy(encoder.layers[0])))
    assert (model.config.encoder_layers, model.config.decoder_layers) == (3, 1)


def test_depth_of_a_part() -> None:
    model = CASES["clip"].model
    text, vision = stacks_of(model)
    replace_layers(model, vision, vision.layers[:2])
    assert (model.config.text_config.num_hidden_layers, model.config.vision_config.num_hidden_layers) == (3, 2)
    assert model.vision_model.encoder.config is model.config.vision_config
    replace_layers(model, text, text.layers[:1])
    assert (model.config.text_config.num_hidden_layers, model.config.vision_config.num_hidden_layers) == (1, 2)
    assert model.text_model.config is model.config.text_config


def test_depth_of_a_stage() -> None:
    model = BY_NAME["swin"].make_model()  # two stages of two layers: num_layers, the number of stages, must stay
    first, second = stacks_of(model)
    replace_layers(model, first, first.layers[:1])
    assert list(model.config.depths) == [1, 2] and model.config.num_layers == 2
    replace_layers(model, second, second.layers[:1])
    assert list(model.config.depths) == [1, 1] and model.config.num_layers == 2 == model.swin.encoder.num_layers


def test_depth_under_another_name() -> None:
    model = CASES["distilbert"].model
    (stack,) = stacks_of(model)
    replace_layers(model, stack, stack.layers[:2])
    assert model.config.n_layers == model.config.num_hidden_layers == model.distilbert.transformer.n_layers == 2


def test_entries_travel() -> None:
    model = CASES["gpt_neo"].model
    (stack,) = stacks_of(model)
    a, b, c, d = stack.layers
    replace_layers(model, stack, (d, a, b))
    assert model.config.attention_layers == ["local", "global", "local"]
    assert model.config.expand_attention_types_params(model.config.attention_types) == ["local", "global", "local"]
    new = copy.deepcopy(b)
    replace_layers(model, replace(stack, layers=(d, a, b)), (c, new, d, a, b))  # c comes back, with what it had
    assert model.config.attention_layers == ["global", "local", "local", "global", "local"]


def test_the_last_of_its_kind_comes_back() -> None:
    model = CASES["gpt_neo"].model
    (stack,) = stacks_of(model)
    a, b, c, d = stack.layers
    replace_layers(model, stack, (b, d))
    assert model.config.attention_layers == ["local", "local"]
    replace_layers(model, replace(stack, layers=(b, d)), (b, d, a))
    assert model.config.attention_layers == ["local", "local", "global"]


def test_indices_travel() -> None:
    model = CASES["qwen3_moe"].model
    (stack,) = stacks_of(model)
    a, b, c, d = stack.layers
    assert model.config.mlp_only_layers == [0, 2]
    replace_layers(model, stack, (b, d, copy.deepcopy(c), c, a))
    assert model.config.mlp_only_layers == [2, 3, 4]


def test_positions_of_layers_and_their_copies() -> None:
    model = CASES["gemma3"].model
    (stack,) = stacks_of(model)
    replace_layers(model, stack, EDITS["double"](stack.layers[::-1]))
    assert [layer.layer_idx for layer in model.model.layers] == list(range(8))
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(8))


def test_what_is_no_position_stays() -> None:
    model = CASES["gpt2"].model
    (stack,) = stacks_of(model)
    for layer in stack.layers:
        layer.first_layer_id, layer.block_index = 0, 7
    replace_layers(model, stack, stack.layers[::-1])
    assert [layer.attn.layer_idx for layer in model.transformer.h] == [0, 1, 2, 3]
    assert {layer.first_layer_id for layer in stack.layers} == {0}


def test_a_model_by_hand() -> None:
    model = CASES["custom"].model
    (stack,) = stacks_of(model)
    a, b, c, d = stack.layers
    new = copy.deepcopy(b)
    replace_layers(model, stack, (d, new, a))
    assert model.in_order == [d, new, a] and model.num_layers == model.config.num_layers == 3
    assert [layer.layer_number for layer in model.blocks] == [1, 2, 3]
    assert model.config.layer_kinds == ["b", "b", "a"]
    assert new.config is model.config


def test_a_constructor_by_hand_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = CASES["custom"].model, []
    (stack,) = stacks_of(model)
    monkeypatch.setattr(_Custom, "__init__", lambda *_: calls.append(1))
    replace_layers(model, stack, (*stack.layers, copy.deepcopy(stack.layers[0])))
    assert not calls


def test_depth_of_a_plain_dict() -> None:
    model = nn.Module()
    model.config = {"model": {"n_layers": 3, "width": WIDTH}, "num_heads": 3}
    model.layers = nn.ModuleList(ResidualMlp() for _ in range(3))
    old, (stack,) = model.config, stacks_of(model)
    undo = replace_layers(model, stack, stack.layers[1:])
    assert model.config == {"model": {"n_layers": 2, "width": WIDTH}, "num_heads": 3}
    undo()
    assert model.config is old and old["model"]["n_layers"] == 3


def test_transformer_encoder() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    (stack,) = stacks_of(model)
    undo = replace_layers(model, stack, (*stack.layers, copy.deepcopy(stack.layers[0])))
    assert model.num_layers == 4 == len(model.layers)
    undo()
    assert model.num_layers == 3 == len(model.layers)


def test_sequential_with_embedding_and_head() -> None:
    model = nn.Sequential(nn.Embedding(9, WIDTH), *(ResidualMlp() for _ in range(3)), nn.Linear(WIDTH, 9))
    embedding, *layers, head = model
    (stack,) = stacks_of(model)
    new = ResidualMlp()
    undo = replace_layers(model, stack, (layers[2], new, layers[0], layers[1]))
    assert list(model) == [embedding, layers[2], new, layers[0], layers[1], head]
    assert list(model._modules) == ["0", "1", "2", "3", "4", "5"]
    made = nn.Sequential(nn.Embedding(9, WIDTH), *(ResidualMlp() for _ in range(4)), nn.Linear(WIDTH, 9))
    made.load_state_dict(model.state_dict())
    ids = torch.arange(9)[None]
    assert torch.equal(made.eval()(ids), model.eval()(ids))
    undo()
    assert list(model) == [embedding, *layers, head]


def test_names_of_members_go_on() -> None:
    parts = {"stem": nn.Linear(9, WIDTH), "block1": ResidualMlp(), "block2": ResidualMlp(), "head": nn.Linear(WIDTH, 9)}
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    (stack,) = stacks_of(model)
    replace_layers(model, stack, (parts["block2"], ResidualMlp(), parts["block1"]))
    assert list(model._modules) == ["stem", "block1", "block2", "block3", "head"]
    assert model.block1 is parts["block2"]


def test_members_between_layers_keep_their_slots() -> None:
    model = BY_NAME["inplace"].make_model()
    (stack,) = stacks_of(model)
    a, b, c, d = stack.layers
    replace_layers(model, stack, (a, d, c, b))
    assert [type(part).__name__ for part in model][:4] == ["Conv2d", "ReLU", "Conv2d", "ReLU"] and model[2] is d
    with pytest.raises(ValueError, match="between the layers of Sequential are other members \\(ReLU\\)"):
        replace_layers(model, replace(stack, layers=(a, d, c, b)), (a, d, c))


# --- what must not happen ------------------------------------------------------------------------------------------


def test_another_model_of_the_same_configuration_keeps_its_depth() -> None:
    config = _llama_like(hf.LlamaConfig)
    one, other = hf.LlamaForCausalLM(config).eval(), hf.LlamaForCausalLM(config).eval()
    before = logits(other, tokens())
    (stack,) = stacks_of(one)
    replace_layers(one, stack, stack.layers[:1])
    assert (one.config.num_hidden_layers, other.config.num_hidden_layers, config.num_hidden_layers) == (1, 3, 3)
    assert torch.equal(logits(other, tokens()), before)


def test_every_module_holds_the_new_configuration() -> None:
    model = CASES["llama"].model
    (stack,) = stacks_of(model)
    old = model.config
    replace_layers(model, stack, (*stack.layers, copy.deepcopy(stack.layers[0])))
    holders = [module for module in model.modules() if "config" in vars(module)]
    assert len(holders) > 6 and all(module.config is model.config for module in holders) and model.config is not old


def test_random_state_is_left_alone() -> None:
    model = CASES["t5"].model
    stack = stacks_of(model)[0]
    new = (*stack.layers, copy.deepcopy(stack.layers[-1]))
    before = torch.get_rng_state()
    replace_layers(model, stack, new)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_dropped_layer_is_freed() -> None:
    model = CASES["gemma3"].model
    (stack,) = stacks_of(model)
    dropped = weakref.ref(stack.layers[1])
    keep = (stack.layers[0], *stack.layers[2:])
    replace_layers(model, stack, keep)
    del stack, keep
    gc.collect()
    assert dropped() is None


def test_undone_out_of_order() -> None:
    model = CASES["gpt2"].model
    (stack,) = stacks_of(model)
    first = replace_layers(model, stack, stack.layers[:3])
    second = replace_layers(model, replace(stack, layers=stack.layers[:3]), stack.layers[:2])
    with pytest.raises(RuntimeError, match="undo later edits first, each once"):
        first()
    second()
    first()
    with pytest.raises(RuntimeError, match="each once"):
        first()


# --- refusals ------------------------------------------------------------------------------------------------------


def refuses(model: nn.Module, stack: Stack, layers: Any, message: str, **options: Any) -> None:
    before = picture(model)
    with pytest.raises(ValueError, match=re.escape(message)):
        replace_layers(model, stack, layers, **options)
    assert picture(model) == before


def test_layers_that_cannot_be() -> None:
    model = CASES["gpt2"].model
    (stack,) = stacks_of(model)
    a, b, c, d = stack.layers
    refuses(model, stack, (), "transformer.h would be left without layers; at least one must stay")
    refuses(model, stack, (a, b, a), "positions 0, 2 of transformer.h would hold the same GPT2Block")
    refuses(model, stack, (a, model.lm_head), "is already in the model, as 'lm_head'; put in a copy")
    with pytest.raises(TypeError, match="layers contains 3"):
        replace_layers(model, stack, (a, 3))
    replace_layers(model, stack, (a, b))
    refuses(model, stack, (a, b, c, d), "no longer holds the stack's layers in this order")


def test_one_module_in_several_places() -> None:
    layer, other, own = ResidualMlp(), ResidualMlp(), ResidualMlp()
    model = nn.Sequential(nn.Linear(9, WIDTH), layer, other, layer)
    (stack,) = stacks_of(model)
    assert stack.layers == (layer, other, layer)
    for layers in [(layer,), (layer, other), (layer, other, layer, own)]:
        refuses(model, stack, layers, "holds one module in several places")
    refuses(model, stack, (layer, other, other), "positions 1, 2 of Sequential would hold the same")
    before = picture(model)
    put_back = replace_layers(model, stack, (layer, other, own))
    assert list(model)[1:] == [layer, other, own]
    put_back()
    assert picture(model) == before
    replace_layers(model, stack, (other, layer, layer))
    assert list(model)[1:] == [other, layer, layer]


def test_layers_of_another_shape() -> None:
    model = CASES["llama"].model
    (stack,) = stacks_of(model)
    wider = hf.LlamaForCausalLM(_llama_like(hf.LlamaConfig, intermediate_size=80)).model.layers[0]
    refuses(model, stack, (*stack.layers, wider), "the new layer would be at position 3 and has parameter mlp.up_proj")
    replace_layers(model, stack, (*stack.layers, wider), force=True)


def test_scale_by_depth() -> None:
    sizes = dict(vocab_size=VOCAB, n_embd=WIDTH, n_layer=4, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=2)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(scale_attn_by_inverse_layer_idx=True, **sizes)).eval()
    (stack,) = stacks_of(model)
    refuses(
        model, stack, stack.layers[::-1], "has attn.scaling = 0.0625, where the model builds a layer that has attn.scal"
    )
    refuses(
        model, stack, (*stack.layers, copy.deepcopy(stack.layers[3])), "would be at position 4 and has attn.scaling"
    )
    new = type(stack.layers[0])(model.config, layer_idx=4).eval()
    replace_layers(model, stack, (*stack.layers, new))
    assert torch.equal(logits(rebuilt(model), tokens()), logits(model, tokens()))


def test_a_kind_that_begins_deeper_down() -> None:
    """All layers are alike so far, and the configuration wants the next one to be another."""
    config = _llama_like(hf.Qwen3MoeConfig, num_hidden_layers=3, decoder_sparse_step=4, **_EXPERTS)
    model = hf.Qwen3MoeForCausalLM(config)
    (stack,) = stacks_of(model)
    refuses(model, stack, (*stack.layers, copy.deepcopy(stack.layers[2])), "would be at position 3 and has")


def test_what_the_class_cannot_build() -> None:
    """Gemma3n shares the keys of its last layers with earlier ones of their kind, which must be there."""
    kinds = dict(layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2)
    extra = dict(vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8, laurel_rank=4)
    config = _llama_like(
        hf.Gemma3nTextConfig, num_hidden_layers=4, activation_sparsity_pattern=[0.0] * 4, **kinds, **extra
    )
    model = hf.Gemma3nForCausalLM(config)
    (stack,) = stacks_of(model)
    refuses(
        model,
        stack,
        EDITS["drop"](stack.layers),
        "Gemma3nForCausalLM cannot be built with these 3 layers in model.layers",
    )


def test_a_role_without_configuration() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(ResidualMlp() for _ in range(3))
    model.blocks[0].table = nn.Parameter(torch.zeros(4))
    (stack,) = stacks_of(model)
    a, b, c = stack.layers
    refuses(model, stack, (b, a, c), "only the ResidualMlp at position 0 has parameter table")
    refuses(model, stack, (b, c), "only the ResidualMlp at position 0 has parameter table")
    replace_layers(model, stack, (a, c))


def test_layers_of_another_class_without_configuration() -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList([ResidualMlp(), MixtureBlock(), ResidualMlp()])
    (stack,) = find_stacks(model, list(model.blocks))
    replace_layers(model, stack, stack.layers[::-1])


def test_a_new_layer_of_no_known_kind() -> None:
    model = CASES["custom"].model
    (stack,) = stacks_of(model)
    new = _Numbered(_Config(), 1)
    del new.kind  # it does not show what it is
    refuses(
        model,
        stack,
        (*stack.layers, new),
        "layer_kinds has an entry for every layer of blocks (a, b), and that of the new _Numbered at",
    )
    refuses(model, stack, (*stack.layers, new), "not a layer of blocks", like={new: copy.deepcopy(new)})
    new.kind = "b"
    replace_layers(model, stack, (*stack.layers, new), like={new: stack.layers[1]})
    assert model.config.layer_kinds == ["a", "b", "a", "b", "b"]


def test_layers_held_elsewhere() -> None:
    model = CASES["gpt2"].model
    (stack,) = stacks_of(model)
    model.favourite = stack.layers[2]
    refuses(model, stack, stack.layers[:2], "a layer of transformer.h is also in the model as 'favourite'")
    del model.favourite
    model.transformer.uniform_numel = [stack.layers[0], stack.layers[2]]
    refuses(
        model,
        stack,
        stack.layers[:2],
        "'transformer.uniform_numel' holds layers of transformer.h in another arrangement",
    )


def test_companions_of_the_layers() -> None:
    model = NormOutside([ResidualMlp() for _ in range(4)])
    (stack,) = stacks_of(model)
    refuses(model, stack, stack.layers[:3], "norms has 4 members, probably one for each of the 4 layers of layers")
    replace_layers(model, stack, stack.layers[::-1])
    other = nn.Module()
    other.layers, other.layer_gains = nn.ModuleList(ResidualMlp() for _ in range(3)), nn.Parameter(torch.ones(3))
    (stack,) = stacks_of(other)
    refuses(other, stack, stack.layers[:2], "parameter layer_gains has 3 rows, probably for the 3 layers of layers")


def test_names_that_do_not_go_on() -> None:
    model = nn.Sequential()
    for name in ("red", "green"):
        model.add_module(name, ResidualMlp())
    (stack,) = stacks_of(model)
    refuses(model, stack, (*stack.layers, ResidualMlp()), "are named red, green, which gives no name for another one")
    replace_layers(model, stack, stack.layers[1:])
    assert list(model._modules) == ["red"]


def test_depth_that_the_configuration_does_not_tell() -> None:
    model = BY_NAME["albert"].make_model()
    (stack,) = stacks_of(model)
    new = (*stack.layers, copy.deepcopy(stack.layers[0]))
    refuses(
        model,
        stack,
        new,
        "no field of AlbertConfig is the depth of albert.encoder.albert_layer_groups.0.albert_layers (1)",
    )
    refuses(
        model,
        stack,
        new,
        "Fields with this value: num_hidden_groups, inner_group_num; force=True skips this check",
    )
    replace_layers(model, stack, new, force=True)
    assert model.config.inner_group_num == 1


def test_depth_that_several_fields_may_be() -> None:
    model = CASES["custom"].model
    model.config.n_blocks = 4
    (stack,) = stacks_of(model)
    message = (
        "several fields of _Config may be the depth of blocks (4): num_layers, n_blocks; delete all but one of them"
    )
    refuses(model, stack, stack.layers[:3], message)
    del model.config.n_blocks
    replace_layers(model, stack, stack.layers[:3])
    assert model.config.num_layers == 3


def test_standard_name_wins() -> None:
    model = hf.BertModel(_bert_like(hf.BertConfig, num_layers=3))
    (stack,) = stacks_of(model)
    replace_layers(model, stack, stack.layers[:2])
    assert (model.config.num_hidden_layers, model.config.num_layers) == (2, 3)


def test_settings_of_single_layers() -> None:
    model = hf.LlamaForCausalLM(_llama_like(hf.LlamaConfig))
    model.config.per_layer_config = {1: {"intermediate_size": 48}}
    (stack,) = stacks_of(model)
    refuses(model, stack, stack.layers[:2], "overrides settings for single layers (per_layer_config)")
