"""The parameters of a model from its configuration alone: shapes of a layer and of the shell, counted without building it.

Read by attribute (`hidden_size` or `n_embd`, and so on), so no library of models is needed. Families: BERT and RoBERTa with
their masked-word head, GPT-2, Llama, Mistral, Qwen2 and Qwen3 with their language head, ViT with its classifier. Tests count
the real models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from l2l_core.eps.blocks import aligned

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ActivationSize:
    """Bytes that autograd keeps of a layer, per token: times the width, the inner width, and heads times length.

    Found by metering layers of these families at several sizes, with dropout where the family has it by default.
    """

    width: float
    inner: float
    scores: float

    def nbytes(self, model: ModelShapes, rows: int, length: int) -> int:
        """Return the bytes for one layer and one micro-batch of `rows` rows and `length` tokens each."""
        per_token = self.width * model.width + self.inner * model.inner + self.scores * model.heads * length
        return round(rows * length * per_token)


@dataclass(frozen=True, slots=True)
class ShellStorage:
    """A storage that a micro-batch keeps beside what layers hand on, as the CPU has it.

    Attributes:
        rows: whether there is one of every row, or one for all.
        wide: whether it has the width of a layer for every token.
        itemsize: bytes of an element; None for that of activations.
        reader: who reads it: all layers, the loss, the end of backward, or nobody, though it is there.
    """

    per_row: bool
    has_width: bool
    itemsize: int | None
    reader: Literal["layers", "loss", "end"] | None

    def nbytes(self, rows: int, length: int, width: int, itemsize: int) -> int:
        """Return its bytes for a micro-batch of `rows` rows of `length` tokens."""
        return (rows if self.per_row else 1) * length * (width if self.has_width else 1) * (self.itemsize or itemsize)


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What a forecast needs to know of a model.

    Attributes:
        layer, shell: shapes of their parameters; a tied one counts once.
        depth: layers.
        width, inner, heads: of a layer: hidden size, size inside of the MLP, attention heads.
        outputs: of the head, per token; of a classifier, per row.
        head_params: parameters of the shell that take part in a matrix product for every token.
        tied: whether the head's weight is the embedding's; then a gradient of the shell leaves with every micro-batch, twice.
        per_row: whether the head sees one token per row.
        length: tokens of a row, where the configuration fixes it (images), else None.
        graphs: what autograd keeps of a layer, by precision, where all of it is trained.
        adapters: shapes of those parameters of a layer that adapters have brought; then nothing else is trained.
        beside: what a micro-batch keeps beside what layers hand on; None where that is not known.
    """

    layer: tuple[Shape, ...]
    shell: tuple[Shape, ...]
    depth: int
    width: int
    inner: int
    heads: int
    outputs: int
    head_params: int
    tied: bool
    per_row: bool
    length: int | None
    activation_sizes: dict[str, ActivationSize]
    adapters: tuple[Shape, ...] = ()
    shell_storages: tuple[ShellStorage, ...] | None = None

    def with_adapters(self, shapes: Sequence[Shape]) -> ModelShapes:
        """Return the same model frozen, with trained parameters of these shapes in every layer."""
        beside = None if shapes else self.shell_storages  # a frozen shell keeps less, and that is not counted here
        return replace(self, layer=(*self.layer, *shapes), adapters=tuple(shapes), shell_storages=beside)

    @property
    def trained(self) -> tuple[tuple[Shape, ...], tuple[Shape, ...]]:
        """Shapes of what is trained: of a layer, of the shell."""
        return (self.adapters, ()) if self.adapters else (self.layer, self.shell)

    @property
    def num_params(self) -> int:
        """Parameters of the model."""
        return self.depth * self.layer_params + count_elements(self.shell)

    @property
    def layer_params(self) -> int:
        """Parameters of a layer."""
        return count_elements(self.layer)


def count_elements(shapes: tuple[Shape, ...]) -> int:
    """Count the elements of these shapes."""
    return sum(map(math.prod, shapes))


def slot_numel(shapes: tuple[Shape, ...]) -> int:
    """Count the elements of a flat buffer that holds parameters of these shapes, padding included."""
    return sum(aligned(math.prod(shape)) for shape in shapes)


def read_model_shapes(config: Any) -> ModelShapes:
    """Read the shapes of a model off its configuration, as transformers has it.

    Raises:
        ValueError: a family that is not known here; a forecast of the built model works for every one.
    """
    kind = getattr(config, "model_type", None)
    readers = {"gpt2": _gpt2, "vit": _vit}
    readers |= dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _bert)
    readers |= dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _llama)
    if kind not in readers:
        raise ValueError(
            f"there is no formula for model_type={kind!r}, only for {', '.join(readers)}: build the model, and Relay.forecast "
            "finds out by rehearsing"
        )
    return readers[kind](config)


def _linear(inputs: int, outputs: int, bias: bool = True) -> tuple[Shape, ...]:
    return ((outputs, inputs), (outputs,)) if bias else ((outputs, inputs),)


def _norm(width: int) -> tuple[Shape, ...]:
    return ((width,), (width,))


def _bert(config: Any) -> ModelShapes:
    width, inner, words = config.hidden_size, config.intermediate_size, config.vocab_size
    layer = (
        *_linear(width, width) * 4,  # query, key, value, output
        *_norm(width),
        *_linear(width, inner),
        *_linear(inner, width),
        *_norm(width),
    )
    head = (*_linear(width, width), *_norm(width), (words,))  # the bias of the outputs is the head's own, tied or not
    tables = ((words, width), (config.max_position_embeddings, width), (config.type_vocab_size, width), *_norm(width))
    own = () if getattr(config, "tie_word_embeddings", True) else _linear(width, words)
    return ModelShapes(
        layer=layer,
        shell=(*tables, *head, *own),
        depth=config.num_hidden_layers,
        width=width,
        inner=inner,
        heads=config.num_attention_heads,
        outputs=words,
        head_params=words * width + width * width,
        tied=not own,
        per_row=False,
        length=None,
        activation_sizes={"fp32": ActivationSize(48, 8, 12), "bf16": ActivationSize(31, 4, 12)},
    )


def _gpt2(config: Any) -> ModelShapes:
    width, words = config.n_embd, config.vocab_size
    inner = config.n_inner or 4 * width  # None is the default, and stands for that
    layer = (
        *_norm(width),
        *_linear(width, 3 * width),
        *_linear(width, width),
        *_norm(width),
        *_linear(width, inner),
        *_linear(inner, width),
    )
    own = () if getattr(config, "tie_word_embeddings", True) else ((words, width),)
    return ModelShapes(
        layer=layer,
        shell=((words, width), (config.n_positions, width), *_norm(width), *own),
        depth=config.n_layer,
        width=width,
        inner=inner,
        heads=config.n_head,
        outputs=words,
        head_params=words * width,
        tied=not own,
        per_row=False,
        length=None,
        activation_sizes={"fp32": ActivationSize(54, 20, 12), "bf16": ActivationSize(33, 10, 12)},
        shell_storages=(
            ShellStorage(True, False, 8, "end"),  # ids
            ShellStorage(True, False, 8, "loss"),  # labels
            ShellStorage(False, False, 8, "layers"),  # numbers of positions
            ShellStorage(False, True, None, None),  # their embeddings
            ShellStorage(True, True, None, None),  # those of tokens
            *([ShellStorage(True, True, None, "end")] if config.embd_pdrop else []),  # what dropout has drawn
        ),
    )


def _llama(config: Any) -> ModelShapes:
    width, inner, words, kind = config.hidden_size, config.intermediate_size, config.vocab_size, config.model_type
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or width // heads  # Qwen3 says it, and it need not be width // heads
    bias = bool(getattr(config, "attention_bias", False))
    bias_in = bias or kind == "qwen2"  # whose queries, keys and values have biases that no setting tells of
    layer = (
        *_linear(width, heads * size, bias_in),
        *_linear(width, groups * size, bias_in) * 2,
        *_linear(heads * size, width, bias),
        *((size,),) * (2 if kind == "qwen3" else 0),  # norms of queries and of keys
        *_linear(width, inner, bool(getattr(config, "mlp_bias", False))) * 2,
        *_linear(inner, width, bool(getattr(config, "mlp_bias", False))),
        (width,),
        (width,),
    )
    own = () if config.tie_word_embeddings else ((words, width),)
    return ModelShapes(
        layer=layer,
        shell=((words, width), (width,), *own),
        depth=config.num_hidden_layers,
        width=width,
        inner=inner,
        heads=heads,
        outputs=words,
        head_params=words * width,
        tied=not own,
        per_row=False,
        length=None,
        # no scores: without dropout in attention, which is the default here, the fused kernel keeps none
        activation_sizes={"fp32": ActivationSize(36, 16, 0), "bf16": ActivationSize(26, 8, 0)},
    )


def _vit(config: Any) -> ModelShapes:
    width, inner, labels = config.hidden_size, config.intermediate_size, config.num_labels
    bias = bool(getattr(config, "qkv_bias", True))
    layer = (
        *_linear(width, width, bias) * 3,
        *_linear(width, width),
        *_norm(width) * 2,
        *_linear(width, inner),
        *_linear(inner, width),
    )
    size, patch = (_to_pair(getattr(config, name)) for name in ("image_size", "patch_size"))
    patches = (size[0] // patch[0]) * (size[1] // patch[1])
    patch_shape = (width, config.num_channels, *patch)
    shell = ((1, 1, width), (1, patches + 1, width), patch_shape, (width,), *_norm(width), *_linear(width, labels))
    return ModelShapes(
        layer=layer,
        shell=shell,
        depth=config.num_hidden_layers,
        width=width,
        inner=inner,
        heads=config.num_attention_heads,
        outputs=labels,
        head_params=math.prod(patch_shape),
        tied=False,
        per_row=True,
        length=patches + 1,
        activation_sizes={"fp32": ActivationSize(48, 8, 0), "bf16": ActivationSize(31, 4, 0)},
    )


def _to_pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
