"""A stash on the disk: the bits of plain training, and host memory that grows neither with depth nor with micro-batches."""

import errno
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from on_shelf import ROWS, assert_same, compared, in_core_loss, relay_on, stack, state_of, train, weights_of
from patience import rarely
from zoo import BY_NAME, KINDS, Kind

from l2l_core import EmulatedDevice, Profile, Relay, RelayConfig, simulate
from l2l_core.devices import Ledger
from l2l_core.shelf import direct_io
from l2l_core.shelf.buffer_rotation import BUFFERS
from l2l_core.shelf.direct_io import round_to_pages
from l2l_core.shelf.disk_stash import DiskStashStore
from l2l_core.shelf.record_store import RecordStore
from l2l_core.trace import Event, Trace

CONFIG = RelayConfig(micro_batches=3, stash="disk")
FEW = ("chain", "gpt2", "tied_layers")


def of_stash(trace: Trace) -> tuple[list[Event], list[Event]]:
    """What it wrote, and what it read."""
    reads, writes = trace.lanes["disk read"], trace.lanes["disk write"]
    return [e for e in writes if e.kind == "stash"], [e for e in reads if e.kind == "fetch"]


@pytest.mark.parametrize("kind", [k if k.name in FEW else rarely(k) for k in KINDS], ids=str)
def test_every_kind(kind: Kind, folder: Path) -> None:
    with compared(folder, kind, config=CONFIG) as (relay, plain):
        train(relay, plain, 2)
        assert relay.trace.settings["stash"] == "disk" and of_stash(relay.trace)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"ahead": 0},
        {"micro_batches": 7, "update": "deferred", "max_grad_norm": 0.5},
        {"micro_batches": 1},
        rarely({"micro_batches": 4, "ahead": 2, "resident": 1, "keep": 2}),
        rarely({"meter": "always"}),
    ],
    ids=str,
)
def test_every_setting(settings: dict[str, Any], folder: Path) -> None:
    kind = BY_NAME["chain"]
    with compared(folder, kind, config=RelayConfig(**{"micro_batches": 3, "stash": "disk", **settings})) as (
        relay,
        plain,
    ):
        train(relay, plain, 2)
        if relay.config.micro_batches == 3:
            assert relay.evaluate(kind.make_batch(ROWS, 9)) == in_core_loss(kind, plain.model, 9)
            relay.look(kind.make_batch(ROWS, 9))


def test_forward_and_the_place_of_the_stash_may_change(folder: Path) -> None:
    kind = BY_NAME["chain"]
    with compared(folder, kind, config=CONFIG) as (relay, plain):
        train(relay, plain, 1)
        on_disk = relay.forward(kind.make_batch(ROWS, 3))
        relay.config = RelayConfig(micro_batches=3, stash="host")
        assert torch.equal(on_disk, relay.forward(kind.make_batch(ROWS, 3)))
        train(relay, plain, 1)
        relay.config = CONFIG
        train(relay, plain, 1)


# -- memory and bytes --------------------------------------------------------------------------------------------------


def stash_on_host(trace: Trace) -> int:
    return max(s.bytes_by_category.get("stash", 0) for s in trace.memory if s.place == "host")


def steps_of(folder: Path, depth: int, micro_batches: int, stash: Any = "disk") -> Trace:
    """The trace of a second step, with one row per micro-batch."""
    kind = stack(depth)
    config = RelayConfig(micro_batches=micro_batches, stash=stash)
    options: dict[str, Any] = {"config": config, "loss_over": "micro-batch"}  # no stash of other passes
    with relay_on(folder / f"{depth} {micro_batches} {stash}", kind, **options) as relay:
        relay.step(kind.make_batch(micro_batches, 0))
        trace = relay.step(kind.make_batch(micro_batches, 1)).trace
        assert relay.host.by_category().get("stash", 0) == 0
    return trace


def test_host_memory_grows_neither_with_depth_nor_with_micro_batches(folder: Path) -> None:
    held = {(d, k): stash_on_host(steps_of(folder, d, k)) for d, k in ((4, 6), (8, 6), (4, 12))}
    assert len({*held.values()}) == 1
    on_host = {k: stash_on_host(steps_of(folder, 4, k, "host")) for k in (6, 12)}
    assert on_host[12] == 2 * on_host[6]  # it would, elsewhere


def test_bytes_are_those_of_the_link_in_pages_and_the_same_at_every_step(folder: Path) -> None:
    first, again = steps_of(folder / "a", 5, 6), steps_of(folder / "b", 5, 6)
    written, read = of_stash(first)
    sent = [e for e in first.lanes["d2h"] if e.kind == "stash"]
    assert [(e.k, e.visit) for e in written] == [(e.k, e.visit) for e in sent]
    assert all(a.nbytes >= b.nbytes and a.nbytes % direct_io.PAGE == 0 for a, b in zip(written, sent, strict=True))
    fetched = sum(round_to_pages(e.nbytes) for e in first.lanes["h2d"] if e.kind == "fetch")
    assert 0 < sum(e.nbytes for e in read) < fetched * 2
    assert [(e.nbytes, e.k, e.visit) for lane in of_stash(again) for e in lane] == [
        (e.nbytes, e.k, e.visit) for lane in (written, read) for e in lane
    ]


def test_reads_come_before_the_turn_that_wants_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Most are asked for while two others have their turns, in the order of backward."""
    asked: list[tuple[int, int]] = []
    sources: list[int] = []
    expect, source, read = DiskStashStore.prefetch, DiskStashStore.sources, DiskStashStore._start_read

    def _read(self: DiskStashStore, what: Any, layer: str, k: int, visit: int) -> None:
        asked.append((visit, k))
        read(self, what, layer, k, visit)

    def expected(self: DiskStashStore, turns: Any) -> None:
        before = len(asked)
        expect(self, turns)
        sources.append(len(asked) - before)

    monkeypatch.setattr(DiskStashStore, "_start_read", _read)
    monkeypatch.setattr(DiskStashStore, "prefetch", expected)
    assert source is DiskStashStore.sources
    trace = steps_of(folder, 6, 8)
    assert sum(sources) > 0.8 * len(asked)
    backward = [turn for turn in asked[len(asked) // 2 :] if turn[0] >= 6]
    assert backward == sorted(backward) and len(of_stash(trace)[1]) > 0


def test_a_slow_disk_binds_and_the_advice_is_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = direct_io.ScratchFile.read
    monkeypatch.setattr(direct_io.ScratchFile, "read", lambda *args: (time.sleep(0.02), read(*args))[1])
    trace = steps_of(folder, 5, 6)
    bound = next(bound for bound in trace.bound_by() if bound.phase == "backward")
    assert bound.lane == "disk read" and "stash='host'" in str(bound)


# -- errors ------------------------------------------------------------------------------------------------------------


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="Linux lists open files there")
@pytest.mark.parametrize(("verb", "at"), [("write", 2), ("write", 15), ("read", 1), ("read", 12), ("grow", 1)])
def test_an_error_of_the_disk_keeps_the_old_step_and_leaves_nothing(
    verb: str, at: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = BY_NAME["chain"]
    with compared(folder, kind, config=RelayConfig(micro_batches=7, stash="disk")) as (relay, plain):
        train(relay, plain, 1)
        before, files, names = state_of(plain.model), open_files(), sorted(folder.rglob("*"))
        real, calls = getattr(direct_io.ScratchFile, verb), []

        def failing(*args: Any) -> None:
            calls.append(args)
            if len(calls) >= at:
                raise OSError(errno.ENOSPC if verb != "read" else errno.EIO, "the disk says no", "stash.tmp")
            real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(direct_io.ScratchFile, verb, failing)
            said = "the disk says no" + (": .* bytes are to be written .*stash='host'" if verb != "read" else "")
            with pytest.raises(OSError, match=said):
                relay.step(kind.make_batch(ROWS, 1))
        assert open_files() == files and sorted(folder.rglob("*")) == names
        assert relay.steps == 1 and relay.host.by_category().get("stash", 0) == 0
        assert_same(weights_of(relay), before)
        train(relay, plain, 1)


@pytest.mark.parametrize("broken", [False, True])
def test_what_a_user_still_holds_comes_back_or_shows_that_it_is_lost(
    broken: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, held = BY_NAME["chain"], []
    with relay_on(folder, kind, config=RelayConfig(micro_batches=7, stash="disk")) as relay:
        relay.step(kind.make_batch(ROWS, 0))
        expected = held_of(relay, kind, held)
        handle = relay.model.layers[0].register_forward_hook(lambda *args: held.append(args[2].detach()))
        if broken:
            real, reads = direct_io.ScratchFile.read, []
            fails = lambda *args: 1 / 0 if len(reads) > 9 else (reads.append(1), real(*args))[1]  # noqa: E731 - when the layer has run
            monkeypatch.setattr(direct_io.ScratchFile, "read", fails)
            with pytest.raises(ZeroDivisionError):
                relay.forward(kind.make_batch(ROWS, 1))
            assert any(bool(tensor.isnan().all()) for tensor in held)
        else:
            relay.forward(kind.make_batch(ROWS, 1))
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(held, expected, strict=True))
        handle.remove()
        assert relay.host.by_category().get("stash", 0) == 0


def held_of(relay: Relay, kind: Kind, held: list[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of what the first layer gives out, made while it is there."""
    copies: list[torch.Tensor] = []
    handle = relay.model.layers[0].register_forward_hook(lambda *args: copies.append(args[2].detach().clone()))
    relay.forward(kind.make_batch(ROWS, 1))
    handle.remove()
    return copies


def test_a_step_that_fails_in_forward_frees_its_room(folder: Path) -> None:
    kind = BY_NAME["chain"]
    with compared(folder, kind, config=CONFIG) as (relay, plain):
        train(relay, plain, 1)
        files = open_files()
        handle = relay.model.layers[2].register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            relay.step(kind.make_batch(ROWS, 1))
        handle.remove()
        assert open_files() == files and relay.host.by_category().get("stash", 0) == 0
        train(relay, plain, 1)


def test_no_shelf_no_room_on_the_disk(folder: Path) -> None:
    kind = BY_NAME["chain"]
    with pytest.raises(ValueError, match="FileShelf"):
        Relay(kind.make_model(), loss=kind.loss, loss_over=kind.loss_over, device=EmulatedDevice(), config=CONFIG)
    with Relay(kind.make_model(), loss=kind.loss, loss_over=kind.loss_over, device=EmulatedDevice()) as relay:
        with pytest.raises(ValueError, match="FileShelf"):
            relay.config = CONFIG
        with pytest.raises(ValueError, match="FileShelf"):
            relay.forecast(kind.make_batch(ROWS, 0), CONFIG)
        profile = Profile.of(relay.step(kind.make_batch(ROWS, 0)).trace)
    with pytest.raises(ValueError, match="cannot be simulated from a profile"):
        simulate(profile, CONFIG, EmulatedDevice())
    with pytest.raises(ValueError, match="its trace lacks the reads and writes of the single storages"):
        Profile.of(steps_of(folder, 4, 2))


# -- the room by itself ------------------------------------------------------------------------------------------------


class Done:
    """A copy that is over."""

    def wait(self) -> None: ...

    join = abandon = wait


def test_spots_keep_their_bytes_whatever_the_order(folder: Path) -> None:
    """Random storages that leave, come back, change and go, against a dictionary."""
    torch.manual_seed(0)
    records, host = RecordStore(folder), Ledger("host", "Host memory")
    room = DiskStashStore(folder / "stash.tmp", records, lambda numel, dtype: torch.empty(numel, dtype=dtype), host)
    room.begin(Trace(), nullcontext)
    known: dict[Any, torch.Tensor] = {}
    for turn in range(300):
        move = int(torch.randint(0, 5, ()))
        some = [spot for spot in known if torch.rand(()) < 3 / len(known)]
        if move == 0 and some:
            room.prefetch([([spot], "", 0, 0) for spot in some])
        elif move == 1 and some:
            for spot, flat in zip(some, room.sources(some, "", 0, 0), strict=True):
                assert torch.equal(flat, known[spot]), turn
            room.read_started(some, Done())
        elif move == 2 and some:
            for spot in some:
                room.free(spot)
                del known[spot]
        else:
            spots = some if move == 3 and some else [room.allocate(int(n)) for n in torch.randint(1, 20_000, (3,))]
            for spot, target in zip(spots, room.targets(spots), strict=True):
                known[spot] = torch.randint(0, 256, (spot.nbytes,), dtype=torch.uint8)
                target.copy_(known[spot])
            room.write_started(spots, Done(), 0, 0)
    for spot in known:
        assert torch.equal(room.sources([spot], "", 0, 0)[0], known[spot])
    assert 0 < host.peak <= (BUFFERS + 2) * (room._rotation.buffer_bytes + direct_io.PAGE)
    room.clear()
    assert host.total == 0 and not [*folder.iterdir()]
    records.close()
