"""A list of optimizers: each has its own parameters, schedulers and state, as in a plain loop over several."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from transformers import GPT2Config, GPT2LMHeadModel

from l2l_core import Duplicate, Relay, RelayConfig
from l2l_core.config import UpdateMode

IDS = torch.arange(64).view(4, 16).flip(0) % 61
BATCH = {"input_ids": IDS, "labels": IDS}


def make_model() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 3, "n_embd": 32, "n_head": 2, "n_positions": 16, "vocab_size": 64, "use_cache": False}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, loss_type="ForCausalLM")
    )


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return param.ndim == 2 and ".h." in name


def make_optimizers(model: nn.Module) -> list[Optimizer]:
    matrices = [param for name, param in model.named_parameters() if is_matrix(name, param)]
    rest = [param for name, param in model.named_parameters() if not is_matrix(name, param)]
    return [Muon(matrices, lr=0.02), AdamW(rest, lr=1e-3)]


def make_schedulers(optimizers: list[Optimizer]) -> list[Any]:
    return [StepLR(optimizers[0], 1, 0.5), CosineAnnealingLR(optimizers[1], 10)]


def train_plainly(steps: int) -> tuple[nn.Module, list[Optimizer]]:
    model = make_model()
    optimizers = make_optimizers(model)
    schedulers = make_schedulers(optimizers)
    for _ in range(steps):
        train_in_core(model, optimizers)
        for scheduler in schedulers:
            scheduler.step()
    return model, optimizers


def train_in_core(model: nn.Module, optimizers: list[Optimizer]) -> None:
    for part in IDS.chunk(2):
        (model(input_ids=part, labels=part).loss / 2).backward()
    for each in optimizers:
        each.step()
        each.zero_grad()


def state_of(optimizers: list[Optimizer]) -> list[Any]:
    return [
        value if isinstance(value, Tensor) else torch.tensor(value)
        for optimizer in optimizers
        for _, values in sorted(optimizer.state_dict()["state"].items())
        for value in values.values()
    ]


@pytest.mark.parametrize("update", ["eager", "deferred", "whole"])
def test_a_list_trains_as_a_loop_over_it(update: UpdateMode, tmp_path: Path) -> None:
    plain, theirs = train_plainly(5)
    model = make_model()
    ours = make_optimizers(model)
    with Relay(model, ours, "cpu", config=RelayConfig(micro_batches=2, update=update)) as relay:
        schedulers = make_schedulers(ours)
        for step in range(4):
            relay.step(BATCH)
            for scheduler in schedulers:
                scheduler.step()
            if step == 1:  # each optimizer saved and loaded by itself
                for each in ours:
                    each.load_state_dict(copy.deepcopy(each.state_dict()))
        relay.save(tmp_path)
    loaded = make_model()
    with Relay.load(tmp_path, loaded, make_optimizers(loaded), device="cpu") as relay:
        relay.step(BATCH)
        assert relay.verify(BATCH).equal
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), loaded.parameters(), strict=True))
        restored = list(relay.optimizer.optimizers)  # type: ignore[attr-defined]
        assert all(torch.equal(a, b) for a, b in zip(state_of(theirs), state_of(restored), strict=True))


def test_filters_take_what_earlier_ones_left() -> None:
    plain, _ = train_plainly(1)
    model = make_model()
    pairs = [(is_matrix, partial(Muon, lr=0.02)), (lambda name, param: True, partial(AdamW, lr=1e-3))]
    with Relay(model, pairs, "cpu", config=RelayConfig(micro_batches=2)) as relay:
        relay.step(BATCH)
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_edits_undo_and_branches_keep_the_state_of_each() -> None:
    model = make_model()
    with Relay(model, make_optimizers(model), "cpu", config=RelayConfig(micro_batches=2)) as relay:
        relay.step(BATCH)
        relay.apply(Duplicate(1))
        relay.step(BATCH)
        assert relay.verify(BATCH).equal
        relay.undo()
        assert relay.verify(BATCH).equal
        relay.fork("other")
        relay.step(BATCH)
        relay.switch("main")
        assert relay.verify(BATCH).equal


class Counting(AdamW):
    """Counts its steps in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        for group in self.param_groups:
            group["weight_decay"] = 0.01 / self.count
        return super().step(closure)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: [], r"optimizer=\[\]: give at least one"),
        (
            lambda m: [AdamW(m.parameters()), AdamW(m.parameters())],
            r"optimizer\[1\] has 40 parameters of an earlier one",
        ),
        (lambda m: [(lambda n, p: False, AdamW)], r"optimizer\[0\] would have no parameters"),
        (lambda m: [AdamW], r"optimizer\[0\]=.*: give an optimizer, or a pair"),
        (lambda m: [(lambda n, p: True, lambda params: 3)], r"optimizer\[0\]: the factory returned a int"),
        (lambda m: [Counting(m.parameters())], "Counting changes its attribute 'count' in a step"),
        (lambda m: [torch.optim.LBFGS(m.parameters())], "LBFGS re-evaluates the loss"),
    ],
    ids=["empty", "twice", "none", "a class", "no optimizer", "attribute", "lbfgs"],
)
def test_what_no_list_can_hold_is_refused(make: Any, message: str) -> None:
    model = make_model()
    before = [param.clone() for param in model.parameters()]
    with pytest.raises((TypeError, ValueError), match=message):
        Relay(model, make(model), "cpu")
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_groups_added_to_one_of_them_are_refused() -> None:
    model = make_model()
    optimizers = make_optimizers(model)
    with Relay(model, optimizers, "cpu") as relay:
        optimizers[1].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
        with pytest.raises(ValueError, match="AdamW has 2 groups and had 1"):
            relay.step(BATCH)


def test_after_close_the_optimizers_are_ordinary_again() -> None:
    plain, model = make_model(), make_model()
    theirs, ours = make_optimizers(plain), make_optimizers(model)
    for _ in range(3):
        train_in_core(plain, theirs)
    with Relay(model, ours, "cpu", config=RelayConfig(micro_batches=2)) as relay:
        relay.step(BATCH)
    assert [[set(group) for group in each.param_groups] for each in ours] == [
        [set(group) for group in each.param_groups] for each in theirs
    ]
    train_in_core(model, ours)
    with Relay(model, ours, "cpu", config=RelayConfig(micro_batches=2)) as relay:
        relay.step(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(state_of(theirs), state_of(ours), strict=True))
