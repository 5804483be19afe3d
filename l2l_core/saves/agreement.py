"""What a relay must agree in with a save to take it over."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from l2l_core.model import Tensors
from l2l_core.saves.manifest import Saved
from l2l_core.saves.state import State

logger = logging.getLogger("l2l_core")


def check(saved: Saved, state: State) -> None:
    """Whether the relay that `state` was taken from can take over a save.

    Raises:
        ValueError: it is of another model or optimizer.
    """
    told, path = saved.manifest, saved.path
    compare_layers(saved, told["units"], state.keys_and_names)
    _compare(path, "parameters and buffers", _shapes(saved.generation.tensors), _shapes(state.tensors))
    if "ties" in told:
        _compare(path, "shared weights", _tied(told["ties"]), _tied(state.ties))
    _compare(path, "blocks of weights", _together(told["versions"]), _together(state.versions))
    _compare(path, "frozen parameters", _trained(told["trainable"]), _trained(state.trainable))
    _compare(path, "the optimizer", {"class": told["optimizer"]}, {"class": state.optimizer_class})
    _compare(path, "parameter groups", _members(told["groups"]), _members(state.groups()))
    if told["torch"] != torch.__version__:
        logger.warning("%s is by torch %s, here is %s: bits may differ", path, told["torch"], torch.__version__)


def compare_layers(save: Saved, saved: Iterable[Sequence[str]], live: Iterable[Sequence[str]]) -> None:
    """Compare keys and names of units.

    Raises:
        ValueError: they differ.
    """
    _compare(save.path, "layers", _listed(saved), _listed(live))


def _compare(path: Path, what: str, saved: Mapping[str, str], live: Mapping[str, str]) -> None:
    pairs = {name: (saved.get(name, "absent"), live.get(name, "absent")) for name in {**saved, **live}}
    unlike = [f"{name}: {a} in the save, {b} here" for name, (a, b) in pairs.items() if a != b]
    if unlike:
        raise ValueError(
            f"{path} was saved with other {what} ({len(unlike)} differ: {'; '.join(unlike[:3])}). Build the "
            "model and the optimizer as they were when it was saved, and change them after loading"
        )


def _shapes(tensors: Tensors) -> dict[str, str]:
    """What a model's tensors must agree in."""
    own = {name: t for name, t in tensors.items() if name.startswith(("weights/", "buffers/"))}
    return {name: f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in own.items()}


def _listed(units: Iterable[Sequence[str]]) -> dict[str, str]:
    return {f"[{index}]": f"{key} {name}" for index, (key, name) in enumerate(units)}


def _members(groups: Sequence[Sequence[str]]) -> dict[str, str]:
    members = {name: f"group {index}" for index, names in enumerate(groups) for name in names}
    return members | {"number of groups": str(len(groups))}


def _tied(ties: Iterable[Sequence[str]]) -> dict[str, str]:
    return {name: f"one with {', '.join(sorted({*names} - {name}))}" for names in ties for name in names}


def _together(versions: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(versions, "present")


def _trained(names: Iterable[str]) -> dict[str, str]:
    return dict.fromkeys(names, "trained")
