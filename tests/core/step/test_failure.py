"""A step that fails leaves the trace of what happened until then, marked so that nobody takes it for a whole step."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Profile, Relay, RelayConfig, Trace
from l2l_core.analysis import roofline

WIDTH = 16


def squares(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, batch[1])


def make_relay(memory_bytes: int | None, micro_batches: int) -> Relay:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers)
    device, config = EmulatedDevice(memory_bytes), RelayConfig(micro_batches=micro_batches)
    # Steps that fail: no evaluation of a few rows fails before them.
    return Relay(model, device=device, layers=layers, loss=squares, loss_over="micro-batch", config=config)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(64, WIDTH), torch.zeros(64, WIDTH)


@pytest.fixture
def full() -> tuple[Trace, DeviceOutOfMemory]:
    """The trace of a step that needs more than its device has, and its error."""
    with make_relay(None, 8) as relay:
        budget = relay.step(batch()).peak_device_bytes
    with make_relay(budget, 8) as relay:
        finished = relay.step(batch()).trace
        relay.config = replace(relay.config, micro_batches=1)
        with pytest.raises(DeviceOutOfMemory) as caught:
            relay.step(batch())
        assert relay.trace is not None and relay.trace is not finished and finished.failed is None
        failed = relay.trace
        relay.config = replace(relay.config, micro_batches=8)
        assert relay.step(batch()).trace.failed is None
    return failed, caught.value


def test_the_trace_ends_with_what_was_held_and_asked_for(full: tuple[Trace, DeviceOutOfMemory]) -> None:
    trace, error = full
    failed = trace.failed
    assert failed is not None and failed.error == "DeviceOutOfMemory"
    assert (failed.asked_bytes, failed.held_bytes) == (error.requested_bytes, sum(error.bytes_by_category.values()))
    assert failed.missing_bytes == failed.held_bytes + failed.asked_bytes - error.limit_bytes > 0
    assert failed.asked_for in str(error).replace(" were being allocated", "")
    last = [sample for sample in trace.memory if sample.place == "device"][-1]
    assert dict(last.bytes_by_category) == error.bytes_by_category and last.t_s >= failed.t_s
    assert trace.lanes["compute"][-1].stop_s >= failed.t_s, "what was computed when it failed"
    assert all(a.t_s <= b.t_s for a, b in zip(trace.memory, trace.memory[1:], strict=False))


@pytest.mark.parametrize("read", [roofline, Profile.of], ids=["roofline", "profile"])
def test_nobody_takes_it_for_a_whole_step(
    full: tuple[Trace, DeviceOutOfMemory], read: Callable[[Trace], object]
) -> None:
    trace, _ = full
    assert trace.bound_by() == ()
    with pytest.raises(ValueError, match=r"failed after .*take the trace of a finished step"):
        read(trace)
    assert "failed after" in trace.summary() and "failed after" in repr(trace)


def test_files_say_so_too(full: tuple[Trace, DeviceOutOfMemory], tmp_path: Path) -> None:
    trace, _ = full
    trace.to_jsonl(tmp_path / "trace.jsonl")
    again = Trace.from_jsonl(tmp_path / "trace.jsonl")
    assert again.failed == trace.failed is not None
    trace.to_chrome(tmp_path / "trace.json")
    assert "failed after" in (tmp_path / "trace.json").read_text()


def test_any_other_error_marks_the_trace_too() -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("no luck")

    with make_relay(None, 2) as relay:
        relay.model[2].append(Broken())
        with pytest.raises(RuntimeError, match="no luck"):
            relay.step(batch())
        assert relay.trace is not None and relay.trace.failed is not None
        assert (relay.trace.failed.error, relay.trace.failed.asked_bytes) == ("RuntimeError", 0)
        assert relay.trace.bound_by() == ()
