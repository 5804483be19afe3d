"""Comparison of a save with the relay that is to load it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from l2l_core.saves.relay_state import RelayState
from l2l_core.saves.saved_relay import SavedRelay

logger = logging.getLogger("l2l_core")


def check_compatible(saved: SavedRelay, state: RelayState) -> None:
    """Refuse a save that does not match the relay with the given state.

    Raises:
        ValueError: it belongs to another model or optimizer.
    """
    manifest, live = saved.manifest, state.outline()
    for entry, (what, listed) in _ENTRIES.items():
        _compare(saved.path, what, listed(manifest[entry]), listed(live[entry]))
    if manifest["torch"] != torch.__version__:
        message = "%s was written with torch %s, and this is %s: results may differ in rounding"
        logger.warning(message, saved.path, manifest["torch"], torch.__version__)


def compare_layers(path: Path, saved: Iterable[Sequence[str]], live: Iterable[Sequence[str]]) -> None:
    """Compare keys and names of units; `path` is the save, for the message.

    Raises:
        ValueError: they differ.
    """
    _compare(path, "layers", _index_units(saved), _index_units(live))


def _compare(path: Path, what: str, saved: Mapping[str, str], live: Mapping[str, str]) -> None:
    pairs = {name: (saved.get(name, "absent"), live.get(name, "absent")) for name in {**saved, **live}}
    unlike = [f"{name}: {a} in the save, {b} here" for name, (a, b) in pairs.items() if a != b]
    if unlike:
        raise ValueError(
            f"{path} was saved with other {what} ({len(unlike)} differ: {'; '.join(unlike[:3])}). Build the "
            "model and the optimizer as they were when it was saved, and change them after loading"
        )


def _index_units(units: Iterable[Sequence[str]]) -> dict[str, str]:
    return {f"[{index}]": f"{key} {name}" for index, (key, name) in enumerate(units)}


def _list_ties(ties: Iterable[Sequence[str]]) -> dict[str, str]:
    return {name: f"one with {', '.join(sorted({*names} - {name}))}" for names in ties for name in names}


def _list_groups(groups: Sequence[Sequence[str]]) -> dict[str, str]:
    members = {name: f"group {index}" for index, names in enumerate(groups) for name in names}
    return members | {"number of groups": str(len(groups))}


# Entries of the manifest to compare, in this order: the name for messages, and a function that lists the items
_ENTRIES: dict[str, tuple[str, Callable[[Any], dict[str, str]]]] = {
    "units": ("layers", _index_units),
    "shapes": ("parameters and buffers", dict),
    "ties": ("shared weights", _list_ties),
    "versions": ("blocks of weights", lambda versions: dict.fromkeys(versions, "present")),
    "trainable": ("frozen parameters", lambda names: dict.fromkeys(names, "trained")),
    "optimizer": ("the optimizer", lambda name: {"class": name}),
    "groups": ("parameter groups", _list_groups),
}
