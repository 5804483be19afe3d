"""What worker processes of `crew.py` do in tests of weights and optimizer state in files. Each has its shards in a folder."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crew_cases import Case, plain, relay_of, unlike_state
from on_shelf import ENOUGH, stack
from oracle import adamw, differences
from torch import Tensor, nn
from zoo import BY_NAME

from l2l_core import Drop, FileShelf, Relay, WorkerError, WorkerLostError, Workers, empty_weights
from l2l_core.shelf import shelf_manifest
from l2l_core.shelf.direct_io import DirectFiles
from l2l_core.shelf.record_store import RecordStore


def on_shelf(case: Case, rank: int, folder: Path, resume: bool = False, **options: Any) -> Relay:
    """Make a worker's relay over files."""
    return relay_of(case, rank, shelf=FileShelf(folder=folder, memory_bytes=ENOUGH, resume=resume), **options)


def weights_of(relay: Relay) -> dict[str, Tensor]:
    assert relay.shelf is not None
    return {name: tensor.clone() for name, tensor in relay.shelf.weights()}


def unlike_weights(relay: Relay, model: nn.Module) -> list[str]:
    """Names of the weights in the files that are not a model's."""
    ours, theirs = weights_of(relay), dict(model.named_parameters())
    assert ours.keys() == theirs.keys()
    return [name for name, tensor in ours.items() if not torch.equal(tensor, theirs[name])]


def train_from_files_beside_plain(rank: int, count: int, case: Case, folder: Path) -> dict[str, Any]:
    """Train together from files, then in core on the same micro-batches: what differs, and what was seen on the way."""
    with on_shelf(case, rank, folder) as relay:
        losses = [relay.step(case.rows_of(rank, step), skip=case.skips[step]).loss for step in range(case.steps)]
        twin, optimizer, expected = plain(case, count)
        nan = [bool(torch.isnan(param).all()) for param in relay.model.parameters() if param.numel()]
        seen = {"losses": losses, "expected": expected, "nan": all(nan), "differences": unlike_weights(relay, twin)}
        with relay.gathered() as model:  # with the optimizer's state
            seen["differences"] += [*differences(model, twin)]
            seen["state differs in"] = unlike_state(relay.optimizer, optimizer)
        seen["after"] = unlike_weights(relay, twin)
        seen["verified"] = relay.verify(case.rows_of(rank, 7)).equal
        seen["report"] = str(relay.verify(case.rows_of(rank, 7)))
        seen["after"] += unlike_weights(relay, twin)
    return seen


def go_on_from_files(rank: int, count: int, case: Case, folder: Path, steps: int) -> dict[str, Any]:
    """Resume, train until so many steps are made, and compare with as many in core."""
    with on_shelf(case, rank, folder, resume=True) as relay:
        began = relay.steps
        losses = [relay.step(case.rows_of(rank, step)).loss for step in range(began, steps)]
        twin, _, expected = plain(Case(case.kind, rows=case.rows, steps=steps), count)
        return {"began": began, "losses": losses == expected[began:], "unlike": unlike_weights(relay, twin)}


def _die_in(where: str) -> None:
    """Make this process kill itself: in an update, before its manifest is written, or before that is renamed."""

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "update":
        write, written = RecordStore.write, []

        def write_one(self: RecordStore, *args: Any) -> None:
            if written:
                kill()
            written.append(args)
            write(self, *args)
            self.wait_for_writes()

        RecordStore.write = write_one  # type: ignore[method-assign]
    elif where == "write":
        shelf_manifest.write_bytes = kill  # type: ignore[assignment]
    else:
        shelf_manifest.os = SimpleNamespace(replace=kill)  # type: ignore[assignment]


def lose_one_in_a_step(rank: int, count: int, case: Case, folder: Path, where: str, steps: int) -> str:
    """Worker 1 is killed in the step after so many, or in making the shelf (-1). The other returns what it heard."""
    if rank == 1 and steps < 0:
        _die_in(where)
    relay = on_shelf(case, rank, folder, workers=Workers(reduce="ordered", timeout_s=10.0))
    for step in range(steps):
        relay.step(case.rows_of(rank, step))
    if rank == 1:
        _die_in(where)
    try:
        relay.step(case.rows_of(rank, max(0, steps)))
    except WorkerLostError as error:
        return str(error)
    finally:
        relay.close()
    return ""


def train_a_step(rank: int, count: int, case: Case, folder: Path, resume: bool) -> str:
    """Make one step, or return why it cannot be made."""
    try:
        with on_shelf(case, rank, folder, resume) as relay:
            relay.step(case.rows_of(rank, relay.steps))
    except (ValueError, WorkerError) as error:
        return str(error)
    return ""


def fail_once(rank: int, count: int, case: Case, folder: Path, where: str) -> dict[str, Any]:
    """Make a step, one that fails since the disk of worker 1 does, and two more."""

    def fail(*_: object) -> None:
        raise OSError("a disk of tests")

    with on_shelf(case, rank, folder) as relay:
        losses = [relay.step(case.rows_of(rank, 0)).loss]
        before = weights_of(relay)
        with pytest.MonkeyPatch.context() as patch:
            if rank == 1:
                owner = {"read": DirectFiles, "write": DirectFiles, "manifest": shelf_manifest}[where]
                patch.setattr(owner, "write_bytes" if where == "manifest" else where, fail)
            try:
                relay.step(case.rows_of(rank, 1))
                raise AssertionError("the step was made")
            except (OSError, WorkerError) as error:
                seen = {"error": f"{type(error).__name__}: {error}"}
        after = weights_of(relay)
        kept = all(torch.equal(tensor, after[name]) for name, tensor in before.items())
        losses += [relay.step(case.rows_of(rank, step)).loss for step in (1, 2)]
        twin, _, expected = plain(case, count)
        return seen | {"kept": kept, "losses": losses == expected, "unlike": unlike_weights(relay, twin)}


def save_from_files(rank: int, count: int, case: Case, folder: Path) -> list[str]:
    """Make two steps, save, and write the weights as shards; return what is refused, with the messages."""
    said = []
    with on_shelf(case, rank, folder / "shelf") as relay:
        for step in range(2):
            relay.step(case.rows_of(rank, step))
        relay.save(folder / "save")
        assert relay.shelf is not None
        relay.shelf.save_pretrained(folder / "weights")
        batch = case.rows_of(rank, 2)
        keep = replace(relay.config, keep="1 MB")
        for refused in (
            lambda: relay.apply(Drop(1)),
            lambda: relay.forecast(batch),
            lambda: relay.fork("other"),
            lambda: relay.fit(batch),
            lambda: (setattr(relay, "config", keep), relay.step(batch)),
        ):
            try:
                refused()
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def load_onto_files(rank: int, count: int, case: Case, folder: Path) -> dict[str, Any]:
    """Load that save onto another shelf, and make a step more; begin one with the weights alone, too."""
    kind = BY_NAME[case.kind]
    with empty_weights():
        model = kind.make_model()
    options: dict[str, Any] = {"loss": kind.loss, "workers": Workers(reduce="ordered")}
    shelf = FileShelf(folder=folder / "second", memory_bytes=ENOUGH)
    with Relay.load(folder / "save", model, case.optimizer(model), shelf=shelf, **options) as relay:
        relay.step(case.rows_of(rank, relay.steps))
        twin, _, _ = plain(case, count)
        seen = {"steps": relay.steps, "unlike": unlike_weights(relay, twin)}
    with empty_weights():
        model = kind.make_model()
    shelf = FileShelf(folder=folder / "third", memory_bytes=ENOUGH, weights=folder / "weights")
    with Relay(model, case.optimizer(model), shelf=shelf, config=case.settings, **options) as relay:
        twin, _, _ = plain(replace(case, steps=2), count)
        return seen | {"begun": unlike_weights(relay, twin)}


def begin_without_a_layer(rank: int, count: int, case: Case, folder: Path) -> dict[str, Tensor]:
    """Make a relay from the weights of a model that was edited; return them."""
    kind = BY_NAME[case.kind]
    model = kind.make_model()
    del model.layers[1]  # type: ignore[operator, union-attr]
    shelf = FileShelf(folder=folder / "fourth", memory_bytes=ENOUGH, weights=folder / "edited")
    options: dict[str, Any] = {"loss": kind.loss, "workers": Workers(reduce="ordered"), "config": case.settings}
    with Relay(model, case.optimizer(model), shelf=shelf, **options) as relay:
        weights = weights_of(relay)
        relay.step(case.rows_of(rank, 0))
        return weights


def begin_with_integers(rank: int, count: int, folder: Path) -> tuple[str, float]:
    """Begin a shelf of adapters on frozen integers: why it is refused, and the loss of a step by the remedy."""
    kind, case, text = BY_NAME["lora_int8"], Case("lora_int8"), ""
    try:
        on_shelf(case, rank, folder)
    except ValueError as error:
        text = str(error)
    model = kind.make_model()
    for module in model.modules():
        for name, param in list(module._parameters.items()):
            if param is not None and param.dtype == torch.int8:
                del module._parameters[name]
                module.register_buffer(name, param.data)
    shelf = FileShelf(folder=folder, memory_bytes=ENOUGH)
    options: dict[str, Any] = {"loss": kind.loss, "workers": Workers(reduce="ordered"), "config": case.settings}
    with Relay(model, case.optimizer(model), shelf=shelf, **options) as relay:
        return text, relay.step(case.rows_of(rank, 0)).loss


def bytes_in_memory(rank: int, count: int, depth: int, nbytes: int, folder: Path) -> Any:
    """Train a chain of so many layers in so much memory; return what was held, or why it does not suffice."""
    kind, case = stack(depth), Case("chain", micro_batches=1)
    model = kind.make_model()
    options: dict[str, Any] = {"loss": kind.loss, "workers": Workers(reduce="ordered"), "config": case.settings}
    try:
        relay = Relay(model, adamw(model), shelf=FileShelf(folder=folder, memory_bytes=nbytes), **options)
    except (ValueError, WorkerError) as error:  # that of another worker, which has a larger shard
        return str(error)
    with relay:
        for step in range(2):
            relay.step(case.rows_of(rank, step))
        assert relay.trace is not None
        samples = [sample.bytes_by_category for sample in relay.trace.memory if sample.place == "host"]
        gathered = relay.host.by_owner("weights")["gathered"]
        return {
            "held": max(sample.get("weights", 0) + sample.get("optimizer", 0) for sample in samples) - gathered,
            "gathered": gathered,
            "at most gathered": 16 * max(unit.slot_numel(torch.float32) for unit in relay.stack)
            + 4 * relay.shell.slot_numel(torch.float32),
        }
