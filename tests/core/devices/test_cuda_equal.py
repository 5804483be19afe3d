"""On a GPU with PyTorch's deterministic algorithms: everything that a relay can do equals plain training there, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import programs
import pytest
import torch
from on_gpu import deterministic, relay_on_gpu, sgd, to_gpu, train_by_relay, train_in_core, unequal
from oracle import InCore
from program_run import judge
from torch import nn
from zoo import BY_NAME, KINDS, Kind

from l2l_core import CudaDevice, Drop, Duplicate, FileShelf, Insert, Relay, RelayConfig, StepPlan

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.all_cases,
    # A kernel for attention adds up in any order where it splits a sequence, which these models are too short for.
    pytest.mark.filterwarnings(
        "ignore:Memory Efficient attention defaults to a non-deterministic algorithm:UserWarning"
    ),
    # cuDNN wants the weights of a recurrent layer in an order of its own; otherwise it copies them at every call.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk:UserWarning"),
]

HOST = RelayConfig(micro_batches=3, stash="host", seed=0)


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    with deterministic():
        yield


def assert_equal_training(kind: Kind, config: RelayConfig) -> None:
    losses, model = train_by_relay(kind, config)
    expected, reference = train_in_core(kind, config)
    assert losses == expected and not unequal(model, reference)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_kind_of_the_zoo(kind: Kind) -> None:
    assert_equal_training(kind, HOST)


SETTINGS: list[dict[str, Any]] = [
    {"keep": 2, "resident": 1},
    {"keep": "2 MB", "resident": 2},
    {"schedule": "depth_first", "stash": "device"},
    {"stash": "device", "ahead": 0},
    {"update": "whole"},
    {"rollback": True, "ahead": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name", ["chain", "gpt2", "t5", "batch_norm", "lora_int8"])
def test_every_schedule(name: str, settings: dict[str, Any]) -> None:
    assert_equal_training(BY_NAME[name], replace(HOST, **settings))


def test_a_plan_that_was_changed_as_text() -> None:
    kind = BY_NAME["chain"]
    config = replace(HOST, stash="device", ahead=0)
    with relay_on_gpu(kind, config) as relay:
        plan = relay.plan(kind.make_batch(7, 0))
        losses = [relay.step(kind.make_batch(7, 0), plan=StepPlan.parse(str(plan))).loss]
        losses += [relay.step(kind.make_batch(7, step)).loss for step in (1, 2)]
    expected, reference = train_in_core(kind, config)
    assert losses == expected and not unequal(relay.model, reference)


# --- depth ------------------------------------------------------------------------------------------------------------


def test_edits_undo_and_skipped_layers() -> None:
    """Beside the same edits by hand of a list on the GPU."""
    kind = BY_NAME["gpt2"]
    plain = kind.make_model().cuda()
    with relay_on_gpu(kind, HOST) as relay:
        h = plain.transformer.h
        optimizer = sgd(plain)
        in_core = InCore(kind, plain, optimizer, relay.config)

        def compare() -> None:
            batch = kind.make_batch(7, in_core.steps)
            assert in_core.step(to_gpu(batch)) == relay.step(batch).loss
            assert not unequal(relay.model, plain)

        compare()
        relay.apply(Drop(1))
        optimizer.param_groups[0]["params"] = [
            p for n, p in plain.named_parameters() if not n.startswith("transformer.h.1.")
        ]
        plain.transformer.h = nn.ModuleList(layer for i, layer in enumerate(h) if i != 1)
        compare()
        relay.apply(Duplicate(0))
        new = copy.deepcopy(plain.transformer.h[0])
        plain.transformer.h.insert(1, new)
        optimizer.param_groups[0]["params"] += list(new.parameters())
        for ours, theirs in zip(plain.transformer.h[0].parameters(), new.parameters(), strict=True):
            optimizer.state[theirs] = copy.deepcopy(optimizer.state[ours])
        compare()
        before = copy.deepcopy(relay.model.state_dict())
        relay.apply(Insert(2, copy.deepcopy(kind.make_model().transformer.h[0])))
        relay.undo()
        assert all(torch.equal(value, before[name]) for name, value in relay.model.state_dict().items())
        compare()
        kept = plain.transformer.h
        plain.transformer.h = nn.ModuleList(layer for i, layer in enumerate(kept) if i != 2)
        batch = kind.make_batch(7, in_core.steps)
        expected = in_core.step(to_gpu(batch))
        plain.transformer.h = kept
        assert relay.step(batch, skip=[2]).loss == expected
        assert not unequal(relay.model, plain)


def test_a_save_goes_on_as_if_nothing_had_been(tmp_path: Path) -> None:
    kind = BY_NAME["gpt2"]
    with relay_on_gpu(kind, HOST) as relay:
        relay.step(kind.make_batch(7, 0))
        relay.save(tmp_path)
        expected = [relay.step(kind.make_batch(7, step)).loss for step in (1, 2)]
    with Relay.load(tmp_path, (model := kind.make_model()), sgd(model), device=CudaDevice()) as again:
        assert [again.step(kind.make_batch(7, step)).loss for step in (1, 2)] == expected
        assert not unequal(relay.model, again.model)


@pytest.mark.parametrize("name", ["chain", "gpt2", "lora_tied"])
@pytest.mark.parametrize("stash", ["host", "disk"])
def test_weights_in_files(name: str, stash: Any, tmp_path: Path) -> None:
    kind, config = BY_NAME[name], replace(HOST, stash=stash)
    with relay_on_gpu(kind, config, shelf=FileShelf(folder=tmp_path, memory_bytes="64 MB")) as relay:
        losses = [relay.step(kind.make_batch(7, step)).loss for step in range(3)]
        assert relay.shelf is not None
        weights = {weight: tensor.clone() for weight, tensor in relay.shelf.weights()}
    expected, reference = train_in_core(kind, config)
    assert losses == expected
    theirs = dict(reference.named_parameters())
    assert not [weight for weight, tensor in weights.items() if not torch.equal(tensor, theirs[weight])]


# --- quantised bases ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:inner dimension .* is not aligned for fast kernel:UserWarning")  # 32 numbers wide
@pytest.mark.parametrize("settings", [{}, {"keep": 2, "resident": 1, "stash": "device"}], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "bert", "t5", "mistral"])
def test_adapters_on_a_quantised_base(family: str, bits: int, settings: dict[str, Any]) -> None:
    pytest.importorskip("bitsandbytes", reason="the extra quant is not installed")
    pytest.importorskip("peft", reason="the extra quant is not installed")
    from quantised import adapted

    assert_equal_training(adapted(family, "LoRA", bits), replace(HOST, **settings))


# --- random programs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int) -> None:
    """Where the host and the GPU divide, an optimizer's update rounds otherwise; all else has equal bits."""
    outcome = judge(programs.draw(90_000 + seed), CudaDevice())
    assert not outcome.is_bad or outcome.cause == "rounding of parameters", outcome.trace
