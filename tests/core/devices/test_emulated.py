"""The emulated device: real copies, at no more than the stated speed, in threads that end."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest
import torch
from deep_models import Chain, chain_batch, squared_error

from l2l_core import EmulatedDevice, Event, Relay, RelayConfig
from l2l_core.devices.executors import serial_executor
from l2l_core.eps.blocks.layout import Layout

LATENCY_S, DOWN, UP = 2e-3, 20e6, 5e6


@pytest.mark.parametrize("cores", [1, 2])
def test_a_serial_thread_computes_on_the_cores_it_was_given(cores: int) -> None:
    """Also after its first operation, when PyTorch sets a thread up; the caller's own number stays."""
    torch.set_num_threads(2)
    thread = serial_executor("test", cores)
    thread.submit(torch.randn(2000, 2000).mul_, 2).result()
    assert thread.submit(torch.get_num_threads).result() == cores
    assert torch.get_num_threads() == 2
    thread.shutdown()


def test_copies_take_at_least_latency_and_bytes_over_bandwidth() -> None:
    device = EmulatedDevice(h2d_bytes_per_s=DOWN, d2h_bytes_per_s=UP, latency_s=LATENCY_S)
    with Relay(Chain(3), device=device, loss=squared_error, config=RelayConfig(micro_batches=2, stash="host")) as relay:
        lanes = relay.step(chain_batch(2)).trace.lanes
    for lane, bytes_per_s in (("h2d", DOWN), ("d2h", UP)):
        assert lanes[lane]
        for event in lanes[lane]:
            assert event.stop_s - event.start_s >= LATENCY_S + event.nbytes / bytes_per_s - 1e-9, event
        for before, after in zip(lanes[lane], lanes[lane][1:], strict=False):
            assert after.start_s >= before.stop_s - 1e-9, "a lane is serial"


def test_loads_run_while_layers_compute_only_when_they_may_run_ahead() -> None:
    """Structure, not speed: with `ahead=0` no load overlaps a visit of a layer; with `ahead=1` the next load begins in it."""
    overlapping = {}
    for ahead in (0, 1):
        device, model = EmulatedDevice(h2d_bytes_per_s=5e6), Chain(4)
        for layer in model.layers:  # longer than a busy machine takes to begin a copy
            layer.register_forward_hook(lambda *_: time.sleep(0.02))
        with Relay(model, device=device, loss=squared_error, config=RelayConfig(micro_batches=4, ahead=ahead)) as relay:
            relay.step(chain_batch(4))
            lanes = relay.step(chain_batch(4)).trace.lanes
        loads = [e for e in lanes["h2d"] if e.kind == "load" and e.layer != "shell"]
        visits: dict[tuple[str, int], list[Event]] = {}
        for e in lanes["compute"]:
            if e.kind in ("forward", "backward"):
                visits.setdefault((e.layer, e.visit), []).append(e)
        spans = [(of_visit[0].start_s, of_visit[-1].stop_s) for of_visit in visits.values()]
        overlapping[ahead] = sum(any(start < e.stop_s and e.start_s < stop for start, stop in spans) for e in loads)
    assert overlapping[0] == 0
    assert overlapping[1] >= 3


def test_a_slow_link_changes_nothing_but_time() -> None:
    losses = []
    for device in (EmulatedDevice(), EmulatedDevice(h2d_bytes_per_s=1e7, d2h_bytes_per_s=1e7, latency_s=1e-4)):
        optimizer = partial(torch.optim.AdamW, lr=1e-2)
        with Relay(Chain(3), optimizer, device, loss=squared_error, config=RelayConfig(micro_batches=2)) as relay:
            torch.manual_seed(1)
            losses.append([relay.step(chain_batch(2)).loss for _ in range(3)])
    assert losses[0] == losses[1]


def test_closing_joins_the_threads() -> None:
    before = set(threading.enumerate())
    with Relay(Chain(3), loss=squared_error) as relay:
        relay.step(chain_batch(1))
        assert {t.name.split("_")[0] for t in set(threading.enumerate()) - before} == {
            "relay-eps",
            "relay-h2d",
            "relay-d2h",
        }
    assert set(threading.enumerate()) == before


def test_threads_of_the_caller_are_left_alone() -> None:
    torch.set_num_threads(2)
    try:
        with Relay(Chain(3), loss=squared_error) as relay:
            relay.step(chain_batch(1))
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_a_layout_keeps_strides_and_aligns() -> None:
    tensors = [
        torch.randn(3, 5),
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.randn(()),
        torch.randn(0),
    ]
    layout = Layout.of(tensors)
    flat = torch.zeros(layout.numel)
    for view, tensor in zip(layout.views(flat), tensors, strict=True):
        view.copy_(tensor)
        assert view.stride() == tensor.stride() or tensor.numel() == 0
        assert view.storage_offset() * 4 % 64 == 0
    for view, tensor in zip(layout.views(flat.clone()), tensors, strict=True):
        assert torch.equal(view, tensor)
