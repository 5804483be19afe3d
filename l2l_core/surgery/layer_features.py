"""What tells layers of one stack apart, and what a model would build at each position.

A layer's *features* are the shapes of its parameters by name, and the numbers and strings that its modules keep as
attributes. Features that differ between the layers of a stack are explained by the configuration (a list with one entry
per layer), or they belong to the position: only the first block of a T5 stack owns the position bias that all use. In
the second case other layers cannot stand there: the model that is built from the configuration would differ.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from l2l_core.model import is_compile_wrapper
from l2l_core.surgery.config_depth import is_config, name_words
from l2l_core.surgery.ties import ties_of

Feature = tuple[str, str]  # ("parameter" | "attribute", dotted name)
Features = Mapping[Feature, Hashable]

_TORCH_OWN = frozenset(vars(nn.Module())) | {"training"}
_POSITION_WORDS = {"id", "idx", "index", "number"}


@dataclass(frozen=True)
class LayerDescription:
    """Holds what is looked up in a layer once. Names only: it must not keep the layer alive.

    Attributes:
        features: what tells it apart. Equal features are the same object.
        positions: (submodule, attribute) of integers that may be the layer's position.
        configs: (submodule, attribute) of configuration objects.
    """

    features: Features
    positions: tuple[tuple[str, str], ...]
    configs: tuple[tuple[str, str], ...]


_descriptions: WeakKeyDictionary[nn.Module, LayerDescription] = (
    WeakKeyDictionary()
)  # an edit of 1,000 layers must not look again
_interned: dict[frozenset[tuple[Feature, Hashable]], Features] = {}
_built_features: dict[Hashable, list[Features]] = {}  # a layer that sits a step out asks the same thing every time
_MAX_BUILT = 64


def describe_layer(layer: nn.Module) -> LayerDescription:
    """Give the layer's anatomy, as it was when first asked for."""
    found = _descriptions.get(layer)
    if found is None:
        found = _descriptions[layer] = _describe(layer)
    return found


def layer_fingerprint(layer: nn.Module) -> str:
    """Compute a checksum of a layer but for weights and position: those of one kind compute alike with equal weights.

    It is stricter than features, which evidence is drawn from: classes of all parts, all settings (dropout and tuples
    too), and which parameters are one, count as well. What only code says (a function without a name) does not show.
    """
    known_of = describe_layer(layer)  # a layer that waits on disk has no shapes now
    positions = set(known_of.positions)
    rows: list[Any] = [(*name, shape) for name, shape in known_of.features.items() if name[0] == "parameter"]
    for path, module in layer.named_modules():
        rows.append((path, "class", type(module).__qualname__))
        buffers = module._buffers.items()
        rows += [(path, name, None if b is None else (tuple(b.shape), str(b.dtype))) for name, b in buffers]
        for name, value in () if is_compile_wrapper(module) else vars(module).items():
            if (
                not name.startswith("_")
                and name not in _TORCH_OWN
                and (path, name) not in positions
                and (known := _plain_setting(value)) is not None
            ):
                rows.append((path, name, known))
    return hashlib.sha256(repr((sorted(rows, key=repr), ties_of(layer))).encode()).hexdigest()


def _plain_setting(value: Any) -> Any:
    """Write a setting as something that is the same in every process; None for what is no setting."""
    if isinstance(value, bool | int | float | str | torch.dtype):
        return repr(value)
    if isinstance(value, tuple | list):
        return [_plain_setting(each) for each in value]
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), str(value.dtype)
    return getattr(value, "__qualname__", None) if callable(value) and not isinstance(value, nn.Module) else None


def forget_description(layer: nn.Module) -> None:
    """Forget the layer's anatomy: it may have been changed since it was last seen."""
    _descriptions.pop(layer, None)


def attributes_at(layer: nn.Module, path: str) -> dict[str, Any]:
    """Give the attributes of the submodule at `path` ("" is the layer itself)."""
    for part in path.split(".") if path else ():
        layer = layer._modules[part]  # type: ignore[assignment] - the path is of a module
    return vars(layer)


def _describe(layer: nn.Module) -> LayerDescription:
    features: dict[Feature, Hashable] = {("attribute", "class"): type(layer).__qualname__}
    positions, configs = [], []
    for path, module in layer.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                features["parameter", f"{path}.{name}".lstrip(".")] = tuple(param.shape)
        is_dropout = "drop" in type(module).__name__.lower()
        for name, value in vars(module).items():
            if name in _TORCH_OWN or name.startswith("_"):
                continue
            if is_config(name, value):
                configs.append((path, name))
            elif isinstance(value, int) and not isinstance(value, bool) and is_position_name(name):
                positions.append((path, name))
            elif isinstance(value, int | float | str) and not is_dropout and "drop" not in name:
                # Dropout may grow with depth; it is no part of what the layer computes in evaluation.
                features["attribute", f"{path}.{name}".lstrip(".")] = value
    key = frozenset(features.items())  # layers alike share one object, and are compared by identity
    return LayerDescription(_interned.setdefault(key, features), tuple(positions), tuple(configs))


def is_position_name(name: str) -> bool:
    """Tell whether an attribute of this name may hold a layer's position (layer_idx, layer_id, block_index, idx)."""
    parts = name_words(name)
    return bool(parts & _POSITION_WORDS) and (bool(parts & {"layer", "block"}) or parts <= _POSITION_WORDS)


def varying_features(features: Sequence[Features]) -> list[Feature]:
    """List the features in which some differ."""
    kinds = list({id(each): each for each in features}.values())
    names = dict.fromkeys(name for kind in kinds for name in kind)
    return [name for name in names if len({kind.get(name) for kind in kinds}) > 1]


def explain_feature(
    name: Feature, old: Sequence[Features], entries: Sequence[Hashable], new_entries: Sequence[Hashable]
) -> list[Hashable] | None:
    """Give the value of a feature at every new position as the entries of the configuration explain it.

    Args:
        old, entries: features and entries of the layers that stand in the stack.
        new_entries: the entries of the layers that are to stand there.

    Returns:
        One value per new position, `UNKNOWN` for an entry that is new; None if the entries do not explain the feature.
    """
    known: dict[Hashable, Hashable] = {}
    for entry, features in zip(entries, old, strict=True):
        if known.setdefault(entry, features.get(name)) != features.get(name):
            return None
    return [known.get(entry, UNKNOWN) for entry in new_entries]


UNKNOWN = object()


def extrapolate_feature(name: Feature, old: Sequence[Features], count: int) -> list[Hashable]:
    """Guess a feature at `count` positions by the old ones: they repeat, or the last one goes on."""
    values = [features.get(name) for features in old]
    for period in range(2, len(values) // 2 + 1):
        if all(value == values[i % period] for i, value in enumerate(values)):
            return [values[i % period] for i in range(count)]
    return [values[min(i, len(values) - 1)] for i in range(count)]


def features_as_built(model: nn.Module, config: Any, name: str) -> list[Features]:
    """Find the features of the layers in the container `name` that the model's class would build from `config`.

    Nothing is allocated: the model is built on the meta device. Any class may be here, so any exception may come.
    """
    key = type(model), type(config), repr(config.to_dict()), name  # by what it says: every edit has a copy of its own
    if key not in _built_features:
        while len(_built_features) >= _MAX_BUILT:
            del _built_features[next(iter(_built_features))]
        _built_features[key] = _build_on_meta(model, config, name)
    return _built_features[key]


def _build_on_meta(model: nn.Module, config: Any, name: str) -> list[Features]:
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.device("meta"):
        warnings.simplefilter("ignore")
        container = type(model)(config).get_submodule(name)
    layers = [child for child in container.children() if any(True for _ in child.parameters())]
    return [_describe(layer).features for layer in layers]


def describe_feature(name: Feature) -> str:
    """Word a feature for a message."""
    return ("parameter " if name[0] == "parameter" else "") + name[1]
