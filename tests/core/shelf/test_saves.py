"""Saves of a shelf and in memory are one format: whoever loads goes on to the bit, with a block at a time in memory."""

import errno
import json
import resource
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_shelf import (
    CONFIG,
    ENOUGH,
    OPTIMIZERS,
    ROWS,
    assert_same,
    compared,
    empty,
    in_core,
    relay_on,
    smallest,
    stack,
    state_of,
    train,
    weights_of,
)
from oracle import MakeOptimizer, adamw
from patience import rarely
from zoo import BY_NAME, Kind

from l2l_core import Drop, Duplicate, EmulatedDevice, FileShelf, Interpolate, Relay, RelayConfig
from l2l_core.shelf import direct_io

CHAIN = BY_NAME["chain"]


def in_memory(kind: Kind, optimizer: MakeOptimizer = adamw, **options: Any) -> Relay:
    model = kind.make_model()
    settings: dict[str, Any] = {"loss": kind.loss, "layers": kind.layers, "config": CONFIG, "device": EmulatedDevice()}
    settings["loss_over"] = kind.loss_over
    return Relay(model, optimizer(model), **(settings | options))


def load(save: Path, kind: Kind, optimizer: Any = adamw, shelf: Path | None = None, **options: Any) -> Relay:
    """Load a save, onto a shelf if there is a folder for one."""
    model = options.pop("model", None) or kind.make_model()
    nbytes = options.pop("memory_bytes", ENOUGH)
    if shelf is not None:
        options["shelf"] = FileShelf(folder=shelf, memory_bytes=nbytes)
    return Relay.load(
        save, model, optimizer(model), loss=kind.loss, loss_over=kind.loss_over, device=EmulatedDevice(), **options
    )


def all_weights(relay: Relay) -> dict[str, torch.Tensor]:
    return state_of(relay.model) if relay.shelf is None else weights_of(relay)


def goes_on(kind: Kind, optimizer: MakeOptimizer, ways: tuple[str, str], folder: Path) -> None:
    """Two steps in one relay, saved, and two more in another one are four steps in core."""
    plain = in_core(kind, optimizer)
    first = relay_on(folder / "first", kind, optimizer) if ways[0] == "shelf" else in_memory(kind, optimizer)
    with first as relay:
        train(relay, plain, 2)
        assert relay.save(folder / "save") == folder / "save"
        assert_same(all_weights(relay), state_of(plain.model))
        versions = {unit.key: unit.version for unit in (relay.shell, *relay.stack)}
    with load(folder / "save", kind, optimizer, folder / "second" if ways[1] == "shelf" else None) as relay:
        assert relay.steps == 2 and relay.config == CONFIG and (relay.shelf is None) == (ways[1] != "shelf")
        assert {unit.key: unit.version for unit in (relay.shell, *relay.stack)} == versions
        assert_same(all_weights(relay), state_of(plain.model))
        train(relay, plain, 2)
        assert_same(all_weights(relay), state_of(plain.model))
    if ways[1] == "shelf":  # and the folder is a shelf like any other
        with relay_on(folder / "second", kind, optimizer, resume=True) as relay:
            train(relay, plain, 1)
            assert_same(all_weights(relay), state_of(plain.model))


WAYS = [("shelf", "shelf"), ("shelf", "memory"), ("memory", "shelf")]


@pytest.mark.parametrize("ways", WAYS, ids="-".join)
def test_training_goes_on(ways: tuple[str, str], folder: Path) -> None:
    goes_on(CHAIN, adamw, ways, folder)


@pytest.mark.parametrize("ways", WAYS, ids="-".join)
@pytest.mark.parametrize(
    "name", ["batch_norm", rarely("gpt2"), rarely("tied_layers"), rarely("lora_tied"), rarely("convnext")]
)
def test_every_kind(name: str, ways: tuple[str, str], folder: Path) -> None:
    """Buffers; dropout; weights that are shared, tied, and frozen; strides."""
    goes_on(BY_NAME[name], adamw, ways, folder)


@pytest.mark.parametrize("ways", [WAYS[0], rarely(WAYS[1]), rarely(WAYS[2])], ids="-".join)
@pytest.mark.parametrize(
    "name", ["momentum", "adafactor", *(rarely(n) for n in OPTIMIZERS if n not in ("momentum", "adafactor"))]
)
def test_every_optimizer(name: str, ways: tuple[str, str], folder: Path) -> None:
    goes_on(CHAIN, lambda model: OPTIMIZERS[name](model.parameters()), ways, folder)


def test_saves_of_both_are_the_same_files(folder: Path) -> None:
    kind = BY_NAME["tied_layers"]
    for name, make in (("shelf", partial(relay_on, folder / "it")), ("memory", in_memory)):
        with make(kind) as relay:
            relay.step(kind.make_batch(ROWS, 0))
            torch.manual_seed(5)
            relay.save(folder / name)
    held = [
        {path.name: path.read_bytes() for path in (folder / name).glob("*/*.safetensors")}
        for name in ("shelf", "memory")
    ]
    assert len(held[0]) > 3 and held[0] == held[1]


@pytest.mark.parametrize("stash", ["device", rarely("disk")])
def test_a_save_of_an_edited_shelf_has_the_way_back(stash: str, folder: Path) -> None:
    """Loaded into memory, edits are undone to the weights and the training that the shelf itself goes back to."""
    config = replace(CONFIG, stash=stash)
    with relay_on(folder / "first", CHAIN, config=config) as relay:
        relay.step(CHAIN.make_batch(ROWS, 0))
        relay.apply(Drop(1))
        relay.step(CHAIN.make_batch(ROWS, 1))
        relay.apply(Interpolate(0, 1, 0.5), Duplicate(2))
        relay.step(CHAIN.make_batch(ROWS, 2))
        relay.save(folder / "save")
        edited = weights_of(relay)
        for _ in relay.journal[:3]:
            relay.undo()
        back = weights_of(relay)
        losses = [relay.step(CHAIN.make_batch(ROWS, seed)).loss for seed in (3, 4)]
    with load(folder / "save", CHAIN, config=CONFIG) as relay:
        assert_same(all_weights(relay), edited)
        for _ in relay.journal[:3]:
            relay.undo()
        assert_same(all_weights(relay), back)
        assert [relay.step(CHAIN.make_batch(ROWS, seed)).loss for seed in (3, 4)] == losses


def test_random_numbers_and_settings_come_along(folder: Path) -> None:
    with relay_on(folder / "a", CHAIN) as relay:
        relay.step(CHAIN.make_batch(ROWS, 0))
        relay.optimizer.param_groups[0]["lr"] = 0.25
        torch.manual_seed(3)
        relay.save(folder / "save")
        drawn = torch.rand(2)
    torch.manual_seed(4)
    with load(folder / "save", CHAIN, shelf=folder / "b") as relay:
        assert torch.equal(torch.rand(2), drawn)
    with relay_on(folder / "b", CHAIN, resume=True) as relay:  # they are in the manifest too
        assert torch.equal(torch.rand(2), drawn)
        assert [group["lr"] for group in relay.optimizer.param_groups] == [0.25, 1e-3]


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [3, 9])
def test_a_model_is_never_whole_in_memory(depth: int, folder: Path) -> None:
    """The smallest pool will do at any depth, for a save and for a load of a model without weights."""
    kind = stack(depth)
    nbytes = smallest(folder / "a", kind)
    with relay_on(folder / "a", kind, memory_bytes=nbytes) as relay:
        relay.step(kind.make_batch(ROWS, 0))
        expected = weights_of(relay)
        relay.host.reset_peak()
        # Not in the pool: buffers of the step's gradients, as many as the EPS was behind, kept for the next step
        gradients = relay.host.by_category()["gradients"]
        relay.save(folder / "save")
        assert relay.host.peak - gradients <= nbytes
    with load(folder / "save", kind, shelf=folder / "b", model=empty(kind), memory_bytes=nbytes) as relay:
        assert relay.host.peak <= nbytes
        assert_same(weights_of(relay), expected)


# -- when it fails -----------------------------------------------------------------------------------------------------


class Cut(Exception):
    """What the tests inject."""


@pytest.mark.parametrize("at", [0, 3, rarely(1), rarely(2), rarely(4)])
def test_a_save_that_fails_leaves_the_old_one(at: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with relay_on(folder / "shelf", CHAIN) as relay:
        plain = in_core(CHAIN)
        train(relay, plain, 1)
        old = weights_of(relay)
        relay.save(folder / "save")
        train(relay, plain, 1)
        held, read = {*(folder / "save").iterdir()}, direct_io.DirectFiles.read
        reads: list[Path] = []

        def cut(self: direct_io.DirectFiles, path: Path, into: torch.Tensor) -> None:
            if len(reads) == at:
                raise Cut
            reads.append(path)
            read(self, path, into)

        with monkeypatch.context() as patch, pytest.raises(Cut):
            patch.setattr(direct_io.DirectFiles, "read", cut)
            relay.save(folder / "save")
        assert {*(folder / "save").iterdir()} == held
        assert_same(weights_of(relay), state_of(plain.model))
        train(relay, plain, 1)
    with load(folder / "save", CHAIN) as relay:
        assert relay.steps == 1
        assert_same(all_weights(relay), old)


def full_disk(at: int) -> Any:
    """The limit of every file, which the system refuses like a full disk."""
    return resource.setrlimit(resource.RLIMIT_FSIZE, (at, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def test_a_full_disk_leaves_the_old_save(folder: Path) -> None:
    with relay_on(folder / "shelf", CHAIN) as relay:
        relay.step(CHAIN.make_batch(ROWS, 0))
        relay.save(folder / "save")
        relay.step(CHAIN.make_batch(ROWS, 1))
        soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        full_disk(4096)
        try:
            with pytest.raises(OSError, match="bytes are to be written to .* the relay can continue") as refused:
                relay.save(folder / "save")
        finally:
            full_disk(soft)
        assert refused.value.errno in (errno.EFBIG, errno.ENOSPC)
        relay.step(CHAIN.make_batch(ROWS, 2))
    with load(folder / "save", CHAIN) as relay:
        assert relay.steps == 1


@pytest.fixture
def save(folder: Path) -> Path:
    """A save of two steps in memory."""
    with in_memory(CHAIN) as relay:
        for step in range(2):
            relay.step(CHAIN.make_batch(ROWS, step))
        return relay.save(folder / "save")


@pytest.mark.parametrize("word", ["record", "manifest"])
def test_a_load_that_fails_leaves_no_step_and_everything_as_it_was(
    word: str, save: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CHAIN.make_model()
    optimizer = adamw(model)
    model(*CHAIN.make_batch(ROWS, 0)[:-1]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, known = state_of(model), optimizer.state_dict()
    calls: list[Path] = []
    write = direct_io.DirectFiles.write

    def cut(self: direct_io.DirectFiles, path: Path, source: torch.Tensor) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise Cut
        write(self, path, source)

    def cut_manifest(*_: Any) -> None:
        raise Cut

    with monkeypatch.context() as patch, pytest.raises(Cut):
        if word == "record":
            patch.setattr(direct_io.DirectFiles, "write", cut)
        else:
            patch.setattr("l2l_core.shelf.shelf_manifest.write_tensors", cut_manifest)
        torch.manual_seed(8)
        load(save, CHAIN, lambda _: optimizer, folder / "shelf", model=model)
    drawn = torch.rand(2)
    torch.manual_seed(8)
    assert torch.equal(torch.rand(2), drawn)
    assert_same(state_of(model), before)
    again = optimizer.state_dict()
    assert again["param_groups"] == known["param_groups"] and again["state"].keys() == known["state"].keys()
    assert all(torch.equal(again["state"][p][n], t) for p, each in known["state"].items() for n, t in each.items())
    with pytest.raises(ValueError, match="no whole step to resume"):
        relay_on(folder / "shelf", CHAIN, resume=True)
    with load(
        save, CHAIN, lambda _: optimizer, folder / "shelf", model=model
    ) as relay:  # and it can be loaded after all
        plain = in_core(CHAIN)
        for step in range(2):
            plain.step(CHAIN.make_batch(ROWS, step))
        train(relay, plain, 1)
        assert_same(weights_of(relay), state_of(plain.model))


@pytest.mark.parametrize("change", [lambda relay: relay.apply(Duplicate(1)), lambda relay: relay.fork("other")])
def test_a_past_is_refused(change: Callable[[Relay], Any], folder: Path) -> None:
    with in_memory(CHAIN) as relay:
        relay.step(CHAIN.make_batch(ROWS, 0))
        change(relay)
        relay.save(folder / "save")
    model = CHAIN.make_model()
    before = state_of(model)
    with pytest.raises(ValueError, match="load it without shelf="):
        load(folder / "save", CHAIN, shelf=folder / "shelf", model=model)
    assert_same(state_of(model), before)
    assert not (folder / "shelf").exists()


def test_what_a_load_does_not_go_with(save: Path, folder: Path) -> None:
    given: dict[str, Any] = {"loss": CHAIN.loss, "device": EmulatedDevice()}
    for more in ({"weights": folder}, {"resume": True}):
        relay_on(folder / "old", CHAIN).close() if not (folder / "old").exists() else None
        shelf = FileShelf(folder=folder / "old", memory_bytes=ENOUGH, **more)
        model = CHAIN.make_model()
        with pytest.raises(ValueError, match="leave them out|is the shelf of a model already"):
            Relay.load(save, model, adamw(model), shelf=shelf, **given)
    with pytest.raises(ValueError, match="is the shelf of a model already"):
        load(save, CHAIN, shelf=folder / "old")
    with pytest.raises(ValueError, match="other the optimizer"):
        load(save, CHAIN, lambda model: torch.optim.SGD(model.parameters(), lr=1.0), folder / "new")
    with pytest.raises(ValueError, match="the smallest that works is"):
        load(save, CHAIN, shelf=folder / "new", memory_bytes=1)
    with load(save, CHAIN, shelf=folder / "new", config=RelayConfig(seed=0, micro_batches=2)) as relay:
        assert relay.config.micro_batches == 2 and relay.steps == 2


def test_a_run_with_its_own_loss_does_not_go_on_with_the_models(folder: Path) -> None:
    """On a shelf that is resumed, and on one that was filled from a save."""
    kind = BY_NAME["gpt2"]  # computes a loss
    own, batch = replace(kind, loss=lambda outputs, batch: 2 * outputs.loss), kind.make_batch(ROWS, 1)
    refused = r"was trained with a loss= or objective= of yours.*Pass the same one to Relay or Relay\.load"
    with compared(folder / "it", own) as (relay, plain):
        train(relay, plain, 1)
        relay.save(folder / "save")
    with load(folder / "save", kind, shelf=folder / "filled"):
        pass
    expected = plain.step(batch)
    for shelf in (folder / "it", folder / "filled"):
        with relay_on(shelf, kind, resume=True) as relay:
            before = weights_of(relay)
            for verb in (relay.step, relay.evaluate, lambda batch, relay=relay: relay.probe([batch])):
                with pytest.raises(ValueError, match=refused):
                    verb(batch)
            assert_same(weights_of(relay), before)
            relay.apply(Drop(0))
            relay.undo()  # commits the shelf
        copied = Path(shutil.copytree(shelf, folder / f"copy of {shelf.name}"))
        with relay_on(copied, kind, resume=True, objective=lambda model, batch: model(**batch).loss) as relay:
            assert relay.step(batch).loss < 0.6 * expected, "one remedy"
        with relay_on(shelf, own, resume=True) as relay:
            assert relay.step(batch).loss == expected, "the other"
            assert_same(weights_of(relay), state_of(plain.model))


def test_a_shelf_that_does_not_name_its_loss_is_resumed(folder: Path) -> None:
    """As those of 0.2.0; from then on it does."""
    kind = BY_NAME["gpt2"]
    with relay_on(folder, kind) as relay:
        relay.step(kind.make_batch(ROWS, 0))
    path = folder / "step.json"
    plain = json.loads(path.read_text())
    assert plain.pop("own_loss") is False
    path.write_text(json.dumps(plain))
    with relay_on(folder, kind, resume=True) as relay:
        relay.step(kind.make_batch(ROWS, 1))
    with relay_on(folder, replace(kind, loss=lambda outputs, batch: 2 * outputs.loss), resume=True) as relay:
        relay.step(kind.make_batch(ROWS, 2))
    assert json.loads(path.read_text())["own_loss"] is True


def test_a_shelf_of_another_schema_is_refused(folder: Path) -> None:
    with relay_on(folder, CHAIN) as relay:
        relay.step(CHAIN.make_batch(ROWS, 0))
    path = folder / "step.json"
    path.write_text(path.read_text().replace('"schema": 3', '"schema": 1'))
    model = CHAIN.make_model()
    before = state_of(model)
    with pytest.raises(
        ValueError, match="step.json has schema 1, and this release of l2l_core reads schema 3: use the"
    ):
        relay_on(folder, CHAIN, model=model, resume=True)
    assert_same(state_of(model), before)
