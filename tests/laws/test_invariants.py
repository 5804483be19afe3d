"""What a step may do and what it leaves behind: loads, slots, order of events, random state, threads (invariants 2, 3)."""

import math
import random
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from oracle import adamw, assert_equal, assert_state, both, copy_state, micro_batches_of, targets_in
from torch import Tensor, nn
from zoo import BY_NAME, Chain, Kind, ResidualMlp, loss_of

from l2l_core import Event, Relay, RelayConfig, StepResult

stashes = pytest.mark.parametrize("stash", ["device", "host"])
few_kinds = pytest.mark.parametrize(
    "kind", [BY_NAME[n] for n in ("chain", "gpt2", "t5", "resnet", "qwen3_moe", "lstm_stack")], ids=str
)


def deep(count: int, frozen: int = 0) -> Kind:
    """A chain of `count` layers, the embedding and the first `frozen` layers of which are not trained."""

    def make_model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Chain([ResidualMlp() for _ in range(count)])
        for part in [model.embed, *model.layers[:frozen]] if frozen else []:
            part.requires_grad_(False)
        return model

    return Kind(f"deep{count}", make_model, BY_NAME["chain"].make_batch, BY_NAME["chain"].loss)


def results_of(kind: Kind, steps: int = 2, rows: int = 6, **settings: Any) -> tuple[Relay, list[StepResult]]:
    """The relay (closed) and its results."""
    with both(kind, RelayConfig(**({"micro_batches": 3} | settings))) as pair:
        compared = [pair.step(kind.make_batch(rows, seed)) for seed in range(steps)]
        assert_equal(compared)
    return pair.relay, [step.result for step in compared]


def layer_events(result: StepResult, kind: str) -> list[Event]:
    """Events of one kind that belong to layers, in order."""
    return [event for event in result.trace.events if event.kind == kind and event.layer.startswith("L")]


# --- loads ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_number_of_loads(depth: int, ahead: int) -> None:
    """Invariant 3: 2V - min(V, ahead + 1), because at the turn the last layers are still in their slots."""
    relay, results = results_of(deep(depth), ahead=ahead)
    for result in results:
        loads = [event.layer for event in layer_events(result, "load")]
        assert len(loads) == 2 * depth - min(depth, ahead + 1)
        keys = [layer.key for layer in relay.stack]
        assert sorted(loads[:depth]) == sorted(keys) and set(loads[depth:]) == set(keys[: max(0, depth - ahead - 1)])
        layer_bytes = sum(event.nbytes for event in layer_events(result, "load"))
        assert layer_bytes == len(loads) * relay.stack[0].nbytes
        assert result.bytes_loaded == layer_bytes + relay.shell.nbytes
        assert result.bytes_pushed == depth * relay.stack[0].nbytes + relay.shell.nbytes


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_frozen_prefix_needs_no_backward(ahead: int) -> None:
    """Invariant 3: the first layers are not trained and nothing before them is, so they come once."""
    depth, frozen = 6, 3
    relay, results = results_of(deep(depth, frozen), ahead=ahead)
    prefix = {layer.key for layer in relay.stack[:frozen]}
    assert [layer.frozen for layer in relay.stack] == [True] * frozen + [False] * (depth - frozen)
    for result in results:
        assert prefix.isdisjoint(event.layer for event in layer_events(result, "backward"))
        assert prefix.isdisjoint(event.layer for event in layer_events(result, "push"))
        loads = Counter(event.layer for event in layer_events(result, "load"))
        trained = depth - frozen
        assert sum(loads.values()) == depth + trained - min(trained, ahead + 1)
        assert all(loads[key] == 1 for key in prefix)
    assert [layer.version for layer in relay.stack] == [0] * frozen + [2] * (depth - frozen)


def test_repeated_layer_is_loaded_once() -> None:
    """ALBERT visits its only layer three times."""
    relay, results = results_of(BY_NAME["albert"])
    assert [len(layer_events(result, "load")) for result in results] == [1, 1]
    assert len(relay.stack) == 1 and {event.visit for event in layer_events(results[0], "forward")} == {0, 1, 2}


# --- slots and stash -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("kind", [deep(6), BY_NAME["unlike"], BY_NAME["unet"]], ids=str)
def test_weights_on_the_device(kind: Kind, ahead: int) -> None:
    """Invariant 2: without the shell never more than ahead + 1 times the largest layer."""
    relay, results = results_of(kind, ahead=ahead)
    samples = [s for result in results for s in result.trace.memory if s.place == "device"]
    weights = max(sample.bytes_by_category.get("weights", 0) for sample in samples)
    largest = max(layer.nbytes for layer in relay.stack)
    assert 0 < weights - relay.shell.nbytes <= (ahead + 1) * largest


@stashes
@few_kinds
def test_nothing_stays_on_the_device(kind: Kind, stash: str) -> None:
    """Invariant 3: the stash is empty at the end, and so are slots and gradients."""
    with both(kind, RelayConfig(micro_batches=3, stash=stash)) as pair:
        for step in range(2):
            result = pair.step(kind.make_batch(7, step)).result
            last = [s for s in result.trace.memory if s.place == "device"][-1]
            assert last.bytes_by_category.get("stash", 0) == 0
            assert pair.relay.device.ledger.total == 0, pair.relay.device.ledger.by_category()
            assert pair.relay.host.by_category().get("stash", 0) == 0
        pair.relay.evaluate(kind.make_batch(7, 0))
        pair.relay.forward(kind.make_batch(7, 0))
        assert pair.relay.device.ledger.total == 0, pair.relay.device.ledger.by_category()


def test_stash_moves_to_the_host() -> None:
    relay, (result, _) = results_of(deep(4), stash="host")
    assert any(e.lane == "d2h" and e.kind == "stash" and e.nbytes for e in result.trace.events)
    assert any(e.lane == "h2d" and e.kind == "fetch" and e.nbytes for e in result.trace.events)
    relay, (result, _) = results_of(deep(4), stash="device")
    assert not [e for e in result.trace.events if e.kind in ("stash", "fetch")]


# --- the order of events -------------------------------------------------------------------------------------------


@few_kinds
def test_every_forward_has_one_backward(kind: Kind) -> None:
    """Invariant 3, with backward in the reverse order of visits and micro-batches ascending in each."""
    _, results = results_of(kind)
    for result in results:
        forwards = [(e.visit, e.layer, e.k) for e in layer_events(result, "forward")]
        last = 2 * len({visit for visit, _, _ in forwards}) - 1  # backward counts on where forward ended
        backwards = [(last - e.visit, e.layer, e.k) for e in layer_events(result, "backward")]
        assert len(set(forwards)) == len(forwards) and sorted(forwards) == sorted(backwards)
        assert forwards == sorted(forwards, key=lambda f: (f[0], f[2]))
        assert backwards == sorted(backwards, key=lambda b: (-b[0], b[2]))
        assert Counter(k for _, _, k in forwards) == dict.fromkeys(range(3), len(forwards) // 3)


class CountsCalls(ResidualMlp):
    """Counts how often it really runs, in its class: a recompute leaves its own attributes as they were."""

    runs = Counter[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.runs[id(self)] += 1
        return super().forward(x)


def test_last_layer_is_not_run_twice() -> None:
    """At the turn a micro-batch's loss and backward follow its last forward at once, on the graph that it has left."""
    depth, micro_batches, steps = 4, 3, 2
    model = Chain([CountsCalls() for _ in range(depth)])
    kind = deep(depth)
    with Relay(
        model, loss=kind.loss, loss_over=kind.loss_over, config=RelayConfig(micro_batches=micro_batches)
    ) as relay:
        relay.step(kind.make_batch(6, 0))  # in which every layer that counts proves that it can be recomputed
        CountsCalls.runs.clear()
        for seed in range(1, 1 + steps):
            result = relay.step(kind.make_batch(6, seed))
            last = relay.stack[-1].key
            turn = [e.label() for e in result.trace.lanes["compute"] if e.layer == last or e.kind == "loss"]
            assert turn == [
                f"{what} k={k}" for k in range(micro_batches) for what in (f"F {last}", "loss shell", f"B {last}")
            ]
    runs = [CountsCalls.runs[id(layer)] for layer in model.layers]
    assert runs == [2 * micro_batches * steps] * (depth - 1) + [micro_batches * steps]


def test_each_update_follows_its_push() -> None:
    """Eager updates go from the last layer to the first; no layer is loaded after its update."""
    relay, (_, result) = results_of(deep(5))
    pushes, updates = layer_events(result, "push"), layer_events(result, "update")
    backward_order = [layer.key for layer in reversed(relay.stack)]
    assert [e.layer for e in pushes] == [e.layer for e in updates] == backward_order
    loads = layer_events(result, "load")
    for push, update in zip(pushes, updates, strict=True):
        assert push.stop_s <= update.start_s
        assert all(load.stop_s <= update.start_s for load in loads if load.layer == push.layer)


def test_deferred_updates_come_last() -> None:
    _, (_, result) = results_of(deep(5), update="deferred")
    last_push = max(event.stop_s for event in result.trace.events if event.kind == "push")
    assert all(event.start_s >= last_push for event in layer_events(result, "update"))
    assert len(layer_events(result, "update")) == 5


@few_kinds
def test_lanes_are_serial(kind: Kind) -> None:
    _, results = results_of(kind, stash="host")
    for lane, events in results[-1].trace.lanes.items():
        for earlier, later in zip(events, events[1:], strict=False):
            assert earlier.stop_s <= later.start_s, f"{lane}: {earlier} overlaps {later}"


def test_versions() -> None:
    """A version counts the updates of a layer; keys are its own for good."""
    kind = BY_NAME["frozen_layer"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        assert [(unit.key, unit.version) for unit in pair.relay.stack] == [(f"L{i:03d}", 0) for i in range(4)]
        for step in range(3):
            pair.step(kind.make_batch(6, step))
            assert [unit.version for unit in pair.relay.stack] == [step + 1, 0, step + 1, step + 1]
        assert pair.relay.steps == 3
        pair.relay.evaluate(kind.make_batch(6, 0))
        pair.relay.verify(kind.make_batch(6, 0))
        assert [unit.version for unit in pair.relay.stack] == [3, 0, 3, 3] and pair.relay.steps == 3


# --- what a pass leaves alone --------------------------------------------------------------------------------------


def random_states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate()


@few_kinds
def test_random_state_of_the_caller(kind: Kind) -> None:
    with both(kind, RelayConfig(micro_batches=3)) as pair:
        before = random_states()
        pair.relay.step(kind.make_batch(7, 0))
        pair.relay.evaluate(kind.make_batch(7, 0))
        pair.relay.forward(kind.make_batch(7, 0))
        pair.relay.verify(kind.make_batch(7, 0))
        assert random_states() == before


@stashes
@few_kinds
def test_inference_changes_nothing(kind: Kind, stash: str) -> None:
    """`evaluate` and `forward` give what plain evaluation gives, and change nothing, training flags among it."""
    model = kind.make_model()
    list(model.modules())[-1].eval()  # flags need not be the same everywhere
    batch = kind.make_batch(7, 0)
    with Relay(
        model, adamw(model), loss=kind.loss, loss_over=kind.loss_over, config=RelayConfig(micro_batches=3, stash=stash)
    ) as relay:
        relay.step(kind.make_batch(7, 1))
        flags = [module.training for module in model.modules()]
        before, parts = copy_state(model), micro_batches_of(batch, 3)
        expected_loss, expected = plain_evaluation(kind, model, parts)
        for module, flag in zip(model.modules(), flags, strict=True):
            module.training = flag

        assert relay.evaluate(batch) == pytest.approx(expected_loss, rel=1e-6)
        outputs = relay.forward(batch)
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        assert torch.equal(logits, expected) and not logits.requires_grad
        assert [module.training for module in model.modules()] == flags
        assert_state(model, before)
        assert all(p.grad is None for p in model.parameters())
        assert relay.steps == 1


def plain_evaluation(kind: Kind, model: nn.Module, parts: list[Any]) -> tuple[float, Tensor]:
    """Mean loss over all targets, and logits, in evaluation mode."""
    model.eval()
    counts = [targets_in(model, part) for part in parts]
    with torch.no_grad():
        losses = [float(loss_of(kind, model, part)) for part in parts]
        outputs = [model(**part) if isinstance(part, dict) else model(*part[:-1]) for part in parts]
    loss = sum(n * loss for n, loss in zip(counts, losses, strict=True)) / sum(counts)
    return loss, torch.cat([y if isinstance(y, Tensor) else y.logits for y in outputs])


def test_inference_before_the_first_step_and_in_training() -> None:
    """Interleaved evaluations leave the training bits alone."""
    kind = BY_NAME["gpt2"]
    with both(kind, RelayConfig(micro_batches=3)) as pair:
        for step in range(3):
            pair.relay.evaluate(kind.make_batch(6, 9))
            pair.relay.forward({"input_ids": kind.make_batch(5, 9)["input_ids"]})
            assert_equal([pair.step(kind.make_batch(7, step))])


# --- the end -------------------------------------------------------------------------------------------------------


def test_threads_are_joined() -> None:
    before = set(threading.enumerate())
    kind = BY_NAME["chain"]
    relay = Relay(
        kind.make_model(), loss=kind.loss, loss_over=kind.loss_over, config=RelayConfig(micro_batches=2, stash="host")
    )
    relay.step(kind.make_batch(4, 0))
    assert set(threading.enumerate()) > before
    relay.close()
    relay.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(RuntimeError, match="closed"):
        relay.step(kind.make_batch(4, 0))


def test_threads_are_joined_after_an_error() -> None:
    before, kind = set(threading.enumerate()), BY_NAME["chain"]
    with (
        pytest.raises(ValueError, match="boom"),
        Relay(kind.make_model(), loss=kind.loss, loss_over=kind.loss_over) as relay,
    ):
        relay.step(kind.make_batch(4, 0))
        raise ValueError("boom")
    assert set(threading.enumerate()) == before


def test_model_is_ordinary_after_close() -> None:
    """Its parameters are leaves with their own identity, and the optimizer trains them."""
    kind = BY_NAME["gpt2"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        pair.step(kind.make_batch(6, 0))
    relay, model = pair.relay, pair.relay.model
    assert {p for group in relay.optimizer.param_groups for p in group["params"]} == set(model.parameters())
    before = copy_state(model)
    loss = loss_of(kind, model, kind.make_batch(6, 1))
    loss.backward()
    relay.optimizer.step()
    relay.optimizer.zero_grad()
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters())
    with Relay(model, relay.optimizer, config=RelayConfig(micro_batches=2)) as again:  # and a new relay takes over
        assert math.isfinite(again.step(kind.make_batch(6, 2)).loss)
