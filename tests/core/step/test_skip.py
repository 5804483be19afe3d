"""Layers that sit a step out, against plain training of the same model without them in its ModuleList.

`test_stand_ins.py` has models that read things by the position of a layer.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from small import make_batch, make_gpt, make_relay
from torch import nn

from l2l_core import ActiveLayers, Depth, EmulatedDevice, Freeze, Insert, LayerDrop, Relay, RelayConfig, Schedule
from l2l_core.model.reference import train_step

WAYS = [(1,), (0, 3), (), (2, 1, 3), (4,), (0, 1, 2, 3), (3,)]


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay(make_gpt(5)) as made:
        yield made


def optimizer_state(relay: Relay) -> list[Any]:
    """By group and parameter, in order: the values and what is known of them."""
    return [
        (p.detach().clone(), {k: torch.as_tensor(v).clone() for k, v in relay.optimizer.state.get(p, {}).items()})
        for group in relay.optimizer.param_groups
        for p in group["params"]
    ]


def held_bytes(relay: Relay) -> dict[str, int]:
    """On the host, without buffers of gradients, whose number is a matter of timing."""
    return {category: nbytes for category, nbytes in relay.host.by_category().items() if category != "gradients"}


def assert_same(a: list[Any], b: list[Any]) -> None:
    assert len(a) == len(b)
    for (value, known), (other, its) in zip(a, b, strict=True):
        assert torch.equal(value, other) and known.keys() == its.keys()
        assert all(torch.equal(known[name], its[name]) for name in known)


def train_in_core(model: nn.Module, optimizer: Any, config: RelayConfig, step: int, skip: Collection[int]) -> float:
    """One plain step of the model whose list lacks some layers."""
    layers = model.transformer.h
    model.transformer.h = nn.ModuleList(layer for i, layer in enumerate(layers) if i not in skip)
    parts = [{key: value[2 * k : 2 * k + 2] for key, value in make_batch(step).items()} for k in range(2)]
    seeds = [config.micro_batch_seed(step, k) for k in range(2)]
    losses = train_step(
        model, optimizer, parts, lambda m, b: m(**b, use_cache=False).loss, [2, 2], seeds, config.max_grad_norm
    )
    model.transformer.h = layers
    return float(sum(losses))


@pytest.mark.parametrize(
    "settings",
    [{}, {"stash": "host"}, {"ahead": 0, "update": "deferred", "max_grad_norm": 0.5}, {"rollback": True}],
)
def test_steps_with_holes_are_those_of_the_model_without_these_layers(settings: dict[str, Any]) -> None:
    model, plain, config = make_gpt(5), make_gpt(5), RelayConfig(seed=0, micro_batches=2, **settings)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with make_relay(model, config=config) as relay:
        for step, skip in enumerate(WAYS):
            expected = train_in_core(plain, optimizer, config, step, skip)
            assert relay.step(make_batch(step), skip=skip).loss == expected
            for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), (step, name)
        steps = {int(optimizer.state[p]["step"]) for p in plain.transformer.h[4].parameters()}
        assert steps == {len(WAYS) - 1} == {relay.stack[4].version}
        assert relay.verify(make_batch(9)).equal


@pytest.mark.parametrize("layers", [None, [], ["transformer.h"]])
def test_a_model_without_layers_is_refused_with_a_remedy_that_works(layers: Any) -> None:
    with pytest.raises(ValueError, match=r"the ModuleList 'transformer\.h' of GPT2LMHeadModel is empty") as caught:
        make_relay(make_gpt(0), layers=layers)
    remedies = "relay.step(batch, skip=range(12))", "ActiveLayers({0: 0, 800: 12}).step(relay, batch)"
    assert all(remedy in str(caught.value) for remedy in remedies)
    plain, config = make_gpt(12), RelayConfig(seed=0, micro_batches=2)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with make_relay(make_gpt(12), config=config) as relay:
        for step, remedy in enumerate(remedies):
            batch = make_batch(step)
            expected = train_in_core(plain, optimizer, config, step, range(12))
            assert eval(remedy, {"relay": relay, "batch": batch, "ActiveLayers": ActiveLayers}).loss == expected
        assert all(map(torch.equal, relay.model.parameters(), plain.parameters()))


def test_a_layer_that_sits_out_is_not_touched_and_all_else_is_as_before(relay: Relay) -> None:
    relay.step(make_batch())
    out = relay.stack[1], relay.stack[3]
    model_config, h, steps = relay.model.config, relay.model.transformer.h, relay.steps
    groups = [list(group["params"]) for group in relay.optimizer.param_groups]
    stack, names, indices = relay.stack, [unit.name for unit in relay.stack], [layer.attn.layer_idx for layer in h]
    before = [[param.detach().clone() for param in unit.params] for unit in out]
    known = [
        copy.deepcopy([relay.optimizer.state[m] for m in relay.store.masters.master_by_param(unit).values()])
        for unit in out
    ]
    held, versions = held_bytes(relay), [unit.version for unit in out]
    result = relay.step(make_batch(1), skip=["L001", ("transformer.h", 3), -2])
    moved = {
        event.layer for event in result.trace.events if event.kind in ("load", "forward", "backward", "push", "update")
    }
    assert moved == {"shell", "L000", "L002", "L004"}
    assert relay.model.config is model_config and model_config.n_layer == 5 and relay.model.transformer.h is h
    assert relay.stack == stack and [unit.name for unit in stack] == names and len(h) == 5
    assert [layer.attn.layer_idx for layer in h] == indices and relay.journal == () and relay.steps == steps + 1
    assert [group["params"] for group in relay.optimizer.param_groups] == groups
    assert held_bytes(relay) == held, "nothing is parked, nothing was copied"
    for unit, values, states, version in zip(out, before, known, versions, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(unit.params, values, strict=True)) and unit.version == version
        for master, state in zip(relay.store.masters.master_by_param(unit).values(), states, strict=True):
            assert all(torch.equal(relay.optimizer.state[master][name], state[name]) for name in state)
        assert not unit.stats, "of this step nothing is known of it"
    assert relay.stack[0].stats


def test_no_copy_of_weights_is_made(relay: Relay) -> None:
    relay.step(make_batch())
    where = [unit.blocks[0].master.data_ptr() for unit in relay.stack]
    total = sum(relay.host.by_category()[c] for c in ("weights", "optimizer"))
    result = relay.step(make_batch(1), skip=[0, 1])
    assert [unit.blocks[0].master.data_ptr() for unit in relay.stack] == where
    held = [sample.bytes_by_category for sample in result.trace.memory if sample.place == "host"]
    assert {sum(row.get(c, 0) for c in ("weights", "optimizer", "other")) for row in held} == {total}


def test_a_step_that_fails_brings_them_back(relay: Relay) -> None:
    relay.step(make_batch())
    config, stack, before = relay.model.config, relay.stack, optimizer_state(relay)
    with pytest.raises(IndexError):
        relay.step({"input_ids": torch.full((4, 8), 99), "labels": make_batch()["labels"]}, skip=[0, 2])
    assert relay.model.config is config and relay.stack == stack
    assert_same(optimizer_state(relay), before)
    assert relay.verify(make_batch()).equal


def test_steps_with_holes_are_not_metered_every_time(relay: Relay) -> None:
    """Metering takes time: a step needs none if each of its layers was in a metered one."""
    seen = []
    find = relay._runner.pass_cache.find_step
    relay._runner.pass_cache.find_step = lambda kind: seen.append(find(kind)) or seen[-1]
    for step, skip in enumerate([(0,), (1,), (2,), (0, 3), (3, 4)]):
        relay.step(make_batch(step), skip=skip)
    assert [known is None for known in seen] == [True, True, False, False, False]
    result = relay.step(make_batch())
    assert seen[-1] is None
    peak = result.peak_device_bytes
    assert relay.step(make_batch()).peak_device_bytes == pytest.approx(peak, rel=0.02), "the whole is metered by itself"
    assert relay.step(make_batch(), skip=[2]).peak_device_bytes == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    ("skip", "error", "message"),
    [
        ([7], ValueError, "position 7 is out of range"),
        (["L009"], ValueError, "there are L000"),
        ("L001", TypeError, "a collection of layers"),
        (1, TypeError, r"not a collection of layers: pass a list, as \[1\]"),
        ([True], TypeError, "names no layer"),
    ],
)
def test_what_cannot_sit_out_is_refused_and_nothing_has_changed(
    relay: Relay, skip: Any, error: type[Exception], message: str
) -> None:
    config, stack, before = relay.model.config, relay.stack, optimizer_state(relay)
    with pytest.raises(error, match=message):
        relay.step(make_batch(), skip=skip)
    assert relay.model.config is config and relay.stack == stack and relay.steps == 0
    assert_same(optimizer_state(relay), before)


def test_layers_of_the_stack_are_skipped_by_the_key_that_the_refusal_names(relay: Relay) -> None:
    with pytest.raises(TypeError, match=r"^a Unit names no layer; pass its key, 'L001'$"):
        relay.step(make_batch(), skip=relay.stack[1:])
    relay.step(make_batch(), skip=[unit.key for unit in relay.stack[1:]])
    assert relay.steps == 1


def test_a_relay_saved_after_such_steps_goes_on_to_the_bit(relay: Relay, tmp_path: Path) -> None:
    relay.apply(Insert(at=1, init="copy"), Freeze(0))
    relay.step(make_batch(), skip=[2])
    relay.save(tmp_path)
    losses = [relay.step(make_batch(step), skip=skip).loss for step, skip in ((1, [0]), (2, []), (3, [1, 2]))]
    with Relay.load(tmp_path, make_gpt(5), partial(torch.optim.AdamW, lr=1e-2), device=EmulatedDevice()) as again:
        assert [again.step(make_batch(s), skip=skip).loss for s, skip in ((1, [0]), (2, []), (3, [1, 2]))] == losses
        assert_same(optimizer_state(again), optimizer_state(relay))


def test_edits_and_their_undoing_do_not_notice(relay: Relay) -> None:
    relay.apply(Insert(at=2, init="copy", warmup=3))
    relay.step(make_batch(), skip=["L005"])
    assert relay.stack[2].version == 0, "its warm-up waits"
    relay.undo()
    relay.step(make_batch(1), skip=[1])
    relay.redo()
    assert relay.verify(make_batch(2)).equal
    assert [entry.kind for entry in relay.journal] == ["edit", "undo", "redo"]


def test_groups_of_the_optimizer_keep_an_order_of_their_own() -> None:
    model = make_gpt(3)
    params = list(model.parameters())
    groups = [{"params": params[1::2], "lr": 1e-2}, {"params": params[::2][::-1]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    with Relay(model, optimizer, EmulatedDevice()) as relay:
        before = [list(group["params"]) for group in optimizer.param_groups]
        relay.step(make_batch(), skip=[1])
        assert [group["params"] for group in optimizer.param_groups] == before
        assert relay.verify(make_batch()).equal


def test_layers_of_several_stacks_sit_out_together() -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(n))) for n in (3, 2)]
    model = nn.Sequential(*blocks)
    twin = copy.deepcopy(nn.Sequential(blocks[0][0], blocks[0][2], blocks[1][1]))
    layers = [f"{i}.{j}" for i, n in ((0, 3), (1, 2)) for j in range(n)]
    x = torch.randn(4, 4)
    with Relay(
        model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), layers, lambda y, b: y.square().mean()
    ) as relay:
        assert relay.step((x,), skip=[("0", 1), "1.0"]).loss == twin(x).square().mean().item()
        left = copy.deepcopy(nn.Sequential(blocks[0][0], blocks[0][2]))
        assert relay.step((x,), skip=[("0", 1), "1.0", "1.1"]).loss == left(x).square().mean().item(), "all of a stack"
        assert [unit.name for unit in relay.stack] == layers and relay.verify((x,)).equal


def test_bytes_of_optimizer_state_are_known_before_the_first_step(relay: Relay, tmp_path: Path) -> None:
    """Layers leave with their state, whoever has put it there: a loaded save, a step that failed, one that was tried."""
    relay.step(make_batch())
    relay.save(tmp_path)
    held = held_bytes(relay)
    with Relay.load(tmp_path, make_gpt(5), partial(torch.optim.AdamW, lr=1e-2), device=EmulatedDevice()) as again:
        assert held_bytes(again) == held
        again.step(make_batch(1), skip=[1])
    with make_relay(make_gpt(5)) as fresh:
        before = held_bytes(fresh)
        assert fresh.verify(make_batch()).equal and held_bytes(fresh) == before
        fresh.step(make_batch(1), skip=[1])


class Beside(nn.Module):
    """As many norms beside the layers as there are layers: one each, as it seems. No layer's output is like its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.norms[0](x)


def test_what_is_refused_on_evidence_alone_may_be_trusted() -> None:
    batch = (torch.ones(2, 4),)
    layers = [f"layers.{i}" for i in range(3)]
    with make_relay(Beside(), loss=lambda out, _: (out**2).mean(), layers=layers) as relay:
        with pytest.raises(ValueError, match="probably one for each of the.*force=True"):
            relay.step(batch, skip=[1])
        assert relay.steps == 0
        with pytest.raises(
            ValueError, match=r"all of layers \(L000 to L002, 3 layers\) would be skipped, but one layer"
        ):
            relay.step(batch, skip=[0, 1, 2], force=True)
        relay.step(batch, skip=[1], force=True)
        assert [unit.version for unit in relay.stack] == [1, 0, 1]
        with pytest.raises(ValueError, match="force=True"):
            LayerDrop(0.9).step(relay, batch)
        (LayerDrop(0.9, force=True) + Schedule()).step(relay, batch)
        assert relay.steps == 2 and relay.verify(batch).equal


def test_the_remedy_of_a_refusal_is_an_argument_of_every_operation_that_refuses() -> None:
    batch, names = (torch.ones(2, 4),), [f"layers.{i}" for i in range(3)]
    settings = RelayConfig(micro_batches=1)
    with make_relay(Beside(), loss=lambda out, _: (out**2).mean(), layers=names, config=settings) as relay:
        relay.step(batch)
        operations = [
            lambda **force: ActiveLayers(1, **force).step(relay, batch),
            lambda **force: relay.evaluate(batch, skip=[1, 2], **force),
            lambda **force: relay.probe([batch], skip=[1, 2], **force)[0],
            lambda **force: relay.look(batch, leave_out=[1, 2], **force),
            lambda **force: Depth(2, shrink="top", **force).step(relay, batch),
        ]
        for operation in operations:
            with pytest.raises(ValueError, match="probably one for each of the.*force=True"):
                operation()
        _, evaluated, probed, *_ = [operation(force=True) for operation in operations[:-1]]
        assert [depth.why_not == "" for depth in relay.look(batch, lens=True).depths] == [False, False, True]
        assert not any(depth.why_not for depth in relay.look(batch, lens=True, force=True).depths)
        first, norm = relay.model.layers[0].eval(), relay.model.norms[0]
        with torch.no_grad():
            assert evaluated == probed == norm(batch[0] + first(batch[0])).square().mean().item()
        operations[-1](force=True)
        assert len(relay.stack) == 2 and relay.steps == 3 and relay.verify(batch).equal


def test_schedules_are_forced_if_one_of_them_is() -> None:
    assert (LayerDrop(0.1, force=True) + ActiveLayers(2)).force and not (LayerDrop(0.1) + ActiveLayers(2)).force
