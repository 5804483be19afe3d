"""Edits of a stack that lies in files: training goes on as in core, undo is exact, and the folder has one stack or the other."""

import copy
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from beside import Beside, kind_of, parameter, relay_of
from on_shelf import ROWS, assert_same, compared, in_core, relay_on, state_of, train, weights_of
from oracle import InCore
from shelf_writes import Cut, at_every_write
from torch import nn
from zoo import BY_NAME, Chain, Kind, ResidualMlp

from l2l_core import (
    Delink,
    Drop,
    Duplicate,
    Freeze,
    Insert,
    Interpolate,
    LayerDrop,
    Loops,
    Move,
    Relay,
    Replace,
    Swap,
    Unfreeze,
    Unroll,
)
from l2l_core.edits import Edit

KIND = BY_NAME["chain"]
Layers = list[nn.Module]


def twin_of(plain: InCore, layer: nn.Module, state: bool) -> nn.Module:
    """Copy a layer of the in-core side by hand, with its optimizer's state or without."""
    new = copy.deepcopy(layer)
    for old, param in zip(layer.parameters(), new.parameters(), strict=True):
        group = next(g for g in plain.optimizer.param_groups if any(p is old for p in g["params"]))
        group["params"].append(param)
        if state and old in plain.optimizer.state:
            plain.optimizer.state[param] = copy.deepcopy(plain.optimizer.state[old])
    return new


def joined(plain: InCore, like: nn.Module, module: nn.Module) -> nn.Module:
    """Give a module of our own to the in-core side's optimizer."""
    new = twin_of(plain, like, state=False)
    new.load_state_dict(module.state_dict())
    return new


def half(layer: nn.Module) -> nn.Module:
    new = copy.deepcopy(layer)
    with torch.no_grad():
        for param in new.parameters():
            param.mul_(0.5)
    return new


def module_for(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ResidualMlp()


def placed(plain: InCore, layers: Layers, at: int, new: nn.Module) -> Layers:
    return [*layers[:at], new, *layers[at:]]


def frozen(layers: Layers, which: list[int], trained: bool) -> Layers:
    for i in which:
        layers[i].requires_grad_(trained)
    return layers


# An edit of the relay, and what becomes of the layers of the in-core side, by hand
EDITS: dict[str, tuple[Edit, Callable[[InCore, Layers], Layers]]] = {
    "drop": (Drop(1), lambda plain, old: [old[0], *old[2:]]),
    "drop two": (Drop(slice(1, 3)), lambda plain, old: [old[0], *old[3:]]),
    "drop to disk": (Drop(1, park="disk"), lambda plain, old: [old[0], *old[2:]]),
    "swap": (Swap(0, -1), lambda plain, old: [old[-1], *old[1:-1], old[0]]),
    "move": (Move(0, 2), lambda plain, old: [old[1], old[2], old[0], *old[3:]]),
    "freeze": (Freeze(slice(0, 2)), lambda plain, old: frozen(old, [0, 1], False)),
    "insert a copy": (
        Insert(at=2, init="copy", optimizer="copy"),
        lambda plain, old: placed(plain, old, 2, twin_of(plain, old[1], True)),
    ),
    "insert a copy without state": (
        Insert(at=0, like=2, init="copy"),
        lambda plain, old: placed(plain, old, 0, twin_of(plain, old[2], False)),
    ),
    "insert a module": (
        Insert(at=2, module=module_for(5)),
        lambda plain, old: placed(plain, old, 2, joined(plain, old[1], module_for(5))),
    ),
    "replace": (
        Replace(1, module_for(6)),
        lambda plain, old: [old[0], joined(plain, old[1], module_for(6)), *old[2:]],
    ),
    "double": (
        Duplicate(mode="interleaved"),
        lambda plain, old: [each for layer in old for each in (layer, twin_of(plain, layer, True))],
    ),
}


def edit_in_core(plain: InCore, change: Callable[[InCore, Layers], Layers]) -> Layers:
    """Edit the in-core side; returns the layers of before."""
    before = list(plain.model.layers)
    plain.model.layers = nn.ModuleList(change(plain, list(before)))
    return before


@pytest.mark.parametrize("name", EDITS)
def test_training_goes_on_as_in_core_and_so_it_does_after_undo_and_redo(name: str, folder: Path) -> None:
    edit, change = copy.deepcopy(EDITS[name][0]), EDITS[name][1]
    with compared(folder, KIND) as (relay, plain):
        train(relay, plain, 2)
        relay.apply(edit)
        before = edit_in_core(plain, change)
        after = list(plain.model.layers)
        assert_same(weights_of(relay), state_of(plain.model))
        train(relay, plain, 2)
        relay.undo()
        plain.model.layers = nn.ModuleList(before).requires_grad_(True)
        assert_same(weights_of(relay), state_of(plain.model))
        train(relay, plain, 2)
        relay.redo()
        plain.model.layers = nn.ModuleList(change(plain, before) if name == "freeze" else after)
        train(relay, plain, 1)


def made_by_hand(
    plain: InCore, old: Layers, at: int, like: int, weights: dict[str, torch.Tensor], scale: float
) -> Layers:
    """A layer whose weights the edit has chosen, with the state of another one, scaled."""
    new = twin_of(plain, old[like], state=bool(scale))
    with torch.no_grad():
        for name, param in new.named_parameters():
            param.copy_(weights[f"layers.{at}.{name}"])
            if scale:
                plain.optimizer.state[param]["exp_avg"] *= scale
                plain.optimizer.state[param]["exp_avg_sq"] *= scale**2
    return placed(plain, old, at, new)


@pytest.mark.parametrize(
    ("edit", "like", "scale"),
    [
        (Insert(at=2), 1, 0.0),
        (Insert(at=2, init="fresh"), 1, 0.0),
        (Insert(at=1, init="interpolate", optimizer=0.5), 0, 0.5),
    ],
    ids=["identity", "fresh", "interpolate"],
)
def test_layers_that_are_made(edit: Insert, like: int, scale: float, folder: Path) -> None:
    with compared(folder, KIND) as (relay, plain):
        train(relay, plain, 2)
        batch = KIND.make_batch(ROWS, 7)
        before, loss = weights_of(relay), relay.evaluate(batch)
        relay.apply(edit)
        weights = weights_of(relay)
        if edit.preserves_function:
            assert relay.evaluate(batch) == loss
        if edit.init == "interpolate":
            for name in dict(plain.model.layers[0].named_parameters()):
                middle = torch.lerp(before[f"layers.0.{name}"], before[f"layers.1.{name}"], 0.5)
                assert torch.equal(weights[f"layers.1.{name}"], middle)
        old = edit_in_core(plain, lambda plain, old: made_by_hand(plain, old, edit.at, like, weights, scale))
        train(relay, plain, 2)
        relay.undo()
        plain.model.layers = nn.ModuleList(old)
        train(relay, plain, 1)


def test_a_layer_that_is_moved_towards_another(folder: Path) -> None:
    with compared(folder, KIND) as (relay, plain):
        train(relay, plain, 2)
        relay.apply(Interpolate(1, 2, 0.25))
        layer, other, state = plain.model.layers[1], plain.model.layers[2], plain.optimizer.state
        before = [(param, param.detach().clone(), copy.deepcopy(state[param])) for param in layer.parameters()]
        with torch.no_grad():
            for param, theirs in zip(layer.parameters(), other.parameters(), strict=True):
                param.copy_(torch.lerp(param, theirs, 0.25))
                for name in ("exp_avg", "exp_avg_sq"):
                    state[param][name] = torch.lerp(state[param][name], state[theirs][name], 0.25)
        train(relay, plain, 1)
        relay.undo()
        with torch.no_grad():
            for param, value, known in before:
                param.copy_(value)
                state[param] = known
        train(relay, plain, 1)


def test_layers_that_shared_weights_are_delinked(folder: Path) -> None:
    kind = BY_NAME["tied_layers"]
    with compared(folder, kind) as (relay, plain):
        train(relay, plain, 2)
        relay.apply(Delink())
        old = list(plain.model.layers)
        tied = {param for layer in old[:1] for param in layer.parameters()}
        plain.model.layers = nn.ModuleList(
            [old[0], *(twin_of(plain, layer, True) if tied & {*layer.parameters()} else layer for layer in old[1:])]
        )
        train(relay, plain, 2)
        relay.undo()
        plain.model.layers = nn.ModuleList(old)
        train(relay, plain, 1)


# -- what the model keeps by position ----------------------------------------------------------------------------------


class Faded(Beside):
    """By a formula of the position, which no name shows."""

    def at(self, i: int, h: torch.Tensor) -> torch.Tensor:
        return h * (1 - i / len(self.layers))


class Scaled(Beside):
    """By a scalar for each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = parameter(len(self.layers))

    def at(self, i: int, h: torch.Tensor) -> torch.Tensor:
        return h * self.gain[i]


class Numbered(ResidualMlp):
    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        return super().forward(x) * (1 + 0.1 * number)


class ByArgument(Chain):
    """By an argument of the layers."""

    def __init__(self) -> None:
        super().__init__([Numbered() for _ in range(4)])

    def walk(self, h: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            h = layer(h, i)
        return h


class Summed(Beside):
    """Behind the last layer, each output with a weight."""

    def walk(self, h: torch.Tensor) -> torch.Tensor:
        total: Any = 0
        for i, layer in enumerate(self.layers):
            h = layer(h)
            total = total + h * (i + 1)
        return total


class Counted(Beside):
    """As many layers as it was written for."""

    def walk(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:4]:
            h = layer(h)
        return h


POSITIONS: list[tuple[type[Chain], Edit]] = [
    *((made, edit) for made in (Faded, Scaled, ByArgument, Summed) for edit in (Drop(1), Swap(0, 2))),
    (Faded, Insert(at=2)),
    (Summed, Insert(at=2, init="copy")),
    (Counted, Insert(at=2, init="copy")),
    (Counted, Duplicate()),
]


@pytest.mark.parametrize(("made", "edit"), POSITIONS, ids=lambda each: getattr(each, "__name__", repr(each)))
def test_edits_are_refused_as_in_memory_where_layers_would_get_what_is_for_others(
    made: type[Chain], edit: Edit, folder: Path
) -> None:
    kind = kind_of(made)
    with relay_of(kind) as relay:
        relay.step(kind.make_batch(ROWS, 0))
        with pytest.raises(ValueError) as in_memory:
            relay.apply(edit)
    with compared(folder, kind) as (relay, plain):
        train(relay, plain, 1)
        files = {path.name for path in (folder / "records").iterdir()}
        with pytest.raises(ValueError, match=re.escape(str(in_memory.value))):
            relay.apply(edit)
        with pytest.raises(ValueError, match=re.escape(str(in_memory.value))):
            relay.probe([kind.make_batch(ROWS, 1)], edit)
        assert not relay.journal and files == {path.name for path in (folder / "records").iterdir()}
        train(relay, plain, 1)


class Gained(ResidualMlp):
    """The remedy: the scalar is a member of its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = parameter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.gain)


@pytest.mark.parametrize("name", ["drop", "swap", "insert a copy", "double"])
def test_the_remedy_and_force_train_as_a_model_built_anew(name: str, folder: Path) -> None:
    """Built at that depth with the same weights: a scalar of a layer moves with it, and by force those beside it stay."""
    edit, change = copy.deepcopy(EDITS[name][0]), EDITS[name][1]
    for made, force in ((lambda: Chain([Gained() for _ in range(4)]), False), (Scaled, True)):
        if force and name in ("insert a copy", "double"):
            continue  # there is no scalar for a fifth layer
        with compared(folder / str(force), kind_of(made)) as (relay, plain):
            train(relay, plain, 1)
            relay.apply(edit, force=force)
            edit_in_core(plain, change)
            train(relay, plain, 2)


def test_a_module_of_ours_keeps_its_values_if_it_is_only_tried_or_its_group_fails(folder: Path) -> None:
    with relay_on(folder, KIND) as relay:
        relay.step(KIND.make_batch(ROWS, 0))
        module = module_for(5)
        expected = state_of(module)
        relay.probe([KIND.make_batch(ROWS, 1)], Insert(at=2, module=module))
        assert_same(state_of(module), expected)
        for edit in (Insert(at=2, module=module), Replace(1, module)):
            with pytest.raises(ValueError, match="out of range"):
                relay.apply(edit, Drop(17))
            assert_same(state_of(module), expected)
        relay.apply(Insert(at=2, module=module))
        kept = {
            name.removeprefix("layers.2."): value for name, value in weights_of(relay).items() if "layers.2" in name
        }
        assert_same(kept, expected)


# -- whole on disk -----------------------------------------------------------------------------------------------------


def edited() -> Chain:
    """The model of `KIND` in the form that `EDIT` gives it; weights do not matter."""
    model = KIND.make_model()
    layers = list(model.layers)
    model.layers = nn.ModuleList([layers[0], copy.deepcopy(layers[0]), *layers[2:]])
    return model


EDIT = (Drop(1), Insert(at=1, init="copy", optimizer="copy"))


def edit_both(relay: Relay, plain: InCore) -> None:
    relay.apply(*EDIT)
    edit_in_core(plain, lambda plain, old: [old[0], twin_of(plain, old[0], True), *old[2:]])


def test_a_crash_at_any_write_leaves_the_old_stack_or_the_new_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[str] = []

    def copy_folder(word: str) -> None:
        shutil.copytree(folder / "shelf", folder / f"{len(words)}", symlinks=True)
        words.append(word)

    with relay_on(folder / "shelf", KIND) as relay:
        plain = in_core(KIND)
        train(relay, plain, 2)
        old = state_of(plain.model)
        with at_every_write(monkeypatch, copy_folder):
            edit_both(relay, plain)
        new, keys = state_of(plain.model), [unit.key for unit in relay.stack]
    last = ["write_tensors", "sync", "sync", "write_bytes", "replace", "sync", "unlink"]
    tried = ["record", "half a record", "unlink"]  # a new depth is tried once, and taken back
    assert words == [*tried, "record", "half a record", *last]
    switched = words.index("replace") + 1
    for number, word in enumerate(words):
        is_new = number >= switched
        model = edited() if is_new else KIND.make_model()
        with relay_on(folder / f"{number}", KIND, resume=True, model=model) as relay:
            assert_same(weights_of(relay), new if is_new else old)
            assert ([unit.key for unit in relay.stack] == keys) == is_new
            stems = {path.stem for path in (folder / f"{number}" / "records").iterdir()}
            assert stems == {"shell", *(unit.key for unit in relay.stack)}, word  # nothing is left over
            if is_new:
                continue
            assert relay.step(KIND.make_batch(ROWS, 2)).loss > 0


def test_whoever_resumes_goes_on_with_the_edited_stack(folder: Path) -> None:
    with relay_on(folder, KIND) as relay:
        plain = in_core(KIND)
        train(relay, plain, 2)
        edit_both(relay, plain)
        relay.apply(Freeze(0))
        frozen(list(plain.model.layers), [0], False)
        train(relay, plain, 1)
        relay.apply(Duplicate(2), Drop(3))  # a key is given out, and none is given out twice
        keys = [unit.key for unit in relay.stack]
    with pytest.raises(ValueError, match="other layers|other parameters"):  # of the form before the edits
        relay_on(folder, KIND, resume=True, model=Chain([*KIND.make_model().layers][:-1]))
    with relay_on(folder, KIND, resume=True, model=edited()) as relay:
        assert [unit.key for unit in relay.stack] == keys
        assert relay.stack[0].frozen and not relay.can_undo
        train(relay, plain, 1)
        relay.apply(Duplicate(0))
        assert relay.stack[1].key == "L006"
        relay.undo()
        relay.apply(Unfreeze(0))
        frozen(list(plain.model.layers), [0], True)
        train(relay, plain, 2)
        assert_same(weights_of(relay), state_of(plain.model))


def test_an_error_at_any_write_leaves_the_old_stack(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with relay_on(folder, KIND) as relay:
        plain = in_core(KIND)
        train(relay, plain, 2)
        keys, files = [unit.key for unit in relay.stack], {path.name for path in (folder / "records").iterdir()}
        words: list[str] = []
        last = -1
        while last < 0 or words[last] != "replace":
            words, last = [], last + 1

            def cut(word: str, words: list[str] = words, last: int = last) -> None:
                if word == "unlink":
                    return  # of a layer that was only tried; errors of deleting are ignored
                words.append(word)
                if len(words) == last + 1:
                    raise Cut(word)

            with at_every_write(monkeypatch, cut), pytest.raises(Cut):
                relay.apply(Interpolate(0, 2), *EDIT)
            assert [unit.key for unit in relay.stack] == keys and not relay.can_undo
            assert words[last] == "replace" or {path.name for path in (folder / "records").iterdir()} == files
            if words[last] != "replace":
                assert_same(weights_of(relay), state_of(plain.model))
        with pytest.raises(OSError, match="resume=True"):  # nobody knows whether it was replaced
            relay.step(KIND.make_batch(ROWS, 2))
    with relay_on(folder, KIND, resume=True) as relay:
        train(relay, plain, 2)
        assert_same(weights_of(relay), state_of(plain.model))


def test_an_error_leaves_training_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with compared(folder, KIND) as (relay, plain):
        train(relay, plain, 2)
        with pytest.raises(ValueError, match="out of range"):
            relay.apply(Interpolate(0, 2), *EDIT, Drop(17))
        usage = shutil.disk_usage(folder)
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(OSError, match="take [0-9,]+ bytes more, and 1,000 are free there"):
            relay.apply(Duplicate())
        monkeypatch.undo()
        train(relay, plain, 1)


def test_files_live_as_long_as_undo_may_want_them(folder: Path) -> None:
    def stems() -> set[str]:
        return {path.stem for path in (folder / "records").iterdir()} - {"shell"}

    with relay_on(folder, KIND) as relay:
        all_of_them = {unit.key for unit in relay.stack}
        relay.apply(Drop(1))
        relay.step(KIND.make_batch(ROWS, 0))
        assert stems() == all_of_them
        relay.undo()
        relay.apply(Duplicate(0))
        assert stems() == {*all_of_them, "L004"}
        relay.undo()
        assert stems() == {*all_of_them, "L004"}  # redo may want it
        relay.apply(Drop(2, park=None))
        assert stems() == all_of_them - {"L002"}
        with pytest.raises(ValueError, match="dropped with park=None"):
            relay.undo()


@pytest.mark.parametrize("skip", [[0], [1, 2]])
def test_a_step_that_layers_sit_out_can_be_resumed(skip: list[int], folder: Path) -> None:
    """The manifest names them all the same, where they stand."""
    with relay_on(folder, KIND) as relay:
        train(relay, plain := in_core(KIND), 1)
        relay.step(KIND.make_batch(ROWS, 1), skip=skip)
        before = weights_of(relay)
    with relay_on(folder, KIND, resume=True) as relay:
        assert_same(weights_of(relay), before)
        relay.step(KIND.make_batch(ROWS, 1))
    assert plain.steps == 1


def test_layers_drop_out_at_random_as_in_core(folder: Path) -> None:
    schedule = LayerDrop(0.5)
    with compared(folder, KIND) as (relay, plain):
        layers, sat_out = list(plain.model.layers), 0
        for step in range(4):
            batch, skip = KIND.make_batch(ROWS, step), schedule.skip(relay)
            stay = [layer for layer, unit in zip(layers, relay.stack, strict=True) if unit.key not in skip]
            sat_out += len(layers) - len(stay)
            plain.model.layers = nn.ModuleList(stay)
            assert relay.step(batch, skip=skip).loss == plain.step(batch)
        plain.model.layers = nn.ModuleList(layers)
        assert sat_out > 1


def test_edits_on_trial_leave_nothing(folder: Path) -> None:
    with compared(folder, KIND) as (relay, plain):
        train(relay, plain, 2)
        batch = KIND.make_batch(ROWS, 5)
        files, (before,) = {path.name for path in (folder / "records").iterdir()}, relay.probe([batch])
        tried = {edit: relay.probe([batch], edit)[0] for edit in (Drop(1), Insert(at=2), Interpolate(0, 1), Swap(0, 2))}
        assert tried.pop(next(edit for edit in tried if isinstance(edit, Insert))) == before
        for edit, loss in tried.items():
            relay.apply(edit)
            assert loss == relay.evaluate(batch) != before
            relay.undo()
        assert relay.probe([batch]) == [before]
        assert {path.name for path in (folder / "records").iterdir()} == files
        train(relay, plain, 1)


# -- memory ------------------------------------------------------------------------------------------------------------


def deep(depth: int) -> Kind:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Chain([ResidualMlp() for _ in range(depth)])

    return Kind("deep", make, KIND.make_batch, KIND.loss)


def test_an_edit_holds_a_few_blocks_at_any_depth(folder: Path) -> None:
    peaks = []
    for depth in (4, 7):
        kind = deep(depth)
        with relay_on(folder / str(depth), kind) as relay:
            relay.step(kind.make_batch(ROWS, 0))
            layer = 3 * relay.stack[0].nbytes
            peaks.append([])
            edits: list[Edit] = [Duplicate(), Drop(slice(1, 4)), Insert(at=2), Interpolate(0, 1), Freeze(slice(0, 3))]
            for edit in edits:
                relay.shelf._load_pool.close()
                relay.shelf._update_pool.close()
                relay.host.reset_peak()
                before = relay.host.total
                relay.apply(edit)
                peaks[-1].append(relay.host.peak - before)
            assert len(relay.stack) == 2 * depth - 2
    assert peaks[0] == peaks[1]
    assert max(peaks[0]) < 4 * layer + 50_000


class Wide(ResidualMlp):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.zeros(3000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.extra.sum()


def test_a_layer_too_large_for_the_memory_is_refused_before_anything_changes(folder: Path) -> None:
    kind = deep(4)
    least = _least(pytest.raises(ValueError, relay_on, folder, kind, memory_bytes=1))
    with compared(folder, kind, memory_bytes=least) as (relay, plain):
        train(relay, plain, 1)
        wide = Wide()
        held = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        needed = _least(pytest.raises(ValueError, relay.apply, Replace(1, Wide())))
        assert needed > least
        assert held == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        train(relay, plain, 1)
    with relay_on(folder / "more", kind, memory_bytes=needed) as relay:
        relay.apply(Replace(1, wide))
        for seed in range(2):
            relay.step(kind.make_batch(ROWS, seed))
        samples = [sample.bytes_by_category for sample in relay.trace.memory if sample.place == "host"]
        assert max(s.get("weights", 0) + s.get("optimizer", 0) for s in samples) <= needed
    with pytest.raises(ValueError, match="smallest"):
        relay_on(folder / "less", kind, memory_bytes=needed - 1).apply(Replace(1, Wide()))


def _least(refused: Any) -> int:
    found = re.search(r"the smallest that works is ([\d,]+)", str(refused.value))
    assert found is not None, refused.value
    return int(found[1].replace(",", ""))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5", "bert"])
def test_what_needs_all_weights_says_so(name: str, folder: Path) -> None:
    kind = BY_NAME[name]
    with relay_on(folder, kind) as relay:
        relay.step(kind.make_batch(ROWS, 0))
        with pytest.raises(ValueError, match="needs all weights in memory at once.*init='copy'"):
            relay.apply(Insert(at=(next(iter(relay.stacks)), 1)))
        relay.step(kind.make_batch(ROWS, 1))


@pytest.mark.slow
def test_a_model_whose_configuration_follows(folder: Path) -> None:
    kind = BY_NAME["gpt2"]
    with relay_on(folder / "shelf", kind) as relay:
        relay.step(kind.make_batch(ROWS, 0))
        batch = kind.make_batch(ROWS, 1)
        loss = relay.evaluate(batch)
        relay.apply(Insert(at=1))
        assert relay.evaluate(batch) == loss
        relay.step(batch)
        loss, before = relay.evaluate(batch), weights_of(relay)
        relay.shelf.save_pretrained(folder / "export")
    plain = type(relay.model).from_pretrained(folder / "export")
    with relay_on(folder / "shelf", kind, resume=True, model=type(plain)(plain.config)) as relay:
        assert_same(weights_of(relay), before)
        assert relay.evaluate(batch) == loss


def test_the_number_of_loops_is_resumed_and_unrolled_by_hand(folder: Path) -> None:
    kind = BY_NAME["looped"]
    with compared(folder, kind) as (relay, plain):
        train(relay, plain, 2)
        relay.apply(Loops(3))
        plain.model.n_loops = 3
        train(relay, plain, 1)
        with pytest.raises(ValueError, match=r"needs all weights in memory at once") as refused:
            relay.apply(Unroll())
    with relay_on(folder, kind, resume=True) as relay:
        assert vars(relay.model)["n_loops"] == 3
        train(relay, plain, 1)
        relay.apply(*eval(re.search(r"apply\((.*)\) makes", str(refused.value))[1], globals()))
        layers, optimizer = plain.model.layers, plain
        plain.model.layers = nn.ModuleList([*layers, *(twin_of(optimizer, each, True) for each in [*layers] * 2)])
        plain.model.n_loops = 1
        train(relay, plain, 1)
