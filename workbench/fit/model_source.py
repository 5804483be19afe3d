"""Models of a fit: a folder, a file, a configuration, a name or a module, and code that makes it.

A configuration is enough for the families in `l2l_core/forecast/model_shapes.py`. Others are built, to be measured.
"""

from __future__ import annotations

import pprint
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from l2l_core.forecast import read_model_shapes

# Published configurations by name: model type, and the values that differ from the defaults of its class.
PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bert-base": ("bert", {}),
    "bert-large": (
        "bert",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "vit-base": ("vit", {}),
    "t5-small": ("t5", {"decoder_start_token_id": 0}),
    "llama-1b": (
        "llama",
        {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_key_value_heads": 4},
    ),
    "llama-7b": ("llama", {}),
    "llama-8b": (
        "llama",
        {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 8192},
    ),
    "llama-70b": (
        "llama",
        {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
        | {"num_key_value_heads": 8},
    ),
    "qwen2-7b": ("qwen2", {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944}
        | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}),
}  # fmt: skip
ALIASES = {"llama": "llama-7b", "bert": "bert-base", "vit": "vit-base", "t5": "t5-small", "qwen2": "qwen2-7b"}

_IMAGE_SIZE = 224  # of configurations that leave it open, such as ResNet's
# Heads in the order in which a family's is looked up, since several families have more than one.
_HEADS = {  # class that builds the model, and the mapping from configurations that have it
    "AutoModelForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    "AutoModelForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING",
    "AutoModelForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING",
    "AutoModelForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
}


@dataclass(frozen=True)
class ModelSource:
    """A model that may not exist yet, and the code that makes it.

    Attributes:
        name: for the title.
        config: configuration of transformers; None for a module.
        code: lines that define `config`, or lines that explain where `model` and `batch` are.
        module: the module itself, if one was given.
        weights: folder with the weights of the configuration; "" without one.
        options: names of the arguments, such as `loss`, that were given with a module.
        part_code, loss_code: expressions for micro-batch `k` of `count`, and for its loss.
    """

    name: str
    config: Any = None
    code: str = ""
    module: nn.Module | None = field(default=None, compare=False)
    weights: str = ""
    options: tuple[str, ...] = ()
    part_code: str = "{name: value.chunk(count)[k].to(device) for name, value in batch.items()}"
    loss_code: str = "model(**part).loss"

    @property
    def has_formula(self) -> bool:
        """True if bytes follow from the configuration alone."""
        if self.config is None:
            return False
        try:
            read_model_shapes(self.config)
        except ValueError:
            return False
        return True

    @property
    def auto_class(self) -> str:
        """Name of the class of transformers that builds the model with its head.

        Raises:
            ValueError: a family with none of the heads.
        """
        import transformers

        for name, mapping in _HEADS.items():
            if type(self.config) in getattr(transformers, mapping):
                return name
        raise ValueError(
            f"model_type={self.config.model_type!r} has no head of {', '.join(_HEADS)}: build the model, and give it with a "
            "batch: Fit(model, batch=batch)"
        )

    def build(self) -> nn.Module:
        """Return the module, or a new one of the configuration with random weights."""
        import transformers

        if self.module is not None:
            return self.module
        torch.manual_seed(0)
        model = getattr(transformers, self.auto_class).from_config(self.config).train()
        if getattr(model, "loss_type", "") is None:
            model.loss_type = "ForCausalLM"  # the fallback of transformers, which warns about it
        return model

    @property
    def num_params(self) -> int:
        """Number of parameters, counted without memory for them."""
        import transformers

        if self.module is not None:
            return sum(param.numel() for param in self.module.parameters())
        with torch.device("meta"):
            model = getattr(transformers, self.auto_class).from_config(self.config)
        return sum(param.numel() for param in model.parameters())

    def length_of(self, length: int) -> int:
        """Return the tokens of a row: as given, or as the configuration of an image model fixes them."""
        return (read_model_shapes(self.config).length or length) if self.has_formula else length

    def check_length(self, length: int) -> None:
        """Refuse rows longer than the positions of the model.

        Raises:
            ValueError: the length is too large.
        """
        most = getattr(self.config, "max_position_embeddings", None)
        if most is not None and length > most:
            raise ValueError(
                f"length={length}: {self.name} has {most} positions, so a row has at most {most} tokens (length={most}). Or "
                "give a configuration with a larger max_position_embeddings"
            )

    def batch_code(self, rows: int, length: int) -> str:
        """Return lines that make a random batch of these sizes."""
        if self.config is None:
            return ""
        if self.auto_class == "AutoModelForImageClassification":
            side = getattr(self.config, "image_size", _IMAGE_SIZE)
            height, width = (side, side) if isinstance(side, int) else side
            return (
                f"batch = {{  # random: put your own data here\n"
                f'    "pixel_values": torch.randn({rows}, {self.config.num_channels}, {height}, {width}),\n'
                f'    "labels": torch.randint({self.config.num_labels}, ({rows},)),\n'
                f"}}"
            )
        return (
            f"tokens = torch.randint(2, config.vocab_size, ({rows}, {length}))  # random: put your own data here\n"
            f'batch = {{"input_ids": tokens, "labels": tokens}}'
        )

    def make_batch(self, rows: int, length: int) -> Any:
        """Return the batch that `batch_code` makes."""
        names: dict[str, Any] = {"torch": torch, "config": self.config}
        exec(self.batch_code(rows, length), names)
        return names["batch"]


def read_model(model: Any, batch: Any = None, options: Mapping[str, Any] | None = None) -> ModelSource:
    """Read a model from a module, a configuration, a folder, a config.json or the name of a preset.

    Args:
        model: one of these.
        batch: for a module.
        options: arguments of a `Relay` for a module, such as `loss`.

    Raises:
        TypeError: none of these, or a module without a batch.
        ValueError: no such file, folder or preset.
    """
    if isinstance(model, nn.Module):
        return _module(model, batch, options or {})
    if hasattr(model, "model_type"):
        return ModelSource(f"a {model.model_type} of your configuration", model, _config_code(model))
    if not isinstance(model, str | Path):
        raise TypeError(
            f"model={model!r} is a {type(model).__name__}: give a folder or a config.json, a configuration of transformers, a "
            f"module with batch=, or a name: {', '.join([*ALIASES, *PRESETS])}"
        )
    name = ALIASES.get(str(model).lower(), str(model).lower())
    return _preset(name) if name in PRESETS else _file(Path(model))


def _module(model: nn.Module, batch: Any, options: Mapping[str, Any]) -> ModelSource:
    if batch is None:
        raise TypeError(
            f"model is a module ({type(model).__name__}), which is measured on a batch: give one, Fit(model, batch=batch)"
        )
    given = ", ".join(["model", "batch", *options])
    is_mapping, loss = isinstance(batch, Mapping), options.get("loss")
    call = "model(**part)" if is_mapping else "model(*part)" if loss is None else "model(*part[:-1])"
    loss_code = f"{call}.loss"
    if "objective" in options:
        loss_code = "objective(model, part)"
    elif isinstance(loss, nn.Module) or getattr(loss, "__module__", "") == "torch.nn.functional":
        loss_code = f"loss({call}, part[-1])"  # a criterion takes outputs and targets
    elif loss is not None:
        loss_code = f"loss({call}, part)"
    return ModelSource(
        type(model).__name__,
        code=f"# {given}: yours, so run this where they are defined",
        module=model,
        options=tuple(options),
        part_code=ModelSource.part_code if is_mapping else "[value.chunk(count)[k].to(device) for value in batch]",
        loss_code=loss_code,
    )


def _preset(name: str) -> ModelSource:
    from transformers import AutoConfig

    kind, values = PRESETS[name]
    config = AutoConfig.for_model(kind, **values)
    arguments = "".join(f", {key}={value!r}" for key, value in values.items())
    return ModelSource(name, config, f"config = AutoConfig.for_model({kind!r}{arguments})")


def _file(path: Path) -> ModelSource:
    from transformers import AutoConfig

    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(
            f"model={str(path)!r}: neither a folder with a config.json, nor a file, nor one of the names "
            f"{', '.join([*ALIASES, *PRESETS])}"
        )
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    config = AutoConfig.from_pretrained(path)
    code = f"config = AutoConfig.from_pretrained({str(path)!r})"
    return ModelSource(path.name, config, code, weights=str(path) if has_weights else "")


def _config_code(config: Any) -> str:
    values = {key: value for key, value in config.to_diff_dict().items() if key != "transformers_version"}
    return f"config = AutoConfig.for_model(**{pprint.pformat(values, sort_dicts=False, width=100)})"
