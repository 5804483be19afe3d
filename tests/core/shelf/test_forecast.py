"""A step on a shelf is forecast from a configuration: its bytes are those of a step that was really made."""

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from on_shelf import ENOUGH, relay_on
from patience import rarely
from transformers import GPT2Config, GPT2LMHeadModel
from zoo import BY_NAME

from l2l_core import (
    Disk,
    EmulatedDevice,
    FileShelf,
    Forecast,
    Machine,
    PlannedShelf,
    Relay,
    RelayConfig,
    Trace,
    fit_config,
    forecast_config,
    in_bf16,
)
from l2l_core.devices import Ledger
from l2l_core.eps.optimizers import state_bytes
from l2l_core.forecast.optimizer_state_size import OptimizerStateSize
from l2l_core.shelf.direct_io import BufferPool, PoolBuffer
from l2l_core.simulator.virtual_shelf import VirtualPool

MACHINE = Machine(flops_per_s=1e10, update_params_per_s=1e9, h2d_bytes_per_s=1e9, d2h_bytes_per_s=1e9)
DISK = Disk(read_bytes_per_s=1e9, write_bytes_per_s=5e8)
MODEL = GPT2Config(n_embd=40, n_layer=5, n_head=2, vocab_size=601, n_positions=32, bos_token_id=0, eos_token_id=0)
BATCH, LENGTH = {"micro_batches": 2, "batch": 4}, 16
ADAMW = partial(torch.optim.AdamW, lr=1e-3)
IN_BF16 = partial(in_bf16(torch.optim.AdamW), lr=1e-3)
ALL_IN_BF16 = partial(in_bf16(torch.optim.AdamW, weights=True), lr=1e-3)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adamw": ADAMW,
    "fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "bf16": IN_BF16,
    "adafactor": partial(torch.optim.Adafactor, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
}


def told(optimizer: Any = ADAMW, disk: Disk = DISK, pool: int | None = None, **options: Any) -> Forecast:
    """Forecast a step on a shelf."""
    shelf = PlannedShelf(disk=disk, memory_bytes=pool)
    asked: dict[str, Any] = {**BATCH, "sequence": LENGTH, "emulated": True, "shelf": shelf, "optimizer": optimizer}
    return forecast_config(MODEL, MACHINE, **(asked | options))


def third_step(optimizer: Any, config: RelayConfig, model: Any = MODEL, **options: Any) -> Trace:
    """The first step makes state, the second writes the halves that have none; the third is as all others."""
    torch.manual_seed(0)
    built, ids = GPT2LMHeadModel(model), torch.arange(BATCH["batch"] * LENGTH).view(-1, LENGTH)
    if optimizer is ALL_IN_BF16:
        built = built.bfloat16()
    config = replace(config, micro_batches=BATCH["micro_batches"])
    with Relay(built, optimizer, config=config, device=EmulatedDevice(), **options) as relay:
        return [relay.step({"input_ids": ids, "labels": ids}).trace for _ in range(3)][-1]


def most_on_host(trace: Trace, category: str) -> int:
    return max(s.bytes_by_category.get(category, 0) for s in trace.memory if s.place == "host")


@pytest.mark.parametrize(
    "name, settings",
    [
        ("adamw", {}),
        rarely("bf16", {"ahead": 0}),
        rarely("adafactor", {"stash": "host", "update": "deferred", "max_grad_norm": 1.0}),
        ("fused", {"ahead": 2, "resident": 1}),
        rarely("momentum", {"stash": "host"}),
        rarely("sgd", {"precision": "bf16"}),
    ],
    ids=str,
)
def test_bytes_are_those_of_a_real_step(name: str, settings: dict[str, Any], folder: Path) -> None:
    config, optimizer = RelayConfig(**settings), OPTIMIZERS[name]
    forecast = told(optimizer, relay_config=config)
    assert forecast.shelf is not None
    with pytest.raises(ValueError, match="smallest that works") as refused:
        third_step(optimizer, config, shelf=FileShelf(folder=folder, memory_bytes=1))
    (least,) = re.findall(r"smallest that works is ([\d,]+)", str(refused.value))
    assert forecast.shelf.min_bytes == forecast.shelf.memory_bytes == int(least.replace(",", ""))
    trace = third_step(optimizer, config, shelf=FileShelf(folder=folder, memory_bytes=forecast.shelf.min_bytes))
    for lane in ("disk read", "disk write"):
        real, ours = (sorted(event.nbytes for event in each.lanes[lane]) for each in (trace, forecast.trace))
        assert real == ours and len(real) >= MODEL.n_layer + 1
    assert forecast.shelf.read_bytes == sum(event.nbytes for event in trace.lanes["disk read"])
    for category in ("weights", "optimizer"):
        assert forecast.host_bytes[category] == most_on_host(trace, category)
    assert forecast.shelf.disk_bytes == sum(file.stat().st_size for file in (folder / "records").iterdir())


@pytest.mark.parametrize("name", ["adamw", *(rarely(n) for n in OPTIMIZERS if n != "adamw"), "all in bf16"])
def test_bytes_in_memory_are_those_of_the_ledger(name: str) -> None:
    """Parameters large enough not to be tried as they are among them."""
    optimizer = OPTIMIZERS.get(name, ALL_IN_BF16)
    model = GPT2Config(n_embd=96, n_layer=1, n_head=2, vocab_size=301, n_positions=32, bos_token_id=0, eos_token_id=0)
    trace = third_step(optimizer, RelayConfig(), model)
    forecast = forecast_config(model, MACHINE, **BATCH, sequence=LENGTH, emulated=True, optimizer=optimizer)
    for category in ("weights", "optimizer"):
        assert forecast.host_bytes.get(category, 0) == most_on_host(trace, category)


@pytest.mark.slow
def test_bytes_with_adapters(folder: Path) -> None:
    """What is frozen is never written, and memory has room for its state all the same."""
    kind, config = BY_NAME["lora_llama"], RelayConfig(micro_batches=2)
    with pytest.raises(ValueError, match="smallest that works") as refused:
        relay_on(folder / "small", kind, memory_bytes=1, config=config).close()
    with relay_on(folder / "large", kind, config=config) as relay:
        adapters = [tuple(param.shape) for param in relay.stack[0].module.parameters() if param.requires_grad]
        batches = [kind.make_batch(4, seed) for seed in range(3)]
        trace = [relay.step(batch).trace for batch in batches][-1]
        shelf = PlannedShelf(disk=DISK, memory_bytes=ENOUGH)
        length = batches[0]["input_ids"].shape[1]  # type: ignore[index,call-overload]
        asked: dict[str, Any] = {"emulated": True, "optimizer": ADAMW, "adapters": adapters, "shelf": shelf}
        told = forecast_config(relay.model.config, MACHINE, **BATCH, sequence=length, **asked).shelf
    assert told is not None and f"{told.min_bytes:,}" in str(refused.value)
    assert told.read_bytes == sum(event.nbytes for event in trace.lanes["disk read"])
    assert told.written_bytes == sum(event.nbytes for event in trace.lanes["disk write"]) > 0
    assert told.disk_bytes == sum(file.stat().st_size for file in (folder / "large" / "records").iterdir())


@pytest.mark.parametrize("ahead", [0, 1])
def test_casts_take_memory_and_move_nothing_more(ahead: int) -> None:
    """For devices whose copies cannot cast; no such device is here, so this holds one forecast to another."""
    config = RelayConfig(ahead=ahead, precision="bf16")
    plain, casting = (told(relay_config=config, emulated=emulated).shelf for emulated in (True, False))
    assert plain is not None and casting is not None
    assert (plain.read_bytes, plain.written_bytes) == (casting.read_bytes, casting.written_bytes)
    assert plain.min_bytes < casting.min_bytes and casting.unused_bytes >= 0


class InBlocks(torch.optim.Optimizer):
    """Keeps what 8-bit optimizers do: a byte per element, a scale per block of 256, and one table for all."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.table = torch.zeros(256)

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.numel() < 4096:  # as there, small ones stay in float32
                self.state[param] = {"moment": torch.zeros_like(param)}
                continue
            scales = torch.zeros(-(-param.numel() // 256))
            moment = torch.zeros_like(param, dtype=torch.uint8)
            self.state[param] = {"moment": moment, "scales": scales, "table": self.table}


@pytest.mark.parametrize("make", [InBlocks, *OPTIMIZERS.values()], ids=["in blocks", *OPTIMIZERS])
def test_state_of_large_parameters_is_that_of_a_real_step(make: Any) -> None:
    shapes = [(301, 97), (70_001,), (5, 7, 31, 33), (40, 40), (7,)]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    real, kept = make(params), OptimizerStateSize(make)
    for param in params:
        param.grad = torch.ones_like(param)
    real.step()
    assert kept.nbytes(shapes) + kept.shared_bytes(shapes) == state_bytes(*real.state.values())


def test_a_disk_that_takes_no_time_is_memory() -> None:
    config = RelayConfig(micro_batches=2)
    in_memory = told(shelf=None, relay_config=config)
    fast = told(disk=Disk(read_bytes_per_s=1e18, write_bytes_per_s=1e18), relay_config=config)
    assert fast.seconds == pytest.approx(in_memory.seconds, rel=1e-6)
    assert fast.trace.lanes["compute"][-1].stop_s == pytest.approx(
        in_memory.trace.lanes["compute"][-1].stop_s, rel=1e-6
    )
    assert fast.hiding_micro_batches == in_memory.hiding_micro_batches


def test_a_slow_disk_is_what_binds_and_larger_batches_hide_it() -> None:
    slow = told(disk=Disk(read_bytes_per_s=1e8, write_bytes_per_s=1e8))
    assert slow.shelf is not None and slow.bound is not None and slow.bound.lane in ("disk read", "disk write")
    assert slow.seconds >= slow.shelf.read_bytes / 1e8
    count = slow.hiding_micro_batches
    assert count is not None and count > BATCH["micro_batches"]

    def lanes(micro_batches: int) -> set[str]:
        disk, rows = Disk(read_bytes_per_s=1e8, write_bytes_per_s=1e8), BATCH["batch"] // BATCH["micro_batches"]
        forecast = told(disk=disk, micro_batches=micro_batches, batch=rows * micro_batches)
        return {bound.lane for bound in forecast.bounds if bound.phase in ("forward", "backward")}

    assert (
        told(disk=Disk(read_bytes_per_s=1e6, write_bytes_per_s=1e6)).hiding_micro_batches > 64
    )  # beyond what is simulated
    assert lanes(count) == {"compute"} and lanes(count - 1) != {"compute"}


@pytest.mark.slow
def test_more_of_anything_is_never_slower() -> None:
    speeds = [told(disk=Disk(read_bytes_per_s=s, write_bytes_per_s=s)).seconds for s in (5e7, 1e8, 1e9)]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] > speeds[-1]
    disk = Disk(read_bytes_per_s=1e8, write_bytes_per_s=1e8)
    shelf = told(disk=disk).shelf
    assert shelf is not None
    pools = [
        told(disk=disk, pool=shelf.min_bytes + n * (shelf.max_useful_bytes - shelf.min_bytes) // 4) for n in range(6)
    ]
    seconds = [forecast.seconds for forecast in pools]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[4] == seconds[5]
    assert all(f.shelf is not None and f.shelf.unused_bytes >= 0 for f in pools)
    less_state = [told(OPTIMIZERS[name], disk=disk).seconds for name in ("adamw", "bf16", "sgd")]
    assert less_state == sorted(less_state, reverse=True)


def test_it_says_what_does_not_fit() -> None:
    shelf = told().shelf
    assert shelf is not None
    full = told(disk=replace(DISK, free_bytes=shelf.needed_bytes - 1))
    assert not full.fits and "does not fit the disk" in str(full) and full.largest_depth == MODEL.n_layer - 1
    assert told(disk=replace(DISK, free_bytes=shelf.needed_bytes)).fits
    wide = told(pool=10**9, host_bytes=5 * 10**8)
    room = int(re.findall(r"would fit with memory_bytes=([\d,]+)", wide.advice)[0].replace(",", ""))
    assert not wide.fits and told(pool=room, host_bytes=5 * 10**8).fits
    assert not told(pool=room + 1, host_bytes=5 * 10**8).fits
    assert "smallest pool that works" in told(host_bytes=1000).advice


def test_pools_lend_as_real_ones() -> None:
    draw = random.Random(0)
    for _ in range(50):
        limit, sizes = 4096 * draw.randint(4, 30), [4096 * n for n in (1, 2, 3, 7)]
        host = Ledger("host", "host")
        pool, virtual = (
            BufferPool(limit, lambda n, dtype: torch.empty(n, dtype=dtype), host, "weights"),
            VirtualPool(limit),
        )
        lent: list[PoolBuffer] = []
        for _ in range(60):
            if lent and draw.random() < 0.5:
                buffer = lent.pop(draw.randrange(len(lent)))
                pool.release(buffer)
                virtual.release(len(buffer.flat))
            else:
                size = draw.choice(sizes)
                taken = pool.acquire(size)
                assert virtual.acquire(size) == (taken is not None)
                lent += [taken] if taken is not None else []
            assert virtual.peak_bytes >= host.total


# -- the disk itself ---------------------------------------------------------------------------------------------------


def test_a_disk_is_measured_and_nothing_stays(folder: Path) -> None:
    disk = Disk.of(folder, nbytes=1 << 20)
    assert min(disk.read_bytes_per_s, disk.write_bytes_per_s) > 0 and disk.free_bytes and not [*folder.iterdir()]


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Disk(read_bytes_per_s=0, write_bytes_per_s=1e9), "read_bytes_per_s=0"),
        (lambda: Disk(read_bytes_per_s=1e9, write_bytes_per_s=1e9, free_bytes=-1), "free_bytes=-1"),
        (lambda: Disk.of(".", nbytes=0), "nbytes=0"),
        (lambda: PlannedShelf(disk=DISK, memory_bytes=0), "memory_bytes=0"),
        (
            lambda: PlannedShelf(disk=DISK, memory_bytes="2 gigs"),
            "memory_bytes='2 gigs': must be a number of bytes with",
        ),
        (lambda: told(pool=1), "smallest that works"),
        (lambda: told(optimizer=None), "shelf= needs optimizer="),
        (lambda: told(ALL_IN_BF16), "masters in bfloat16"),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


# -- memory, codec or disk ---------------------------------------------------------------------------------------------

DEEP = GPT2Config(n_embd=40, n_layer=16, n_head=2, vocab_size=61, n_positions=32, bos_token_id=0, eos_token_id=0)
OFFERED = {"float32": ADAMW, "bf16": IN_BF16, "all bf16": ALL_IN_BF16}


def chosen(host_bytes: int, disk: Disk | None = DISK) -> Any:
    asked: dict[str, Any] = {**BATCH, "sequence": LENGTH, "emulated": True}
    return fit_config(DEEP, MACHINE, optimizers=OFFERED, host_bytes=host_bytes, disk=disk, **asked)


def test_the_fastest_that_fits_is_taken() -> None:
    """What is chosen is what forecasts of each by itself say, as memory gets scarcer."""
    disk = Disk(read_bytes_per_s=2e8, write_bytes_per_s=2e8)
    needs = {way.name: way.forecast.needed_host_bytes for way in chosen(10**9, None).ways}
    assert [chosen(host_bytes, None).best.name for host_bytes in needs.values()] == [*needs]
    assert sorted(needs.values(), reverse=True) == [*needs.values()]
    scarce = chosen(min(needs.values()) - 1, disk)
    assert scarce.best is not None and scarce.best.name == "bf16 on disk"  # it moves less than float32
    assert scarce.best.forecast.needed_host_bytes < min(needs.values())
    assert "faster would be" in str(scarce) and "does not fit the host" in str(scarce)
    assert scarce.ways[0].forecast.seconds < scarce.best.forecast.seconds
    nothing = chosen(1000, disk)
    assert nothing.best is None and "nothing of this fits" in str(nothing)
    assert chosen(min(needs.values()) - 1, None).best is None


def test_a_full_disk_leaves_memory() -> None:
    full = replace(DISK, free_bytes=0)
    fit = chosen(10**9, full)
    assert fit.best is not None and fit.best.forecast.shelf is None
    assert all(not way.forecast.fits for way in fit.ways if way.forecast.shelf is not None)
