"""A layer made the identity: inserted into real models, by hand, it leaves the loss where it was, and it can learn."""

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from patience import sampled
from torch import Tensor, nn
from zoo import (
    BY_NAME,
    CLASSES,
    FEATURES,
    STEPS,
    VOCAB,
    WIDTH,
    Batch,
    Kind,
    MixtureBlock,
    ResidualMlp,
    cross_entropy,
    loss_of,
    masked_tokens,
    padded_tokens,
    sequences,
)

from l2l_core.surgery.identity import (
    CallSample,
    IdentityPlan,
    capture_samples,
    plan_identity,
    sample_after,
)

# --- models ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, and where in it a layer is inserted: before `stack[at]`, or behind the last."""

    name: str
    kind: Kind
    stack: str
    at: int = 1
    before: str | None = None  # at 0: the shell's module that makes the first hidden state
    exact: bool = True
    zeroed: tuple[str, ...] | None = None  # endings of the names, where the test insists on them
    minus_ones: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


class Encoder(nn.Module):
    """embed, norm, PyTorch's own layers, head."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.embed, self.norm = nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH)
        settings: dict[str, Any] = dict(dropout=0.1, batch_first=True, norm_first=norm_first)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 64, **settings) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.embed(x))
        for layer in self.layers:
            h = layer(h)
        return self.head(h.mean(1))


SIZES = dict(hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=64, vocab_size=VOCAB)
IDS = dict(pad_token_id=1, bos_token_id=2, eos_token_id=2)


def text(name: str, build: Callable[[], nn.Module], make_batch: Callable[..., Batch] = padded_tokens) -> Kind:
    return Kind(name, build, make_batch)


def opt_post() -> nn.Module:
    sizes = dict(SIZES, ffn_dim=64, word_embed_proj_dim=16, do_layer_norm_before=False, max_position_embeddings=32)
    return hf.OPTForCausalLM(hf.OPTConfig(**sizes, **IDS))


def gemma2() -> nn.Module:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**SIZES, num_key_value_heads=1, head_dim=16, sliding_window=4, **IDS))


def olmo2() -> nn.Module:
    return hf.Olmo2ForCausalLM(hf.Olmo2Config(**SIZES, num_key_value_heads=1, **IDS))


def falcon() -> nn.Module:
    sizes = {name: size for name, size in SIZES.items() if name != "intermediate_size"}
    return hf.FalconForCausalLM(hf.FalconConfig(**sizes, parallel_attn=True, bias=True, **IDS))


def distilbert() -> nn.Module:
    sizes = dict(dim=WIDTH, n_layers=3, n_heads=2, hidden_dim=64, vocab_size=VOCAB, max_position_embeddings=32)
    return hf.DistilBertForMaskedLM(hf.DistilBertConfig(**sizes, pad_token_id=1))


NORM = "attention.output.LayerNorm.bias"
SANDWICH = ("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")
GPT2_ZEROED = ("attn.c_proj.weight", "attn.c_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias")
T5_ZEROED = ("SelfAttention.o.weight", "EncDecAttention.o.weight", "DenseReluDense.wo.weight")
BERT_ZEROED = (
    "attention.output.dense.weight",
    "attention.output.dense.bias",
    NORM,
    "output.dense.weight",
    "output.dense.bias",
)
CASES = [
    Case("gpt2", BY_NAME["gpt2"], "transformer.h", zeroed=GPT2_ZEROED),
    Case("gpt2 first", BY_NAME["gpt2"], "transformer.h", at=0),
    Case("gpt2 last", BY_NAME["gpt2"], "transformer.h", at=4),
    Case("llama", BY_NAME["llama"], "model.layers", zeroed=("self_attn.o_proj.weight", "mlp.down_proj.weight")),
    Case("llama last", BY_NAME["llama"], "model.layers", at=3),
    Case("qwen3", BY_NAME["qwen3"], "model.layers"),
    Case("mixtral", BY_NAME["mixtral"], "model.layers", zeroed=("self_attn.o_proj.weight", "mlp.experts.down_proj")),
    Case("qwen3_moe", BY_NAME["qwen3_moe"], "model.layers"),
    Case("gemma2", text("gemma2", gemma2), "model.layers", zeroed=(), minus_ones=SANDWICH),
    Case("gemma3", BY_NAME["gemma3"], "model.layers"),
    Case("olmo2", text("olmo2", olmo2), "model.layers", zeroed=SANDWICH),
    Case("gpt_neox", BY_NAME["gpt_neox"], "gpt_neox.layers"),
    Case("falcon", text("falcon", falcon), "transformer.h"),
    Case("opt", BY_NAME["opt"], "model.decoder.layers"),
    Case("vit", BY_NAME["vit"], "vit.layers"),
    Case("modernbert", BY_NAME["modernbert"], "model.layers"),
    Case("t5 encoder", BY_NAME["t5"], "encoder.block"),
    Case("t5 decoder", BY_NAME["t5"], "decoder.block", at=2, zeroed=T5_ZEROED),
    Case("whisper decoder", BY_NAME["whisper"], "model.decoder.layers"),
    Case("swin block", BY_NAME["swin"], "swin.encoder.layers.1.blocks", at=2),
    Case("convnext block", BY_NAME["convnext"], "convnext.encoder.stages.1.layers", zeroed=("layer_scale_parameter",)),
    Case("resnet, relu after the addition", BY_NAME["resnet"], "resnet.encoder.stages.0.layers"),
    Case("torch, norm first", Kind("torch", lambda: Encoder(True), sequences, cross_entropy), "layers"),
    Case("residual mlp", BY_NAME["chain"], "layers", zeroed=("fc2.weight", "fc2.bias")),
    Case("batch norm", BY_NAME["batch_norm"], "layers"),
    Case("spectral norm", BY_NAME["spectral_norm"], "layers"),
    Case("spectral norm by a hook", BY_NAME["spectral_norm_old"], "layers"),
    Case("bert", BY_NAME["bert"], "bert.encoder.layer", exact=False, zeroed=BERT_ZEROED),
    Case("bert first", BY_NAME["bert"], "bert.encoder.layer", at=0, before="bert.embeddings.LayerNorm", exact=False),
    Case("bert first, behind ids", BY_NAME["bert"], "bert.encoder.layer", at=0, before="bert.embeddings", exact=False),
    Case("bert last", BY_NAME["bert"], "bert.encoder.layer", at=3, exact=False),
    Case("roberta", BY_NAME["roberta"], "roberta.encoder.layer", exact=False),
    Case("distilbert", text("distilbert", distilbert, masked_tokens), "distilbert.transformer.layer", exact=False),
    Case("opt, norm last", text("opt350", opt_post), "model.decoder.layers", exact=False),
    Case("bart encoder", BY_NAME["bart"], "model.encoder.layers", exact=False),
    Case("bart decoder, three norms", BY_NAME["bart"], "model.decoder.layers", exact=False),
    Case("torch, norm last", Kind("torch", lambda: Encoder(False), sequences, cross_entropy), "layers", exact=False),
]  # fmt: skip


def make(case: Case, trained: bool) -> tuple[nn.Module, Batch]:
    """`trained`: gains that are not 1 and biases that are not 0; a fresh model hides errors."""
    model, batch = case.kind.make_model().eval(), case.kind.make_batch(3)
    if hasattr(model, "config"):
        model.config.use_cache = False
        model.config.output_router_logits = False  # the router's own loss is averaged over layers
    if trained:
        shake(model)
    return model, batch


def shake(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim < 2:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)


def apply_plan(plan: IdentityPlan, layer: nn.Module, before: nn.Module | None = None) -> None:
    params, its = dict(layer.named_parameters()), dict(before.named_parameters()) if before else {}
    with torch.no_grad():
        for name, value in plan.constants.items():
            params[name].fill_(value)
        for item in plan.transfers:
            params[item.new].copy_(its[item.preceding].view_as(params[item.new]))
            its[item.preceding].fill_(item.neutral)


def insert(model: nn.Module, case: Case, batch: Batch) -> tuple[nn.Module, IdentityPlan]:
    """Insert a copy of a neighbour as the identity."""
    stack, at = model.get_submodule(case.stack), case.at
    before = stack[at - 1] if at else (model.get_submodule(case.before) if case.before else None)
    wanted = [layer for layer in (before, stack[min(at, len(stack) - 1)]) if layer is not None]
    samples = capture_samples(model, lambda: loss_of(case.kind, model, batch), wanted)
    new = copy.deepcopy(stack[max(at - 1, 0)])
    sample = samples[stack[at]] if at < len(stack) else sample_after(stack[at - 1], samples[stack[at - 1]])
    plan = plan_identity(new, sample, before, samples.get(before) if before is not None else None)
    apply_plan(plan, new, before)
    stack.insert(at, new)
    if hasattr(model, "config"):
        tell_config(model.config, at)
    return new, plan


def tell_config(config: Any, at: int) -> None:
    for name in ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"):
        if name in vars(config):
            setattr(config, name, getattr(config, name) + 1)
    if (kinds := getattr(config, "layer_types", None)) is not None:
        config.layer_types = [*kinds[:at], kinds[max(at - 1, 0)], *kinds[at:]]


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("case", sampled(CASES, 2), ids=str)
def test_insertion_leaves_the_loss_and_can_learn(case: Case, trained: bool) -> None:
    model, batch = make(case, trained)
    loss = loss_of(
        case.kind, model, batch
    ).item()  # with gradients, as below: without, attention may take other kernels
    new, plan = insert(model, case, batch)
    after = loss_of(case.kind, model, batch)
    assert abs(after.item() - loss) <= (0.0 if case.exact else 1e-6 * max(1.0, abs(loss)))
    after.backward()
    params = dict(new.named_parameters())
    assert plan.zeroed or plan.minus_ones
    for name in (*plan.zeroed, *plan.minus_ones):
        gradient = params[name].grad
        assert gradient is not None and gradient.isfinite().all() and gradient.any(), name
    if case.zeroed is not None:
        assert len(plan.zeroed) == len(case.zeroed)
        assert all(name.endswith(end) for name, end in zip(plan.zeroed, case.zeroed, strict=True))
    assert not case.minus_ones or plan.minus_ones == case.minus_ones
    assert bool(plan.transfers) == (not case.exact)
    assert (plan.max_abs_error == 0) or not case.exact


def test_a_layer_that_is_not_made_the_identity_would_be_noticed() -> None:
    """The models' losses do depend on their layers: a plain copy moves each of them far more than the bound."""
    for case in CASES:
        model, batch = make(case, trained=True)
        with torch.no_grad():
            loss = loss_of(case.kind, model, batch).item()
        stack = model.get_submodule(case.stack)
        stack.insert(case.at, copy.deepcopy(stack[max(case.at - 1, 0)]))
        if hasattr(model, "config"):
            tell_config(model.config, case.at)
        assert abs(loss_of(case.kind, model, batch).item() - loss) > 1e-5, case


def test_handing_over_is_what_keeps_bert() -> None:
    case = next(case for case in CASES if case.name == "bert")
    model, batch = make(case, trained=True)
    before = model.bert.encoder.layer[0].output.LayerNorm
    gain, shift = before.weight.detach().clone(), before.bias.detach().clone()
    loss = loss_of(case.kind, model, batch).item()
    new, plan = insert(model, case, batch)
    assert [(item.preceding, item.new, item.neutral) for item in plan.transfers] == [
        ("output.LayerNorm.weight", "output.LayerNorm.weight", 1.0),
        ("output.LayerNorm.bias", "output.LayerNorm.bias", 0.0),
    ]
    assert plan.ones == ("attention.output.LayerNorm.weight",)
    assert torch.equal(new.output.LayerNorm.weight, gain) and torch.equal(new.output.LayerNorm.bias, shift)
    assert (before.weight == 1).all() and (before.bias == 0).all()
    with torch.no_grad():
        before.weight.copy_(gain)
    assert abs(loss_of(case.kind, model, batch).item() - loss) > 1e-5


# --- layers by hand --------------------------------------------------------------------------------------------------


def hidden(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, STEPS, WIDTH)), generator=torch.Generator().manual_seed(3))


def sample_of(*args: Any) -> CallSample:
    return CallSample(args, {})


def output_of(layer: nn.Module, plan: IdentityPlan, x: Tensor) -> Any:
    layer = copy.deepcopy(layer).eval()
    apply_plan(plan, layer)
    with torch.no_grad():
        return layer(x)


class Branch(nn.Module):
    """x + make(x), `make` given by a function of the module and x."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def test_experts_without_tokens_are_silenced_too() -> None:
    block = MixtureBlock()
    x = hidden(1, 1, WIDTH)  # one token: one expert of four
    plan = plan_identity(block, sample_of(x))
    assert set(plan.zeroed) == {f"experts.{i}.down.{part}" for i in range(4) for part in ("weight", "bias")}
    for seed in range(5):
        x = torch.randn(2, STEPS, WIDTH, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(output_of(block, plan, x)[0], x)


def test_members_of_a_list_that_follow_one_another_are_no_experts() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        h = x
        for part in self.parts:
            h = F.gelu(part(h))
        return x + h

    layer = Branch(run, parts=nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    assert plan_identity(layer, sample_of(hidden())).zeroed == ("parts.2.weight", "parts.2.bias")


def test_what_comes_last_in_a_branch_is_zeroed() -> None:
    linear, scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(()))
    layer = Branch(lambda self, x: x + self.scale * self.linear(x), linear=linear, scale=scale)
    assert plan_identity(layer, sample_of(hidden())).zeroed == ("scale",)  # though it is 0 already
    layer = Branch(
        lambda self, x: x + self.scale * self.linear(x), linear=linear, scale=nn.Parameter(torch.ones(WIDTH))
    )
    assert plan_identity(layer, sample_of(hidden())).zeroed == ("scale",)
    layer = Branch(
        lambda self, x: x + self.scale.relu() * self.linear(x), linear=linear, scale=nn.Parameter(torch.ones(()))
    )
    assert plan_identity(layer, sample_of(hidden())).zeroed == ("linear.weight", "linear.bias")


def test_names_do_not_depend_on_values() -> None:
    fresh, trained = ResidualMlp(), ResidualMlp()
    nn.init.zeros_(fresh.fc2.bias)
    nn.init.zeros_(fresh.fc2.weight)
    shake(trained)
    assert plan_identity(fresh, sample_of(hidden())) == plan_identity(trained, sample_of(hidden()))


def test_a_known_plan_is_tried_first_and_searched_anew_where_it_does_not_hold() -> None:
    class Counted(ResidualMlp):
        runs = 0

        def forward(self, x: Tensor) -> Tensor:
            Counted.runs += 1
            return super().forward(x)

    found = plan_identity(Counted(), sample_of(hidden()))
    Counted.runs = 0
    assert plan_identity(Counted(), sample_of(hidden()), known=found) == found
    assert Counted.runs <= 2
    for wrong in (IdentityPlan(zeroed=("fc1.weight",)), IdentityPlan(zeroed=("elsewhere",))):
        assert plan_identity(Counted(), sample_of(hidden()), known=wrong) == found


def test_parameters_of_two_types() -> None:
    linear = nn.Linear(WIDTH, WIDTH).bfloat16()
    norm = nn.LayerNorm(WIDTH)
    layer = Branch(lambda self, x: x + self.linear(self.norm(x).bfloat16()).float(), linear=linear, norm=norm)
    assert plan_identity(layer, sample_of(hidden())).zeroed == ("linear.weight", "linear.bias")


def test_weight_norm_stays_away_from_zero_over_zero() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    layer = Branch(lambda self, x: x + self.linear(x), linear=linear)
    plan = plan_identity(layer, sample_of(hidden()))
    assert set(plan.zeroed) == {"linear.bias", "linear.parametrizations.weight.original0"}
    assert torch.equal(output_of(layer, plan, hidden()), hidden())


class Doubled(torch.autograd.Function):
    """A function of its own, as fused kernels are: nothing can be seen behind its node in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return 2 * x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return 2 * grads[0] @ weight.T, 2 * torch.einsum("...i,...j->ij", x, grads[0])


def test_custom_autograd_functions() -> None:
    up, down = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
    layer = Branch(lambda self, x: x + Doubled.apply(Doubled.apply(x, self.up), self.down), up=up, down=down)
    assert plan_identity(layer, sample_of(hidden())).zeroed == ("down",)


def test_hidden_state_is_found_among_arguments_of_one_shape() -> None:
    class Cross(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, memory: Tensor, *, x: Tensor) -> dict[str, Tensor]:
            return {"hidden": x.add_(self.linear(memory)), "memory": memory}  # in place: samples are copies

    x, memory = hidden(), hidden() + 1
    plan = plan_identity(Cross(), CallSample((memory,), {"x": x}))
    assert plan.zeroed == ("linear.weight", "linear.bias")
    assert torch.equal(x, hidden())


def test_rms_norm_last() -> None:
    def build() -> nn.Module:
        linear, norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.RMSNorm(WIDTH, eps=1e-6)
        layer = Branch(lambda self, x: self.norm(x + self.linear(x)), linear=linear, norm=norm)
        shake(layer)
        return layer

    before, layer = build(), build()
    x = before(hidden()).detach()
    plan = plan_identity(layer, sample_of(x), before, sample_of(hidden()))
    assert plan.zeroed == ("linear.weight",) and not plan.ones
    assert [(item.preceding, item.new) for item in plan.transfers] == [("norm.weight", "norm.weight")]
    apply_plan(plan, layer, before)
    assert torch.allclose(layer(before(hidden())), x, rtol=0, atol=5e-6)


# --- refusals --------------------------------------------------------------------------------------------------------


class ResNetV1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.conv(x))


def test_relu_after_the_addition_rests_on_the_layer_before() -> None:
    image, layer = hidden(2, 4, 6, 6), ResNetV1()
    stem, rectified = nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
    x = rectified(image).detach()
    plan = plan_identity(layer, sample_of(x), rectified, sample_of(image))
    assert plan.zeroed == ("conv.weight", "conv.bias")
    with pytest.raises(ValueError, match="Pass preceding="):
        plan_identity(layer, sample_of(x))
    with torch.no_grad():
        stem.bias.fill_(100.0)  # no negative value here, but no promise either
    with pytest.raises(ValueError, match="the Conv2d before it does not ensure"):
        plan_identity(layer, sample_of(stem(image).detach()), stem, sample_of(image))
    with pytest.raises(ValueError, match="no residual path"):
        plan_identity(layer, sample_of(image))


def spectral_relu() -> nn.Module:
    first, second = (nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    return Branch(lambda self, x: x + self.second(F.relu(self.first(x))), first=first, second=second)


def post_norm() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 64, batch_first=True)


def highway() -> nn.Module:
    gate, make = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return Branch(lambda self, x: (1 - self.gate(x).sigmoid()) * x + self.make(x), gate=gate, make=make)


def scaled_by_relu() -> nn.Module:
    linear, scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(()))
    return Branch(lambda self, x: x + self.linear(x) * self.scale.relu(), linear=linear, scale=scale)


def ends_in_relu() -> nn.Module:
    return Branch(lambda self, x: x + self.linear(x).relu(), linear=nn.Linear(WIDTH, WIDTH))


def fourier() -> nn.Module:
    return Branch(lambda self, x: x + torch.fft.fft(x).real)


def plain_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


WIDENED = r"changes the shape of the hidden state \(from \(2, 8, 32\) to \(2, 8, 5\)"
REFUSED = [
    (lambda: nn.Linear(WIDTH, WIDTH), hidden(), "Linear the identity: it has no residual path: .* passes weight"),
    (lambda: nn.Linear(WIDTH, 5), hidden(), WIDENED),
    (lambda: nn.Linear(3, 3), hidden(), "does not run on its sample"),
    (lambda: nn.Conv2d(4, 4, 3, padding=1), hidden(2, 4, 6, 6), "no residual path"),
    (lambda: nn.LSTM(WIDTH, WIDTH), hidden(), "no residual path"),
    (plain_mlp, hidden(), "no residual path"),
    (highway, hidden(), "no residual path"),
    (fourier, hidden(), "branch without parameters"),
    (post_norm, hidden(), r"ends in a norm \(norm2.weight\).*Pass preceding="),
    (spectral_relu, hidden(), "first.parametrizations.weight.original cannot be 0"),
    (scaled_by_relu, hidden(), "scale would get no gradient"),
    (ends_in_relu, hidden(), "remain the identity: .* linear.weight would get no gradient"),
]  # fmt: skip


@pytest.mark.parametrize(("build", "x", "message"), REFUSED)
def test_refused(build: Callable[[], nn.Module], x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        plan_identity(build(), sample_of(x))
    assert 'init="copy" or init="fresh"' in str(error.value)


def test_merging_of_patches_is_refused() -> None:
    kind = BY_NAME["swin"]
    model, batch = kind.make_model(), kind.make_batch(2)
    layer = model.swin.encoder.layers[0].downsample
    sample = capture_samples(model, lambda: model(**batch), [layer])[layer]
    with pytest.raises(ValueError, match="changes the shape"):
        plan_identity(layer, sample)


def test_a_norm_needs_a_norm_before_it() -> None:
    layer, x = post_norm(), hidden()
    before = ResidualMlp().eval()
    with pytest.raises(ValueError, match="the ResidualMlp before it does not end in a norm"):
        plan_identity(layer, sample_of(before(x).detach()), before, sample_of(x))
    norm = nn.LayerNorm(WIDTH)
    with pytest.raises(ValueError, match="is not the output of the"):
        plan_identity(layer, sample_of(2 * norm(x).detach()), norm, sample_of(x))
    rms = nn.RMSNorm(WIDTH)
    with pytest.raises(ValueError, match="no residual path was found"):
        plan_identity(layer, sample_of(rms(x).detach()), rms, sample_of(x))
    bare = Branch(
        lambda self, x: self.norm(x + self.f(x)), norm=nn.LayerNorm(WIDTH, bias=False), f=nn.Linear(WIDTH, WIDTH)
    )
    with pytest.raises(ValueError, match="without a shift.* before it has a shift"):
        plan_identity(bare, sample_of(norm(x).detach()), norm, sample_of(x))
    assert plan_identity(layer, sample_of(norm(x).detach()), norm, sample_of(x)).transfers


def test_a_preceding_layer_comes_with_its_sample() -> None:
    with pytest.raises(ValueError, match="pass both, or neither"):
        plan_identity(post_norm(), sample_of(hidden()), nn.LayerNorm(WIDTH))


def test_a_shift_that_nobody_hands_over_is_zeroed() -> None:
    x, layer, before = hidden(), post_norm(), nn.LayerNorm(WIDTH, bias=False)
    shake(layer)
    plan = plan_identity(layer, sample_of(before(x).detach()), before, sample_of(x))
    assert "norm2.bias" in plan.zeroed and [item.new for item in plan.transfers] == ["norm2.weight"]


def test_eps_that_would_count_is_refused() -> None:
    layer, norm = post_norm().eval(), nn.LayerNorm(WIDTH)
    for size, fits in ((1.0, True), (0.3, False), (0.01, False)):
        x = size * hidden()
        sample, its = sample_of(norm(x).detach()), sample_of(x)
        if fits:
            plan = plan_identity(layer, sample, norm, its)
            assert 1e-7 < plan.max_abs_error < 1e-4  # eps / 2 * (1 / v - 1)
        else:
            with pytest.raises(ValueError, match="eps matters"):
                plan_identity(layer, sample, norm, its)
    for part in (layer.norm1, layer.norm2, norm):
        part.eps = 1e-12
    x = 0.01 * hidden()
    assert plan_identity(layer, sample_of(norm(x).detach()), norm, sample_of(x)).max_abs_error < 5e-6


# --- what stays as it was --------------------------------------------------------------------------------------------


class Noisy(ResidualMlp):
    """Draws from every generator, has a running statistic and a hook that must not be called."""

    def __init__(self) -> None:
        super().__init__()
        self.statistic, self.side = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.unregister = 0
        self.register_forward_hook(self.count)

    def count(self, *_: Any) -> None:
        self.unregister += 1

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + random.random() + float(np.random.rand()) + torch.rand(()).item()
        return super().forward(x) + scale * self.side(self.statistic(x.flatten(0, 1)).view_as(x))


SILENCED = ("fc2.weight", "fc2.bias", "side.weight", "side.bias")


def state_of(module: nn.Module) -> list[Any]:
    tensors = [tensor.clone() for tensor in module.state_dict().values()]
    flags = [(part.training, len(part._forward_hooks), len(part._forward_pre_hooks)) for part in module.modules()]
    params = [(id(p), p.requires_grad, p.grad) for p in module.parameters()]
    generators = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]
    return [tensors, flags, params, generators, torch.is_grad_enabled(), [id(b) for b in module.buffers()]]


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, list):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert torch.equal(one, other) if isinstance(one, Tensor) else one == other


def test_planning_changes_nothing() -> None:
    layer = Noisy().train()
    layer.norm.eval()
    layer.fc1.requires_grad_(False)
    x = hidden()
    before = state_of(layer)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        plan = plan_identity(layer, sample_of(x))
        assert torch.is_autocast_enabled("cpu")
    assert plan.zeroed == SILENCED and layer.unregister == 0
    assert_same(state_of(layer), before)
    assert torch.equal(x, hidden())
    refused = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(STEPS))
    before = state_of(refused)
    with pytest.raises(ValueError):
        plan_identity(refused, sample_of(x))
    assert_same(state_of(refused), before)


def test_applying_touches_what_is_named_and_nothing_else() -> None:
    case = next(case for case in CASES if case.name == "bert")
    model, batch = make(case, trained=True)
    old = {name: value.clone() for name, value in model.state_dict().items()}
    donor = {name: value.clone() for name, value in model.bert.encoder.layer[0].state_dict().items()}
    new, plan = insert(model, case, batch)
    named = {*plan.zeroed, *plan.ones, *(item.new for item in plan.transfers)}
    assert {name for name, value in new.state_dict().items() if not torch.equal(value, donor[name])} <= named
    model.bert.encoder.layer.pop(1)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, old[name])}
    assert changed == {f"bert.encoder.layer.0.{item.preceding}" for item in plan.transfers}


def test_capture_stops_early_and_leaves_nothing_behind() -> None:
    model = nn.Sequential(*(Noisy() for _ in range(4))).train()
    model[1].eval()
    before, x = state_of(model), hidden()
    samples = capture_samples(model, lambda: model(x), [model[2], model[1]])
    assert_same(state_of(model), before)
    assert [layer.unregister for layer in model] == [1, 1, 0, 0]
    assert list(samples) == [model[2], model[1]]
    (seen,), kwargs = samples[model[1]]
    assert seen.shape == x.shape and not seen.requires_grad and not kwargs
    assert plan_identity(model[2], samples[model[2]]).zeroed == SILENCED


def test_captured_tensors_are_copies_that_keep_who_is_who() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.add_(1) + y

    class Shell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Twice()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, y=x)

    model, x = Shell(), hidden()
    args, kwargs = capture_samples(model, lambda: model(x), [model.layer])[model.layer]
    assert args[0] is kwargs["y"] and args[0] is not x and torch.equal(args[0], x)


def test_a_layer_that_is_not_called() -> None:
    model = nn.Sequential(ResidualMlp(), ResidualMlp())
    with pytest.raises(ValueError, match="layer 1 was not called"):
        capture_samples(model, lambda: model[0](hidden()), list(model))
    with pytest.raises(KeyError):  # an error of the model's own comes through
        capture_samples(model, lambda: {}["x"], list(model))
    assert not any(layer._forward_pre_hooks for layer in model)


def test_a_cache_among_the_arguments_is_not_written_to() -> None:
    kind = BY_NAME["gpt2"]
    model, batch = kind.make_model(), kind.make_batch(2)
    layer = model.transformer.h[1]
    sample = capture_samples(model, lambda: model(**batch, use_cache=True), [layer])[layer]
    caches = [leaf for leaf in sample.leaves if hasattr(leaf, "get_seq_length")]
    assert len(caches) == 1
    assert len(plan_identity(layer, sample).zeroed) == 4
    assert caches[0].get_seq_length(1) == 0


def test_what_a_layer_behind_the_last_is_given() -> None:
    layer, x, mask = post_norm().eval(), hidden(), torch.zeros(STEPS, STEPS)
    args, kwargs = sample_after(layer, CallSample((x,), {"src_mask": mask}))
    assert torch.allclose(args[0], layer(x), atol=1e-6) and torch.equal(kwargs["src_mask"], mask)
    with pytest.raises(ValueError, match=r"Linear has an output of shape \(2, 8, 5\)"):
        sample_after(nn.Linear(WIDTH, 5), sample_of(x))
