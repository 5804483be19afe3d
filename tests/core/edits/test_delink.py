"""Stacks that share weights: what is held and moved of them, and how they become layers of their own (`Delink`).

The oracle is plain training in core: modules that are copied with `copy.deepcopy`, and optimizer state that is copied by hand.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from small import assert_same, keys, make_batch, make_gpt, state_of
from torch import nn
from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from l2l_core import Delink, Drop, Duplicate, EmulatedDevice, Freeze, Insert, Move, Relay, RelayConfig, Replace, Swap
from l2l_core.model.reference import train_step

Stash = Literal["host", "device"]

DEPTH, K = 6, 3
SHARINGS = {  # which module, or weights of which, stands at every place
    "one module": [0] * DEPTH,
    "groups": [0, 0, 1, 1, 2, 2],
    "cycle": [0, 1, 2, 0, 1, 2],
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Deep(nn.Module):
    """Blocks between a stem and a head."""

    def __init__(self, blocks: list[Block]) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = nn.Linear(6, 6), nn.ModuleList(blocks), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def make_model(sharing: str) -> Deep:
    torch.manual_seed(0)
    if sharing in SHARINGS:
        distinct = [Block() for _ in range(DEPTH)]
        return Deep([distinct[i] for i in SHARINGS[sharing]])
    model = Deep([Block() for _ in range(DEPTH)])
    if sharing == "tied":
        for block, part in itertools.product(model.blocks[1:], ("up", "down")):
            setattr(block, part, copy.deepcopy(getattr(block, part)))  # other modules, with
            for name in ("weight", "bias"):  # the same parameters
                setattr(getattr(block, part), name, getattr(getattr(model.blocks[0], part), name))
    else:  # chained: of 1 and 2 one weight is shared, and another one of 2 and 3
        model.blocks[2].up.weight = model.blocks[1].up.weight
        model.blocks[3].down.weight = model.blocks[2].down.weight
    return model


def layers_of(model: Deep) -> list[nn.Module]:
    return list(dict.fromkeys(model.blocks))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    groups = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    decays = zip(groups, (0.1, 0.0), strict=True)
    return torch.optim.AdamW([{"params": params, "weight_decay": decay} for params, decay in decays], lr=0.01)


def batch_of(seed: int) -> tuple[torch.Tensor]:
    return (torch.randn(2 * K, 6, generator=torch.Generator().manual_seed(seed)),)


def loss_of(outputs: torch.Tensor, batch: Any) -> torch.Tensor:
    return outputs.square().mean()


def make_relay(model: Deep, stash: Stash = "host", **settings: Any) -> Relay:
    config = RelayConfig(seed=0, micro_batches=K, stash=stash, **settings)
    return Relay(model, adamw(model), EmulatedDevice(), layers=layers_of(model), loss=loss_of, config=config)


def step_in_core(model: Deep, optimizer: torch.optim.Optimizer, step: int, config: RelayConfig) -> float:
    """Take one step with the random numbers of the relay's."""
    objective: Callable[[nn.Module, Any], torch.Tensor] = lambda model, part: loss_of(model(part), None)  # noqa: E731
    seeds = [config.micro_batch_seed(step, k) for k in range(K)]
    losses = train_step(model, optimizer, list(batch_of(step)[0].chunk(K)), objective, [K] * K, seeds)
    return float(sum(losses))


def delinked_by_hand(model: Deep, optimizer: torch.optim.Optimizer, factor: float | None) -> torch.optim.Optimizer:
    """Give every place but the first of shared weights a deep copy; `factor` of their state, None: none of it."""
    seen: set[nn.Parameter] = set()
    shared: set[nn.Parameter] = set()
    origin: dict[nn.Parameter, nn.Parameter] = {}  # by parameter of the delinked model, the one that it is a copy of
    for i, block in enumerate(model.blocks):
        twin = copy.deepcopy(block) if not seen.isdisjoint(block.parameters()) else block
        origin |= dict(zip(twin.parameters(), block.parameters(), strict=True))
        shared |= set(block.parameters()) if twin is not block else set()
        seen |= set(twin.parameters())
        model.blocks[i] = twin
    made = adamw(model)
    for param in model.parameters():
        old = origin.get(param, param)
        known = {name: value.clone() for name, value in optimizer.state[old].items()}
        if old in shared:
            if factor is None:
                continue
            known["exp_avg"].mul_(factor)
            known["exp_avg_sq"].mul_(factor**2)
        made.state[param] = known
    return made


# -- what is held and moved --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize(("ahead", "resident"), [(0, 0), (1, 0), (2, 0), (1, 1)])
def test_a_shared_layer_is_held_once_and_moves_once_per_run_of_visits(sharing: str, ahead: int, resident: int) -> None:
    with make_relay(make_model(sharing), "device", ahead=ahead, resident=resident) as relay:
        relay.step(batch_of(0))  # which layer comes next is known from the second step on
        result = relay.step(batch_of(1))
        loads = [event.layer for event in result.trace.events if event.kind == "load" and event.layer != "shell"]
        layer_bytes, shell_bytes = relay.stack[0].nbytes, relay.shell.nbytes
        assert relay.host.by_category()["weights"] == len(relay.stack) * layer_bytes + shell_bytes
    runs = [place for place, _ in itertools.groupby(SHARINGS[sharing])]
    slots = min(ahead + 1 + resident, len(set(runs)))
    if sharing == "cycle":  # what was used last is wanted last, so of a cycle that has no room the slots keep one less
        there = len(runs) if slots < 3 else 3
        back = len(runs) - slots if slots < 3 else 0
        assert len(loads) <= there + back
        assert (slots < 3) == (len(loads) > 3)
    else:
        assert len(loads) == 2 * len(runs) - min(len(runs), ahead + 1 + resident)


# -- delinking ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stash", ["host", "device"])
@pytest.mark.parametrize("policy", ["copy", "fresh", 1 / 8])
@pytest.mark.parametrize("sharing", ["one module", "groups", "tied", "chained"])
def test_training_on_is_plain_training_of_copied_modules(sharing: str, policy: Any, stash: Stash) -> None:
    model, twin = make_model(sharing), make_model(sharing)
    optimizer = adamw(twin)
    with make_relay(model, stash) as relay:
        for step in range(2):
            assert relay.step(batch_of(step)).loss == step_in_core(twin, optimizer, step, relay.config)
        before = relay.evaluate(batch_of(9))
        relay.apply(Delink(optimizer=policy))
        optimizer = delinked_by_hand(twin, optimizer, {"copy": 1.0, "fresh": None}.get(policy, policy))
        assert relay.evaluate(batch_of(9)) == before
        assert len(relay.stack) == len(set(model.blocks)) == DEPTH
        for step in range(2, 5):
            assert relay.step(batch_of(step)).loss == step_in_core(twin, optimizer, step, relay.config)
        pairs = list(zip(model.named_parameters(), twin.named_parameters(), strict=True))
        assert [ours for (ours, _), _ in pairs] == [theirs for _, (theirs, _) in pairs]
        for (name, ours), (_, theirs) in pairs:
            assert torch.equal(ours, theirs), name
        held = state_of(relay)
        for name, param in twin.named_parameters():
            for entry, value in optimizer.state[param].items():
                assert torch.equal(held[f"{name}/{entry}"], value), (name, entry)


@pytest.mark.parametrize(
    "sharing", ["one module", "tied", *(pytest.param(name, marks=pytest.mark.slow) for name in ("cycle", "chained"))]
)
def test_the_way_back_branches_and_saves(sharing: str, tmp_path: Path) -> None:
    with make_relay(make_model(sharing)) as relay:
        relay.step(batch_of(0))
        linked, layers = state_of(relay), keys(relay)
        relay.fork("own")
        relay.apply(Delink())
        assert relay.undo().kind == "undo"
        assert_same(state_of(relay), linked)
        assert keys(relay) == layers
        relay.redo()
        relay.step(batch_of(1))
        relay.apply(Drop(2))
        relay.step(batch_of(2))
        relay.save(tmp_path)
        there = keys(relay), state_of(relay)
        as_it_is = copy.deepcopy(relay.model)

        def go_on(other: Relay) -> tuple[Any, ...]:
            after = other.step(batch_of(3)).loss, state_of(other)
            other.undo()
            other.undo()
            back = keys(other), other.step(batch_of(4)).loss, state_of(other)
            other.switch("main")
            return *after, *back, keys(other), other.step(batch_of(5)).loss, state_of(other)

        expected = go_on(relay)
        assert expected[5] == layers
    for model in (make_model(sharing), as_it_is):
        with Relay.load(tmp_path, model, adamw(model), device=EmulatedDevice(), loss=loss_of) as again:
            assert keys(again) == there[0]
            assert_same(state_of(again), there[1])
            for ours, theirs in zip(go_on(again), expected, strict=True):
                assert_same(ours, theirs) if isinstance(ours, dict) else _is(ours, theirs)


def _is(ours: object, theirs: object) -> None:
    assert ours == theirs


def test_a_part_of_a_stack() -> None:
    with make_relay(make_model("tied")) as relay:
        relay.step(batch_of(0))
        relay.apply(Delink(("L004", "L005"), optimizer="fresh"))  # the others still share, so what they have stays
        assert keys(relay) == ["L000", "L001", "L002", "L003", "L006", "L007"]
        assert len(set(relay.model.blocks[0].parameters()) & set(relay.model.blocks[3].parameters())) == 4
        assert all(
            f"blocks.0.{name}/exp_avg" in state_of(relay) for name, _ in relay.model.blocks[0].named_parameters()
        )
        assert relay.verify(batch_of(1)).equal
        relay.apply(Delink())
        assert keys(relay) == ["L000", "L008", "L009", "L010", "L006", "L007"]
        assert relay.verify(batch_of(1)).equal
    with make_relay(make_model("groups")) as relay:
        relay.apply(Delink("L001"))  # by its key: all its places
        assert keys(relay) == ["L000", "L001", "L003", "L002"]
        relay.apply(Delink(4))  # a place; the other one keeps what they shared
        assert keys(relay) == ["L000", "L001", "L003", "L004", "L002"]
        assert relay.verify(batch_of(1)).equal


def test_frozen_layers_stay_frozen() -> None:
    with make_relay(make_model("one module")) as relay:
        relay.apply(Freeze("L000"), Delink())
        assert [unit.frozen for unit in relay.stack] == [True] * DEPTH
        before = copy.deepcopy(relay.model.blocks.state_dict())
        relay.step(batch_of(0))
        assert_same(dict(relay.model.blocks.state_dict()), dict(before))


def test_the_journal_counts_shared_weights_once() -> None:
    for sharing in ("one module", "tied"):
        with make_relay(make_model(sharing)) as relay:
            relay.apply(Delink())
            entry = relay.journal[-1]
            assert entry.params == (DEPTH - 1) * relay.stack[0].num_params and entry.layers == DEPTH
            assert entry.preserves_function and entry.optimizer == "copy"


def test_refusals() -> None:
    with make_relay(make_model("plain")) as relay:
        relay.apply(Delink())  # chained by two weights
        with pytest.raises(ValueError, match=r"no layer there shares weights.*runs several times is in one place"):
            relay.apply(Delink())
    with make_relay(make_model("groups")) as relay:
        relay.step(batch_of(0))
        before, made = state_of(relay), set(keys(relay))
        for edit in (Drop("L001"), Duplicate("L001"), Insert(2, init="copy"), Move(0, 3)):
            with pytest.raises(ValueError, match=r"one module in several places.*Delink"):
                relay.apply(edit)
        with pytest.raises(ValueError, match="sit out|one module in several places"):
            relay.step(batch_of(1), skip=["L001"])
        assert_same(state_of(relay), before)
        relay.apply(Swap(1, 2), Replace(5, copy.deepcopy(relay.model.blocks[0])))  # the number of places stays
        assert relay.verify(batch_of(1)).equal and set(keys(relay)) == made | {"L003"}
        relay.undo()
        assert_same(state_of(relay), before)


@pytest.mark.parametrize("family", [pytest.param("gpt2", marks=pytest.mark.slow), "llama"])
def test_a_shared_transformer_becomes_an_ordinary_one(family: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    llama = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model = make_gpt() if family == "gpt2" else LlamaForCausalLM(llama).train()
    stack = model.transformer.h if family == "gpt2" else model.model.layers
    for i in range(1, len(stack)):
        stack[i] = stack[0]
    config = RelayConfig(seed=0, micro_batches=2)
    factory = partial(torch.optim.AdamW, lr=0.01)
    with Relay(model, factory, EmulatedDevice(), layers=[stack[0]], config=config) as relay:
        relay.step(make_batch(0))
        before = relay.evaluate(make_batch(1))
        relay.apply(Delink())
        assert relay.evaluate(make_batch(1)) == before
        attention = "attn" if family == "gpt2" else "self_attn"
        assert [getattr(layer, attention).layer_idx for layer in stack] == [0, 1, 2, 3]
        relay.step(make_batch(1))
        assert relay.verify(make_batch(2)).equal
    model.eval().save_pretrained(tmp_path)
    kind = GPT2LMHeadModel if family == "gpt2" else LlamaForCausalLM
    again = kind.from_pretrained(tmp_path).eval()
    tokens = make_batch(3)["input_ids"]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    with_cache = model.generate(tokens[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(with_cache, again.generate(tokens[:, :3], max_new_tokens=4, do_sample=False, pad_token_id=0))
