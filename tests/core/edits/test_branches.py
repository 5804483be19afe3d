"""Branches: whole states side by side, each as if there were no other, and no byte more than what differs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import assert_same, keys, make_batch, make_gpt, make_relay, whole
from torch import nn

from l2l_core import (
    Drop,
    Duplicate,
    EmulatedDevice,
    Freeze,
    Insert,
    Interpolate,
    Relay,
    RelayConfig,
    Swap,
    TornStep,
    Unfreeze,
)


def kept(relay: Relay) -> int:
    """Host bytes without the buffers of gradients: how many of these there are depends on how far the EPS falls behind."""
    return relay.host.total - relay.host.by_category()["gradients"]


def bytes_of(relay: Relay, name: str) -> int:
    return next(branch.nbytes for branch in relay.branches if branch.name == name)


def test_a_branch_is_a_whole_state_and_the_other_does_not_notice(relay: Relay) -> None:
    before, stats = whole(relay), [dict(unit.stats) for unit in relay.stack]
    assert relay.branch == "main" and relay.fork("wide").name == relay.branch == "wide"
    assert_same(whole(relay), before)
    relay.apply(Duplicate(1), Swap(0, 3), Freeze(2))
    relay.optimizer.param_groups[0]["lr"] = 0.5
    relay.config = replace(relay.config, micro_batches=4)
    losses = [relay.step(make_batch(seed)).loss for seed in (3, 4)]
    wide = whole(relay)
    assert len(relay.journal) == 1 and len(relay.stack) == 5

    main = relay.switch("main")
    assert main.active and main.layers == 4 and main.steps == 2 and relay.journal == ()
    assert relay.config.micro_batches == 2 and relay.model.config.n_layer == 4
    assert_same(whole(relay), before)
    assert [unit.stats for unit in relay.stack] == stats
    assert relay.verify(make_batch()).equal
    other = relay.step(make_batch(3)).loss
    assert other != losses[0]

    relay.switch("wide")
    assert_same(whole(relay), wide)
    assert relay.verify(make_batch()).equal and len(relay.journal) == 1
    relay.undo()
    assert keys(relay) == ["L000", "L001", "L002", "L003"] and not relay.stack[2].frozen


def test_a_scheduler_keeps_its_position_in_a_switch_and_the_remedy_works(relay: Relay) -> None:
    def rates_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8)  # computes a rate from the one before

    alone = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=relay.optimizer.param_groups[0]["lr"])
    of_plain, expected = rates_of(alone), list[float]()
    for _ in range(4):
        expected.append(alone.param_groups[0]["lr"])
        alone.step()
        of_plain.step()

    scheduler, used = rates_of(relay.optimizer), {"main": list[float](), "slim": list[float]()}
    relay.fork("slim")
    positions = dict.fromkeys(used, scheduler.state_dict())
    for name in ("slim", "slim", "main", "slim", "main", "main", "slim", "main"):
        positions[relay.branch] = scheduler.state_dict()
        before = scheduler.last_epoch
        relay.switch(name)
        assert scheduler.last_epoch == before, "as documented"
        scheduler.load_state_dict(positions[name])
        used[name].append(relay.optimizer.param_groups[0]["lr"])
        relay.step(make_batch())
        scheduler.step()
    assert used == {"main": expected, "slim": expected}


def test_both_branches_go_on_as_if_they_were_alone(relay: Relay, tmp_path: Path) -> None:
    """The oracle is a relay of its own for each: loaded from a save that was made at the fork."""
    relay.apply(Insert(at=1, init="copy", warmup=5))
    relay.save(tmp_path)
    relay.fork("other")
    alone = [
        Relay.load(tmp_path, make_gpt(), partial(torch.optim.AdamW, lr=1e-2), device=EmulatedDevice()) for _ in range(2)
    ]
    try:
        for round_, edit in enumerate([Drop(0), Interpolate(0, 1), Freeze(0)]):
            for name, twin in zip(("main", "other"), alone, strict=True):
                relay.switch(name)
                if name == "other":
                    relay.apply(edit)
                    twin.apply(edit)
                for step in range(2):
                    batch = make_batch(10 * round_ + step)
                    assert relay.step(batch).loss == twin.step(batch).loss
                assert_same(whole(relay), whole(twin))
    finally:
        for twin in alone:
            twin.close()


def test_a_branch_costs_bytes_for_layers_that_changed_only(relay: Relay) -> None:
    start = kept(relay)
    relay.fork("other")
    assert kept(relay) == start and bytes_of(relay, "main") == 0
    relay.apply(Freeze(slice(0, 3)))
    assert bytes_of(relay, "main") == 0, "flags are no bytes"
    relay.step(make_batch(3))
    changed = [relay.stack[3], relay.shell]
    expected = sum(unit.nbytes + 8 * unit.num_params + 4 * len(unit.params) for unit in changed)
    assert bytes_of(relay, "main") == expected
    assert kept(relay) == start + expected
    relay.step(make_batch(4))
    assert kept(relay) == start + expected, "copied once"
    relay.switch("main")
    assert bytes_of(relay, "other") == expected and kept(relay) == start + expected
    relay.fork("third")
    relay.step(make_batch(3))
    assert kept(relay) < start + 3 * expected + sum(unit.nbytes * 4 for unit in relay.stack)
    relay.discard("main")
    relay.discard("other")
    assert kept(relay) == start and [branch.name for branch in relay.branches] == ["third"]


def test_what_only_a_discarded_branch_had_is_let_go(relay: Relay) -> None:
    relay.fork("wide")
    relay.apply(Duplicate(0))
    known = weakref.ref(relay.stack[1].module), weakref.ref(relay.stack[1].params[0])
    relay.step(make_batch(3))
    relay.switch("main")
    relay.discard("wide")
    gc.collect()
    assert [each() for each in known] == [None, None]


class TwoMomenta(torch.optim.Optimizer):
    """Keeps its state in a list, as Shampoo and SOAP do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    momenta = self.state[param].setdefault("momenta", [torch.zeros_like(param) for _ in range(2)])
                    for momentum, decay in zip(momenta, (0.9, 0.5), strict=True):
                        param.sub_(momentum.mul_(decay).add_(param.grad), alpha=group["lr"])


def test_optimizer_state_in_lists_is_a_branchs_own() -> None:
    with Relay(make_gpt(2), TwoMomenta, EmulatedDevice()) as relay, Relay(make_gpt(2), TwoMomenta) as alone:
        assert relay.step(make_batch()).loss == alone.step(make_batch()).loss
        assert relay.verify(make_batch()).equal
        assert relay.host.by_category()["optimizer"] == sum(8 * unit.num_params for unit in (relay.shell, *relay.stack))
        relay.fork("other")
        relay.step(make_batch(1))
        relay.switch("main")
        for seed in (2, 3):
            assert relay.step(make_batch(seed)).loss == alone.step(make_batch(seed)).loss


def test_what_one_branch_dropped_for_good_another_still_has(relay: Relay) -> None:
    before = whole(relay)
    relay.fork("thin")
    relay.apply(Drop(1, park=None))
    relay.step(make_batch(3))
    relay.apply(Drop(0, park="disk"))
    relay.step(make_batch(4))
    relay.switch("main")
    assert_same(whole(relay), before)
    assert relay.verify(make_batch()).equal
    relay.switch("thin")
    assert keys(relay) == ["L002", "L003"]
    relay.undo()
    assert keys(relay) == ["L000", "L002", "L003"]


def test_a_layer_of_another_branch_is_kept_whatever_is_edited_here(relay: Relay) -> None:
    relay.fork("deep")
    relay.apply(Insert(at=2, init="copy"))
    relay.step(make_batch(3))
    deep = whole(relay)
    relay.switch("main")
    for _ in range(2):
        relay.apply(Swap(0, 1))
    relay.undo()
    relay.step(make_batch(4))
    relay.switch("deep")
    assert_same(whole(relay), deep)
    relay.undo()
    assert len(relay.stack) == 4


def test_the_same_edit_is_undone_on_either_branch(relay: Relay) -> None:
    relay.apply(Interpolate(0, 1))
    before = whole(relay)
    relay.fork("other")
    relay.step(make_batch(3))
    relay.undo()
    relay.step(make_batch(4))
    relay.switch("main")
    assert_same(whole(relay), before)
    own = {name for name in before if name.startswith("transformer.h.0.")}
    relay.undo()
    undone = {name: value for name, value in whole(relay).items() if name in own}
    with make_relay(make_gpt()) as twin:
        for seed in range(2):
            twin.step(make_batch(seed))
        assert_same(undone, {name: value for name, value in whole(twin).items() if name in own})


def test_verify_and_failed_steps_cost_a_branch_nothing_that_lasts(relay: Relay) -> None:
    relay.config = replace(relay.config, rollback=True)
    relay.fork("other")
    relay.verify(make_batch())
    assert bytes_of(relay, "main") == 0
    before = whole(relay)
    broken = make_batch(3) | {"labels": torch.full((4, 8), 99)}
    with pytest.raises((IndexError, RuntimeError, TornStep)):
        relay.step(broken)
    assert_same(whole(relay), before)
    relay.step(make_batch(3))
    relay.switch("main")
    assert_same({**whole(relay), "random": before["random"]}, before)


def test_buffers_belong_to_a_branch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(3)))
    options: dict[str, Any] = {"loss": lambda out, batch: (out**2).mean(), "config": RelayConfig()}
    with Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), **options) as relay:
        batch = (torch.randn(8, 4),)
        relay.step(batch)
        before = whole(relay)
        relay.fork("other")
        relay.step(batch)
        after = whole(relay)
        relay.switch("main")
        assert_same(whole(relay), before)
        relay.switch("other")
        assert_same(whole(relay), after)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda relay: relay.fork("main"), "branch 'main' exists already: there are main, other"),
        (lambda relay: relay.fork(" "), "' ' is no name for a branch"),
        (lambda relay: relay.fork(None), "None is no name for a branch"),
        (lambda relay: relay.switch("nowhere"), "no branch 'nowhere': there are main, other"),
        (lambda relay: relay.discard("nowhere"), "no branch 'nowhere'"),
        (lambda relay: relay.discard("other"), "switch to another"),
    ],
)
def test_what_cannot_be_is_refused(relay: Relay, act: Callable[[Relay], Any], message: str) -> None:
    relay.fork("other")
    before = whole(relay)
    with pytest.raises(ValueError, match=message):
        act(relay)
    assert relay.branch == "other"
    assert_same(whole(relay), before)
    assert relay.switch("other").active, "where one is already is fine"


def test_an_inverse_of_another_branch_is_refused(relay: Relay) -> None:
    relay.fork("deep")
    inverse = relay.apply(Insert(at=1, init="copy"))
    mixed = relay.apply(Interpolate(1, 2))
    relay.switch("main")
    before = whole(relay)
    for edit in (inverse, mixed):
        with pytest.raises(ValueError, match="changed since|in no stack"):
            relay.apply(edit)
        assert_same(whole(relay), before)


POSITION = st.integers(min_value=-2, max_value=4)
ACT = st.one_of(
    st.sampled_from(["step", "undo", "redo", "a", "b", "main"]),
    st.builds(Insert, at=POSITION, init=st.just("copy"), optimizer=st.sampled_from(["copy", "fresh"])),
    st.builds(Drop, POSITION, park=st.sampled_from(["memory", "disk", None])),
    st.builds(Swap, POSITION, POSITION),
    st.builds(Interpolate, POSITION, POSITION),
    st.builds(Freeze, POSITION),
    st.builds(Unfreeze, POSITION),
)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(acts=st.lists(ACT, min_size=4, max_size=24))
def test_whatever_happens_a_branch_is_found_as_it_was_left(acts: list[Any]) -> None:
    with make_relay(make_gpt(3)) as relay:
        relay.step(make_batch(0))
        left: dict[str, dict[str, torch.Tensor]] = {}
        for number, act in enumerate(acts):
            if act in ("a", "b", "main"):
                left[relay.branch] = whole(relay)
                if act in [branch.name for branch in relay.branches]:
                    relay.switch(act)
                else:
                    left[act] = whole(relay)
                    relay.fork(act)
                assert_same(whole(relay), left[act])
            elif act == "step":
                if any(not unit.frozen for unit in relay.stack):
                    relay.step(make_batch(number))
            else:
                try:
                    getattr(relay, act)() if isinstance(act, str) else relay.apply(act)
                except ValueError:
                    pass  # nothing to undo, out of range, and so on
        if any(not unit.frozen for unit in relay.stack):
            assert relay.verify(make_batch(2)).equal
        left[relay.branch] = whole(relay)
        for name in left:
            relay.switch(name)
            assert_same(whole(relay), left[name])


def test_a_weight_that_two_layers_share_goes_from_one_to_the_other() -> None:
    """On each branch another one of them is in the model, in one stack or in two."""
    for same in (True, False):
        torch.manual_seed(0)
        low, high = (nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(n))) for n in (3, 2))
        (low[1] if same else high[0])[0].weight = low[0][0].weight
        first, second = "L000", "L001" if same else "L003"
        layers = [*low, *high]
        with make_relay(nn.Sequential(low, high), loss=lambda out, _: (out**2).mean(), layers=layers) as relay:
            batch = (torch.ones(4, 4),)
            relay.step(batch)
            relay.fork("other")
            relay.apply(Drop(first))
            relay.step(batch)
            left = whole(relay)
            relay.switch("main")
            relay.apply(Drop(second))
            relay.step(batch)
            here = whole(relay)
            for _ in range(2):
                relay.switch("other")
                assert_same(whole(relay), left)
                relay.switch("main")
                assert_same(whole(relay), here)
            assert relay.verify(batch).equal
