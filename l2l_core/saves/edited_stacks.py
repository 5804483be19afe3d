"""What a save has to say of edits, and how a relay over a model as it was, or as it is now, gets to the saved stacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from l2l_core.edits import Editor, History, JournalEntry, ModelStructure
from l2l_core.surgery import layer_fingerprint, ties_of


@dataclass(frozen=True)
class EditedStacks:
    """Tells of the stacks of an edited relay.

    Attributes:
        stacks: keys of the layers in order, by the name that the stack had first; one for each place.
        original: dotted names of the layers before any edit, by key; those of `first`.
        origin: by key, the original layer that it goes back to.
        made: keys given out so far, or passed over.
        journal: what was edited.
        kinds: checksum of what tells a layer apart, by key; see `kind_of`.
        sizes: number of members of the container, by its dotted name; those of `now`.
        stats: what the last step told of the shell and of each layer, by key.
        orders: of the optimizer's groups, see `GroupOrder.to_plain`.
        first, now: how the model was built before any edit, and is now.
        by_place: True, for the format: `stacks` have a key for each place.
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
    def from_editor(editor: Editor, history: History) -> EditedStacks:
        """Tell of a relay as it is now."""
        lineup = editor.registry
        now, first = lineup.structure, lineup.first_structure
        kinds = {unit.key: layer_fingerprint(unit.module) for unit in lineup.layers}
        sizes = {now.containers[name]: size for name, size in now.sizes.items()}
        stats = {unit.key: dict(unit.stats) for unit in lineup.units}
        origin, made, journal = lineup.origin, lineup.key_count, history.journal
        orders = editor.group_order.to_plain(lineup.first_names)
        told = now.stacks, first.layers, origin, made, journal, kinds, sizes, stats, first, now, orders
        return EditedStacks(*told)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> EditedStacks:
        """Read it from `asdict` of one, which JSON has made lists of."""
        builts = {name: ModelStructure(**plain[name]) for name in ("first", "now")}
        journal = tuple(JournalEntry(**row) for row in plain["journal"])
        return EditedStacks(**{**plain, "journal": journal, **builts})

    @property
    def is_edited(self) -> bool:
        """Whether the model may be another one than when the relay was made."""
        return bool(self.journal)

    def match_model(
        self, model: nn.Module, names: Mapping[str, str], kinds: Mapping[str, str], where: object
    ) -> ModelStructure:
        """Find how a model is built that is as it was before the edits, or as it is in the save.

        Args:
            model: the caller's.
            names: of the layers in the save, by key.
            kinds: what the save tells of layers, of parked ones too, by key; see `kind_of`.
            where: the save, for messages.

        Raises:
            ValueError: it is neither.
        """
        if self.first.layers == names:
            return self.now
        modules, ways = dict(model.named_modules()), [self.first, self.now]
        unlike = [_mismatch(built, model, modules) for built in ways]
        fitting = [built for built, why in zip(ways, unlike, strict=True) if not why]
        fitting.sort(
            key=lambda built: sum(key not in kinds for key in built.layers)
        )  # the one that can be compared best
        for is_alike in (_are_same, _are_alike):  # other settings will do, if layers that were alike still are
            for built in fitting:
                here = {key: layer_fingerprint(modules[name]) for key, name in built.layers.items() if key in kinds}
                if is_alike({key: kinds[key] for key in here}, here):
                    return built
        reasons = unlike if not fitting else ["its layers are others", "its layers are others"]
        raise ValueError(
            f"{where} was saved with other layers: the model is neither as it was when the relay was made ({reasons[0]}), nor "
            f"as it is in the save ({reasons[1]}). Build the model and the optimizer as they were when the relay was made"
        )

    def restore_into(self, editor: Editor, history: History) -> None:
        """Let a relay with the saved stacks go on with the same journal."""
        history.restore(self.journal, (), ())
        for unit in editor.registry.units:
            unit.stats.update(self.stats.get(unit.key, {}))


def _mismatch(built: ModelStructure, model: nn.Module, modules: Mapping[str, nn.Module]) -> str:
    """Say in what a model is not built so; empty if it is."""

    def reasons() -> Iterator[str]:
        for name in built.layers.values():
            if name not in modules:
                yield f"there is no {name}"
        for stack, size in built.sizes.items():
            there = modules.get(built.containers[stack])
            if there is None or len(there._modules) != size:
                yield f"{built.containers[stack] or 'the model'} has not {size} members"
        if _as_sets(built.ties) != _as_sets(ties_of(model)):
            yield "other weights are shared"

    return next(reasons(), "")


def _as_sets(ties: Sequence[Sequence[str]]) -> set[frozenset[str]]:
    return {frozenset(names) for names in ties}


def _are_same(saved: Mapping[str, str], here: Mapping[str, str]) -> bool:
    return saved == here


def _are_alike(saved: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Tell whether layers of one kind there are of one kind here, and of different ones otherwise."""
    pairs = {(saved[key], here[key]) for key in saved}
    return len(pairs) == len(set(saved.values())) == len(set(here.values()))
