"""What is frozen costs no gradient: not on the device, not on the link, not on the host; and what is trained follows flags."""

from __future__ import annotations

import gc
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import adamw, assert_equal, assert_state, both, copy_state, differences
from patience import sampled
from small import assert_same, make_batch, make_gpt, make_relay, whole
from torch import nn
from zoo import BY_NAME, KINDS, Chain, ResidualMlp, adapted, cross_entropy

from l2l_core import (
    Drop,
    Duplicate,
    EmulatedDevice,
    Freeze,
    Machine,
    Profile,
    Relay,
    RelayConfig,
    Shapes,
    StepResult,
    Trace,
    Unfreeze,
    simulate,
)
from l2l_core.eps.optimizers import make_optimizer

LORA = ["lora", "lora_tied", "lora_llama", "lora_albert"]
stashes = pytest.mark.parametrize("stash", ["device", "host"])


def trained_elements(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters() if param.requires_grad)


def peak(result: StepResult, place: str, category: str) -> int:
    return max(sample.bytes_by_category.get(category, 0) for sample in result.trace.memory if sample.place == place)


def pushed(trace: Trace) -> set[str]:
    return {event.layer for event in trace.lanes["d2h"] if event.kind == "push"}


# -- bytes -------------------------------------------------------------------------------------------------------------


@stashes
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_gradients_cost_what_is_trained(stash: str, precision: str, update: str) -> None:
    """Slots, pushes, host buffers and optimizer state, in a metered step and in one that replays it."""
    model = make_gpt(6).requires_grad_(False)
    for layer in model.transformer.h:
        layer.ln_1.requires_grad_(True)  # 2 x 16 weights of 3,280
    model.transformer.h[4].requires_grad_(False)
    model.transformer.ln_f.requires_grad_(True)
    config = RelayConfig(micro_batches=2, stash=stash, precision=precision, update=update)
    with Relay(model, partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), config=config) as relay:
        for _ in range(2):
            result = relay.step(make_batch())
            assert result.bytes_pushed == 4 * trained_elements(model) == 4 * 32 * 6
            assert peak(result, "device", "gradients") == 4 * 32 * (1 + 2)  # the shell's, and two slots
            assert 4 * 32 <= peak(result, "host", "gradients") <= 4 * 32 * 6
            assert pushed(result.trace) == {"shell", "L000", "L001", "L002", "L003", "L005"}
            assert {e.nbytes for e in result.trace.lanes["eps"]} == {4 * 32}
            loads = {e.layer: e.nbytes for e in result.trace.lanes["h2d"] if e.kind == "load" and e.layer == "L004"}
        assert result.bytes_loaded > 2 * relay.stack[4].nbytes / (2 if precision == "bf16" else 1) and loads
        assert relay.store.masters.state_bytes == 6 * (
            2 * (2 * 4 * 16 + 4)
        )  # two moments and a step count of 12 tensors
        assert [unit.version for unit in relay.stack] == [2, 2, 2, 2, 0, 2]


@pytest.mark.parametrize("kind", [BY_NAME[name] for name in LORA], ids=str)
@stashes
def test_adapters_train_bit_by_bit_and_push_only_themselves(kind: Any, stash: str) -> None:
    """Where micro-batches are kept apart, each pushes its own; flat buffers are padded to 16 elements per tensor."""
    with both(kind, RelayConfig(micro_batches=3, stash=stash)) as pair:
        trained = {name for name, param in pair.in_core.model.named_parameters() if param.requires_grad}
        before = copy_state(pair.in_core.model)
        steps = [pair.step(kind.make_batch(7, seed)) for seed in range(3)]
        assert_equal(steps)
        changed = differences(pair.in_core.model, _like(kind, before))
        assert changed.keys() and changed.keys() <= trained
        padded = sum(4 * (-(-p.numel() // 16) * 16) for p in pair.relay.model.parameters() if p.requires_grad)
        apart = 3 * 3 if kind.name in ("lora_tied", "lora_albert") else 1  # micro-batches, and visits
        assert 0 < steps[-1].result.bytes_pushed <= apart * padded
        assert pushed(steps[-1].result.trace).isdisjoint(u.key for u in pair.relay.stack if u.frozen)


def some_frozen(model: nn.Module, every: int, at: int) -> None:
    """What is not float32 cannot be trained."""
    for number, param in enumerate(param for param in model.parameters() if param.dtype == torch.float32):
        param.requires_grad_(number % every == at)


@pytest.mark.parametrize("kind", sampled(KINDS), ids=str)
def test_any_model_with_any_third_of_its_parameters_trained(kind: Any) -> None:
    """Another third in every step: whatever a model shares, ties, parks or lays out in an order of its own."""
    with both(kind, RelayConfig(micro_batches=2, stash="host")) as pair:
        for seed in range(3):
            for model in (pair.relay.model, pair.in_core.model):
                some_frozen(model, 3, seed)
            assert_equal([pair.step(kind.make_batch(5, seed))])


def _like(kind: Any, state: dict[str, torch.Tensor]) -> nn.Module:
    model = kind.make_model()
    with torch.no_grad():
        for name, value in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items():
            value.copy_(state[name])
    return model


def test_a_shell_and_layers_without_gradients_push_nothing() -> None:
    """One layer is trained: then there is one push, one update, and a slot for its gradient alone."""
    model = make_gpt(4).requires_grad_(False)
    model.transformer.h[1].mlp.requires_grad_(True)
    with make_relay(model) as relay:
        trace = [relay.step(make_batch(seed)) for seed in range(2)][-1].trace
        assert pushed(trace) == {"L001"} and [e.kind for e in trace.lanes["eps"]] == ["reduce", "update"]
        assert relay.host.by_category()["gradients"] == relay.stack[1].gradient_numel * 4


# -- flags that change -------------------------------------------------------------------------------------------------


@stashes
def test_slots_pushes_and_forecasts_follow_what_is_frozen_between_steps(stash: str) -> None:
    """By Freeze and Unfreeze, and by hand; the forecast does not take an older step's word for it."""
    kind, config = BY_NAME["gpt2_untied"], RelayConfig(micro_batches=2, stash=stash)
    batch = kind.make_batch(4, 0)
    with both(kind, config) as pair:
        relay, layers = pair.relay, pair.in_core.model.transformer.h

        def check() -> int:
            forecast = relay.forecast(batch)
            made = [pair.step(batch) for _ in range(2)]
            assert_equal(made)
            result = made[-1].result
            for told in (forecast, relay.forecast(batch)):
                assert told.device_bytes["gradients"] == peak(result, "device", "gradients")
                assert abs(told.check(result).peak_device.error) <= 0.02
            return result.bytes_pushed

        all_of_it = check()
        relay.apply(Freeze(0))
        layers[0].requires_grad_(False)
        without_one = check()
        assert all_of_it - without_one == relay.stack[0].nbytes
        relay.apply(Unfreeze(0))
        layers[0].requires_grad_(True)
        assert check() == all_of_it
        for model in (relay.model, pair.in_core.model):
            for name, param in model.named_parameters():
                param.requires_grad_("ln_" in name)
        assert check() < all_of_it / 20


def test_what_is_frozen_keeps_its_state_and_is_trained_on_with_it() -> None:
    kind = BY_NAME["lora"]
    with both(kind, RelayConfig(micro_batches=2, rollback=True)) as pair:
        models = pair.relay.model, pair.in_core.model
        for seed, frozen in enumerate(["fc1.a", "fc2.b", "head", None, "fc1"]):
            for model in models:
                for name, param in model.named_parameters():
                    if "base" not in name and name.startswith(("layers", "head")):
                        param.requires_grad_(frozen is None or frozen not in name)
            assert_equal([pair.step(kind.make_batch(5, seed))])


def partly_frozen_gpt() -> nn.Module:
    model = make_gpt(4).requires_grad_(False)
    for layer in model.transformer.h:
        layer.mlp.requires_grad_(True)
    return model


@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_undone_edits_of_partly_frozen_layers_leave_no_trace(update: str) -> None:
    config = RelayConfig(micro_batches=2, update=update)
    with (
        make_relay(partly_frozen_gpt(), config=config) as edited,
        make_relay(partly_frozen_gpt(), config=config) as plain,
    ):
        for relay in (edited, plain):
            relay.step(make_batch(0))
        for edit in (Freeze(1), Drop(2), Duplicate(1)):
            edited.apply(edit)
            edited.undo()
            assert_same(whole(edited), whole(plain))
        torch.manual_seed(3)
        loss = edited.step(make_batch(1)).loss
        torch.manual_seed(3)
        assert loss == plain.step(make_batch(1)).loss
        assert_same(whole(edited), whole(plain))


def test_a_branch_with_other_flags_and_a_save_of_it_go_on_bit_by_bit(tmp_path: Path) -> None:
    with make_relay(partly_frozen_gpt()) as relay:
        relay.step(make_batch(0))
        relay.fork("more")
        relay.apply(Unfreeze(1))
        wide = relay.step(make_batch(1)).bytes_pushed
        relay.switch("main")
        narrow = relay.step(make_batch(1)).bytes_pushed
        assert wide - narrow == relay.stack[1].nbytes - 4 * relay.stack[1].gradient_numel
        relay.save(tmp_path / "save")
        with Relay.load(tmp_path / "save", partly_frozen_gpt(), partial(torch.optim.AdamW, lr=1e-2)) as again:
            assert_same(whole(again), whole(relay))
            assert again.step(make_batch(2)).loss == relay.step(make_batch(2)).loss
            assert_same(whole(again), whole(relay))


@pytest.mark.parametrize("when", ["layer", "shell"])
@pytest.mark.parametrize("to", [True, False])
def test_flags_that_change_during_a_step_are_refused_before_anything_is_trained(when: str, to: bool) -> None:
    """A gradient would be lost, or have no place."""
    kind = BY_NAME["chain"]
    model = kind.make_model()
    model.layers[1].fc2.weight.requires_grad_(not to)
    place = model.layers[2] if when == "layer" else model.head
    place.register_forward_pre_hook(lambda *_: setattr(model.layers[1].fc2.weight, "requires_grad", to))
    # The hook changes the flag in any forward, so there is none before the step's.
    options: dict[str, Any] = {"loss": kind.loss, "loss_over": "micro-batch", "config": RelayConfig(micro_batches=2)}
    with Relay(model, adamw(model), EmulatedDevice(), **options) as relay:
        before = copy_state(model)
        with pytest.raises(
            RuntimeError, match=r"layers\.1\.fc2\.weight became \w+ during the step.*Freeze and Unfreeze"
        ):
            relay.step(kind.make_batch(4))
        assert_state(model, before)


# -- formulas and forecasts --------------------------------------------------------------------------------------------


def test_a_formula_counts_what_is_trained() -> None:
    """By hand: 2 operations per parameter forward, 2 more for what goes on back, 2 more for what is trained."""
    machine = Machine(1e6, 1e6, 1e9, 1e9)
    sizes = dict(layer_params=[100] * 4, shell_params=50, tokens=10, boundary_bytes=64)
    profile = Profile.of_shapes(Shapes(**sizes, layer_trained=[0, 7, 0, 3], shell_trained=0), machine)
    assert {key: layer.push_bytes for key, layer in profile.layers.items() if layer.push_bytes} == {
        "L001": 28,
        "L003": 12,
    }
    trace = simulate(profile, RelayConfig(micro_batches=1))
    assert pushed(trace) == {"L001", "L003"} and {e.layer for e in trace.lanes["eps"]} == {"L001", "L003"}
    took = {e.layer: e.stop_s - e.start_s for e in trace.lanes["compute"] if e.kind == "backward"}
    once_s = 2 * 10 / 1e6  # a token's share of one parameter, ten times
    assert took == pytest.approx({"L003": 103 * once_s, "L002": 200 * once_s, "L001": 207 * once_s})
    assert dict(profile.memory[0][1])["gradients"] == 4 * (0 + 2 * 7)
    everything = Profile.of_shapes(Shapes(**sizes), machine)
    assert everything == Profile.of_shapes(Shapes(**sizes, layer_trained=[100] * 4, shell_trained=50), machine)


@pytest.mark.parametrize("wrong", [{"layer_trained": [1, 2]}, {"layer_trained": [200] * 4}, {"shell_trained": -1},
                                   {"layer_trained": [0] * 4, "shell_trained": 0}], ids=str)  # fmt: skip
def test_a_formula_refuses_impossible_numbers(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Shapes(layer_params=[100] * 4, shell_params=50, tokens=10, boundary_bytes=64, **wrong)


def test_the_depth_that_fits_the_host_counts_optimizer_state_of_what_is_trained() -> None:
    """With the most layers that are said to fit, a step does; with a tenth more, it does not."""

    def relay_of(depth: int) -> Relay:
        model = adapted(Chain([ResidualMlp() for _ in range(depth)]), "fc1")
        model.embed.requires_grad_(True)  # of the shell: it has state too
        optimizer = partial(torch.optim.AdamW, lr=1e-3)
        return Relay(model, optimizer, EmulatedDevice(), loss=cross_entropy, config=RelayConfig(micro_batches=2))

    batch, limit = BY_NAME["chain"].make_batch(4), 1_000_000
    with relay_of(6) as relay:
        told = relay.forecast(batch, host_bytes=limit).largest_depth
        relay.step(batch)
        assert abs(relay.forecast(batch, host_bytes=limit).largest_depth - told) <= 1
    needs = []
    for depth in (told, told + 1 + told // 10):
        with relay_of(depth) as relay:
            needs.append([relay.step(batch) for _ in range(2)][-1].trace.peak_bytes("host"))
    assert needs[0] <= limit < needs[1]


# -- the way back of a step that fails ---------------------------------------------------------------------------------


class Forgets(torch.optim.SGD):
    """Lets all weights decay, also those without a gradient."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(0.9)


class ForgetsByRate(torch.optim.SGD):
    """The same by its learning rate, which may be 0 for now."""

    def step(self, closure: Any = None) -> None:
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.mul_(1 - 0.5 * float(group["lr"]))


class NeedsGradients(torch.optim.Optimizer):
    """Does not ask whether there is one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for group in self.param_groups:
                for param in group["params"]:
                    param.add_(param.grad, alpha=-group["lr"])


@pytest.mark.parametrize("kind", [Forgets, ForgetsByRate])
@pytest.mark.parametrize("lr", [0.0, 0.1])
def test_an_optimizer_that_writes_what_has_no_gradient_steps_as_a_whole(kind: Any, lr: float) -> None:
    """The undo of updates by block counts on it: it keeps weights with a gradient only."""
    findings = make_optimizer(partial(kind, lr=lr), BY_NAME["chain"].make_model())[1]
    assert re.search("couples parameters of different layers: .* another weights", findings.couples)


def test_an_optimizer_that_needs_all_gradients_is_taken() -> None:
    assert not make_optimizer(partial(NeedsGradients, lr=0.1), BY_NAME["chain"].make_model())[1].couples


def storage_bytes() -> int:
    tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter) and t.layout == torch.strided]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("settings", [{"update": "deferred", "max_grad_norm": 1.0}, {"rollback": True}], ids=str)
def test_a_failed_step_is_undone_and_its_log_costs_what_is_trained(make: Any, settings: dict[str, Any]) -> None:
    """Until the step is over, a copy of all that it changes is kept, and of nothing else."""
    needed: list[int] = []
    standing, fails_at = 0, 0

    class Watched(make):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            if standing:
                gc.collect()
                needed.append(storage_bytes() - standing)
                if len(needed) == fails_at:
                    raise RuntimeError("on purpose")

    kind, config = BY_NAME["lora_llama"], RelayConfig(micro_batches=2, **settings)
    model = kind.make_model()
    with Relay(model, partial(Watched, lr=0.1), EmulatedDevice(), config=config) as relay:
        relay.step(kind.make_batch(4))
        gc.collect()
        standing = storage_bytes()
        relay.step(kind.make_batch(4))
        # The log grows until the step is over; at earlier updates the device computes beside them, with activations.
        most, before = needed[-1], whole(relay)
        fails_at = 2 * len(needed)  # in the last update of the next step
        with pytest.raises(RuntimeError, match="on purpose"):
            relay.step(kind.make_batch(4))
        assert_same(
            {n: v for n, v in whole(relay).items() if n != "random"}, {n: v for n, v in before.items() if n != "random"}
        )
        weights = sum(unit.nbytes for unit in relay.stack)
        trained = sum(4 * unit.num_trained for unit in relay.stack)
        assert trained < weights / 20
        assert most < weights / 2
