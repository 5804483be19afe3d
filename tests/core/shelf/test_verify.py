"""`verify` judges training from files as it does training in memory, and leaves the folder as it was."""

import re
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from on_shelf import OPTIMIZERS, ROWS, assert_same, compared, relay_on, state_of, train, weights_of
from patience import rarely
from zoo import BY_NAME, Kind

import l2l_core.eps.updater
from l2l_core import RelayConfig

CHAIN = BY_NAME["chain"]


def held(folder: Path) -> dict[Path, bytes]:
    """What a resume would read, and all else but records that are not current."""
    current = re.findall(r'"file": "([^"]+)", "half": (\d)', (folder / "step.json").read_text())
    names = {f"{file.replace(':', '%3A')}.{'ab'[int(half)]}" for file, half in current}
    assert len(names) > 3
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files if path.parent.name != "records" or path.name in names}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", [CHAIN, *(rarely(BY_NAME[n]) for n in ("batch_norm", "gpt2", "tied_layers"))], ids=str)
def test_it_says_equal_and_leaves_no_trace(kind: Kind, steps: int, folder: Path) -> None:
    with compared(folder, kind) as (relay, plain):
        train(relay, plain, steps)
        before, files = weights_of(relay), held(folder)
        torch.manual_seed(2)
        report = relay.verify(kind.make_batch(ROWS, 7))
        assert report.equal, str(report)
        assert report.loss == report.reference_loss and report.max_abs_diff == 0
        assert [row.key for row in report.rows] == [unit.key for unit in (relay.shell, *relay.stack)]
        assert relay.steps == relay.shelf.steps == steps and held(folder) == files
        assert_same(weights_of(relay), before)
        drawn = torch.rand(2)
        torch.manual_seed(2)
        assert torch.equal(drawn, torch.rand(2))
        train(relay, plain, 2)
        assert relay.verify(kind.make_batch(ROWS, 8)).equal


@pytest.mark.parametrize("name", ["momentum", rarely("adafactor"), rarely("bf16"), rarely("fused"), rarely("norms")])
def test_every_optimizer(name: str, folder: Path) -> None:
    with compared(folder, CHAIN, lambda model: OPTIMIZERS[name](model.parameters())) as (relay, plain):
        train(relay, plain, 1)
        report = relay.verify(CHAIN.make_batch(ROWS, 7))
        assert report.equal, str(report)
        train(relay, plain, 2)


@pytest.mark.parametrize(
    "settings", [{"update": "deferred", "max_grad_norm": 0.1}, rarely({"ahead": 2, "stash": "host"})]
)
def test_every_setting(settings: dict[str, Any], folder: Path) -> None:
    with compared(folder, CHAIN, config=RelayConfig(micro_batches=2, **settings)) as (relay, plain):
        train(relay, plain, 1)
        assert relay.verify(CHAIN.make_batch(ROWS, 7)).equal
        train(relay, plain, 1)


@pytest.mark.parametrize("what", ["weights", "state"])
def test_it_says_what_differs(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In-core training shares nothing with the relay's updates, so it does not hear of what is wrong in them."""
    update_part: Callable[..., Any] = l2l_core.eps.updater.update_part

    def spoilt(part: torch.optim.Optimizer, *args: Any) -> Any:
        result = update_part(part, *args)
        [param, *_] = [p for group in part.param_groups for p in group["params"]]
        with torch.no_grad():
            (param if what == "weights" else part.state[param]["exp_avg"]).view(-1)[0] += 0.5
        return result

    with compared(folder, CHAIN) as (relay, plain):
        train(relay, plain, 1)
        with monkeypatch.context() as patch:
            patch.setattr(l2l_core.eps.updater, "update_part", spoilt)
            report = relay.verify(CHAIN.make_batch(ROWS, 7))
        assert not report.equal
        if what == "weights":
            assert all(len(row.different) == 1 for row in report.rows) and 0.49 < report.max_abs_diff < 0.51
        else:
            assert report.optimizer == ("state 'exp_avg'",) and report.max_abs_diff == 0
        train(relay, plain, 2)


def test_a_model_that_fails_meanwhile_leaves_no_trace(folder: Path) -> None:
    with compared(folder, CHAIN) as (relay, plain):
        train(relay, plain, 1)
        files, calls = held(folder), SimpleQueue[None]()  # a list or counter would be restored between the two sides

        def fail(*_: Any) -> None:
            calls.put(None)
            if calls.qsize() > relay.config.micro_batches + 1:  # past the in-core side
                raise ZeroDivisionError

        handle = relay.model.layers[0].register_full_backward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            relay.verify(CHAIN.make_batch(ROWS, 7))
        handle.remove()
        assert held(folder) == files
        assert_same(weights_of(relay), state_of(plain.model))
        train(relay, plain, 2)


def test_what_it_takes_is_said(folder: Path) -> None:
    with relay_on(folder, CHAIN) as relay:
        with pytest.raises(ValueError, match=r"takes [\d,]+ bytes of host memory .* and is limited to 1,000"):
            relay.verify(CHAIN.make_batch(ROWS, 0), host_bytes=1000)
        numel = sum(unit.num_params for unit in (relay.shell, *relay.stack))
        with pytest.raises(ValueError, match=rf"{4 * numel:,} for weights, {4 * numel:,} for gradients"):
            relay.verify(CHAIN.make_batch(ROWS, 0), host_bytes=16 * numel - 1)
        assert relay.verify(CHAIN.make_batch(ROWS, 0), host_bytes=40 * numel).equal
