"""Save and resume: bit-exact in a new process, whole after every crash, strict about what it loads."""

from __future__ import annotations

import builtins
import hashlib
import io
import json
import logging
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import HANG_S, rarely
from safetensors.torch import load_file
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from zoo import BY_NAME, Chain, ResidualMlp, sequences

from l2l_core import Drop, Duplicate, Edit, Freeze, Insert, Interpolate, Relay, RelayConfig, Swap, saves
from l2l_core.devices import tensor_files
from l2l_core.model import Tensors, encode
from l2l_core.saves import generations
from l2l_core.saves.history_parts import history_parts

HERE = str(Path(__file__).parent)
KINDS = ["gpt2", "batch_norm", "llama", "tied_layers", "frozen_layer", "spectral_norm_old", "convnext"]
IN_NEW_PROCESS = KINDS[:3]
CONFIG = RelayConfig(micro_batches=2)
OTHER_CONFIG = RelayConfig(micro_batches=2, stash="host", ahead=0, update="deferred")


# -- a training run ----------------------------------------------------------------------------------------------------


def decay_groups(model: nn.Module) -> Optimizer:
    """AdamW as people build it: no decay for vectors."""
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1}]
    groups.append({"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0})
    return AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)


def warmup(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 7))


def train(relay: Relay, scheduler: LambdaLR, kind: str, steps: int) -> list[str]:
    """Losses, and draws from the global generators, to the bit."""
    seen = []
    for _ in range(steps):
        loss = relay.step(BY_NAME[kind].make_batch(rows=4, seed=relay.steps)).loss
        scheduler.step()
        seen += [loss.hex(), random.random().hex(), float(torch.rand(())).hex()]
    return seen


def fingerprint(relay: Relay) -> str:
    """A hash over weights, buffers, optimizer and versions."""
    content = hashlib.sha256()
    state = relay.optimizer.state_dict()
    tensors = [*relay.model.named_parameters(), *relay.model.named_buffers()]
    tensors += [(f"{i}.{k}", v) for i, values in state["state"].items() for k, v in values.items()]
    for name, tensor in sorted(tensors):
        content.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        content.update(tensor.detach().contiguous().numpy().tobytes())
    content.update(repr((state["param_groups"], [u.version for u in (relay.shell, *relay.stack)])).encode())
    return content.hexdigest()


def start(kind: str) -> tuple[Relay, LambdaLR]:
    model = BY_NAME[kind].make_model()
    optimizer = decay_groups(model)
    scheduler = warmup(optimizer)
    return Relay(model, optimizer, loss=BY_NAME[kind].loss, layers=BY_NAME[kind].layers, config=CONFIG), scheduler


def resume(kind: str, folder: Path, **options: Any) -> tuple[Relay, LambdaLR]:
    """From a model in which no number is right."""
    model = BY_NAME[kind].make_model()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.zero_()
    optimizer = decay_groups(model)
    scheduler = warmup(optimizer)
    relay = Relay.load(folder / kind, model, optimizer, loss=BY_NAME[kind].loss, **options)
    scheduler.load_state_dict(json.loads((folder / f"{kind}.json").read_text()))
    return relay, scheduler


def save(relay: Relay, scheduler: LambdaLR, kind: str, folder: Path) -> None:
    relay.save(folder / kind)
    (folder / f"{kind}.json").write_text(json.dumps(scheduler.state_dict()))


def continued(kind: str, folder: Path, **options: Any) -> list[str]:
    """What three more steps give after loading."""
    relay, scheduler = resume(kind, folder, **options)
    with relay:
        assert relay.steps == 3
        return [*train(relay, scheduler, kind, 3), fingerprint(relay)]


def in_new_process(code: str, *args: object, timeout_s: float = HANG_S) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([HERE, *filter(None, sys.path)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::ResourceWarning", "-c", f"import sys, test_files as t; {code}"]
    done = subprocess.run([*command, *map(str, args)], env=environment, capture_output=True, timeout=timeout_s)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()


def print_continued(folder: str) -> None:
    """Run in the new process."""
    runs = {kind: continued(kind, Path(folder)) for kind in IN_NEW_PROCESS}
    runs["other config"] = continued("gpt2", Path(folder), config=OTHER_CONFIG)
    print(json.dumps(runs | {"edited": continued("gpt2", Path(folder) / "edited")}))


# -- resuming ----------------------------------------------------------------------------------------------------------


def half_trained(kind: str, folder: Path, *edits: Edit) -> list[str]:
    """Train three steps, edit, save, train three more: what those gave."""
    relay, scheduler = start(kind)
    with relay:
        train(relay, scheduler, kind, 3)
        if edits:
            relay.apply(*edits)
        before = fingerprint(relay)
        save(relay, scheduler, kind, folder)
        assert fingerprint(relay) == before, "saving changed something"
        return [*train(relay, scheduler, kind, 3), fingerprint(relay)]


def test_a_new_process_continues_bit_by_bit(tmp_path: Path) -> None:
    expected = {kind: half_trained(kind, tmp_path) for kind in IN_NEW_PROCESS}
    expected["other config"] = expected["gpt2"]
    (tmp_path / "edited").mkdir()
    edits = Insert(at=1, init="identity", warmup=5), Swap(0, 2), Drop(2), Duplicate(0, optimizer="copy"), Freeze(1)
    expected["edited"] = half_trained("gpt2", tmp_path / "edited", *edits)
    assert expected["edited"] != expected["gpt2"]
    assert json.loads(in_new_process("t.print_continued(sys.argv[1])", tmp_path)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_resume(kind: str, tmp_path: Path) -> None:
    expected = half_trained(kind, tmp_path)
    torch.manual_seed(99)
    random.seed(99)
    assert continued(kind, tmp_path) == expected
    assert continued(kind, tmp_path, config=OTHER_CONFIG) == expected


def test_saved_config_and_layers_are_the_default(tmp_path: Path) -> None:
    kind = BY_NAME["unlike"]
    with Relay(
        kind.make_model(), loss=kind.loss, loss_over=kind.loss_over, layers=kind.layers, config=OTHER_CONFIG
    ) as relay:
        batch = kind.make_batch()
        relay.step(batch)
        loss = relay.evaluate(batch)
        assert relay.save(str(tmp_path)) == tmp_path
    with Relay.load(str(tmp_path), kind.make_model(), loss=kind.loss, loss_over=kind.loss_over) as again:
        assert (again.config, again.steps, again.evaluate(batch)) == (relay.config, 1, loss)
        assert [(u.key, u.name, u.version) for u in again.stack] == [(u.key, u.name, u.version) for u in relay.stack]


# -- small models for everything else ----------------------------------------------------------------------------------


class Counting(ResidualMlp):
    """With a buffer that state_dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, *args: Any) -> Any:
        self.count += 1
        return super().forward(*args)


def chain(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return Chain([Counting() for _ in range(layers)])


PLAIN = partial(AdamW, lr=1e-3)


def relay_over(model: nn.Module, optimizer: Callable[..., Optimizer] = PLAIN) -> Relay:
    return Relay(model, optimizer, loss=BY_NAME["chain"].loss, config=CONFIG)


def load(folder: Path, model: nn.Module, optimizer: Any = PLAIN, **options: Any) -> Relay:
    return Relay.load(folder, model, optimizer, loss=BY_NAME["chain"].loss, **options)


@pytest.fixture
def relay() -> Iterator[Relay]:
    with relay_over(chain()) as relay:
        relay.step(sequences())
        yield relay


def generations_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def test_what_a_save_consists_of(relay: Relay, tmp_path: Path) -> None:
    """safetensors and JSON, one file per layer, nothing left of older saves, others' files left alone."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    relay.save(tmp_path)
    relay.save(tmp_path)
    *saves, notes = sorted(generations_in(tmp_path), key=lambda path: path.name == "notes")
    assert len(saves) == 1 and notes.is_dir()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest.json", "notes", "notes.txt", saves[0].name]
    names = {f"{name}.safetensors" for name in ("shell", "L000", "L001", "L002", "relay")} | {"manifest.json"}
    assert {path.name for path in saves[0].iterdir()} == names
    tensors = load_file(saves[0] / "L001.safetensors")
    params = dict(relay.model.layers[1].named_parameters(prefix="layers.1"))
    assert {n.removeprefix("weights/") for n in tensors if n.startswith("weights/")} == set(params)
    assert all(torch.equal(tensors[f"weights/{name}"], param) for name, param in params.items())
    assert {p.stat().st_mode & 0o777 for p in saves[0].iterdir()} == {(tmp_path / "notes.txt").stat().st_mode & 0o777}


def test_shared_weights_are_saved_once(tmp_path: Path) -> None:
    with relay_over(BY_NAME["tied_layers"].make_model()) as relay:
        relay.save(tmp_path)
    held = {path.stem: load_file(path) for path in tmp_path.glob("*/*.safetensors")}
    files = [name for name, tensors in held.items() if "weights/layers.0.fc1.weight" in tensors]
    assert files == ["shared%3Alayers.0.fc1.weight"]


class Awkward(ResidualMlp):
    """Buffers that overlap, one expanded, one transposed, one empty, one absent."""

    def __init__(self, value: float) -> None:
        super().__init__()
        whole = torch.full((4, 6), value)
        buffers = {"whole": whole, "part": whole[:2], "transposed": whole.t(), "empty": torch.zeros(0), "none": None}
        for name, buffer in (buffers | {"expanded": torch.tensor(value).expand(2, 3)}).items():
            self.register_buffer(name, buffer)


def test_awkward_buffers(tmp_path: Path) -> None:
    saved, fresh = (Chain([Awkward(value), Awkward(value)]) for value in (0.5, 0.0))
    with relay_over(saved) as relay:
        relay.save(tmp_path)
    load(tmp_path, fresh).close()
    pairs = zip(fresh.named_buffers(), saved.named_buffers(), strict=True)
    assert all(a == b and torch.equal(x, y) and x.stride() == y.stride() for (a, x), (b, y) in pairs)


def test_settings_and_state_keep_type_and_bits(tmp_path: Path) -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    odd = {
        "initial_lr": 0.1 + 0.2,
        "nested": (1, [2.5e-308, None, True, ("x",)], {(2, "b"): -0.0}),
        "limit": float("inf"),
    }
    with relay_over(chain(), partial(AdamW, lr=lr)) as relay:
        relay.step(sequences())
        relay.optimizer.param_groups[0].update(odd, initial=lr)
        of_first = relay.optimizer.state[relay.optimizer.param_groups[0]["params"][0]]
        of_first["note"], of_first["rate"] = ["kept", 3], torch.tensor(0.5, dtype=torch.bfloat16)
        relay.save(tmp_path)
    with load(tmp_path, chain()) as again:
        group = again.optimizer.param_groups[0]
        assert {name: repr(group[name]) for name in odd} == {name: repr(value) for name, value in odd.items()}
        assert torch.equal(group["lr"], lr) and group["lr"].dtype == lr.dtype and group["lr"] is group["initial"]
        state = again.optimizer.state[group["params"][0]]
        assert repr(state["note"]) == repr(of_first["note"]) and repr(state["rate"]) == repr(of_first["rate"])


def test_optimizer_state_that_was_not_saved_goes(tmp_path: Path) -> None:
    with relay_over(chain()) as relay:
        relay.save(tmp_path)
    fresh = chain()
    ready = PLAIN(fresh.parameters())
    sum(param.sum() for param in fresh.parameters()).backward()
    ready.step()
    ready.zero_grad()
    load(tmp_path, fresh, ready).close()
    assert len(ready.state) == 0


def test_strides_of_optimizer_state(tmp_path: Path) -> None:
    model = BY_NAME["inplace"].make_model().to(memory_format=torch.channels_last)
    batch = BY_NAME["inplace"].make_batch()
    with relay_over(model, partial(AdamW, lr=1e-3, fused=True)) as relay:
        relay.step(batch)
        relay.save(tmp_path)
        fresh = BY_NAME["inplace"].make_model().to(memory_format=torch.channels_last)
        with load(tmp_path, fresh, partial(AdamW, fused=True)) as again:
            strides = [
                [v.stride() for p in g["params"] for v in r.optimizer.state[p].values()]
                for r in (relay, again)
                for g in r.optimizer.param_groups
            ]
            assert strides[0] == strides[1] and (27, 1, 9, 3) in strides[0]
            assert [relay.step(batch).loss, fingerprint(relay)] == [again.step(batch).loss, fingerprint(again)]


def test_saving_takes_no_second_copy_of_the_model(tmp_path: Path) -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("needs /proc/self/clear_refs to measure the peak of resident memory")
    model = Chain([nn.Linear(1024, 1024) for _ in range(12)])  # 151 MB with the state of AdamW
    with Relay(model, AdamW(model.parameters()), layers=list(model.layers), loss=BY_NAME["chain"].loss) as relay:
        for group in relay.optimizer.param_groups:
            for param in group["params"]:
                state = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.ones_like(param),
                    "exp_avg_sq": torch.ones_like(param),
                }
                relay.optimizer.state[param] = state
        relay.save(tmp_path)
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        before = resident_bytes("VmRSS")
        relay.save(tmp_path)
        assert resident_bytes("VmHWM") - before < 40e6


def resident_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def test_a_random_state_of_cuda_is_left_out_where_there_is_none(
    relay: Relay, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = relay._saved_state()
    other = replace(state.random_state, torch_cuda=torch.arange(16, dtype=torch.uint8))
    with saves.GenerationWriter(tmp_path, relay._backend) as new:
        saves.write_save(new, replace(state, random_state=other))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING), load(tmp_path, chain()):
        assert "CUDA is not available" in caplog.text


# -- crashes -----------------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for the death of the process."""


CALLS = [(os, name) for name in "mkdir open fsync replace chmod scandir unlink rmdir stat".split()]
CALLS += [
    (builtins, "open"),
    (io, "open"),
    (tensor_files, "save_file"),
    (generations, "load_file"),
    (hashlib, "file_digest"),
]


class Failing:
    """The `at`-th call to the system or to safetensors fails; after `Killed`, nothing works any more."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error
        self.calls: list[str] = []
        self.lock = threading.Lock()

    def wrapped(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.lock:  # files are synced and read by a thread
                self.calls.append(real.__name__)
                number = len(self.calls)
            if number == self.at or (number > self.at and isinstance(self.error, Killed)):
                if real.__name__ == "save_file" and number == self.at:
                    real(*args, **kwargs)
                    os.truncate(args[1], 100)  # half a file
                raise self.error
            return real(*args, **kwargs)

        return call

    @contextmanager
    def active(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in CALLS:
                patch.setattr(module, name, self.wrapped(getattr(module, name)))
            yield

    @property
    def switched(self) -> bool:
        """Whether the new save had been made the current one."""
        return "replace" in self.calls[: self.at - 1]


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is left out: it takes most of the time of a small save."""

    def fsync(descriptor: int) -> None: ...

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), Killed()], ids=repr)
def test_failures_of_every_call_keep_a_good_save(error: BaseException, relay: Relay, tmp_path: Path) -> None:
    at = 0
    while True:
        relay.save(tmp_path)
        old, old_steps = weights_of(tmp_path), relay.steps
        for param in relay.model.parameters():
            param.data += 1
        relay._runner.steps += 1
        failing = Failing(at := at + 1, error)
        try:
            with failing.active():
                relay.save(tmp_path)
        except BaseException as raised:
            assert raised is error or (isinstance(raised, OSError) and raised.__cause__ is error), f"call {at}"
        steps = saves.load_save(tmp_path).steps
        assert steps == (relay.steps if failing.switched else old_steps), f"call {at}: {failing.calls[at - 1]}"
        shift = 1 if failing.switched else 0
        assert all(torch.equal(a, b + shift) for a, b in zip(weights_of(tmp_path), old, strict=True)), f"call {at}"
        if not isinstance(error, Killed) and not failing.switched:
            assert len(generations_in(tmp_path)) == 1, f"call {at}: an unfinished save is left"
        relay.save(tmp_path)
        assert len(generations_in(tmp_path)) == 1, f"call {at}: the next save did not clean up"
        if len(failing.calls) < at:
            break
    assert at > 40


def weights_of(folder: Path) -> list[torch.Tensor]:
    tensors = saves.generations.read_current(folder).tensors
    return [tensors[f"weights/{name}"] for name, _ in chain().named_parameters()]


@pytest.mark.usefixtures("no_waiting")
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), Killed()], ids=repr)
def test_failures_of_the_first_save(error: BaseException, relay: Relay, tmp_path: Path) -> None:
    for at in range(1, 1000):
        failing, folder = Failing(at, error), tmp_path / f"{at}"
        try:
            with failing.active():
                relay.save(folder)
        except type(error):
            pass
        if not failing.switched:
            with pytest.raises(ValueError, match="latest.json is missing"):
                saves.load_save(folder)
        relay.save(folder)
        assert saves.load_save(folder).steps == relay.steps and len(generations_in(folder)) == 1
        if len(failing.calls) < at:
            break
    assert at > 20


def test_everything_is_on_the_disk_before_the_switch(
    relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    at_the_switch: list[int] = []
    replace_file = os.replace

    def switch(old: Path, new: Path) -> None:
        assert {path.stat().st_ino for path in [tmp_path, *tmp_path.rglob("*")]} == set(synced)
        at_the_switch.append(len(synced))
        replace_file(old, new)

    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    monkeypatch.setattr(os, "replace", switch)
    relay.save(tmp_path)
    assert synced[at_the_switch[0] :] == [tmp_path.stat().st_ino], "the switch itself"


def test_folders_on_the_way_are_on_the_disk_too(relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    relay.save(tmp_path / "a" / "b" / "c")
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")} <= set(synced)


def test_leftovers_go_before_anything_is_written(relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be what fills the disk."""
    [good] = generations_in(relay.save(tmp_path))
    for name in ("step-00000007-0123abcd", "step-00000008-0123abcd"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "L000.safetensors").write_bytes(b"half")
    seen = []
    monkeypatch.setattr(generations, "_write_file", lambda path, tensors: seen.append(generations_in(tmp_path)) or path)
    with pytest.raises(FileNotFoundError):
        relay.save(tmp_path)
    assert all(good in there and len(there) == 2 for there in seen), "more than the last save and the new one"
    assert generations_in(tmp_path) == [good] and saves.load_save(tmp_path).steps == relay.steps


def edit_before_step(relay: Relay) -> None:
    """Edits, and branches, as a function of what the relay is."""
    turn = relay.steps % 5
    if turn == 1 and len(relay.stack) < 6:
        relay.apply(Insert(at=1, init="copy", warmup=3))
    elif turn == 2:
        relay.apply(Drop(0, park="disk" if relay.steps % 2 else "memory"), Interpolate(0, 1))
    elif turn == 3:
        relay.undo()
    elif turn == 4:
        for branch in relay.branches:
            if not branch.active:
                relay.discard(branch.name)
        relay.fork(f"at {relay.steps}")


def past_of(relay: Relay) -> str:
    """A hash over what a save holds beside the present state."""
    content = hashlib.sha256(repr(relay.journal).encode())
    for name, part in sorted(history_parts(relay._editor, relay._history, relay._branches).items()):
        tensors: Tensors = {}
        content.update(repr(encode(part, name, tensors)).encode())
        for tensor in tensors.values():
            content.update(tensor.detach().contiguous().numpy().tobytes())
    return content.hexdigest()


def hammer(folder: str, kills: str, edits: str = "") -> None:
    """Kill a training run that saves all the time, again and again. Run in a process of its own.

    Every run resumes from what the one before left, and checks it: no finished save is lost, and what was saved at a
    step is to the bit what any other run had at that step.
    """
    import torch._dynamo  # noqa: F401 - what the first optimizer imports, so that the runs start at once

    waits = random.Random(int(kills))
    unfinished, lines = 0, 1  # the first run has finished a save (its second line), however slow the disk is today
    for _ in range(int(kills)):
        pid = os.fork()  # nothing has been computed in this process: there are no threads yet
        if pid == 0:
            run_until_killed(Path(folder), bool(edits))
        lines = wait_for_more(Path(folder).parent / "log", lines)  # however slow the machine is today
        time.sleep(waits.uniform(0.0, 0.4))
        os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1]), "the run failed before it was killed"
        unfinished += os.path.exists(folder) and len(generations_in(Path(folder))) != 1
    print(f"{unfinished} of {kills} kills hit a save", file=sys.stderr)
    run_until_killed(Path(folder), bool(edits), check_only=True)


def wait_for_more(log: Path, lines: int) -> int:
    """Wait until a log has more lines than so many, and say how many it has."""
    until_s = time.monotonic() + HANG_S
    while (count := log.read_bytes().count(b"\n") if log.exists() else 0) <= lines and time.monotonic() < until_s:
        time.sleep(0.01)
    return count


def run_until_killed(folder: Path, edits: bool, check_only: bool = False) -> None:
    def seal(relay: Relay) -> str:
        return fingerprint(relay) + (past_of(relay) if edits else "")

    try:
        log = folder.parent / "log"
        lines = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        seen = {int(step): content for what, step, content in lines if what == "saving"}
        saved = max((int(step) for what, step, _ in lines if what == "saved"), default=0)
        assert all(seen[int(step)] == content for _, step, content in lines), "two runs differ"
        relay = load(folder, chain()) if saved or (folder / "latest.json").exists() else relay_over(chain())
        assert relay.steps >= saved and (relay.steps == 0 or seal(relay) == seen[relay.steps])
        if check_only:
            print(relay.steps, seal(relay))
            return
        with open(log, "a", buffering=1) as record:
            while True:
                if edits:
                    edit_before_step(relay)
                relay.step(sequences(seed=relay.steps))
                record.write(f"saving {relay.steps} {seal(relay)}\n")
                relay.save(folder)
                record.write(f"saved {relay.steps} {seal(relay)}\n")
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(1)


def test_a_run_with_edits_goes_on_alike_from_any_of_its_saves(tmp_path: Path) -> None:
    def go_on(relay: Relay, folder: Path | None = None) -> list[str]:
        seen = []
        while relay.steps < 10:
            edit_before_step(relay)
            relay.step(sequences(seed=relay.steps))
            seen.append(fingerprint(relay) + past_of(relay))
            if folder is not None:
                relay.save(folder / str(relay.steps))
        return seen

    with relay_over(chain()) as relay:
        seen = go_on(relay, tmp_path)
    for step in range(1, 10):
        with load(tmp_path / str(step), chain()) as relay:
            assert go_on(relay) == seen[step:], f"from step {step}"


@pytest.mark.parametrize("edits", [rarely(""), "edits"])
@pytest.mark.parametrize("kills", [8, pytest.param(50, marks=pytest.mark.slow)])
def test_kill_9_at_random_moments(kills: int, edits: str, tmp_path: Path) -> None:
    steps, content = in_new_process("t.hammer(*sys.argv[1:])", tmp_path / "save", kills, edits).split()
    assert int(steps) > 0 and saves.load_save(tmp_path / "save").steps == int(steps)


def test_loading_while_another_saves(relay: Relay, tmp_path: Path) -> None:
    relay.save(tmp_path)
    stop, loads, errors = threading.Event(), [], []

    def read() -> None:
        while not stop.is_set():
            try:
                loads.append(saves.load_save(tmp_path).steps)
            except Exception as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        relay.save(tmp_path)
    stop.set()
    reader.join()
    assert loads and not errors


# -- what cannot be loaded ---------------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


@contextmanager
def refused(match: str, model: nn.Module) -> Iterator[None]:
    """A ValueError, and the model and the generators are as they were."""
    torch.manual_seed(5)
    random.seed(5)
    old = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(ValueError, match=match):
        yield
    now = dict([*model.named_parameters(), *model.named_buffers()])
    assert all(torch.equal(now[name], tensor) for name, tensor in old.items())
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


@pytest.mark.parametrize("harm", [flip, truncate, Path.unlink], ids=["flip", "truncate", "unlink"])
@pytest.mark.parametrize(
    "name", ["latest.json", *(f"*/{n}" for n in ("manifest.json", "L001.*", "shell.*", "relay.*"))]
)
def test_damage_is_named(name: str, harm: Callable[[Path], None], relay: Relay, tmp_path: Path) -> None:
    [path] = relay.save(tmp_path).glob(name)
    harm(path)
    fresh = chain()
    with refused(re.escape(str(path)), fresh):
        load(tmp_path, fresh)
    relay.save(tmp_path)
    with load(tmp_path, fresh) as again:
        assert again.steps == relay.steps, "the next save is whole"


def test_every_bit_of_the_small_files_counts(relay: Relay, tmp_path: Path) -> None:
    relay.save(tmp_path)
    [manifest] = tmp_path.glob("*/manifest.json")
    for path, step in ((tmp_path / "latest.json", 1), (manifest, 501)):
        content = path.read_bytes()
        for bit in range(0, 8 * len(content), step):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
                saves.load_save(tmp_path)
        path.write_bytes(content)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no such folder"):
        saves.load_save(tmp_path / "elsewhere")


def rewrite_manifest(save: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a save, and the checksum of it."""
    [path] = save.glob("*/manifest.json")
    manifest = json.loads(path.read_text())
    change(manifest)
    content = json.dumps(manifest).encode()
    path.write_bytes(content)
    generations.set_current(save, path.parent.name, hashlib.sha256(content).hexdigest())


def test_another_schema_is_refused(relay: Relay, tmp_path: Path) -> None:
    relay.save(tmp_path)
    rewrite_manifest(tmp_path, lambda manifest: manifest.update(schema=3))
    fresh = chain()
    with refused(
        "manifest.json has schema 3, and this release of l2l_core reads schemas 1 and 2: load it with the", fresh
    ):
        load(tmp_path, fresh)


@pytest.mark.parametrize(
    "change, absent",
    [
        (lambda manifest: manifest.pop("shapes"), "shapes"),
        (lambda manifest: [manifest.pop(name) for name in ("past", "residuals")], "past, residuals"),
        (lambda manifest: manifest["edits"].pop("by_place"), "edits.by_place"),
    ],
    ids=["shapes", "past", "places"],
)
def test_a_save_from_before_the_first_release_is_refused(
    change: Callable[[dict[str, Any]], object], absent: str, relay: Relay, tmp_path: Path
) -> None:
    relay.save(tmp_path)
    rewrite_manifest(tmp_path, change)
    fresh = chain()
    with refused(f"manifest.json has no {absent}: .* before the first release. Load it with that version", fresh):
        load(tmp_path, fresh)


def wider() -> nn.Module:
    model = chain()
    model.layers[1].fc1 = nn.Linear(model.layers[1].fc1.in_features, 7)
    return model


def frozen() -> nn.Module:
    model = chain()
    model.layers[0].requires_grad_(False)
    return model


def with_buffer() -> nn.Module:
    model = chain()
    model.register_buffer("scale", torch.ones(2))
    return model


def halves(params: Any) -> Optimizer:
    params = list(params)
    return AdamW([{"params": params[:4]}, {"params": params[4:]}])


@pytest.mark.parametrize(
    "make_model, optimizer, options, match",
    [
        (wider, AdamW, {}, r"layers.1.fc1.weight: \(64, 32\) float32 in the save, \(7, 32\) float32 here"),
        (partial(chain, 4), AdamW, {}, r"parameters and buffers \(\d+ differ: weights/layers.3.*absent in the save"),
        (with_buffer, AdamW, {}, "buffers/scale: absent in the save"),
        (chain, AdamW, {"layers": ["layers.0", "layers.2"]}, r"other layers.*\[2\]: L001 layers.1 in the save"),
        (chain, partial(torch.optim.SGD, lr=0.1), {}, "class: AdamW in the save, SGD here"),
        (chain, halves, {}, "parameter groups .*group 0 in the save, group 1 here"),
        (frozen, AdamW, {}, r"frozen parameters .*layers.0.fc1.bias: trained in the save, absent here"),
    ],
    ids=["shape", "deeper", "buffer", "layers", "class", "groups", "frozen"],
)
def test_another_model_or_optimizer(
    make_model: Callable[[], nn.Module],
    optimizer: Any,
    options: dict[str, Any],
    match: str,
    relay: Relay,
    tmp_path: Path,
) -> None:
    relay.save(tmp_path)
    fresh = make_model()
    with refused(r"manifest.json was saved with.*" + match, fresh):
        load(tmp_path, fresh, optimizer, **options)
    with load(tmp_path, chain()) as again:
        assert again.steps == relay.steps, "the save itself is as good as before"


def test_a_refused_load_leaves_a_ready_optimizer_alone(relay: Relay, tmp_path: Path) -> None:
    relay.save(tmp_path)
    fresh = chain(4)
    ready = AdamW(fresh.parameters(), lr=0.5)
    with refused("saved with other", fresh):
        load(tmp_path, fresh, ready)
    assert ready.param_groups[0]["params"] == list(fresh.parameters())
    assert (ready.param_groups[0]["lr"], len(ready.state)) == (0.5, 0)


# -- nothing is executed -----------------------------------------------------------------------------------------------


def test_nothing_is_pickled(relay: Relay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("pickle was called")

    for module, name in [(torch, "load"), (torch, "save"), *((pickle, n) for n in ("load", "loads", "dump", "dumps"))]:
        monkeypatch.setattr(module, name, never)
    relay.save(tmp_path)
    load(tmp_path, chain()).close()
    for path in tmp_path.rglob("*.json"):
        json.loads(path.read_text())
    assert not re.search(r"pickle\b|torch\.(load|save)|\beval\b|\bexec\b", Path(generations.__file__).read_text())


def test_what_is_not_plain_data_is_refused_and_named(relay: Relay, tmp_path: Path) -> None:
    relay.save(tmp_path)
    relay.optimizer.param_groups[0]["hook"] = print
    with pytest.raises(ValueError, match="settings/0/hook is a builtin_function_or_method"):
        relay.save(tmp_path)
    assert saves.load_save(tmp_path).steps == relay.steps and len(generations_in(tmp_path)) == 1
