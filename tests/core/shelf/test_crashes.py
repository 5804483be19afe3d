"""Whatever happens when, the folder has the old step or the new one, whole, and training goes on from it to the bit."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from on_shelf import ROWS, assert_same, compared, in_core, relay_on, state_of, train, weights_of
from oracle import decay_groups
from patience import rarely
from shelf_writes import Cut, at_every_write
from torch import nn
from zoo import BY_NAME

from l2l_core import RelayConfig

KIND = BY_NAME["chain"]
PROGRAM = Path(__file__).parents[2] / "support" / "shelf_kills.py"


@pytest.mark.parametrize(("first", "every"), [(1, 4), rarely(0, 1)])
def test_a_crash_at_any_write_leaves_the_old_step_or_the_new_one(
    first: int, every: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the folder is what a crash leaves, but for what the system has not put on the disk yet."""
    words: list[str] = []

    def copy(word: str) -> None:
        shutil.copytree(folder / "shelf", folder / f"{len(words)}", symlinks=True)
        words.append(word)

    with relay_on(folder / "shelf", KIND) as relay:
        plain = in_core(KIND)
        train(relay, plain, 1)
        old = state_of(plain.model)
        with at_every_write(monkeypatch, copy):
            train(relay, plain, 1)
        new = state_of(plain.model)
    blocks = len({block for unit in (relay.shell, *relay.stack) for block in unit.blocks})
    # Synced are tensors, the list of records, and the list of files when the manifest is among them; it by `write_bytes`
    last = ["write_tensors", "sync", "sync", "write_bytes", "replace", "sync", "unlink"]
    assert words == ["record", "half a record"] * blocks + last
    switched = words.index("replace") + 1
    for number in range(first, len(words), every):
        with relay_on(folder / f"{number}", KIND, resume=True) as relay:
            assert relay.steps == (1 if number < switched else 2), words[number]
            assert_same(weights_of(relay), old if number < switched else new)
            if words[number] in ("half a record", "replace"):  # so is what the optimizer knows, and all that is counted
                twin = in_core(KIND)
                for step in range(3):
                    loss = twin.step(KIND.make_batch(ROWS, step))
                    if step >= relay.steps:
                        assert relay.step(KIND.make_batch(ROWS, step)).loss == loss
                assert_same(weights_of(relay), state_of(twin.model))


class Counting(torch.optim.AdamW):
    """Keeps a count of steps in its settings."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["counted"] = group.get("counted", 0) + 1
        return super().step(closure)


def counting(model: nn.Module) -> torch.optim.Optimizer:
    return Counting(decay_groups(model), lr=1e-3)


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_an_error_at_any_write_leaves_the_old_step(update: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next step is made as if nothing had been."""
    config = RelayConfig(seed=0, micro_batches=2, update=update)
    with relay_on(folder, KIND, counting, config=config) as relay:
        plain = in_core(KIND, counting, config)
        train(relay, plain, 1)
        words: list[str] = []
        last = -1
        while last < 0 or words[last] != "replace":
            words, last = [], last + 1

            def cut(word: str, words: list[str] = words, last: int = last) -> None:
                words.append(word)
                if len(words) == last + 1:  # once: whatever comes after it could be written
                    raise Cut(word)

            with at_every_write(monkeypatch, cut), pytest.raises(Cut):
                relay.step(KIND.make_batch(ROWS, 1))
            assert relay.steps == 1 and not relay.store.updated
            assert {unit.version for unit in (relay.shell, *relay.stack)} == {1}
            assert [group["counted"] for group in relay.optimizer.param_groups] == [1, 1]
            if last == 4:
                assert_same(weights_of(relay), state_of(plain.model))
        assert last > 8
        with pytest.raises(OSError, match="resume=True"):  # nobody knows whether it was replaced
            relay.step(KIND.make_batch(ROWS, 2))
    with relay_on(folder, KIND, counting, config=config, resume=True) as relay:
        train(relay, plain, 2)
        assert_same(weights_of(relay), state_of(plain.model))


@pytest.mark.parametrize("late", [False, True])
def test_an_error_elsewhere_leaves_the_old_step(late: bool, folder: Path) -> None:
    """In a step of eager updates, of which some are written by then: no TornStep, as there is in memory."""
    with compared(folder, KIND) as (relay, plain):
        train(relay, plain, 1)
        layer = relay.model.layers[0 if late else 2]
        handle = layer.register_full_backward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            relay.step(KIND.make_batch(ROWS, 1))
        handle.remove()
        assert_same(weights_of(relay), state_of(plain.model))
        for model in (
            relay.model,
            plain.model,
        ):  # its update was written by then, and must not come back with the next step
            model.layers[3].requires_grad_(False)
        train(relay, plain, 1)


def test_a_full_disk_says_so_and_training_goes_on(folder: Path) -> None:
    with compared(folder, KIND) as (relay, plain):
        train(relay, plain, 1)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (4096, hard)
        )  # of every file, which the system refuses like a full disk
        try:
            with pytest.raises(OSError, match="bytes are to be written to .* make room there") as refused:
                relay.step(KIND.make_batch(ROWS, 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert refused.value.errno in (errno.EFBIG, errno.ENOSPC)
        assert_same(weights_of(relay), state_of(plain.model))
        train(relay, plain, 1)


def test_a_disk_too_small_is_refused_before_anything_is_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    model = KIND.make_model()
    before = state_of(model)
    with pytest.raises(OSError, match="take [0-9,]+ bytes, and 1,000 are free there"):
        relay_on(folder, KIND, model=model)
    assert_same(state_of(model), before)
    assert not [*(folder / "records").iterdir()]


@pytest.mark.parametrize("block", ["shell", "L001"])
def test_a_read_error_names_the_file_and_loses_nothing(block: str, folder: Path) -> None:
    with compared(folder, KIND) as (relay, plain):
        train(relay, plain, 2)
        damaged = folder / "records" / f"{block}.a"  # two steps after the first half
        whole = damaged.read_bytes()
        damaged.write_bytes(whole[:4096] if len(whole) > 4096 else b"")
        with pytest.raises(OSError, match="the file ends after") as refused:
            relay.step(KIND.make_batch(ROWS, 2))
        assert refused.value.filename == str(damaged)
        damaged.write_bytes(whole)
        assert_same(weights_of(relay), state_of(plain.model))
        train(relay, plain, 1)


# -- whose a folder is -------------------------------------------------------------------------------------------------


def test_a_folder_goes_on_in_another_relay(folder: Path) -> None:
    """Weights, optimizer, its settings, buffers, random state, number of the step."""
    batch_norm = BY_NAME["batch_norm"]
    plain = in_core(batch_norm)
    with relay_on(folder, batch_norm) as relay:
        scheduler = torch.optim.lr_scheduler.StepLR(relay.optimizer, 1, 0.5)
        train(relay, plain, 2)
        scheduler.step()
        train(relay, plain, 0)
        torch.manual_seed(7)
        for group in plain.optimizer.param_groups:
            group["lr"] *= 0.5
        train(relay, plain, 1)
        drawn = torch.rand(3)
    torch.manual_seed(1)
    with relay_on(folder, batch_norm, resume=True) as relay:
        assert relay.steps == 3 and torch.equal(torch.rand(3), drawn)
        assert [g["lr"] for g in relay.optimizer.param_groups] == [g["lr"] for g in plain.optimizer.param_groups]
        train(relay, plain, 2)
        assert_same(weights_of(relay), state_of(plain.model))


def wider() -> nn.Module:
    model = KIND.make_model()
    model.layers[1].extra = nn.Parameter(torch.zeros(3))
    return model


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": wider}, "other parameters .*layers.1.extra: absent in the folder"),
        ({"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=1.0)}, "other the optimizer .*AdamW.*SGD"),
        ({"optimizer": lambda model: torch.optim.AdamW(model.parameters())}, "other parameter groups"),
        ({"layers": ["layers.0", "layers.1"]}, "other layers"),
    ],
)
def test_a_folder_of_another_model_is_refused(change: dict[str, Any], said: str, folder: Path) -> None:
    relay_on(folder, KIND).close()
    held = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    change = {name: value() if name == "model" else value for name, value in change.items()}
    model = change.setdefault("model", KIND.make_model())
    before = state_of(model)
    with pytest.raises(ValueError, match=said):
        relay_on(folder, KIND, resume=True, **change)
    assert_same(state_of(model), before)
    assert held == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_one_relay_at_a_time_and_none_over_another(folder: Path) -> None:
    with pytest.raises(ValueError, match="no whole step to resume"):
        relay_on(folder, KIND, resume=True)
    with relay_on(folder, KIND):
        model = KIND.make_model()
        before = state_of(model)
        with pytest.raises(ValueError, match="in use by another relay"):
            relay_on(folder, KIND, resume=True, model=model)
        assert_same(state_of(model), before)
    with pytest.raises(ValueError, match="is the shelf of a model already"):
        relay_on(folder, KIND)
    relay_on(folder, KIND, resume=True).close()


@pytest.mark.slow
def test_fifty_kills(tmp_path: Path) -> None:
    """At random moments, on a real disk: nothing that was said to be a step is lost, and all are those of one run."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path), "50"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    log = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    plain = in_core(KIND)
    losses = [plain.step(KIND.make_batch(ROWS, step)).hex() for step in range(max(int(step) for step, _ in log))]
    assert not [line for line in log if losses[int(line[0]) - 1] != line[1]], "a run has another loss"
    with relay_on(tmp_path / "shelf", KIND, resume=True) as relay:
        assert relay.steps >= len(losses)
        torn = int(done.stdout)
    assert torn > 10, "hardly any kill has hit a step"
