"""Record of edits in a save, and its comparison with the model that is to load it."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from l2l_core.edits import Editor, History, JournalEntry, ModelStructure
from l2l_core.eps.blocks import Unit
from l2l_core.surgery import layer_fingerprint, ties_of


@dataclass(frozen=True)
class EditedStacks:
    """Stacks of an edited relay, as they are saved.

    Attributes:
        stacks: keys of the layers in order, one for each place, by the first name of the stack.
        original: dotted names of the layers before any edit, by key; those of `first`.
        origin: the original layer from which each layer derives, by key.
        made: number of keys given out or skipped so far.
        journal: the edits.
        kinds: fingerprint of each layer, by key; see `layer_fingerprint`.
        sizes: number of members of each container, by its dotted name; those of `now`.
        stats: statistics of the last step, by key of the shell or layer.
        orders: order of the optimizer's groups; see `GroupOrder.to_plain`.
        first: structure of the model before any edit.
        now: present structure of the model.
        by_place: always True; marks the format in which `stacks` has a key for each place.
    """

    stacks: dict[str, list[str]]
    original: dict[str, str]
    origin: dict[str, str]
    made: int
    journal: tuple[JournalEntry, ...]
    kinds: dict[str, str]
    sizes: dict[str, int]
    stats: dict[str, dict[str, float]]
    first: ModelStructure
    now: ModelStructure
    orders: list[Any]
    by_place: bool = True

    @staticmethod
    def from_editor(editor: Editor, history: History, order: Sequence[Unit]) -> EditedStacks:
        """Describe the present stacks of a relay, whose layers run in `order`."""
        registry = editor.registry
        first, now = registry.structures_to_save(order)
        kinds = {unit.key: layer_fingerprint(unit.module) for unit in registry.layers}
        sizes = {now.containers[name]: size for name, size in now.sizes.items()}
        stats = {unit.key: dict(unit.stats) for unit in registry.units}
        origin, made, journal = registry.origin, registry.key_count, history.journal
        orders = editor.group_order.to_plain(registry.first_names)
        return EditedStacks(now.stacks, first.layers, origin, made, journal, kinds, sizes, stats, first, now, orders)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> EditedStacks:
        """Return the stacks from the result of `asdict`, after JSON has turned tuples into lists."""
        structures = {name: ModelStructure(**plain[name]) for name in ("first", "now")}
        journal = tuple(JournalEntry(**row) for row in plain["journal"])
        return EditedStacks(**{**plain, "journal": journal, **structures})

    @property
    def is_edited(self) -> bool:
        """Whether the model may differ from the one with which the relay was made."""
        return bool(self.journal)

    def match_model(
        self, model: nn.Module, names: Mapping[str, str], kinds: Mapping[str, str], where: object
    ) -> ModelStructure:
        """Return the structure that a model has: that before the edits, or that in the save `where`.

        `names` and `kinds` are the names and fingerprints of the layers in the save, by key.

        Raises:
            ValueError: the model has neither structure.
        """
        if self.first.layers == names:
            return self.now
        modules, structures = dict(model.named_modules()), [self.first, self.now]
        reasons = [_mismatch(structure, model, modules) for structure in structures]
        candidates = [structure for structure, reason in zip(structures, reasons, strict=True) if not reason]
        # First the one with fewer layers that cannot be compared
        candidates.sort(key=lambda structure: sum(key not in kinds for key in structure.layers))
        for matches in (
            operator.eq,
            _are_alike,
        ):  # layers with other settings match if layers that were alike still are
            for structure in candidates:
                here = {key: layer_fingerprint(modules[name]) for key, name in structure.layers.items() if key in kinds}
                if matches({key: kinds[key] for key in here}, here):
                    return structure
        if candidates:
            reasons = ["the layers differ", "the layers differ"]
        raise ValueError(
            f"{where} was saved with other layers: the model is neither as it was when the relay was made ({reasons[0]}), nor "
            f"as it is in the save ({reasons[1]}). Build the model and the optimizer as they were when the relay was made"
        )

    def restore_into(self, editor: Editor, history: History) -> None:
        """Restore the journal and the statistics in a relay with the saved stacks."""
        history.restore(self.journal, (), ())
        for unit in editor.registry.units:
            unit.stats.update(self.stats.get(unit.key, {}))


def _mismatch(structure: ModelStructure, model: nn.Module, modules: Mapping[str, nn.Module]) -> str:
    """Return the first difference between a model and a structure, or ""."""
    for name in structure.layers.values():
        if name not in modules:
            return f"the model has no {name}"
    for stack, size in structure.sizes.items():
        name = structure.containers[stack]
        container = modules.get(name)
        if container is None or len(container._modules) != size:
            return f"{name or 'the model'} has not {size} members"
    return "other weights are shared" if _as_sets(structure.ties) != _as_sets(ties_of(model)) else ""


def _as_sets(ties: Sequence[Sequence[str]]) -> set[frozenset[str]]:
    return {frozenset(names) for names in ties}


def _are_alike(saved: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Return whether layers have equal fingerprints here exactly where they have in the save."""
    pairs = {(saved[key], here[key]) for key in saved}
    return len(pairs) == len(set(saved.values())) == len(set(here.values()))
