"""Configurations of transformers made small, by the names of their settings; and batches that fit a model's inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

WIDTH, HEADS, LAYERS, VOCABULARY, LENGTH, ROWS, CLASSES = 32, 4, 2, 99, 12, 4, 3

# Names of settings, as model families call them; the value that each gets. Nothing is set that a configuration has not.
_WIDTHS = (
    "hidden_size d_model n_embd embed_dim dim emb_dim embedding_size model_dim word_embed_proj_dim hidden_dim".split()
)
_HEADS = (
    "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_key_value_heads "
    "num_kv_heads attention_heads encoder_num_attention_heads decoder_num_attention_heads encoder_num_key_value_heads "
    "decoder_num_key_value_heads"
).split()
_DEPTHS = (
    "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers num_encoder_layers "
    "encoder_num_hidden_layers decoder_num_hidden_layers num_blocks"
).split()
_INNER = (
    "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim d_inner n_inner ffn_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size mlp_dim dim_feedforward feed_forward_proj_dim expert_ffn_hidden_size"
).split()
_HEAD_DIMS = "head_dim d_kv kv_channels v_head_dim attention_head_size".split()
_POSITIONS = "max_position_embeddings n_positions max_source_positions max_target_positions n_ctx max_seq_len".split()
_TOKENS = (
    "pad_token_id bos_token_id eos_token_id decoder_start_token_id cls_token_id sep_token_id mask_token_id".split()
)
_FIXED = {
    **dict.fromkeys(_WIDTHS, WIDTH),
    **dict.fromkeys(_HEADS, HEADS),
    **dict.fromkeys(_DEPTHS, LAYERS),
    **dict.fromkeys(_INNER, 2 * WIDTH),
    **dict.fromkeys(_HEAD_DIMS, WIDTH // HEADS),
    **dict.fromkeys(_POSITIONS, 64),
    "vocab_size": VOCABULARY,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4,
    "num_experts_per_tok": 2, "moe_k": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "image_size": 32, "num_mel_bins": 16, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_heads": 8, "state_size": 8,
    "num_labels": CLASSES,
}  # fmt: skip


def shrunk(config: Any) -> Iterator[tuple[str, Any]]:
    """Copies of a configuration, from the smallest on; the first that makes a model which trains is the one to take."""
    yield "all sizes", _with(config, _FIXED, lists=True)
    yield "all sizes but lists", _with(config, _FIXED, lists=False)
    yield "widths stay", _with(config, _without(_WIDTHS, _HEADS, _HEAD_DIMS, _INNER, ["image_size"]), lists=False)
    yield "depth and vocabulary only", _with(config, {n: _FIXED[n] for n in [*_DEPTHS, "vocab_size"]}, lists=False)


def _without(*names: list[str]) -> dict[str, int]:
    left_out = {name for each in names for name in each}
    return {name: value for name, value in _FIXED.items() if name not in left_out}


def _with(config: Any, sizes: dict[str, int], lists: bool) -> Any:
    small = copy.deepcopy(config)
    for part in _parts(small):
        had = vars(part)
        alias = getattr(type(part), "attribute_map", {})
        names = {alias.get(name, name): value for name, value in sizes.items()}
        for name, value in names.items():
            if isinstance(had.get(name), int) and not isinstance(had[name], bool) and had[name] > value:
                _set(part, name, value)
        vocabulary = getattr(part, "vocab_size", None) or VOCABULARY
        for name in _TOKENS:
            if isinstance(had.get(name), int) and had[name] >= vocabulary:
                _set(part, name, 1)
        for name in ("pad_token_id", "decoder_start_token_id"):  # which some families leave to the tokenizer
            if getattr(part, name, None) is None:
                _set(part, name, 1)
        if lists:
            for name, value in list(vars(part).items()):
                if isinstance(value, list) and value and all(type(item) is int for item in value):
                    _set(part, name, _small_list(name, value))
        depth = next((vars(part)[n] for n in (alias.get(n, n) for n in _DEPTHS) if n in vars(part)), None)
        for name in ("layer_types", "layers_block_type", "block_types", "mlp_layer_types"):
            if isinstance(depth, int) and isinstance(had.get(name), list | tuple):
                _set(
                    part, name, (list(dict.fromkeys(had[name])) * depth)[:depth]
                )  # one of each kind, as far as it goes
    return small


def _set(part: Any, name: str, value: Any) -> None:
    try:
        setattr(part, name, value)
    except Exception:  # a configuration that checks one setting against another: the next way of shrinking is tried
        vars(part)[name] = value


def _parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _parts(value)


def _small_list(name: str, values: list[int]) -> list[int]:
    if "depth" in name or "layers" in name or "blocks" in name:
        return [min(value, 2) for value in values]
    if "size" in name or "dim" in name or "channel" in name or "width" in name:
        return [max(8, value // 8) if value >= 32 else value for value in values]
    return values


# -- batches ---------------------------------------------------------------------------------------------------------

Batch = dict[str, torch.Tensor]


def batches(model: nn.Module, task: str) -> Iterator[Callable[[int], Batch]]:
    """Ways to make a batch of `ROWS` rows from a seed, for a model and what it is trained for; the first that it takes counts."""
    config, name = model.config, getattr(model, "main_input_name", "input_ids")
    text = getattr(config, "get_text_config", lambda: config)()
    vocabulary = getattr(text, "vocab_size", None) or VOCABULARY
    for shape in _shapes(config, name):

        def make(seed: int, shape: tuple[int, ...] = shape) -> Batch:
            generator = torch.Generator().manual_seed(seed)
            if name in ("input_ids", "decoder_input_ids"):
                inputs = {"input_ids": torch.randint(5, vocabulary, shape, generator=generator)}
            else:
                inputs = {name: torch.randn(shape, generator=generator)}
            return inputs | _labels(task, inputs, vocabulary, config, generator)

        yield make


def _shapes(config: Any, name: str) -> list[tuple[int, ...]]:
    if name == "pixel_values":
        side = getattr(config, "image_size", None) or 64
        height, width = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(config, "num_channels", None) or 3
        return [(ROWS, channels, height, width), (ROWS, channels, 64, 64), (ROWS, channels, 224, 224)]
    if name == "input_values":
        side = (getattr(config, "max_length", 64), getattr(config, "num_mel_bins", 16))
        return [(ROWS, 4000), (ROWS, *side), (ROWS, 1, *side)]
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80
        frames = 2 * (getattr(config, "max_source_positions", None) or 32)
        wide = getattr(config, "feature_size", None) or getattr(config, "feature_projection_input_dim", None) or 160
        return [(ROWS, bins, frames), (ROWS, frames, bins), (ROWS, 64, wide), (ROWS, 1, 64, bins)]
    return [(ROWS, LENGTH), (ROWS, 32)]


def _labels(task: str, inputs: Batch, vocabulary: int, config: Any, generator: torch.Generator) -> Batch:
    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    classes = getattr(config, "num_labels", CLASSES)
    given = next(iter(inputs.values()))
    if task in ("causal", "masked"):
        return {"labels": given.clone()}
    if task in ("sequence to sequence", "speech"):
        return {"labels": draw(vocabulary - 5, ROWS, LENGTH) + 5}
    if task == "ctc":
        return {"labels": draw(vocabulary - 5, ROWS, 3) + 5}
    if task == "tokens":
        return {"labels": draw(classes, *given.shape[:2])}
    if task == "questions":
        return {"start_positions": draw(given.shape[1], ROWS), "end_positions": draw(given.shape[1], ROWS)}
    if task == "segmentation":
        return {"labels": draw(classes, ROWS, *given.shape[-2:])}
    return {"labels": draw(classes, ROWS)}
