"""Training from files is training in core, to the bit, in memory that does not grow with the model."""

import copy
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from on_shelf import (
    CONFIG,
    OPTIMIZERS,
    ROWS,
    assert_same,
    compared,
    in_core,
    in_core_loss,
    relay_on,
    smallest,
    stack,
    state_of,
    train,
    weights_of,
)
from oracle import adamw
from patience import rarely
from torch import nn
from zoo import BY_NAME, FEATURES, KINDS, WIDTH, Chain, Kind, ResidualMlp

from l2l_core import EmulatedDevice, FileShelf, Relay, RelayConfig
from l2l_core.devices import Ledger
from l2l_core.shelf import direct_io, disk_storage
from l2l_core.shelf.direct_io import BufferPool
from l2l_core.shelf.disk_step import DiskWeightSource
from l2l_core.trace import Trace

FEW = ("chain", "gpt2", "lora_tied", "tied_layers")  # a plain stack; the shell's; blocks that are shared and frozen


@pytest.mark.parametrize("kind", [k if k.name in FEW else rarely(k) for k in KINDS], ids=str)
def test_every_kind(kind: Kind, folder: Path) -> None:
    with compared(folder, kind) as (relay, plain):
        train(relay, plain, 3)


@pytest.mark.parametrize(
    "name", ["momentum", "adafactor", *(rarely(n) for n in OPTIMIZERS if n not in ("momentum", "adafactor"))]
)
def test_every_optimizer(name: str, folder: Path) -> None:
    with compared(folder, BY_NAME["chain"], lambda model: OPTIMIZERS[name](model.parameters())) as (relay, plain):
        train(relay, plain, 3)


@pytest.mark.parametrize(
    "settings",
    [
        {"ahead": 0},
        {"ahead": 2, "resident": 1, "stash": "host"},
        {"update": "deferred", "max_grad_norm": 0.5},
        rarely({"update": "deferred"}),
        rarely({"rollback": True}),
        rarely({"keep": 2, "resident": 1}),
    ],
    ids=str,
)
def test_every_setting(settings: dict[str, Any], folder: Path) -> None:
    config = RelayConfig(micro_batches=3, **settings)
    with compared(folder, BY_NAME["chain"], config=config) as (relay, plain):
        train(relay, plain, 3)
        assert relay.evaluate(plain.kind.make_batch(ROWS, 9)) == in_core_loss(plain.kind, plain.model, 9)


def test_layers_that_freeze_and_thaw(folder: Path) -> None:
    with compared(folder, BY_NAME["chain"]) as (relay, plain):
        for model in (relay.model, plain.model):
            model.layers[1].requires_grad_(False)
        train(relay, plain, 2)
        for model in (relay.model, plain.model):
            model.layers[1].requires_grad_(True)
        train(relay, plain, 2)


def test_a_layer_that_sits_out_is_not_touched(folder: Path) -> None:
    kind = BY_NAME["chain"]
    with relay_on(folder, kind) as relay:
        before = weights_of(relay)
        trace = relay.step(kind.make_batch(ROWS, 0), skip=[1]).trace
        after = weights_of(relay)
        skipped = relay.stack[1].key
    assert skipped not in {event.layer for lane in ("disk read", "disk write") for event in trace.lanes[lane]}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and not any(name.startswith("layers.1.") for name in changed)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 2])
def test_the_smallest_memory_works_at_any_depth_and_is_kept(ahead: int, folder: Path) -> None:
    config = RelayConfig(micro_batches=2, ahead=ahead)
    needed = {depth: smallest(folder / str(depth), stack(depth), config=config) for depth in (4, 12)}
    assert needed[4] == needed[12]
    for depth, nbytes in needed.items():
        with pytest.raises(ValueError, match="smallest"):
            relay_on(folder / str(depth), stack(depth), config=config, memory_bytes=nbytes - 1)
        with compared(folder / str(depth), stack(depth), config=config, memory_bytes=nbytes) as (relay, plain):
            train(relay, plain, 2)
            samples = [sample.bytes_by_category for sample in relay.trace.memory if sample.place == "host"]
            assert max(s.get("weights", 0) + s.get("optimizer", 0) for s in samples) <= nbytes
            assert relay.host.peak <= nbytes + relay.host.by_category().get("gradients", 0)
            assert relay.trace.peak_bytes("host") > 0


def frozen_shell() -> nn.Module:
    """A chain whose embedding has most of the weights, and is not trained; nor is the head."""
    torch.manual_seed(0)
    model = Chain([ResidualMlp() for _ in range(3)])
    model.embed = nn.Sequential(nn.Linear(FEATURES, 8192), nn.Linear(8192, WIDTH))
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    return model


@pytest.mark.parametrize("only_trained", [True, False], ids=["of the trained", "of all"])
def test_a_frozen_shell_takes_its_memory_once(only_trained: bool, folder: Path) -> None:
    """Of an optimizer without its parameters; one with them reserves their state, beside which loads take no more."""
    kind = replace(BY_NAME["chain"], make_model=frozen_shell)

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model) if not only_trained else torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)

    shell = sum(param.nbytes for name, param in frozen_shell().named_parameters() if not name.startswith("layers"))
    nbytes = smallest(folder / "it", kind, optimizer=optimizer)
    assert nbytes < (1.1 if only_trained else 3.1) * shell
    with pytest.raises(ValueError, match="smallest"):
        relay_on(folder / "it", kind, optimizer, memory_bytes=nbytes - 1)
    with compared(folder / "it", kind, optimizer, memory_bytes=nbytes) as (relay, plain):
        train(relay, plain, 2)
        samples = [sample.bytes_by_category for sample in relay.trace.memory if sample.place == "host"]
        assert max(s.get("weights", 0) + s.get("optimizer", 0) for s in samples) <= nbytes
        assert relay.verify(kind.make_batch(ROWS, 5)).equal
        relay.save(folder / "save")
        if not only_trained:
            relay.model.embed.requires_grad_(True)
            with pytest.raises(ValueError, match=r"the smallest that works is [\d,]+"):
                relay.step(kind.make_batch(ROWS, 9))
            relay.model.embed.requires_grad_(False)
        train(relay, plain, 1)
    if not only_trained:  # the remedy
        with relay_on(folder / "it", kind, optimizer, memory_bytes=7 * shell, resume=True) as relay:
            relay.model.embed.requires_grad_(True)
            plain.model.embed.requires_grad_(True)
            train(relay, plain, 1)
            assert_same(weights_of(relay), state_of(plain.model))


def test_a_model_that_was_refused_is_as_it_was(folder: Path) -> None:
    kind = BY_NAME["chain"]
    model = kind.make_model()
    before = state_of(model)
    with pytest.raises(ValueError, match="smallest"):
        relay_on(folder, kind, model=model, memory_bytes=1)
    assert_same(state_of(model), before)
    with Relay(
        model, adamw(model), loss=kind.loss, loss_over=kind.loss_over, config=CONFIG
    ) as relay:  # an ordinary relay
        assert relay.step(kind.make_batch(ROWS, 0)).loss == in_core(kind).step(kind.make_batch(ROWS, 0))


def test_memory_may_be_shared_out_anew(folder: Path) -> None:
    """More layers ahead than the shelf was made for."""
    kind = stack(6)
    nbytes = smallest(folder, kind, config=RelayConfig(ahead=0))
    with relay_on(folder, kind, config=RelayConfig(ahead=0), memory_bytes=nbytes) as relay:
        relay.step(kind.make_batch(ROWS, 0))
        before = weights_of(relay)
        relay.config = RelayConfig(ahead=4)
        with pytest.raises(ValueError, match="leaves no room for the weights of"):
            relay.step(kind.make_batch(ROWS, 1))
        assert_same(weights_of(relay), before)
        relay.config = RelayConfig(ahead=0)
        relay.step(kind.make_batch(ROWS, 1))


# -- what is seen of it ------------------------------------------------------------------------------------------------


def test_lanes_of_the_disk_are_in_the_trace(folder: Path, tmp_path: Path) -> None:
    kind = stack(5)
    with relay_on(folder, kind) as relay:
        relay.step(kind.make_batch(ROWS, 0))
        trace = relay.step(kind.make_batch(ROWS, 1)).trace
        weights = {unit.key: 4 * unit.slot_numel(torch.float32) for unit in (relay.shell, *relay.stack)}
    assert list(trace.lanes)[-2:] == ["disk read", "disk write"]
    reads, writes = trace.lanes["disk read"], trace.lanes["disk write"]
    assert sorted(e.layer for e in writes) == sorted(weights)  # each block once
    assert sum(e.nbytes for e in writes) >= 3 * sum(weights.values())  # with both moments of AdamW
    loads = [e for e in trace.events if e.kind == "load"]
    assert len(reads) == len(loads) + len(writes)  # once per load, once per update
    for lane in (reads, writes):
        assert all(a.stop_s <= b.start_s for a, b in zip(lane, lane[1:], strict=False))  # one after another
    assert trace.busy_s("disk write") > 0 and "disk write" in trace.summary()
    trace.to_jsonl(tmp_path / "trace.jsonl")
    assert Trace.from_jsonl(tmp_path / "trace.jsonl").lanes == trace.lanes
    trace.to_chrome(tmp_path / "trace.json")
    assert {"disk read", "disk write"} <= {row["args"].get("name") for row in rows_of(tmp_path / "trace.json")}


def test_a_slow_disk_is_what_binds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, read = stack(5), direct_io.DirectFiles.read
    monkeypatch.setattr(
        direct_io.DirectFiles, "read", lambda *args: (time.sleep(0.15), read(*args))[1]
    )  # however busy the machine
    with compared(folder, kind) as (relay, plain):
        train(relay, plain, 2)
        forward = next(bound for bound in relay.trace.bound_by() if bound.phase == "forward")
    assert forward.lane == "disk read" and "a disk of" in str(forward)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [row for row in json.loads(path.read_text())["traceEvents"] if "args" in row]


def test_going_through_weights_leaves_the_last_trace_alone(folder: Path) -> None:
    kind = BY_NAME["chain"]
    with relay_on(folder, kind) as relay:
        trace = relay.step(kind.make_batch(ROWS, 0)).trace
        count = len(trace.events)
        assert weights_of(relay)
        assert len(trace.events) == count


def test_a_file_system_without_direct_access_has_the_same_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "_O_DIRECT", 0)
    with compared(folder, BY_NAME["chain"]) as (relay, plain):
        train(relay, plain, 2)
        assert relay.trace.settings["shelf"] == "buffered"


def test_weights_are_cast_for_a_device_whose_copies_cannot(folder: Path) -> None:
    """As a GPU's: they are lent in its type, and the float32 that was read goes back to the pool."""
    kind = BY_NAME["chain"]
    with relay_on(folder, kind) as relay:
        expected = weights_of(relay)
        block = relay.stack[1].blocks[0]
        assert relay.shelf is not None
        host, size = Ledger("host", "Host memory"), direct_io.round_to_pages(4 * block.layout.numel)
        pool = BufferPool(size + direct_io.round_to_pages(size // 2) + 2 * direct_io.PAGE, _empty, host, "weights")
        place = DiskWeightSource(relay.shelf._records, pool, casts=True)
        for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
            place.begin([], dtype, Trace())
            place.prefetch([relay.stack[1]])
            lent = place.acquire(block)
            for name, view in zip(block.names, block.layout.views(lent), strict=True):
                assert torch.equal(view, expected[name].to(dtype))
            place.release(block, None)
            place.end()
        pool.close()
        assert host.total == 0 and host.peak <= pool.limit_bytes


def _empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(numel, dtype=dtype)


def test_what_cannot_be_had_says_what_can(folder: Path) -> None:
    kind = BY_NAME["chain"]
    batch = kind.make_batch(ROWS, 0)
    with relay_on(folder, kind) as relay:
        relay.step(batch)
        before = weights_of(relay)
        for read in (relay.model.state_dict, relay.model.layers[0].state_dict, relay.optimizer.state_dict):
            with pytest.raises(RuntimeError, match=re.escape("relay.shelf.save_pretrained")):
                read()
        for verb in (lambda: relay.fit(batch), lambda: relay.fork("b")):
            with pytest.raises(ValueError, match="in files"):
                verb()
        assert relay.probe([batch]) == [relay.evaluate(batch)]
        assert relay.look(batch).keys == tuple(unit.key for unit in relay.stack)
        assert_same(weights_of(relay), before)
        assert relay.step(batch).loss > 0
    with pytest.raises(RuntimeError, match="in memory they are NaN"):  # nor when it is closed
        relay.model.state_dict()
    with pytest.raises(ValueError, match="has no values here"):
        Relay(relay.model, adamw(relay.model), EmulatedDevice(), loss=kind.loss, loss_over=kind.loss_over)


def test_all_weights_in_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written inside of `gathered` is in the files afterwards, and an error leaves them as they were."""
    kind = BY_NAME["chain"]
    with relay_on(folder, kind) as relay:
        plain = in_core(kind)
        relay.step(kind.make_batch(ROWS, 0))
        plain.step(kind.make_batch(ROWS, 0))
        with pytest.raises(KeyError), relay.gathered() as model:
            next(model.parameters()).data.zero_()
            raise KeyError
        with relay.gathered() as model:
            assert_same(dict(model.state_dict()), dict(plain.model.state_dict()))
            for each in (model, plain.model):
                next(each.parameters()).data.mul_(2.0)
        assert relay.step(kind.make_batch(ROWS, 1)).loss == plain.step(kind.make_batch(ROWS, 1))
        monkeypatch.setattr(disk_storage, "free_bytes", lambda device: 1000)
        with pytest.raises(ValueError, match=re.escape("and 1,000 are free: read weights by relay.shelf.weights()")):
            relay.gathered().__enter__()


def test_a_loaded_state_is_stored_too(folder: Path) -> None:
    """`load_state_dict` of the optimizer replaces its state, and what it has put there is in the files after the block."""
    kind = BY_NAME["chain"]
    with relay_on(folder, kind) as relay:
        plain = in_core(kind)
        for seed in range(2):
            relay.step(kind.make_batch(ROWS, seed))
            plain.step(kind.make_batch(ROWS, seed))
            if not seed:
                early = copy.deepcopy(plain.optimizer.state_dict())
        with relay.gathered():
            relay.optimizer.load_state_dict(early)
        plain.optimizer.load_state_dict(early)
        for seed in range(2, 4):
            assert relay.step(kind.make_batch(ROWS, seed)).loss == plain.step(kind.make_batch(ROWS, seed))
        assert_same(weights_of(relay), state_of(plain.model))


def test_replaced_weights_are_refused_and_written_ones_are_stored(folder: Path) -> None:
    with relay_on(folder, BY_NAME["chain"]) as relay:
        before = weights_of(relay)
        with (
            pytest.raises(RuntimeError, match=re.escape("in place (param.data.copy_(new))")),
            relay.gathered() as model,
        ):
            for param in model.parameters():
                param.data = param.data + 1
        assert_same(weights_of(relay), before)
        with relay.gathered() as model:
            for param in model.parameters():
                param.data.copy_(param.data + 1)
        assert_same(weights_of(relay), {name: tensor + 1 for name, tensor in before.items()})


def test_a_relay_is_not_closed_before_its_gathered_weights_are_stored(folder: Path) -> None:
    with relay_on(folder, BY_NAME["chain"]) as relay:
        with relay.gathered() as model:
            next(model.parameters()).data.zero_()
            with pytest.raises(RuntimeError, match="leave that block first. Nothing was done"):
                relay.close()
        shelf = relay.shelf
        relay.close()
    assert shelf is not None
    with pytest.raises(RuntimeError, match="is closed: resume it with FileShelf"):
        next(shelf.weights())
    with relay_on(folder, BY_NAME["chain"], resume=True) as relay:
        assert not next(iter(weights_of(relay).values())).any()


@pytest.mark.slow
def test_an_emulated_link_in_bf16_is_the_same_as_from_memory(folder: Path) -> None:
    kind, config = BY_NAME["gpt2"], RelayConfig(micro_batches=2, precision="bf16")
    model = kind.make_model()
    with (
        relay_on(folder, kind, config=config) as relay,
        Relay(model, adamw(model), EmulatedDevice(), config=config) as other,
    ):
        for seed in range(2):
            assert relay.step(kind.make_batch(ROWS, seed)).loss == other.step(kind.make_batch(ROWS, seed)).loss
        assert_same(weights_of(relay), state_of(model))


def test_settings_that_there_cannot_be(folder: Path) -> None:
    for nbytes in (0, -1, True, 1.5, "much", None):
        with pytest.raises(ValueError, match="memory_bytes="):
            FileShelf(folder=folder, memory_bytes=nbytes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="might choose to load"):
        shelf = FileShelf(folder=folder, memory_bytes=1)
        Relay(BY_NAME["gpt2"].make_model(), adamw, EmulatedDevice(), config="auto", shelf=shelf)
    with pytest.raises(ValueError, match="leave out one"):
        FileShelf(folder=folder, memory_bytes=1, resume=True, weights=folder)
    model = BY_NAME["chain"].make_model()
    with pytest.raises(TypeError, match="FileShelf"):
        Relay(model, shelf=str(folder))  # type: ignore[arg-type]
