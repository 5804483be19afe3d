"""A relay is freed with its last reference, a model has one relay, and a closed relay's parameters have their own memory."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from small import make_batch, make_gpt, make_relay
from torch import nn

from l2l_core import Drop, Duplicate, EmulatedDevice, Freeze, Relay, RelayConfig
from l2l_core.devices import serial_executor

ADAMW = partial(torch.optim.AdamW, lr=1e-2)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """References alone decide what is freed."""
    torch.optim.SGD(
        [nn.Parameter(torch.zeros(1))]
    )  # the first import of torch._dynamo leaves cycles with its callers' frames
    gc.collect()
    gc.disable()
    yield
    gc.enable()


_EARLIER: set[threading.Thread] = set()  # of devices that tests before this one have left to the collector


@pytest.fixture(autouse=True)
def earlier_threads() -> Iterator[None]:
    _EARLIER.update(threading.enumerate())
    yield
    _EARLIER.clear()


def relay_threads() -> list[str]:
    """Names of the threads of relays that this test has made."""
    return [each.name for each in threading.enumerate() if each.name.startswith("relay-") and each not in _EARLIER]


def open_relay(**options: Any) -> Relay:
    options.setdefault("config", RelayConfig(micro_batches=2))
    return Relay(make_gpt(), ADAMW, "cpu", **options)


def fail(relay: Relay) -> None:
    def raise_error(*_: object) -> None:
        raise OSError("no")

    relay.step(make_batch())
    handle = relay.model.transformer.h[2].register_forward_hook(raise_error)
    with pytest.raises(OSError, match="no"):
        relay.step(make_batch())
    handle.remove()


def edit(relay: Relay) -> None:
    relay.step(make_batch())
    relay.apply(Drop(1))
    relay.undo()
    relay.redo()
    relay.apply(Duplicate(0), Freeze(1))
    relay.step(make_batch())
    relay.probe([make_batch()], Drop(1))


def branch(relay: Relay) -> None:
    relay.fork("other")
    relay.step(make_batch())
    relay.switch("main")
    relay.step(make_batch())


def save(relay: Relay, folder: Path) -> None:
    relay.save(folder / "save")


OPERATIONS: dict[str, Callable[[Relay], object]] = {
    "nothing": lambda relay: None,
    "steps": lambda relay: [relay.step(make_batch(seed)) for seed in range(2)],
    "evaluate": lambda relay: relay.evaluate(make_batch()),
    "forward": lambda relay: relay.forward(make_batch()),
    "verify": lambda relay: relay.verify(make_batch()),
    "forecast": lambda relay: relay.forecast(make_batch()),
    "fit": lambda relay: relay.fit(make_batch(), most_s=1.0),
    "look": lambda relay: relay.look(make_batch()),
    "skip": lambda relay: relay.step(make_batch(), skip=[1]),
    "failed step": fail,
    "edits": edit,
    "branches": branch,
    "close": lambda relay: (relay.step(make_batch()), relay.close()),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_dropped_relay_is_freed_by_reference_counting(name: str, no_collector: None) -> None:
    relay = open_relay()
    OPERATIONS[name](relay)
    alive = weakref.ref(relay), weakref.ref(relay.model), weakref.ref(relay.optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del relay
    assert [ref() for ref in alive] == [None, None, None]
    assert not relay_threads()


@pytest.mark.parametrize(
    "config",
    [
        RelayConfig(micro_batches=2, schedule="depth_first"),
        RelayConfig(micro_batches=2, update="deferred", max_grad_norm=1.0),
        RelayConfig(micro_batches=2, update="whole"),
        RelayConfig(keep=2, stash="host", rollback=True),
        RelayConfig(compress="int8"),
    ],
    ids=lambda config: config.schedule + " " + config.update,
)
def test_schedules_leave_no_cycles(config: RelayConfig, no_collector: None) -> None:
    relay = open_relay(config=config)
    relay.step(make_batch())
    model = weakref.ref(relay.model)
    del relay
    assert model() is None


LOSSES: dict[str, dict[str, Any]] = {
    "module": {"loss": nn.MSELoss()},
    "function of torch": {"loss": nn.functional.mse_loss},
    "function": {"loss": lambda outputs, batch: (outputs - batch[1]).square().mean()},
    "objective": {"objective": lambda model, batch: (model(batch[0]) - batch[1]).square().mean()},
    "over the batch": {"loss": nn.MSELoss(), "loss_over": "batch"},
}


@pytest.mark.all_cases
@pytest.mark.parametrize("options", LOSSES.values(), ids=LOSSES)
def test_losses_leave_no_cycles(options: dict[str, Any], no_collector: None) -> None:
    relay = Relay(nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), ADAMW, "cpu", **options)
    relay.step((torch.ones(4, 6), torch.zeros(4, 6)))
    alive = weakref.ref(relay.model), weakref.ref(relay.model[1].weight)
    del relay
    assert [ref() for ref in alive] == [None, None]


def test_a_save_leaves_no_cycle(tmp_path: Path, no_collector: None) -> None:
    relay = open_relay()
    relay.step(make_batch())
    save(relay, tmp_path)
    model = weakref.ref(relay.model)
    del relay
    assert model() is None


def test_a_device_of_the_caller_is_left_open() -> None:
    device = EmulatedDevice()
    first, second = (Relay(make_gpt(), ADAMW, device) for _ in range(2))
    first.step(make_batch()), second.step(make_batch())
    del first
    assert "relay-h2d_0" in relay_threads(), "the second relay uses it"
    second.step(make_batch(1))
    del second, device
    until_s = time.monotonic() + 10
    while relay_threads() and time.monotonic() < until_s:  # they end with the device, and nothing waits for them
        time.sleep(0.01)
    assert not relay_threads()


def test_what_a_dropped_relay_leaves_is_an_ordinary_model_and_optimizer() -> None:
    model = make_gpt()
    optimizer = ADAMW(model.parameters())
    relay = Relay(model, optimizer, "cpu")
    relay.step(make_batch())
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    del relay
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    model(**make_batch()).loss.backward()
    optimizer.step()  # without the relay's hook
    assert len(optimizer.state) == len(list(model.parameters()))


def test_a_relay_in_a_cycle_of_the_callers_is_closed_by_the_collector() -> None:
    relay = open_relay()
    relay.step(make_batch())
    model = weakref.ref(relay.model)
    relay.itself = relay
    del relay
    gc.collect()
    assert model() is None
    assert not relay_threads()


def test_a_thread_that_is_shut_down_by_its_own_work_does_not_wait_for_itself() -> None:
    thread = serial_executor("test")
    thread.submit(thread.shutdown).result()
    with pytest.raises(RuntimeError, match="shutdown"):
        thread.submit(print)


def test_open_relays_at_the_end_of_the_interpreter_are_silent() -> None:
    code = (
        "import torch\nfrom torch import nn\nfrom l2l_core import Relay\n"
        "def make():\n"
        "    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))\n"
        "    relay = Relay(model, device='cpu', loss=lambda outputs, batch: outputs.pow(2).mean())\n"
        "    relay.step((torch.ones(2, 4),))\n"
        "    return relay\n"
        "relay, other = make(), make()\n"
        "other.itself = other\n"  # a cycle
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not done.stderr


# -- one relay per model -----------------------------------------------------------------------------------------------


def test_a_cell_run_again_closes_the_relay_before() -> None:
    model, threads = make_gpt(), []
    relay = Relay(model, ADAMW, "cpu")
    for seed in range(4):
        relay.step(make_batch(seed))
        threads.append(len(relay_threads()))
        with pytest.warns(
            UserWarning, match=r"a relay of 4 layers on emulated device, after 1 steps, owned this model and was"
        ):
            relay = Relay(model, ADAMW, "cpu")
    assert max(threads) == threads[0]


def test_the_relay_before_names_the_reason_and_its_optimizer_goes_on() -> None:
    plain = make_gpt()
    model = copy.deepcopy(plain)
    optimizer = ADAMW(model.parameters())
    with Relay(plain, ADAMW, "cpu") as expected:
        losses = [expected.step(make_batch(seed)).loss for seed in range(2)]
    first = Relay(model, optimizer, "cpu")
    got = [first.step(make_batch()).loss]
    with pytest.warns(UserWarning, match="relay.optimizer"):
        second = Relay(model, first.optimizer, "cpu")
    second.load_state_dict({"steps": 1, "seed": first.config.seed})
    got.append(second.step(make_batch(1)).loss)
    assert got == losses
    with pytest.raises(RuntimeError, match="closed, because another relay was made over its model"):
        first.step(make_batch())
    second.close()


def test_a_relay_over_a_part_takes_over_too() -> None:
    encoder = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    both = nn.ModuleList([encoder, nn.Linear(4, 2)])
    relay = Relay(encoder, ADAMW, "cpu", loss=lambda outputs, batch: outputs.mean())
    with pytest.warns(UserWarning, match="owned 0.0.weight, a parameter of this model and was closed.*copy.deepcopy"):
        other = Relay(
            both, ADAMW, "cpu", layers=[*encoder], objective=lambda model, batch: model[1](model[0](*batch)).mean()
        )
    other.step((torch.ones(4, 4),))
    with pytest.raises(RuntimeError, match="another relay"):
        relay.step((torch.ones(4, 4),))
    other.close()


def test_relays_over_disjoint_models_are_left_alone(recwarn: pytest.WarningsRecorder) -> None:
    relays = [open_relay() for _ in range(2)]
    for relay in relays * 2:
        relay.step(make_batch())
    assert not [each for each in recwarn if "relay" in str(each.message)]


def test_a_relay_in_the_middle_of_a_step_is_not_closed() -> None:
    errors: list[str] = []

    def loss(outputs: Any, batch: Any) -> torch.Tensor:
        if not errors:
            with pytest.raises(ValueError, match="is in the middle of a step") as caught:
                Relay(relay.model, ADAMW, "cpu")
            errors.append(str(caught.value))
        return outputs.loss

    relay = open_relay(loss=loss, loss_over="micro-batch")
    relay.step(make_batch())
    assert "wait for it, or train a copy" in errors[0]
    relay.step(make_batch())


# -- memory of parameters, and files of them -----------------------------------------------------------------------------


def file_size(write: Callable[[Path], object], folder: Path) -> int:
    path = folder / "file"
    write(path)
    size = path.stat().st_size
    path.unlink()
    return size


def saved_sizes(model: nn.Module, folder: Path) -> dict[str, int]:
    norm, block = model.transformer.ln_f, model.transformer.h[0]
    adapter = {name: value for name, value in model.state_dict().items() if "c_attn" in name}
    writes = {
        "norm": lambda path: torch.save(norm.state_dict(), path),
        "weight": lambda path: torch.save(norm.weight, path),
        "adapter": lambda path: torch.save(adapter, path),
        "layer": lambda path: torch.save(block.state_dict(), path),
        "model": lambda path: torch.save(model.state_dict(), path),
        "safetensors": lambda path: safetensors.torch.save_model(model, path),
    }
    return {name: file_size(write, folder) for name, write in writes.items()}


@pytest.mark.parametrize("end", ["close", "drop", None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_have_separate_storages(end: str, dtype: torch.dtype, tmp_path: Path) -> None:
    from l2l_core.optim import in_bf16

    model = make_gpt().to(dtype)
    expected = saved_sizes(copy.deepcopy(model), tmp_path)
    optimizer = ADAMW if dtype is torch.float32 else partial(in_bf16(torch.optim.AdamW, weights=True), lr=1e-2)
    relay = Relay(model, optimizer, "cpu")
    relay.step(make_batch())
    if end == "close":
        relay.close()
    if end == "drop":
        del relay
    assert model.lm_head.weight is model.transformer.wte.weight
    for name, param in model.named_parameters():
        assert param.untyped_storage().nbytes() == param.nbytes, name
        assert param.is_contiguous(), name
    assert saved_sizes(model, tmp_path) == expected


def test_strides_are_kept() -> None:
    model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))).to(memory_format=torch.channels_last)
    strides = [param.stride() for param in model.parameters()]
    with Relay(model, ADAMW, "cpu", loss=lambda outputs, batch: outputs.mean()) as relay:
        relay.step((torch.ones(2, 4, 5, 5),))
    assert [param.stride() for param in model.parameters()] == strides
    assert all(param.untyped_storage().nbytes() == param.nbytes for param in model.parameters())


def test_close_in_inference_mode_leaves_parameters_that_train() -> None:
    relay = open_relay()
    model = relay.model
    with torch.inference_mode():
        relay.close()
    model(**make_batch()).loss.backward()
    assert not any(param.is_inference() for param in model.parameters())


def test_files_of_a_model_in_training(tmp_path: Path) -> None:
    """They take the bytes of plain ones."""
    plain = make_gpt()
    relay = make_relay(copy.deepcopy(plain))
    whole, expected = (
        file_size(lambda path, m=m: torch.save(m.state_dict(), path), tmp_path) for m in (relay.model, plain)
    )
    assert whole <= expected
    relay.model.save_pretrained(tmp_path / "relay")
    plain.save_pretrained(tmp_path / "plain")
    names = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "relay").iterdir())
    files = [[(tmp_path / kind / name).read_bytes() for name in names] for kind in ("plain", "relay")]
    assert files[0] == files[1]
