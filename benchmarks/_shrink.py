"""Configurations of transformers made small, by the names of their settings; and batches that fit a model's inputs."""

from __future__ import annotations

import copy
import inspect
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

# Where the above is not enough: rarer sizes, and settings that a configuration may leave open but its model needs.
_RARER = {
    **_FIXED,
    **dict.fromkeys("cross_num_attention_heads cross_num_key_value_heads num_self_attention_heads".split(), HEADS),
    **dict.fromkeys("n_mamba_heads num_key_value_attention_heads".split(), HEADS),
    **dict.fromkeys("l_layers x_layers r_layers num_self_attends_per_block num_kv_shared_layers".split(), LAYERS),
    **dict.fromkeys("cross_hidden_size cross_attention_hidden_size hidden_size_global out_hidden_size".split(), WIDTH),
    **dict.fromkeys("embedding_dim entity_emb_size d_latents output_hidden_size ple_embed_dim".split(), WIDTH),
    **dict.fromkeys("decoder_vocab_size entity_vocab_size vocab_size_per_layer_input".split(), VOCABULARY),
    **dict.fromkeys("encoder_hash_byte_group_vocab ngram_vocab_size_base codebook_vocab_size".split(), VOCABULARY),
    **dict.fromkeys("num_cross_attention_heads n_groups cross_attn_k num_codebooks".split(), 1),
    **dict.fromkeys("cross_head_dim hidden_size_per_layer_input laurel_rank index_head_dim hc_lowrank".split(), 8),
    "rotary_dim": 4, "feed_forward_size": 2 * WIDTH, "index_topk": 4, "index_n_heads": 4, "zero_expert_num": 2,
    "context_size": 16, "num_latents": 8, "subsampling_conv_channels": 8, "num_patches": 16, "visual_feat_dim": 16,
    "num_conv_pos_embedding_groups": 2, "upsample_groups": WIDTH, "num_filters": 4, "width_coefficient": 0.25,
    "depth_coefficient": 0.5,
}  # fmt: skip
_NEEDED = {
    "head_dim": WIDTH // HEADS, "num_key_value_heads": HEADS, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "vocab_size": VOCABULARY, "pad_token_id": 1,
    "cross_attention_hidden_size": WIDTH, "rope_theta": 10000.0, "clip_qkv": 8.0, "indexer_n_heads": HEADS,
    "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 4, "indexer_compress_ratio": 2,
    "upsample_out_channels": [8], "upsample_kernel_sizes": [4], "conv_out_channels": [8], "conv_kernel_sizes": [1],
}  # fmt: skip
_KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")


def shrunk(config: Any, task: str) -> Iterator[tuple[str, Any]]:
    """Copies of a configuration, from the smallest on; the first that makes a model which trains is the one to take."""
    yield "all sizes", _with(config, _FIXED, lists=True)
    yield "all sizes but lists", _with(config, _FIXED, lists=False)
    yield "all sizes, fitted", _fitted(config, task)
    yield "widths stay", _with(config, _without(_WIDTHS, _HEADS, _HEAD_DIMS, _INNER, ["image_size"]), lists=False)
    yield "depth and vocabulary only", _with(config, {n: _FIXED[n] for n in [*_DEPTHS, "vocab_size"]}, lists=False)


def _without(*names: list[str]) -> dict[str, int]:
    left_out = {name for each in names for name in each}
    return {name: value for name, value in _FIXED.items() if name not in left_out}


def _with(config: Any, sizes: dict[str, int], lists: bool) -> Any:
    small = copy.deepcopy(config)
    for part in parts(small):
        had = vars(part)
        alias = getattr(type(part), "attribute_map", {})
        names = {alias.get(name, name): value for name, value in sizes.items()}
        for name, value in names.items():
            if type(had.get(name)) in (int, type(value)) and had[name] > value:
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
        _thin(part)
    return small


def _thin(part: Any) -> None:
    """Two layers of each kind that a configuration lists, or fewer where it has fewer: a relay needs what repeats."""
    at = _depth_of(part)
    listed = {name: list(vars(part)[name]) for name in _KINDS if isinstance(vars(part).get(name), list | tuple)}
    if at is None or not listed:
        return
    depth = min(
        max(vars(part)[at], LAYERS * max(len(set(kinds)) for kinds in listed.values())),
        min(len(kinds) for kinds in listed.values()),
    )
    _set(part, at, depth)
    for name, kinds in listed.items():
        _set(part, name, (list(dict.fromkeys(kinds)) * depth)[:depth])


def _fitted(config: Any, task: str) -> Any:
    """Return all sizes, adjusted to the constraints between them."""
    small = _with(config, _RARER, lists=True)
    flags = {"use_cache": False, "axial_pos_embds": False, "is_decoder": task == "causal"}
    for part, whole in zip(parts(small), parts(config), strict=True):
        for name, value in _NEEDED.items():
            if _get(part, name) is None:
                _set(part, name, value)
        for name, value in flags.items():
            if isinstance(_get(part, name), bool):
                _set(part, name, value)
        _fit_attention(part, whole)
        _fit_mamba(part)
        _fit_taps(part, whole, 4 if task == "segmentation" else 0)
        _fit_lists(part, whole)
    return small


def _get(part: Any, name: str) -> Any:
    try:
        return getattr(part, name, None)
    except Exception:  # of a configuration whose layers differ, which must be read layer by layer
        return vars(part).get(name)


def _fit_attention(part: Any, whole: Any) -> None:
    had = vars(part)
    heads, groups = _get(whole, "num_attention_heads"), _get(whole, "num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int) and groups < heads:
        _set(part, "num_key_value_heads", HEADS // 2)
    if "qk_rope_head_dim" in had and "qk_nope_head_dim" in had:
        _set(part, "qk_head_dim", had["qk_rope_head_dim"] + had["qk_nope_head_dim"])
        if _get(whole, "head_dim") == _get(whole, "qk_head_dim"):
            _set(part, "head_dim", had["qk_head_dim"])
    if "layer_types" in had and had["layer_types"] is None:
        _set(part, "layer_types", ["full_attention"] * part.num_hidden_layers)
    if had.get("rope_parameters") == {}:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        _set(part, "rope_parameters", dict.fromkeys(_get(part, "layer_types") or [], rope) or rope)
    if had.get("num_codebooks") and "audio_pad_token_id" in had:  # the last row of an embedding of all codebooks
        _set(part, "audio_pad_token_id", part.vocab_size + part.num_codebooks * part.codebook_vocab_size)


def _fit_mamba(part: Any) -> None:
    """Heads times their size is the inner width."""
    had = vars(part)
    expand = had.get("mamba_expand", had.get("expand"))
    inner = WIDTH * int(expand or 2)
    pairs = {"mamba_n_heads": "mamba_d_head", "n_mamba_heads": "mamba_headdim", "num_heads": "head_dim"}
    for heads, size in pairs.items():
        if expand and heads in had and size in had:
            _set(part, size, inner // had[heads])
    if had.get("mamba_d_ssm"):
        _set(part, "mamba_d_ssm", inner)
    if "attention_hidden_size" in had and "attention_head_dim" in had:
        _set(part, "attention_hidden_size", 2 * WIDTH)
        _set(part, "attention_head_dim", 2 * WIDTH // HEADS)
    if "hybrid_layer_ids" in had and "layers_block_type" in had:
        _set(part, "hybrid_layer_ids", [k for k, kind in enumerate(part.layers_block_type) if kind == "hybrid"])


def _fit_taps(part: Any, whole: Any, at_least: int) -> None:
    """Where a backbone gives out what is after several of its layers, it has these layers."""
    name = next((n for n in ("backbone_out_indices", "out_indices", "_out_indices") if vars(whole).get(n)), None)
    at = _depth_of(part)
    if name is None or at in (None, "num_stages"):
        return
    count = max(len(vars(whole)[name]), at_least)
    _set(part, at, count + 1)
    if "stage_names" in vars(part):
        _set(part, "stage_names", ["stem", *(f"stage{k + 1}" for k in range(count + 1))])
    _set(part, name.removeprefix("_"), list(range(1, count + 1)))


def _fit_lists(part: Any, whole: Any) -> None:
    """A list of a value a layer ends with the layers; a tuple of sizes is a list of sizes; a factor counts for all."""
    if (factor := vars(whole).get("width_coefficient")) and "hidden_dim" in vars(whole):
        _set(part, "hidden_dim", round(whole.hidden_dim * part.width_coefficient / factor))
    if "num_stages" in vars(part):
        _set(part, "num_stages", whole.num_stages)
    elif at := _depth_of(part):
        for name, value in vars(whole).items():
            if isinstance(value, list | tuple) and len(value) == vars(whole)[at] and name not in _KINDS:
                kept = vars(part)[name][: vars(part)[at]]
                _set(part, name, [HEADS] * len(kept) if "heads" in name else kept)
    for name, value in list(vars(part).items()):
        if isinstance(value, tuple) and value and all(type(item) is int for item in value):
            if min(value) >= 32 or "depth" in name:
                _set(part, name, tuple(_small_list(name, list(value))))


def _depth_of(part: Any) -> str | None:
    alias = getattr(type(part), "attribute_map", {})
    return next((n for n in (alias.get(n, n) for n in _DEPTHS) if isinstance(vars(part).get(n), int)), None)


def _set(part: Any, name: str, value: Any) -> None:
    try:
        setattr(part, name, value)
    except Exception:  # a configuration that checks one setting against another: the next way of shrinking is tried
        vars(part)[name] = value


def parts(config: Any) -> Iterator[Any]:
    """A configuration and those inside it."""
    yield config
    for value in list(vars(config).values()):
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from parts(value)


def _small_list(name: str, values: list[int]) -> list[int]:
    if "depth" in name or "layers" in name or "blocks" in name:
        return [min(value, 2) for value in values]
    if "size" in name or "dim" in name or "channel" in name or "width" in name:
        return [max(8, value // 8) if value >= 32 else value for value in values]
    return values


# -- batches ---------------------------------------------------------------------------------------------------------

Batch = dict[str, torch.Tensor]
_LIKE = {"image": "pixel_values", "speech": "input_values"}  # what a model that calls it "inputs" takes


def batches(model: nn.Module, task: str) -> Iterator[Callable[[int], Batch]]:
    """Ways to make a batch of `ROWS` rows from a seed, for a model and what it is trained for; the first that it takes counts."""
    config, name = model.config, getattr(model, "main_input_name", "input_ids")
    takes = inspect.signature(model.forward).parameters
    text = getattr(config, "get_text_config", lambda: config)()
    vocabulary = getattr(text, "vocab_size", None) or VOCABULARY
    like = name if name != "inputs" else _LIKE.get(task, "input_ids")
    for more in (False, True):
        for shape in _shapes(config, like):

            def make(seed: int, shape: tuple[int, ...] = shape, more: bool = more) -> Batch:
                generator = torch.Generator().manual_seed(seed)
                if like in ("input_ids", "decoder_input_ids"):
                    key = name.removeprefix("decoder_")
                    inputs = {key: torch.randint(5, vocabulary, shape, generator=generator)}
                else:
                    inputs = {name: torch.randn(shape, generator=generator)}
                labels = _labels(task, inputs, vocabulary, config, generator)
                if not more:
                    return inputs | labels
                return _more(inputs, takes, task, config, generator) | _other_labels(
                    labels, inputs, takes, task, config, generator
                )

            yield make


def _more(inputs: Batch, takes: Any, task: str, config: Any, generator: torch.Generator) -> Batch:
    """Inputs that some families need: marks at the places where their tokenizers set them, and further inputs."""
    name, given = next(iter(inputs.items()))
    if name == "input_ids":
        _mark(given, getattr(config, "eos_token_id", None), [-1])
        if task == "questions":
            _mark(given, getattr(config, "sep_token_id", None), [2, 3, -1])
    sides = [side for part in parts(config) if isinstance(side := getattr(part, "image_size", None), int)]
    frames = LENGTH * (_setting(config, "audio_length_per_tok") or 0)
    shapes = {
        "bbox": (ROWS, *given.shape[1:2], 8),
        "visual_feats": (ROWS, 5, _setting(config, "visual_feat_dim") or 0),
        "visual_pos": (ROWS, 5, 4),
        "pixel_values": (ROWS, 3, *2 * [max(sides, default=0)]),
        "input_features": (ROWS, _setting(config, "num_mel_bins") or 0, frames),
    }
    for extra, shape in shapes.items():
        if extra in takes and extra not in inputs and 0 not in shape:
            inputs[extra] = torch.rand(shape, generator=generator)
    if "spatial_shapes" in takes and (patches := _setting(config, "num_patches")):
        inputs["pixel_attention_mask"] = torch.ones(ROWS, patches, dtype=torch.long)
        inputs["spatial_shapes"] = torch.full((ROWS, 2), int(patches**0.5))
    if name == "input_features" and "attention_mask" in takes:
        inputs["attention_mask"] = torch.ones(given.shape[:2], dtype=torch.long)
    return inputs


def _other_labels(
    labels: Batch, inputs: Batch, takes: Any, task: str, config: Any, generator: torch.Generator
) -> Batch:
    """Those of several channels of tokens, and of questions with one answer out of a few."""
    channels = getattr(getattr(config, "decoder_config", None), "num_channels", None)
    if task == "speech" and "input_ids" in inputs and channels:
        return {"labels": torch.randint(VOCABULARY, (ROWS, channels), generator=generator)}
    if task == "causal" and getattr(config, "num_codebooks", None) == 1:
        return {"labels": inputs["input_ids"].unsqueeze(-1).clone()}
    if "labels" in takes and not labels.keys() <= takes.keys():
        answers = _setting(config, "num_qa_labels") or CLASSES
        return {"labels": torch.randint(answers, (ROWS,), generator=generator)}
    return labels


def _mark(tokens: torch.Tensor, mark: Any, columns: list[int]) -> None:
    """A token of that kind in these columns and nowhere else."""
    if isinstance(mark, int):
        tokens.masked_fill_(tokens == mark, mark - 1)
        tokens[:, columns] = mark


def _setting(config: Any, name: str) -> Any:
    """Of the configuration or of the first inside it that has it."""
    return next((vars(part)[name] for part in parts(config) if vars(part).get(name)), None)


def _shapes(config: Any, name: str) -> list[tuple[int, ...]]:
    if name == "pixel_values":
        side = getattr(config, "image_size", None) or 64
        height, width = side if isinstance(side, list | tuple) else (side, side)
        channels = getattr(config, "num_channels", None) or 3
        pictures = [(ROWS, channels, height, width), (ROWS, channels, 64, 64), (ROWS, channels, 224, 224)]
        if (patches := _setting(config, "num_patches")) and (size := _setting(config, "patch_size")):
            pictures.append((ROWS, patches, channels * size**2))
        return pictures
    if name == "input_values":
        side = (getattr(config, "max_length", 64), getattr(config, "num_mel_bins", 16))
        return [(ROWS, 4000), (ROWS, *side), (ROWS, 1, *side)]
    if name == "input_features":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", None) or 80
        frames = 2 * (getattr(config, "max_source_positions", None) or 32)
        inner = [(ROWS, 64, times * (_setting(config, "num_mel_bins") or bins)) for times in (1, 4)]
        wide = getattr(config, "feature_size", None) or getattr(config, "feature_projection_input_dim", None) or 160
        return [(ROWS, bins, frames), (ROWS, frames, bins), (ROWS, 64, wide), (ROWS, 1, 64, bins), *inner]
    if hasattr(config, "codebook_vocab_size") and (books := getattr(config, "num_codebooks", None)):
        return [(ROWS, LENGTH, books + 1)]
    return [(ROWS, LENGTH), (ROWS, 32), (ROWS, 64)]


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
