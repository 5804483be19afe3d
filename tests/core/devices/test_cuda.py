"""A GPU as the device. The upper half runs anywhere, on a double that copies as late as it may; the lower half on a GPU.

On a GPU sums may be added up in any order, so steps are compared by what they changed, to float32 rounding.
"""

from __future__ import annotations

import gc
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deep_models import Chain as Wide
from deep_models import squared_error
from late_cuda import LateDevice, Stream
from on_gpu import sgd, train_by_relay, train_in_core
from oracle import assert_equal, assert_state, both, copy_state
from patience import HANG_S
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import BY_NAME, Kind

from l2l_core import CudaDevice, DeviceOutOfMemory, EmulatedDevice, NonFiniteError, Relay, RelayConfig
from l2l_core.devices import cuda as cuda_module
from l2l_core.devices import resolve_device
from l2l_core.devices.pinned_memory import PinnedMemory
from l2l_core.model.thread_state import RandomState
from l2l_core.step.guards import recompute_check
from l2l_core.trace.trace import Trace

LATE = [
    "chain", "random_skip", "frozen_prefix", "lora", "lora_tied", "tied_layers", "batch_norm", "unet", "gpt2", "bert", "t5",
    "qwen3_moe",
]  # fmt: skip
ON_GPU = [
    "chain", "residual_outside", "norm_outside", "frozen_layer", "frozen_prefix", "tied_layers", "batch_norm",
    "spectral_norm", "mixture", "unet", "gpt2", "gpt2_padded", "bert", "llama", "gemma3", "t5", "vit", "resnet",
    "qwen3_moe", "albert",
]  # fmt: skip  # an nn.LSTM is not among them: cuDNN warns of weights that do not lie as it wants them

stashes = pytest.mark.parametrize("stash", ["device", "host"])


@pytest.fixture(autouse=True)
def checksums_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The double's tensors are on the CPU, where recomputes would be compared at once and by numbers."""
    monkeypatch.setattr(recompute_check, "_checksum", recompute_check._checksum_on_gpu)


def kinds(names: Sequence[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [BY_NAME[name] for name in names], ids=str)


# --- without a GPU: names and errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_without_a_gpu_asking_for_one_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf"device='{name}' does not exist: PyTorch finds no CUDA device. Use 'cpu'"):
        resolve_device(name)
    assert isinstance(resolve_device("auto"), EmulatedDevice)


@pytest.mark.parametrize("name", ["cpu", "cuda:first", "gpu"])
def test_what_is_no_gpu_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device='{name}' is not a CUDA device: give 'cuda', 'cuda:n' or a number"):
        CudaDevice(name)


def test_a_budget_must_be_positive() -> None:
    with pytest.raises(ValueError, match="memory_bytes=0: must be positive"):
        LateDevice(memory_bytes=0)


def test_random_states_are_those_of_manual_seed() -> None:
    before = RandomState.capture()
    state = RandomState.from_seed(7)
    assert torch.equal(before.torch_cpu, torch.get_rng_state()) and before.python == random.getstate()
    torch.manual_seed(7)
    random.seed(7)
    assert torch.equal(state.torch_cpu, torch.get_rng_state()) and state.python == random.getstate()
    before.restore()


# --- without a GPU: nothing is read before it is there --------------------------------------------------------------


@stashes
@kinds(LATE)
def test_copies_that_come_as_late_as_they_may_change_no_bit(kind: Kind, stash: str) -> None:
    device = LateDevice()
    with both(kind, RelayConfig(micro_batches=3, stash=stash), device=device) as pair:
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2)])
        assert not device.cuda.nvtx.open and {name.split()[0] for name in device.cuda.nvtx.names} >= {"load", "forward"}


@pytest.mark.parametrize(
    "settings", [{"ahead": 0}, {"ahead": 2}, {"update": "deferred", "max_grad_norm": 0.1}], ids=str
)
@kinds(["chain", "gpt2"])
def test_settings(kind: Kind, settings: dict[str, Any]) -> None:
    with both(kind, RelayConfig(micro_batches=2, **settings), device=LateDevice()) as pair:
        assert_equal([pair.step(kind.make_batch(4, step)) for step in range(2)])


@pytest.mark.parametrize("forgotten", ["wait", "join"])
def test_a_wait_that_is_forgotten_shows(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What proves that the test above can fail."""
    kind = BY_NAME["chain"]
    monkeypatch.setattr(cuda_module._CudaTicket, forgotten, lambda self: None)
    with both(kind, RelayConfig(micro_batches=2), device=LateDevice(), loss_over="micro-batch") as pair:
        try:
            steps = [pair.step(kind.make_batch(4, step)) for step in range(2)]
        except (NonFiniteError, RuntimeError):
            return  # what lay in the slot before led to nonsense
        assert not all(step.equal for step in steps)


class ReadsHost(TorchDispatchMode):
    """Notes operations that read host memory: of the batch, the model's own buffers, or pinned."""

    # What the engine itself does with host tensors: to cut the batch and count its targets, to move buffers, to make views.
    ENGINE = ("split", "slice", "ne", "sum", "empty_like", "detach", "as_strided", "_to_copy", "equal", "copy_")

    def __init__(self, device: LateDevice, host: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.device, self.found = device, set[str]()
        self.host = {tensor.untyped_storage().data_ptr() for tensor in host}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor) and self._on_host(tensor.untyped_storage().data_ptr()):
                self.found.add(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))

    def _on_host(self, address: int) -> bool:
        ranges = self.device.cuda.runtime.registered.items()
        return address in self.host or any(start <= address < start + nbytes for start, nbytes in ranges)


@stashes
@kinds(LATE)
def test_compute_reads_nothing_on_the_host(kind: Kind, stash: str) -> None:
    """On a GPU that would be an error ("expected all tensors to be on the same device"); the double could not tell."""
    device = LateDevice()
    with both(kind, RelayConfig(micro_batches=3, stash=stash), device=device) as pair:
        pair.relay.evaluate(kind.make_batch(7, 0))  # finds out what its loss is a mean over, on rows of the host
        for step in range(2):
            batch = kind.make_batch(7, step)
            host = [*pytree.tree_leaves(batch), *(b for b in pair.relay.model.buffers() if b.numel())]
            with ReadsHost(device, host) as seen:
                pair.relay.step(batch)
            assert seen.found <= set(ReadsHost.ENGINE)


# --- without a GPU: bfloat16 over the wire --------------------------------------------------------------------------


@stashes
@pytest.mark.parametrize("name", ["chain", "gpt2", "bert"])
def test_casts_on_the_host_give_the_bits_of_casts_on_the_way(name: str, stash: str) -> None:
    kind, results, models = BY_NAME[name], [], []
    for device in (EmulatedDevice(), LateDevice()):
        config = RelayConfig(micro_batches=2, precision="bf16", stash=stash)
        with Relay(kind.make_model(), device=device, loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:
            results.append([relay.step(kind.make_batch(4, step)) for step in range(3)])
            models.append(copy_state(relay.model))
            weights = relay.host.by_owner("weights")
            if isinstance(device, LateDevice):
                assert weights["wire"] * 2 == sum(n for key, n in weights.items() if key != "wire")
    assert [r.loss for r in results[0]] == [r.loss for r in results[1]]
    assert [r.bytes_loaded for r in results[0]] == [r.bytes_loaded for r in results[1]], "2 bytes per parameter"
    assert all(torch.equal(a, models[1][name]) for name, a in models[0].items())


def test_weights_changed_between_steps_are_what_the_next_step_loads() -> None:
    """Even past every version counter, by `.data`."""
    kind = BY_NAME["chain"]
    config, batch = RelayConfig(micro_batches=2, precision="bf16"), kind.make_batch(4, 0)
    with Relay(
        kind.make_model(), device=LateDevice(), loss=kind.loss, loss_over=kind.loss_over, config=config
    ) as relay:
        relay.step(batch)
        for param in relay.model.parameters():
            param.data.mul_(0.5)
        loss = relay.evaluate(batch)
        fresh = kind.make_model()
        fresh.load_state_dict(relay.model.state_dict())
    with Relay(fresh, device=EmulatedDevice(), loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:
        assert relay.evaluate(batch) == loss


# --- without a GPU: pinned host memory ------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_exactly_what_the_ledger_says_is_pinned(precision: str) -> None:
    """Masters, casts, gradients and stash, and not a byte more; the optimizer's state never travels."""
    device, kind = LateDevice(), BY_NAME["gpt2"]
    config = RelayConfig(micro_batches=2, precision=precision)
    # A comparison of losses would pin its own stash, until it has not been used for some steps.
    with Relay(kind.make_model(), device=device, loss_over="micro-batch", config=config) as relay:
        assert device.pinned_bytes == sum(block.nbytes for unit in (relay.shell, *relay.stack) for block in unit.blocks)
        for step in range(3):
            relay.step(kind.make_batch(4, step))
        booked = relay.host.by_category()
        assert device.pinned_bytes == device.cuda.runtime.nbytes == booked["weights"] + booked["gradients"]
        model = relay.model
        before = copy_state(model)
    assert not device.cuda.runtime.registered and device.pinned_bytes == 0
    assert_state(model, before)  # what was pinned is ordinary memory now


def test_a_stash_on_the_host_is_pinned_once_and_given_up_when_unused() -> None:
    device, kind = LateDevice(), BY_NAME["chain"]
    config = RelayConfig(micro_batches=2, stash="host")
    with Relay(kind.make_model(), device=device, loss=kind.loss, loss_over=kind.loss_over, config=config) as relay:

        def pinned_for_stash() -> int:
            booked = relay.host.by_category()  # how many gradients are under way at a time is a matter of speed
            return device.pinned_bytes - booked["weights"] - booked.get("gradients", 0)

        for step in range(2):
            relay.step(kind.make_batch(4, step))
        second = pinned_for_stash()
        for step in range(2, 5):
            relay.step(kind.make_batch(4, step))
            assert 0 < pinned_for_stash() < 2 * second, (
                "the next step uses the same buffers (but for the collector's whims)"
            )
        relay.config = RelayConfig(micro_batches=2)
        for step in range(5, 12):
            relay.step(kind.make_batch(4, step))
        assert pinned_for_stash() == 0


def pinned() -> tuple[PinnedMemory, Any]:
    device = LateDevice()
    return device._pinned, device.cuda.runtime


def test_a_pinned_buffer_lives_as_long_as_a_view_of_it() -> None:
    memory, runtime = pinned()
    tensor = memory.empty(1000, torch.float32)
    assert tensor.shape == (1000,) and tensor.data_ptr() % 4096 == 0 and memory.nbytes == runtime.nbytes == 4000
    view = tensor.view(10, 100)[3].fill_(1.0)
    del tensor
    gc.collect()
    assert memory.empty(1000, torch.float32).data_ptr() != view.untyped_storage().data_ptr() and view.sum() == 100
    address = view.untyped_storage().data_ptr()
    del view
    again = [memory.empty(2000, torch.bfloat16) for _ in range(2)]
    assert address in {tensor.data_ptr() for tensor in again}, "the same bytes, for whoever wants as many"
    assert memory.nbytes == 8000
    memory.close()
    assert not runtime.registered and again[0].zero_().sum() == 0
    assert memory.empty(0, torch.float32).numel() == 0


def test_a_refusal_is_retried_without_idle_buffers_and_then_told() -> None:
    memory, runtime = pinned()
    held = memory.empty(8, torch.float32)
    memory.empty(1000, torch.float32)  # idle at once
    runtime.refuses = 1
    assert memory.empty(10, torch.float32).numel() == 10 and memory.nbytes == 32 + 40
    runtime.refuses = 2
    with pytest.raises(
        MemoryError, match=r"4 MB of host memory cannot be pinned .*error 2.*pinned already. Remedy: free"
    ):
        memory.empty(1_000_000, torch.float32)
    assert memory.nbytes == runtime.nbytes == 32, "idle buffers went, and the failed one is not counted"
    assert held.numel() == 8


# --- without a GPU: buffers -----------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Writes to one buffer in place, replaces another, reads a third that is expanded; one is absent."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("table", torch.ones(1).expand(8))
        self.register_buffer("absent", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x + self.fc(x * self.table) + self.mean


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Counting() for _ in range(3))
        self.register_buffer("scale", torch.full((8,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return x


@stashes
def test_buffers_visit_the_device_and_come_home(stash: str) -> None:
    models = []
    for device in (EmulatedDevice(), LateDevice()):
        with Relay(
            model := Counted(), device=device, loss=squared_error, config=RelayConfig(micro_batches=2, stash=stash)
        ) as r:
            homes = {
                name: buffer for name, buffer in model.named_buffers() if name.split(".")[-1] in ("calls", "scale")
            }
            torch.manual_seed(1)
            for _ in range(3):
                r.step((torch.randn(4, 8), torch.randn(4, 8)))
            assert all(dict(model.named_buffers())[name] is home for name, home in homes.items()), (
                "the host's own tensors"
            )
            assert not device.ledger.by_category()
        models.append(model)
    assert models[0].layers[0].calls == 6
    assert_state(models[1], copy_state(models[0]))


def test_only_the_buffers_of_one_layer_are_on_the_device() -> None:
    device, seen = LateDevice(), []
    with Relay(model := Counted(), device=device, loss=squared_error) as relay:
        hooks = [
            layer.fc.register_forward_hook(lambda *_: seen.append(device.ledger.by_owner("weights")))
            for layer in model.layers
        ]
        relay.step((torch.randn(4, 8), torch.randn(4, 8)))
        for hook in hooks:
            hook.remove()
    assert (
        seen
        and {row["buffers"] for row in seen} == {4 * (1 + 8 + 8)}
        and {row["shell buffers"] for row in seen} == {32}
    )


def test_an_exception_sends_buffers_home_with_their_old_values() -> None:
    device, fail = LateDevice(), [False]
    with Relay(model := Counted(), device=device, loss=squared_error) as relay:
        relay.step((torch.randn(4, 8), torch.randn(4, 8)))
        before, homes = copy_state(model), dict(model.named_buffers())

        def trap(*_: Any) -> None:
            if fail[0]:
                raise KeyError("injected")

        model.layers[1].fc.register_forward_hook(trap)
        fail[0] = True
        with pytest.raises(KeyError, match="injected"):
            relay.step((torch.randn(4, 8), torch.randn(4, 8)))
        assert_state(model, before)
        assert all(buffer is homes[name] for name, buffer in model.named_buffers() if "calls" in name)
        assert not device.ledger.by_category()
        fail[0] = False
        relay.step((torch.randn(4, 8), torch.randn(4, 8)))


# --- without a GPU: times and errors --------------------------------------------------------------------------------


def assert_well_formed(trace: Trace, seconds: float, slack_s: float = 1e-6) -> None:
    """Every lane serial, every time finite and inside the step."""
    for lane, events in trace.lanes.items():
        assert events, lane
        for event in events:
            assert math.isfinite(event.start_s) and -slack_s <= event.start_s <= event.stop_s <= seconds + slack_s, (
                event
            )
        for before, after in zip(events, events[1:], strict=False):
            assert after.start_s >= before.stop_s - slack_s, (before, after)


@stashes
def test_every_event_is_in_the_trace_when_the_step_is_over(stash: str) -> None:
    kind, device, results = BY_NAME["gpt2"], LateDevice(), []
    for each in (EmulatedDevice(), device):
        with Relay(kind.make_model(), device=each, config=RelayConfig(micro_batches=2, stash=stash)) as relay:
            relay.step(kind.make_batch(4, 0))
            results.append(relay.step(kind.make_batch(4, 1)))
    names = [sorted((e.lane, e.kind, e.layer, e.k, e.nbytes) for e in result.trace.events) for result in results]
    assert names[0] == names[1]
    assert_well_formed(results[1].trace, results[1].seconds)
    assert not any(device._pending.values())


def test_events_that_are_over_arrive_while_the_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_module, "_POLL_S", 0.0)
    device, seen = LateDevice(), []
    source, target = torch.ones(3), torch.zeros(3)
    ticket = device.issue("h2d", [(target, source)], lambda a, b: seen.append(("copy", a, b)), label="load")
    device.start_timer(lambda a, b: seen.append(("compute", a, b)))()
    assert [name for name, *_ in seen] == ["compute"] and not target.any(), "the copy has not run yet"
    ticket.join()
    device.start_timer(lambda a, b: None)()
    assert [name for name, *_ in seen] == ["compute", "copy"] and all(0 < a <= b for _, a, b in seen) and target.all()
    device.close()


def test_host_memory_of_a_copy_is_held_until_the_copy_is_over() -> None:
    device = LateDevice()
    target = torch.zeros(1000)
    device.issue("h2d", [(target, device.host_empty(1000).fill_(1.0))], lambda a, b: None)
    gc.collect()
    other = device.host_empty(1000).fill_(2.0)
    device.synchronize()
    assert target.eq(1.0).all() and other.eq(2.0).all()
    device.close()


def test_copies_do_not_cast() -> None:
    device = LateDevice()
    with pytest.raises(AssertionError, match="copies do not cast"):
        device.issue(
            "h2d", [(torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2))], lambda a, b: None, label="load L000"
        )
    device.close()


class Hungry(nn.Module):
    def __init__(self, when: dict[str, bool]) -> None:
        super().__init__()
        self.fc, self.at_time = nn.Linear(8, 8), when

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.at_time["out"]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity")
        return self.fc(x)


def test_the_allocators_own_error_comes_with_the_ledgers_table() -> None:
    when = {"out": False}
    model = nn.Sequential(*(Hungry(when) for _ in range(3)))
    with Relay(model, device=LateDevice(), loss=squared_error) as relay:
        relay.step((torch.randn(4, 8), torch.randn(4, 8)))
        before = copy_state(model)
        when["out"] = True
        with pytest.raises(DeviceOutOfMemory, match="has no memory left during forward of .*L000") as caught:
            relay.step((torch.randn(4, 8), torch.randn(4, 8)))
        assert caught.value.requested_bytes == 20 << 20 and caught.value.bytes_by_category["weights"] > 0
        for word in ("Tried to allocate 20.00 MiB", "weights", "slots", "Remedy"):
            assert word in str(caught.value)
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert_state(model, before)
        assert not relay.device.ledger.by_category()
        when["out"] = False
        relay.step((torch.randn(4, 8), torch.randn(4, 8)))


def test_inference_verification_and_saving(tmp_path: Any) -> None:
    kind, device = BY_NAME["bert"], LateDevice()
    batch = kind.make_batch(4, 0)
    with Relay(kind.make_model(), device=device, config=RelayConfig(micro_batches=2)) as relay:
        assert relay.verify(batch).equal
        relay.step(batch)
        loss, logits = relay.evaluate(batch), relay.forward(batch).logits
        relay.save(tmp_path)
    with Relay.load(tmp_path, kind.make_model(), device=EmulatedDevice()) as relay:
        assert relay.evaluate(batch) == loss and torch.equal(relay.forward(batch).logits, logits)


# --- on a GPU -------------------------------------------------------------------------------------------------------


def assert_close(kind: Kind, ours: Any, theirs: Any, share: float = 2e-3) -> None:
    """Losses to 1e-4; what training has changed of each tensor, to a share of its largest change."""
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    before = dict(kind.make_model().named_parameters()) | dict(kind.make_model().named_buffers())
    mine = dict(ours[1].named_parameters()) | dict(ours[1].named_buffers())
    other = dict(theirs[1].named_parameters()) | dict(theirs[1].named_buffers())
    for name, start in before.items():
        a, b, start = (tensor.detach().double() for tensor in (mine[name], other[name], start))
        if a.numel():
            change = float((b - start).abs().max())
            assert float((a - b).abs().max()) <= share * change + 1e-6, f"{name}: changed by {change:.3g}"


@pytest.mark.cuda
@stashes
@kinds(ON_GPU)
def test_a_step_equals_training_in_core_on_the_gpu(kind: Kind, stash: str) -> None:
    """Dropout on, an uneven last micro-batch, BatchNorm's statistics, tied and frozen parameters."""
    config = RelayConfig(micro_batches=3, stash=stash)
    assert_close(kind, train_by_relay(kind, config), train_in_core(kind, config))


@pytest.mark.cuda
@kinds(["chain", "gpt2", "tied_layers"])
@pytest.mark.parametrize(
    "settings", [{"ahead": 0}, {"ahead": 2}, {"update": "deferred", "max_grad_norm": 0.1}], ids=str
)
def test_settings_on_the_gpu(kind: Kind, settings: dict[str, Any]) -> None:
    config = RelayConfig(micro_batches=2, **settings)
    assert_close(kind, train_by_relay(kind, config), train_in_core(kind, config))


@pytest.mark.cuda
@stashes
@kinds(["chain", "gpt2_untied", "bert", "llama"])
def test_bf16_learns_like_fp32_on_the_gpu(kind: Kind, stash: str) -> None:
    config = RelayConfig(micro_batches=2, precision="bf16", stash=stash)
    losses, model = train_by_relay(kind, config, steps=5)
    assert all(param.dtype == torch.float32 and not param.is_cuda for param in model.parameters())
    expected, _ = train_in_core(kind, RelayConfig(micro_batches=2), steps=5)
    assert losses == pytest.approx(expected, rel=3e-2)


EXACT = [
    "chain",
    "gpt2",
    "bert",
    "llama",
    "t5",
    "vit",
    "resnet",
    "batch_norm",
    "qwen3_moe",
    "tied_layers",
    "unet",
    "albert",
]


def exact_kinds() -> list[str]:
    """Kinds that train to the same bits as in core, with PyTorch's deterministic algorithms."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    equal = []
    for kind in (BY_NAME[name] for name in EXACT):
        config = RelayConfig(micro_batches=3, stash="host", seed=0)
        (losses, model), (expected, reference) = train_by_relay(kind, config), train_in_core(kind, config)
        states = zip(model.state_dict().values(), reference.state_dict().values(), strict=True)
        if losses == expected and all(torch.equal(ours, theirs) for ours, theirs in states):
            equal.append(kind.name)
    return equal


@pytest.mark.cuda
def test_bits_are_equal_on_the_gpu_with_deterministic_algorithms() -> None:
    """With SGD, whose update rounds alike on both; in a process of its own, since cuBLAS reads its setting once."""
    ended = run_apart("print(*test_cuda.exact_kinds())", CUBLAS_WORKSPACE_CONFIG=":4096:8")
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == EXACT


@pytest.mark.cuda
@kinds(["gpt2", "batch_norm", "resnet"])
def test_verify_runs_in_core_on_the_gpu(kind: Kind) -> None:
    model = kind.make_model()
    config = RelayConfig(micro_batches=2)
    with Relay(
        model, sgd(model), "cuda", layers=kind.layers, loss=kind.loss, loss_over=kind.loss_over, config=config
    ) as relay:
        report = relay.verify(kind.make_batch(4, 0))
        assert report.loss == pytest.approx(report.reference_loss, rel=1e-5) and report.max_abs_diff < 1e-5, str(report)
        outputs = pytree.tree_leaves(dict(relay.forward(kind.make_batch(4, 0))) if kind.name == "gpt2" else [])
        assert all(not output.is_cuda and output.isfinite().all() for output in outputs)
    gc.collect()
    assert torch.cuda.memory_allocated() < 256e6, "nothing stays but the libraries' workspaces"


@pytest.mark.cuda
def test_auto_takes_the_gpu_and_names_it() -> None:
    device = resolve_device("auto")
    assert isinstance(device, CudaDevice) and device.name.startswith("cuda:") and device.torch_device.index is not None
    missing = torch.cuda.device_count()
    with pytest.raises(ValueError, match=f"device='cuda:{missing}' does not exist: there are {missing}"):
        resolve_device(f"cuda:{missing}")


@pytest.mark.cuda
def test_random_state_of_the_gpu_is_kept_and_seeded() -> None:
    CudaDevice()
    before = torch.cuda.get_rng_state()
    state = RandomState.from_seed(11)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    torch.manual_seed(11)
    assert state.torch_cuda is not None and torch.equal(state.torch_cuda, torch.cuda.get_rng_state())


class SlowDevice(CudaDevice):
    """Every copy comes several milliseconds late."""

    def issue(self, lane: str, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(self._stream(lane)):
            torch.cuda._sleep(10_000_000)
        return super().issue(lane, *args, **kwargs)


class UnwaitedDevice(SlowDevice):
    """A bug: compute does not wait for copies."""

    def issue(self, lane: str, *args: Any, **kwargs: Any) -> Any:
        ticket = super().issue(lane, *args, **kwargs)
        ticket.wait = lambda: None  # type: ignore[method-assign]
        return ticket


class BusyDevice(CudaDevice):
    """Compute is several milliseconds behind when a copy is issued."""

    def issue(self, lane: str, *args: Any, **kwargs: Any) -> Any:
        torch.cuda._sleep(10_000_000)
        return super().issue(lane, *args, **kwargs)


class HastyDevice(BusyDevice):
    """A bug: copies do not wait for compute (they wait for a stream on which nothing ever runs)."""

    def compute_stream(self) -> Any:
        return self._idle if self._issuing else super().compute_stream()

    _issuing = False

    def issue(self, lane: str, *args: Any, **kwargs: Any) -> Any:
        self._idle = torch.cuda.Stream()
        torch.cuda._sleep(10_000_000)
        self._issuing = True
        try:
            return CudaDevice.issue(self, lane, *args, **kwargs)
        finally:
            self._issuing = False


SLOW_CONFIG = RelayConfig(micro_batches=2, stash="host")


@pytest.mark.cuda
@pytest.mark.parametrize("device", [SlowDevice, BusyDevice])
@kinds(["chain", "gpt2", "batch_norm"])
def test_slow_copies_and_slow_compute_change_nothing(kind: Kind, device: type[CudaDevice]) -> None:
    assert_close(kind, train_by_relay(kind, SLOW_CONFIG, device()), train_by_relay(kind, SLOW_CONFIG))


def shows_a_missing_wait(device: type[CudaDevice]) -> bool:
    """Whether training on such a device fails, or gives other weights than on a sound one."""
    kind = BY_NAME["chain"]
    expected = train_by_relay(kind, SLOW_CONFIG)
    try:
        assert_close(kind, train_by_relay(kind, SLOW_CONFIG, device()), expected)
    except (RuntimeError, FloatingPointError, AssertionError):  # what lay in the slot before may be nonsense
        return True
    return False


def run_apart(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code that uses this file as `test_cuda`, in a new process."""
    here = Path(__file__)
    folders = [str(here.parent), str(here.parents[2] / "support"), str(here.parents[3])]
    program = f"import sys; sys.path[:0] = {folders}\nimport test_cuda\n{code}"
    arguments = [sys.executable, "-c", program]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=HANG_S, env={**os.environ, **variables})


@pytest.mark.cuda
@pytest.mark.all_cases
@pytest.mark.parametrize("device", ["UnwaitedDevice", "HastyDevice"])
def test_a_wait_that_is_missing_shows_on_the_gpu(device: str) -> None:
    """What proves that the test above can fail; in a process of its own, since nonsense may end it."""
    ended = run_apart(f"sys.exit(3 if test_cuda.shows_a_missing_wait(test_cuda.{device}) else 0)")
    assert ended.returncode in (3, -signal.SIGABRT, -signal.SIGSEGV), (ended.returncode, ended.stderr[-2000:])


@pytest.mark.cuda
@stashes
def test_events_on_the_gpu(stash: str) -> None:
    kind = BY_NAME["gpt2"]
    with Relay(kind.make_model(), device="cuda", config=RelayConfig(micro_batches=2, stash=stash)) as relay:
        relay.step(kind.make_batch(4, 0))
        result = relay.step(kind.make_batch(4, 1))
        device = relay.device
    assert_well_formed(result.trace, result.seconds, slack_s=5e-5)
    counts = {
        kind: sum(e.kind == kind for e in result.trace.events) for kind in ("forward", "backward", "load", "update")
    }
    layers, ahead, shell = 4, 1, 1
    chunks = 2 if stash == "host" else 1  # a load gives way to the stash of each micro-batch
    assert counts == {
        "forward": 8,
        "backward": 8,
        "load": chunks * (2 * layers - ahead - 1) + shell,
        "update": layers + shell,
    }
    assert not any(device._pending.values())  # type: ignore[attr-defined]


WIDTH, ROWS = 512, 2048


@contextmanager
def wide_relay(depth: int, **settings: Any) -> Iterator[tuple[Relay, Any]]:
    config = RelayConfig(micro_batches=2, stash="host", **settings)
    with Relay(
        Wide(depth, WIDTH), partial(torch.optim.SGD, lr=1e-3), "cuda", loss=squared_error, config=config
    ) as relay:
        yield relay, (torch.randn(2 * ROWS, 8), torch.randn(2 * ROWS, 3))


def measured_peak(depth: int) -> tuple[int, int]:
    """Bytes that PyTorch's allocator handed out at the peak of a step, workspaces apart; and what the ledger says."""
    with wide_relay(depth) as (relay, batch):
        for _ in range(2):  # libraries allocate their workspaces, once
            relay.step(batch)
        base = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        result = relay.step(batch)
        return torch.cuda.max_memory_allocated() - base, result.peak_device_bytes


@pytest.mark.cuda
def test_memory_on_the_gpu_is_flat_in_depth_and_what_the_ledger_says() -> None:
    peaks = {depth: measured_peak(depth) for depth in (4, 16, 64)}
    measured, booked = zip(*peaks.values(), strict=True)
    assert max(measured) <= 1.01 * min(measured), peaks
    assert max(booked) <= 1.01 * min(booked), peaks
    assert 0.9 <= measured[0] / booked[0] <= 1.15, peaks  # kernels' own scratch memory is in no ledger


@pytest.mark.cuda
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pinned_memory_on_the_gpu_is_exact_and_freed(precision: str) -> None:
    with wide_relay(4, precision=precision) as (relay, batch):
        device = relay.device
        assert isinstance(device, CudaDevice)
        blocks = [block for unit in (relay.shell, *relay.stack) for block in unit.blocks]
        assert device.pinned_bytes == sum(block.nbytes for block in blocks)
        assert all(block.master.is_pinned() for block in blocks)
        relay.step(batch)
        booked = relay.host.by_category()
        assert (
            device.pinned_bytes >= booked["weights"] + booked["gradients"]
        )  # and buffers of the stash, kept for the next
        model = relay.model
        before = copy_state(model)
    assert device.pinned_bytes == 0 and not any(param.is_pinned() for param in model.parameters())
    assert_state(model, before)


@pytest.mark.cuda
def test_running_out_of_gpu_memory_says_what_fills_it() -> None:
    free, _ = torch.cuda.mem_get_info()
    with wide_relay(3) as (relay, batch):
        relay.step(batch)
        before = copy_state(relay.model)
        hook = relay.model.layers[1].up.register_forward_hook(
            lambda *_: torch.empty(2 * free, dtype=torch.uint8, device="cuda")
        )
        with pytest.raises(DeviceOutOfMemory, match=r"(?s)no memory left during forward.*weights.*Remedy"):
            relay.step(batch)
        hook.remove()
        assert_state(relay.model, before)
        relay.step(batch)


@pytest.mark.cuda
def test_a_budget_holds_on_the_gpu() -> None:
    kind = BY_NAME["gpt2"]
    with (
        Relay(kind.make_model(), device=CudaDevice(memory_bytes=50_000)) as relay,
        pytest.raises(DeviceOutOfMemory, match="is full"),
    ):
        relay.step(kind.make_batch(4, 0))


def test_the_double_has_what_the_device_uses() -> None:
    """Names that the double offers exist in PyTorch, or it would prove nothing."""
    real: Any = torch.cuda
    assert all(hasattr(real.Stream, name) for name in ("wait_stream", "wait_event", "synchronize"))
    assert all(hasattr(real.Event, name) for name in ("record", "query", "synchronize", "elapsed_time"))
    assert all(hasattr(real, name) for name in ("current_stream", "device", "stream", "cudart", "Stream", "Event"))
    assert all(hasattr(real.nvtx, name) for name in ("range_start", "range_end")) and issubclass(Stream, object)
