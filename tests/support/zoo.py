"""The model zoo: one tiny model per way in which a model can be awkward to relay.

Every `Kind` makes the same weights and the same batches every time, touches no global random state while doing so,
runs in float32 on the CPU in milliseconds, and is in training mode with dropout 0.1 wherever it can have any.

How a kind is called: a dict batch goes to `model(**batch)`. A tuple batch of a kind with a `loss` goes to
`model(*batch[:-1])` and then `loss(outputs, batch)`, the last entry being the target; a tuple batch of a kind without
goes to `model(*batch)`, which returns something with `.loss`. `loss_of` below does just that. Every entry of a batch
has the rows in dimension 0.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

Batch = dict[str, Tensor] | tuple[Tensor, ...]

WIDTH = 32
TOKENS = 12  # sequence length of text
STEPS = 8  # sequence length of everything else
FEATURES = 16
CLASSES = 5
VOCAB = 100
IGNORED = -100


@dataclass(frozen=True)
class Kind:
    """One row of the zoo. `make_batch(rows, seed)`; `layers` is None where `find_layers` finds them."""

    name: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[..., Batch]
    loss: Callable[[Any, Batch], Tensor] | None = None
    layers: list[str] | None = None
    note: str = ""
    loss_over: Literal["micro-batch"] | None = None  # of losses that mix rows, such as a router's balance

    def __str__(self) -> str:
        return self.name


def loss_of(kind: Kind, model: nn.Module, batch: Batch) -> Tensor:
    """The scalar loss of one batch, in plain torch."""
    if isinstance(batch, dict):
        outputs = model(**batch)
    else:
        outputs = model(*(batch if kind.loss is None else batch[:-1]))
    return outputs.loss if kind.loss is None else kind.loss(outputs, batch)


# --- batches -------------------------------------------------------------------------------------------------------


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def tokens(rows: int = 4, seed: int = 0) -> Batch:
    """Text of full length for a causal model; it predicts its own input."""
    ids = torch.randint(4, VOCAB, (rows, TOKENS), generator=_generator(seed))
    return {"input_ids": ids, "labels": ids.clone()}


def padded_tokens(rows: int = 4, seed: int = 0) -> Batch:
    """Text of different lengths, padded on the right with token 1."""
    batch = tokens(rows, seed)
    mask = _mask(rows, seed)
    return {
        "input_ids": batch["input_ids"].masked_fill(mask == 0, 1),
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, IGNORED),
    }


def masked_tokens(rows: int = 4, seed: int = 0) -> Batch:
    """Padded text in which some tokens, token 1 of every row among them, are hidden (token 3) and to be predicted."""
    batch = padded_tokens(rows, seed)
    hidden = torch.rand(rows, TOKENS, generator=_generator(seed + 1)) < 0.3
    hidden[:, 1] = True
    hidden &= batch["attention_mask"] == 1
    batch["labels"] = batch["labels"].masked_fill(~hidden, IGNORED)
    batch["input_ids"] = batch["input_ids"].masked_fill(hidden, 3)
    return batch


def classified_tokens(rows: int = 4, seed: int = 0) -> Batch:
    return padded_tokens(rows, seed) | {"labels": torch.randint(CLASSES, (rows,), generator=_generator(seed + 1))}


def translated_tokens(rows: int = 4, seed: int = 0) -> Batch:
    """Padded source, and a shorter padded target as labels."""
    return padded_tokens(rows, seed) | {"labels": _short_labels(rows, seed + 1)}


def transcribed_sound(rows: int = 4, seed: int = 0) -> Batch:
    features = torch.randn(rows, FEATURES, 2 * STEPS, generator=_generator(seed))
    return {"input_features": features, "labels": _short_labels(rows, seed)}


def classified_images(rows: int = 4, seed: int = 0, size: int = 16) -> Batch:
    generator = _generator(seed)
    return {
        "pixel_values": torch.randn(rows, 3, size, size, generator=generator),
        "labels": torch.randint(CLASSES, (rows,), generator=generator),
    }


def large_images(rows: int = 4, seed: int = 0) -> Batch:
    return classified_images(rows, seed, size=32)


def image_pairs(rows: int = 4, seed: int = 0) -> Batch:
    """(image, class)"""
    return tuple(classified_images(rows, seed, size=8).values())


def sequences(rows: int = 4, seed: int = 0) -> Batch:
    """(features, class): (rows, STEPS, FEATURES), (rows,)"""
    generator = _generator(seed)
    x = torch.randn(rows, STEPS, FEATURES, generator=generator)
    return x, torch.randint(CLASSES, (rows,), generator=generator)


def _short_labels(rows: int, seed: int) -> Tensor:
    return padded_tokens(rows, seed)["labels"][:, :STEPS].contiguous()  # T5 and BART call .view on labels


def _mask(rows: int, seed: int) -> Tensor:
    lengths = torch.randint(TOKENS // 3, TOKENS + 1, (rows, 1), generator=_generator(seed + 2))
    return (torch.arange(TOKENS) < lengths).long()


def cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(outputs, batch[-1])


# --- models by hand: the blocks ------------------------------------------------------------------------------------


class Mlp(nn.Module):
    """norm, widen, narrow."""

    def __init__(self, width: int = WIDTH, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(F.gelu(self.fc1(self.norm(x)))))


class ResidualMlp(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class MlpWithUnusedParameter(ResidualMlp):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.randn(WIDTH, WIDTH))


class SpectralMlp(ResidualMlp):
    """Spectral norm keeps a power iteration in buffers, which every forward in training mode moves on."""

    def __init__(self, spectral_norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.fc1, self.fc2 = spectral_norm(self.fc1), spectral_norm(self.fc2)


class BatchNormMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.fc1(x).flatten(0, 1)).view_as(x)  # statistics over rows and steps
        return x + self.drop(self.fc2(F.relu(h)))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class MixtureBlock(nn.Module):
    """Every step goes to one of four experts. Returns (x, balance loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(4))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = self.norm(x).flatten(0, 1)  # (rows * STEPS, WIDTH)
        odds = self.gate(flat).softmax(-1)
        best, chosen = odds.max(-1)
        y = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            at = (chosen == i).nonzero().squeeze(1)
            if len(at):
                y = y.index_add(0, at, best[at, None] * expert(flat[at]))
        return x + self.drop(y).view_as(x), odds.mean(0).square().sum()


class ConvBlock(nn.Module):
    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(F.relu(self.conv2(F.relu(self.conv1(x)))))


class ConvOverSteps(nn.Module):
    """A layer of another class: a convolution over the steps, on transposed views."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width_in, width_out, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)


# --- models by hand: the shells ------------------------------------------------------------------------------------


class Chain(nn.Module):
    """embed, layers, pool, head. Subclasses change how `walk` gets through the layers."""

    def __init__(self, layers: list[nn.Module], width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, CLASSES)

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return h

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.walk(self.embed(x)).mean(1))


class Looped(Chain):
    """All layers, several times."""

    def __init__(self, loops: int = 2, depth: int = 2) -> None:
        super().__init__([ResidualMlp() for _ in range(depth)])
        self.n_loops = loops

    def walk(self, h: Tensor) -> Tensor:
        for _ in range(self.n_loops):
            h = super().walk(h)
        return h


class ResidualOutside(Chain):
    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = h + layer(h)
        return h


class NormOutside(Chain):
    """norm, dropout and residual all live in the shell."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in layers)

    def walk(self, h: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            h = h + F.dropout(layer(norm(h)), 0.1, self.training)
        return h


class RandomSkip(Chain):
    """Stochastic depth: the draw decides per call, so micro-batches visit different layers."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()).item() < 0.6:
                h = layer(h)
        return h


class Transposed(Chain):
    """The first layer sees a transposed view: (rows, WIDTH, STEPS)."""

    def walk(self, h: Tensor) -> Tensor:
        return super().walk(h.transpose(1, 2)).transpose(1, 2)


class Reversible(Chain):
    """Two streams, views of one tensor, each updated from the other; layers alternate."""

    def walk(self, h: Tensor) -> Tensor:
        x1, x2 = h.chunk(2, dim=-1)
        for f, g in zip(self.layers[::2], self.layers[1::2], strict=True):
            x1 = x1 + f(x2)
            x2 = x2 + g(x1)
        return torch.cat([x1, x2], dim=-1)


class Coupling(Chain):
    """Every layer sees one half, a view, of what the layer before left behind; the shell reads that view too."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            x1, x2 = h.chunk(2, dim=-1)
            h = torch.cat([x2, x1 + layer(x2)], dim=-1)
        return h


class LstmStack(Chain):
    """Layers return (output, (h, c)); the shell drops out between them."""

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h, _ = layer(h)
            h = F.dropout(h, 0.1, self.training)
        return h


class Mixture(Chain):
    """Takes the target and returns a loss that adds what every layer charges for imbalance."""

    def forward(self, x: Tensor, target: Tensor) -> SimpleNamespace:
        h, balance = self.embed(x), torch.zeros(())
        for layer in self.layers:
            h, charge = layer(h)
            balance = balance + charge
        logits = self.head(h.mean(1))
        return SimpleNamespace(loss=F.cross_entropy(logits, target) + 0.1 * balance, logits=logits)


class DepthBlock(nn.Module):
    """Attention over a window, a value embedding in some layers, and its own number."""

    def __init__(self, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, value: Tensor | None, window: int) -> Tensor:
        q, k, v = self.qkv(F.rms_norm(x, (WIDTH,))).chunk(3, dim=-1)
        v = v if value is None else v + value
        at = torch.arange(x.shape[1], device=x.device)
        mask = (at[:, None] >= at) & (at[:, None] - at < window)
        x = x + self.drop(self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))
        return x + self.drop(self.down(F.relu(self.up(F.rms_norm(x, (WIDTH,)))).square()))


class ByDepth(nn.Module):
    """Things per layer beside the layers, as in nanochat: two scalars, a window, an embedding for every other one."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(DepthBlock(i) for i in range(depth))
        self.resid_lambdas = nn.Parameter(torch.linspace(1.0, 0.7, depth))
        self.x0_lambdas = nn.Parameter(torch.linspace(0.05, 0.2, depth))
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(VOCAB, WIDTH) for i in range(depth - 1, -1, -2)})
        self.windows = [2 + i for i in range(depth - 1)] + [TOKENS]
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def mix(self, i: int, x: Tensor, x0: Tensor) -> Tensor:
        return self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0

    def call(self, i: int, layer: nn.Module, x: Tensor, input_ids: Tensor) -> Tensor:
        value = self.value_embeds[str(i)](input_ids) if str(i) in self.value_embeds else None
        return layer(x, value, self.windows[i])

    def walk(self, x: Tensor, input_ids: Tensor) -> Tensor:
        x0 = x
        for i, layer in enumerate(self.layers):
            x = self.call(i, layer, self.mix(i, x, x0), input_ids)
        return x

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        x = self.walk(F.rms_norm(self.embed(input_ids), (WIDTH,)), input_ids)
        logits = self.head(F.rms_norm(x, (WIDTH,)))
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits=logits)


class UNet(nn.Module):
    """Late layers read what early ones left, last in first out. Takes the target, returns a namespace with `.loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.downs = nn.ModuleList([ConvBlock(8, 16, stride=2), ConvBlock(16, 32, stride=2)])
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.ups = nn.ModuleList([ConvBlock(32 + 16, 16), ConvBlock(16 + 8, 8)])
        self.head = nn.Conv2d(8, 3, 1)

    def forward(self, pixel_values: Tensor, target: Tensor) -> SimpleNamespace:
        h, early = self.stem(pixel_values), []
        for down in self.downs:
            early.append(h)
            h = down(h)
        h = self.middle(h)
        for up in self.ups:
            h = up(torch.cat([F.interpolate(h, scale_factor=2.0), early.pop()], dim=1))
        image = self.head(h)
        return SimpleNamespace(loss=F.mse_loss(image, target), image=image)


class Unlike(nn.Module):
    """Layers of different classes and widths, held as plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.widen = ConvOverSteps(FEATURES, WIDTH)
        self.mix = ResidualMlp()
        self.recur = nn.LSTM(WIDTH, 48, batch_first=True)
        self.attend = nn.TransformerEncoderLayer(48, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(48, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.recur(self.mix(self.widen(x)))
        return self.head(self.attend(h).mean(1))


# --- models by hand: put together ----------------------------------------------------------------------------------


def _blocks(count: int = 4) -> list[nn.Module]:
    return [ResidualMlp() for _ in range(count)]


def _frozen_layer() -> nn.Module:
    model = Chain([ResidualMlp(), ResidualMlp(), MlpWithUnusedParameter(), ResidualMlp()])
    model.layers[1].requires_grad_(False)
    model.unused = nn.Parameter(torch.randn(3))
    return model


def _frozen_prefix() -> nn.Module:
    model = Chain(_blocks())
    for part in (model.embed, model.layers[0], model.layers[1]):
        part.requires_grad_(False)
    return model


class Adapted(nn.Module):
    """A linear layer that is frozen, beside a product of two narrow ones that is not (LoRA, arXiv 2106.09685)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base, self.dropout = base.requires_grad_(False), nn.Dropout(0.1)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(self.dropout(x))) * 2.0


def adapted(model: nn.Module, *names: str) -> nn.Module:
    """The model frozen, with adapters in place of its linear layers of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name in (name for name in names if isinstance(getattr(module, name, None), nn.Linear)):
            setattr(module, name, Adapted(getattr(module, name)))
    return model


class Codes(nn.Module):
    """A linear layer of integers of one byte, with a scale for each row."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        scale = base.weight.detach().abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((base.weight.detach() / scale).round().to(torch.int8), requires_grad=False)
        self.scale, self.bias = nn.Parameter(scale, requires_grad=False), base.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


class Halves(nn.Module):
    """A linear layer in float16, which computes in the dtype of its input."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(p.detach().half(), requires_grad=False) for p in (base.weight, base.bias)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def _lora_on(base: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    """Adapters on bases of another dtype, which layers.2 and the shell have without adapters too."""
    model = adapted(Chain(_blocks()), "fc1", "fc2")
    model.layers[2].requires_grad_(False)
    model.head.requires_grad_(True)
    for module in [m for m in model.modules() if isinstance(m, Adapted)]:
        module.base = base(module.base)
    model.embed = base(model.embed)
    return model


def _on_bitsandbytes(bits: int) -> nn.Module:
    from quantised import quantised  # not at the top: it imports the libraries

    return _lora_on(lambda linear: quantised(linear, bits))


def _lora() -> nn.Module:
    model = adapted(Chain(_blocks()), "fc1", "fc2")
    model.layers[2].requires_grad_(False)
    model.layers[3].fc2.base.bias.requires_grad_(True)
    model.head.requires_grad_(True)
    return model


def _lora_tied() -> nn.Module:
    """Adapters, and frozen weights, that two layers have in common."""
    model = adapted(Chain(_blocks()), "fc1")
    model.layers[2].fc1.a.weight = model.layers[0].fc1.a.weight
    model.layers[3].fc2.weight = model.layers[1].fc2.weight
    return model


def _tied_layers() -> nn.Module:
    model = Chain(_blocks())
    model.layers[2].fc1.weight = model.layers[0].fc1.weight
    return model


def _inplace() -> nn.Module:
    convs = [nn.Conv2d(channels, 16, 3, padding=1) for channels in (3, 16, 16, 16)]
    steps = [step for conv in convs for step in (conv, nn.ReLU(inplace=True))]
    return nn.Sequential(*steps, nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


def _lstm_stack() -> nn.Module:
    return LstmStack([nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3)])


def _spectral(spectral_norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return Chain([SpectralMlp(spectral_norm) for _ in range(3)])


def unet_pairs(rows: int = 4, seed: int = 0) -> Batch:
    """(image, image to be restored)"""
    image, _ = image_pairs(rows, seed)
    return image + 0.1 * torch.randn(image.shape, generator=_generator(seed + 1)), image


# --- transformers --------------------------------------------------------------------------------------------------


def _config(config_class: type, **settings: Any) -> Any:
    """A configuration in which every dropout probability is 0.1 (layer drop stays off: see `random_skip`)."""
    config = config_class(**settings)
    for name, value in config.to_dict().items():
        is_probability = value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if "drop" in name and "layerdrop" not in name and is_probability:
            setattr(config, name, 0.1)
    return config


def _bert_like(config_class: type, **settings: Any) -> Any:
    sizes = dict(hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2, intermediate_size=2 * WIDTH)
    return _config(config_class, vocab_size=VOCAB, **(sizes | dict(max_position_embeddings=32) | settings))


def _llama_like(config_class: type, **settings: Any) -> Any:
    return _bert_like(config_class, **(dict(num_key_value_heads=1, head_dim=16, pad_token_id=1) | settings))


def _gpt2(**settings: Any) -> nn.Module:
    sizes = dict(vocab_size=VOCAB, n_embd=WIDTH, n_layer=4, n_head=2, n_positions=32, bos_token_id=2, eos_token_id=2)
    return hf.GPT2LMHeadModel(_config(hf.GPT2Config, **sizes, **settings))


def _bert_classifier() -> nn.Module:
    return hf.BertForSequenceClassification(_bert_like(hf.BertConfig, num_labels=CLASSES))


def _gemma3() -> nn.Module:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    settings = dict(num_hidden_layers=4, layer_types=kinds, sliding_window=4)
    return hf.Gemma3ForCausalLM(_llama_like(hf.Gemma3TextConfig, **settings))


def _modernbert() -> nn.Module:
    settings = dict(num_hidden_layers=4, global_attn_every_n_layers=2, local_attention=4)
    ids = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2, cls_token_id=0, sep_token_id=2)
    return hf.ModernBertForMaskedLM(_bert_like(hf.ModernBertConfig, **settings, **ids))


def _mixture(config_class: type, model_class: type, **settings: Any) -> nn.Module:
    router = dict(num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.1)
    return model_class(_llama_like(config_class, **router, **settings))


def _vit() -> nn.Module:
    return hf.ViTForImageClassification(
        _config(
            hf.ViTConfig, image_size=16, patch_size=4, hidden_size=WIDTH, num_hidden_layers=3, num_attention_heads=2,
            intermediate_size=2 * WIDTH, num_labels=CLASSES,
        )
    )  # fmt: skip


def _swin() -> nn.Module:
    return hf.SwinForImageClassification(
        _config(
            hf.SwinConfig, image_size=32, patch_size=4, embed_dim=WIDTH, depths=[2, 2], num_heads=[2, 4],
            window_size=4, num_labels=CLASSES,
        )
    )  # fmt: skip


def _convnext() -> nn.Module:
    # The default layer scale of 1e-6 would hide the layers from the loss.
    settings = dict(hidden_sizes=[16, 32], depths=[2, 2], num_stages=2, layer_scale_init_value=0.5)
    return hf.ConvNextForImageClassification(_config(hf.ConvNextConfig, num_labels=CLASSES, **settings))


def _resnet() -> nn.Module:
    settings = dict(embedding_size=16, hidden_sizes=[16, 32], depths=[2, 1], layer_type="basic", num_labels=CLASSES)
    return hf.ResNetForImageClassification(_config(hf.ResNetConfig, **settings))


def _t5() -> nn.Module:
    return hf.T5ForConditionalGeneration(
        _config(
            hf.T5Config, vocab_size=VOCAB, d_model=WIDTH, d_kv=16, d_ff=2 * WIDTH, num_layers=2, num_heads=2,
            relative_attention_num_buckets=8, pad_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        )
    )  # fmt: skip


_SEQ2SEQ = dict(
    vocab_size=VOCAB, d_model=WIDTH, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
    decoder_attention_heads=2, encoder_ffn_dim=2 * WIDTH, decoder_ffn_dim=2 * WIDTH, pad_token_id=1, bos_token_id=0,
    eos_token_id=2, decoder_start_token_id=2,
)  # fmt: skip


def _bart() -> nn.Module:
    return hf.BartForConditionalGeneration(_config(hf.BartConfig, max_position_embeddings=32, **_SEQ2SEQ))


def _whisper() -> nn.Module:
    sizes = dict(num_mel_bins=FEATURES, max_source_positions=STEPS, max_target_positions=16)
    return hf.WhisperForConditionalGeneration(_config(hf.WhisperConfig, **sizes, **_SEQ2SEQ))


def _opt() -> nn.Module:
    settings = dict(ffn_dim=2 * WIDTH, word_embed_proj_dim=WIDTH, pad_token_id=1, bos_token_id=2, eos_token_id=2)
    return hf.OPTForCausalLM(_bert_like(hf.OPTConfig, **settings))


# --- the zoo -------------------------------------------------------------------------------------------------------


def _kind(name: str, build: Callable[[], nn.Module], make_batch: Callable[..., Batch], **fields: Any) -> Kind:
    def make_model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build().train()

    return Kind(name, make_model, make_batch, **fields)


def _pairs(name: str, build: Callable[[], nn.Module], batch: Callable[..., Batch] = sequences, **fields: Any) -> Kind:
    return _kind(name, build, batch, loss=cross_entropy, **fields)


KINDS: list[Kind] = [
    _pairs("chain", lambda: Chain(_blocks())),
    _pairs("looped", Looped, note="two layers, each visited twice"),
    _pairs("residual_outside", lambda: ResidualOutside([Mlp() for _ in range(4)])),
    _pairs("norm_outside", lambda: NormOutside([Mlp() for _ in range(4)])),
    _pairs("random_skip", lambda: RandomSkip(_blocks()), note="may skip every layer for a micro-batch"),
    _pairs("transposed", lambda: Transposed([ResidualMlp(STEPS) for _ in range(3)]), note="first input is a view"),
    _pairs("reversible", lambda: Reversible([Mlp(WIDTH // 2) for _ in range(4)]), note="first inputs are views"),
    _pairs("coupling", lambda: Coupling([Mlp(WIDTH // 2) for _ in range(3)]), note="every input is a view"),
    _pairs("lstm_stack", _lstm_stack, note="layers are bare nn.LSTM and return tuples"),
    _pairs("inplace", _inplace, image_pairs, note="the shell writes into layer outputs"),
    _pairs("frozen_layer", _frozen_layer, note="layers.1 frozen; unused parameters in layers.2 and in the shell"),
    _pairs("frozen_prefix", _frozen_prefix, note="the input of layers.2 needs no gradient"),
    _pairs("lora", _lora, note="adapters; layers.2 and the stem frozen, the head and a bias trained"),
    _pairs("lora_int8", lambda: _lora_on(Codes), note="adapters on frozen 8-bit integers, which keep their bytes"),
    _pairs("lora_float16", lambda: _lora_on(Halves), note="adapters on frozen weights in float16"),
    _pairs("lora_tied", _lora_tied, note="an adapter of layers.0 and layers.2 is one, and a frozen weight of 1 and 3"),
    _pairs("tied_layers", _tied_layers, note="layers.0 and layers.2 share fc1.weight"),
    _pairs("spectral_norm_old", lambda: _spectral(nn.utils.spectral_norm), note="weight is recomputed by a hook"),
    _pairs(
        "spectral_norm", lambda: _spectral(nn.utils.parametrizations.spectral_norm), note="buffers in a parametrization"
    ),
    _pairs("batch_norm", lambda: Chain([BatchNormMlp() for _ in range(3)])),
    _pairs("unlike", Unlike, layers=["widen", "mix", "recur", "attend"], note="no container: layers are named"),
    _kind(
        "mixture",
        lambda: Mixture([MixtureBlock() for _ in range(3)]),
        sequences,
        note="an expert may get no steps",
        loss_over="micro-batch",
    ),
    _kind(
        "by_depth", ByDepth, tokens, note="scalars, windows and embeddings beside the layers, read by their position"
    ),
    _kind("unet", UNet, unet_pairs),
    _kind("gpt2", _gpt2, tokens, note="tied embeddings"),
    _kind("gpt2_padded", _gpt2, padded_tokens, note="tied embeddings"),
    _kind("gpt2_untied", lambda: _gpt2(tie_word_embeddings=False), tokens),
    _kind("bert", lambda: hf.BertForMaskedLM(_bert_like(hf.BertConfig)), masked_tokens, note="tied embeddings"),
    _kind("bert_classifier", _bert_classifier, classified_tokens),
    _kind(
        "roberta", lambda: hf.RobertaForMaskedLM(_bert_like(hf.RobertaConfig)), masked_tokens, note="tied embeddings"
    ),
    _kind("llama", lambda: hf.LlamaForCausalLM(_llama_like(hf.LlamaConfig)), padded_tokens),
    _kind(
        "lora_llama",
        lambda: adapted(hf.LlamaForCausalLM(_llama_like(hf.LlamaConfig)), "q_proj", "v_proj"),
        padded_tokens,
        note="adapters; nothing of the shell is trained",
    ),
    _kind("qwen3", lambda: hf.Qwen3ForCausalLM(_llama_like(hf.Qwen3Config)), padded_tokens),
    _kind("gemma3", _gemma3, padded_tokens, note="a mask and a rotary table per kind of layer; tied embeddings"),
    _kind("modernbert", _modernbert, masked_tokens, note="a mask per kind of layer; tied embeddings"),
    _kind("gpt_neox", lambda: hf.GPTNeoXForCausalLM(_bert_like(hf.GPTNeoXConfig)), padded_tokens),
    _kind("opt", _opt, padded_tokens, note="tied embeddings"),
    _kind("vit", _vit, classified_images),
    _kind("swin", _swin, large_images, note="drop path; shifted windows"),
    _kind("convnext", _convnext, large_images, note="drop path; channels-last views"),
    _kind("resnet", _resnet, large_images, note="BatchNorm; no dropout; stages of 2 and 1 blocks"),
    _kind("t5", _t5, translated_tokens, note="one position bias for all layers of a stack; tied embeddings"),
    _kind("bart", _bart, translated_tokens, note="tied embeddings"),
    _kind("whisper", _whisper, transcribed_sound, note="tied embeddings"),
    _kind(
        "mixtral",
        lambda: _mixture(hf.MixtralConfig, hf.MixtralForCausalLM, num_local_experts=4),
        padded_tokens,
        loss_over="micro-batch",
    ),
    _kind(
        "qwen3_moe",
        lambda: _mixture(hf.Qwen3MoeConfig, hf.Qwen3MoeForCausalLM, num_experts=4, moe_intermediate_size=WIDTH),
        padded_tokens,
        note="router logits leave the layers by hooks",
        loss_over="micro-batch",
    ),
    _kind(
        "albert",
        lambda: hf.AlbertForMaskedLM(_bert_like(hf.AlbertConfig, embedding_size=16)),
        masked_tokens,
        note="one layer, visited three times; tied embeddings",
    ),
    _kind(
        "lora_albert",
        lambda: adapted(hf.AlbertForMaskedLM(_bert_like(hf.AlbertConfig, embedding_size=16)), "query", "value"),
        masked_tokens,
        note="adapters in one layer that is visited three times",
    ),
]
BY_NAME: dict[str, Kind] = {kind.name: kind for kind in KINDS}
# Kinds on layers of bitsandbytes, which not every machine has: not among KINDS, whose hashes are the same everywhere.
QUANTISED_KINDS: list[Kind] = [
    _pairs("lora_nf4", lambda: _on_bitsandbytes(4), note="adapters on NF4, whose scales and tables are loaded with it"),
    _pairs("lora_8_bits", lambda: _on_bitsandbytes(8), note="adapters on 8 bits, which compute in float16"),
]
# Kinds with frozen parameters of other dtypes than float32.
KEPT_DTYPES = {
    "lora_int8": torch.int8,
    "lora_float16": torch.float16,
    "lora_nf4": torch.uint8,
    "lora_8_bits": torch.int8,
}
