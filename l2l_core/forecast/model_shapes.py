"""Shapes of a model's parameters from its configuration, without building the model.

Configurations are read by attribute, without the transformers library. Families: BERT and RoBERTa with the masked-word head,
GPT-2, Llama, Mistral, Qwen2 and Qwen3 with the language head, ViT with the classifier. Tests compare with the real models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from l2l_core.eps.blocks import aligned

Shape = tuple[int, ...]
Reader = Literal["layers", "loss", "end"] | None


@dataclass(frozen=True, slots=True)
class ActivationSize:
    """Bytes per token that autograd keeps of a layer: coefficients of the width, the inner width, and heads times length.

    Measured on layers of these families at several sizes, with dropout where the family has it by default.
    """

    width: float
    inner: float
    scores: float

    def nbytes(self, model: ModelShapes, rows: int, length: int) -> int:
        """Return the bytes for one layer and one micro-batch of `rows` rows of `length` tokens."""
        per_token = self.width * model.width + self.inner * model.inner + self.scores * model.heads * length
        return round(rows * length * per_token)


@dataclass(frozen=True, slots=True)
class ShellStorage:
    """A storage that a micro-batch keeps besides inputs of layers, as measured on the CPU."""

    per_row: bool  # grows with the number of rows
    has_width: bool  # has as many elements per token as a layer is wide
    itemsize: int | None  # None: as activations
    reader: Reader  # all layers, the loss, the end of backward, or none

    def nbytes(self, rows: int, length: int, width: int, itemsize: int) -> int:
        """Return its bytes for a micro-batch of `rows` rows of `length` tokens."""
        return (rows if self.per_row else 1) * length * (width if self.has_width else 1) * (self.itemsize or itemsize)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShapes:
    """Shapes of the parameters of a layer and of the shell, and other sizes of a model."""

    layer: tuple[Shape, ...]
    shell: tuple[Shape, ...]  # a tied parameter counts once
    depth: int  # layers
    width: int  # hidden size
    inner: int  # hidden size of the MLP
    heads: int
    outputs: int  # of the head, per token; of a classifier, per row
    head_params: int  # of the shell in matrix products for every token
    activation_sizes: dict[str, ActivationSize]  # by precision, if all of a layer is trained
    tied: bool = False  # the head's weight is the embedding's; then each micro-batch pushes two gradients of the shell
    per_row: bool = False  # the head reads one token per row
    length: int | None = None  # tokens of a row, if the configuration fixes it (images)
    adapters: tuple[Shape, ...] = ()  # parameters added to a layer; then only these are trained
    quantised: tuple[Shape, ...] = ()  # matrices of a layer in NF4, which are not in `layer`
    shell_storages: tuple[ShellStorage, ...] | None = None  # None without a formula

    def with_adapters(self, shapes: Sequence[Shape], quantised: bool = False) -> ModelShapes:
        """Return the model frozen, with trained parameters of these shapes added to every layer.

        If `quantised`, the matrices of layers are in NF4.
        """
        storages = None if shapes else self.shell_storages  # a frozen shell keeps fewer, for which there is no formula
        matrices = tuple(shape for shape in self.layer if quantised and len(shape) == 2)
        rest = tuple(shape for shape in self.layer if not (quantised and len(shape) == 2))
        added = tuple(shapes)
        return replace(self, layer=(*rest, *added), adapters=added, quantised=matrices, shell_storages=storages)

    @property
    def trained(self) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """Shapes of the trained parameters of a layer and of the shell."""
        return (self.adapters, ()) if self.adapters else (self.layer, self.shell)

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return self.depth * self.layer_params + count_elements(self.shell)

    @property
    def layer_params(self) -> int:
        """Parameters of a layer."""
        return count_elements((*self.layer, *self.quantised))

    @property
    def quantised_bytes(self) -> int:
        """Bytes of the quantised matrices of a layer, padding included."""
        return sum(nf4_bytes(math.prod(shape)) for shape in self.quantised)


def count_elements(shapes: Sequence[Shape]) -> int:
    """Count the elements of these shapes."""
    return sum(map(math.prod, shapes))


def slot_numel(shapes: Sequence[Shape]) -> int:
    """Count the elements of a flat buffer for parameters of these shapes, padding included."""
    return sum(aligned(math.prod(shape)) for shape in shapes)


def nf4_bytes(numel: int) -> int:
    """Return the bytes of a matrix in bitsandbytes' NF4 with nested statistics, as a slot holds its parts.

    Two codes per byte, a byte of scale per 64 codes, four bytes per 256 scales, an offset, and two tables (QLoRA, arXiv
    2305.14314).
    """
    scales = -(-numel // 64)
    return sum(aligned(nbytes, 1) for nbytes in (-(-numel // 2), scales, 4 * -(-scales // 256), 4, 4 * 16, 4 * 256))


def read_model_shapes(config: Any) -> ModelShapes:
    """Read the shapes of a model from its transformers configuration.

    Raises:
        ValueError: a family without a formula; a forecast of the built model works for every family.
    """
    kind = getattr(config, "model_type", None)
    readers = {"gpt2": _gpt2, "vit": _vit}
    readers |= dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _bert)
    readers |= dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama)
    if kind not in readers:
        raise ValueError(
            f"model_type={kind!r} has no formula; formulas exist for {', '.join(readers)}. Build the model and call "
            "Relay.forecast, which measures by rehearsing"
        )
    return readers[kind](config)


def _linear(inputs: int, outputs: int, bias: bool = True) -> tuple[Shape, ...]:
    return ((outputs, inputs), (outputs,)) if bias else ((outputs, inputs),)


def _norm(width: int) -> tuple[Shape, ...]:
    return ((width,), (width,))


def _mlp(width: int, inner: int) -> tuple[Shape, ...]:
    return (*_linear(width, inner), *_linear(inner, width))


def _layer_sizes(config: Any) -> dict[str, Any]:
    return {
        "depth": config.num_hidden_layers,
        "width": config.hidden_size,
        "inner": config.intermediate_size,
        "heads": config.num_attention_heads,
    }


def _bert(config: Any) -> ModelShapes:
    width, inner, words = config.hidden_size, config.intermediate_size, config.vocab_size
    head = (*_linear(width, width), *_norm(width), (words,))  # the outputs have a bias, tied or not
    tables = ((words, width), (config.max_position_embeddings, width), (config.type_vocab_size, width), *_norm(width))
    untied = () if getattr(config, "tie_word_embeddings", True) else _linear(width, words)
    return ModelShapes(
        **_layer_sizes(config),
        layer=(*_linear(width, width) * 4, *_norm(width), *_mlp(width, inner), *_norm(width)),
        shell=(*tables, *head, *untied),
        outputs=words,
        head_params=words * width + width * width,
        tied=not untied,
        activation_sizes={"fp32": ActivationSize(48, 8, 12), "bf16": ActivationSize(31, 4, 12)},
    )


def _gpt2(config: Any) -> ModelShapes:
    width, words = config.n_embd, config.vocab_size
    inner = config.n_inner or 4 * width
    attention = (*_linear(width, 3 * width), *_linear(width, width))
    untied = () if getattr(config, "tie_word_embeddings", True) else ((words, width),)
    return ModelShapes(
        depth=config.n_layer,
        width=width,
        inner=inner,
        heads=config.n_head,
        layer=(*_norm(width), *attention, *_norm(width), *_mlp(width, inner)),
        shell=((words, width), (config.n_positions, width), *_norm(width), *untied),
        outputs=words,
        head_params=words * width,
        tied=not untied,
        activation_sizes={"fp32": ActivationSize(54, 20, 12), "bf16": ActivationSize(33, 10, 12)},
        shell_storages=(
            ShellStorage(True, False, 8, "end"),  # ids
            ShellStorage(True, False, 8, "loss"),  # labels
            ShellStorage(False, False, 8, "layers"),  # position ids
            ShellStorage(False, True, None, None),  # position embeddings
            ShellStorage(True, True, None, None),  # token embeddings
            *([ShellStorage(True, True, None, "end")] if config.embd_pdrop else []),  # dropout mask
        ),
    )


def _llama(config: Any) -> ModelShapes:
    width, inner, words, kind = config.hidden_size, config.intermediate_size, config.vocab_size, config.model_type
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or width // heads
    bias, mlp_bias = bool(getattr(config, "attention_bias", False)), bool(getattr(config, "mlp_bias", False))
    bias_in = bias or kind == "qwen2"  # its queries, keys and values have biases in any configuration
    layer = (
        *_linear(width, heads * size, bias_in),
        *_linear(width, groups * size, bias_in) * 2,
        *_linear(heads * size, width, bias),
        *((size,),) * (2 if kind == "qwen3" else 0),  # norms of queries and keys
        *_linear(width, inner, mlp_bias) * 2,
        *_linear(inner, width, mlp_bias),
        (width,),
        (width,),
    )
    untied = () if config.tie_word_embeddings else ((words, width),)
    return ModelShapes(
        **_layer_sizes(config),
        layer=layer,
        shell=((words, width), (width,), *untied),
        outputs=words,
        head_params=words * width,
        tied=not untied,
        # No scores: attention has no dropout by default, and the fused kernel keeps none.
        activation_sizes={"fp32": ActivationSize(36, 16, 0), "bf16": ActivationSize(26, 8, 0)},
    )


def _vit(config: Any) -> ModelShapes:
    width, labels = config.hidden_size, config.num_labels
    qkv = _linear(width, width, bool(getattr(config, "qkv_bias", True))) * 3
    height_width, patch = (
        (size, size) if isinstance(size, int) else tuple(size) for size in (config.image_size, config.patch_size)
    )
    patches = math.prod(side // part for side, part in zip(height_width, patch, strict=True))
    patch_shape = (width, config.num_channels, *patch)
    return ModelShapes(
        **_layer_sizes(config),
        layer=(*qkv, *_linear(width, width), *_norm(width) * 2, *_mlp(width, config.intermediate_size)),
        shell=((1, 1, width), (1, patches + 1, width), patch_shape, (width,), *_norm(width), *_linear(width, labels)),
        outputs=labels,
        head_params=math.prod(patch_shape),
        per_row=True,
        length=patches + 1,
        activation_sizes={"fp32": ActivationSize(48, 8, 0), "bf16": ActivationSize(31, 4, 0)},
    )
