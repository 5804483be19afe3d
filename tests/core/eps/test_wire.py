"""Gradients in fewer bits against plain training in core that applies the published formulas to every parameter's gradient."""

import zlib
from functools import partial
from typing import Any

import pytest
import torch
from late_cuda import LateDevice
from small import make_batch, make_gpt
from torch import Tensor, nn

from l2l_core import (
    Compress,
    Device,
    DeviceOutOfMemory,
    Disk,
    Drop,
    Duplicate,
    EmulatedDevice,
    FileShelf,
    Freeze,
    Machine,
    Move,
    NonFiniteError,
    Profile,
    Relay,
    RelayConfig,
    Replace,
    Trace,
    Unfreeze,
    forecast_config,
    simulate,
)
from l2l_core.eps import gradient_codec

GROUP = 256
LAYERS = 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.has_width, self.back = nn.LayerNorm(20), nn.Linear(20, 45), nn.Linear(45, 20)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.back(torch.tanh(self.has_width(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.head = nn.Linear(6, 20), nn.Linear(20, 3)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.layers[1].has_width.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_model() -> Model:
    torch.manual_seed(0)
    return Model()


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(12, 6, generator=generator), torch.randn(12, 3, generator=generator)


def relay_of(model: nn.Module, config: RelayConfig, device: Device | None = None, **options: Any) -> Relay:
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    return Relay(model, optimizer, device or EmulatedDevice(), objective=loss_of, config=config, **options)


# -- the oracle: what papers say, in float64 where that changes nothing --------------------------------------------------


def quantized(values: Tensor, form: str, generator: torch.Generator | None) -> Tensor:
    """Q of one parameter's gradient, 1-d."""
    if form == "bf16":
        if generator is None:
            return values.bfloat16().float()
        bits = values.view(torch.int32).long() & 0xFFFFFFFF
        drawn = torch.empty(-(-len(values) // 4), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        noise = [(int(four) >> shift) & 0xFFFF for four in drawn for shift in (0, 16, 32, 48)][: len(values)]
        kept = (bits + torch.tensor(noise)) & 0xFFFF0000
        return torch.where(kept >= 2**31, kept - 2**32, kept).int().view(torch.float32)
    largest, parts = {"int8": 127, "int4": 7}[form], []
    groups = values.split(GROUP)
    noise = torch.rand(len(groups), GROUP, generator=generator) if generator is not None else None
    for number, group in enumerate(groups):
        step = group.abs().max() / largest
        if step == 0:
            parts.append(torch.zeros_like(group))
            continue
        ratio = group / step
        whole = ratio.round() if noise is None else (ratio + noise[number][: len(group)]).floor()
        parts.append(whole.clamp(-largest, largest) * step)
    return torch.cat(parts)


class Oracle:
    """Trains in core; parameters that are `exempt` have their gradients as they are."""

    def __init__(self, model: nn.Module, config: RelayConfig, exempt: frozenset[str] = frozenset()) -> None:
        self.model, self.config, self.exempt = model, config, exempt
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.left_out: dict[str, Tensor] = {}
        self.places: dict[str, tuple[str, int]] = {}  # key of the block and number in it

    def step(self, number: int, micro_batches: list[Any], loss_of: Any) -> None:
        self.optimizer.zero_grad()
        for k, micro_batch in enumerate(micro_batches):
            torch.manual_seed(self.config.micro_batch_seed(number, k))
            (loss_of(self.model, micro_batch) / len(micro_batches)).backward()
        for name, param in self.model.named_parameters():
            if param.grad is not None and name not in self.exempt and self.config.wire is not None:
                param.grad = self.sent(name, param.grad.flatten(), number).view_as(param)
        if self.config.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_grad_norm)
        self.optimizer.step()

    def sent(self, name: str, grad: Tensor, number: int) -> Tensor:
        compress = self.config.wire
        if not compress.feedback:
            key, index = self.places[name]
            seed = zlib.crc32(f"{self.config.seed}/{number}/{key}/{index}/0".encode())
            return quantized(grad, compress.format, torch.Generator().manual_seed(seed))
        owed = grad + self.left_out.get(name, torch.zeros_like(grad))
        sent = quantized(owed, compress.format, None)
        self.left_out[name] = owed - sent
        return sent


def places_of(relay: Relay) -> dict[str, tuple[str, int]]:
    units = [relay.shell, *relay.stack]
    return {name: (b.key, i) for unit in units for b in unit.blocks for i, name in enumerate(b.names)}


def equal_weights(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def assert_as_oracle(config: RelayConfig, device: Device | None = None, steps: int = 3) -> None:
    oracle = Oracle(make_model(), config)
    with relay_of(make_model(), config, device) as relay:
        oracle.places = places_of(relay)
        for step in range(steps):
            batch = batch_of(step)
            relay.step(batch)
            size = 12 // config.micro_batches
            oracle.step(step, list(zip(*(each.split(size) for each in batch), strict=True)), loss_of)
            assert equal_weights(relay.model, oracle.model), f"step {step}"


FORMS = [Compress(form, feedback) for form in ("bf16", "int8", "int4") for feedback in (True, False)]


@pytest.mark.all_cases
@pytest.mark.parametrize("compress", FORMS, ids=str)
@pytest.mark.parametrize("stash", ["device", "host"])
def test_training_is_that_of_the_formulas(compress: Compress, stash: str) -> None:
    assert_as_oracle(RelayConfig(micro_batches=3, compress=compress, stash=stash, seed=5))


@pytest.mark.parametrize(
    "more",
    [
        {"update": "deferred", "max_grad_norm": 0.1},
        {"rollback": True},
        {"keep": 2, "resident": 1},
        {"ahead": 0, "micro_batches": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("compress", ["int4", Compress("int8", feedback=False)], ids=str)
def test_and_so_it_is_in_every_way_of_running(more: dict[str, Any], compress: Any) -> None:
    assert_as_oracle(RelayConfig(**({"seed": 0, "micro_batches": 2, "compress": compress} | more)))


@pytest.mark.parametrize("compress", ["int8", Compress("int4", feedback=False)], ids=str)
def test_copies_that_come_as_late_as_they_may_change_no_bit(compress: Any) -> None:
    assert_as_oracle(RelayConfig(seed=0, micro_batches=3, compress=compress, stash="host"), LateDevice())


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_chunks_change_nothing(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_codec, "PACK_CHUNK", 2 * GROUP)  # the largest parameter has 900 elements
    assert_as_oracle(RelayConfig(seed=0, micro_batches=2, compress=form))


def test_gradients_that_are_kept_apart_go_as_they_are() -> None:
    config = RelayConfig(seed=0, micro_batches=2, compress="int4")
    model = make_gpt(3)  # its head is its embedding
    shell = frozenset(n for n, _ in model.named_parameters() if not n.startswith("transformer.h."))
    oracle = Oracle(make_gpt(3), config, shell)
    with Relay(model, partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), config=config) as relay:
        for step in range(3):
            batch = make_batch(step)
            relay.step(batch)
            parts = [{name: rows[k : k + 2] for name, rows in batch.items()} for k in (0, 2)]
            # Without the cache, as the relay: with it keys and values lie otherwise, and some CPUs' kernels round by that
            oracle.step(step, parts, lambda model, part: model(**part, use_cache=False).loss)
            assert equal_weights(model, oracle.model)
        assert not relay.shell.blocks[0].residuals


# -- bytes -----------------------------------------------------------------------------------------------------------------


def packed_bytes(form: str, numel: int) -> int:
    groups = -(-numel // GROUP)
    return {"bf16": -(-numel // 2) * 4, "int8": (-(-numel // 4) + groups) * 4, "int4": (-(-numel // 8) + groups) * 4}[
        form
    ]


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
def test_the_lane_the_meter_and_the_forecast_count_the_bytes_that_go(form: str) -> None:
    device, config = EmulatedDevice(), RelayConfig(seed=0, micro_batches=2, compress=form)
    with relay_of(make_model(), config, device) as relay:
        expected = sum(packed_bytes(form, p.numel()) for p in relay.model.parameters() if p.requires_grad)
        trained = sum(p.numel() for p in relay.model.parameters() if p.requires_grad)
        forecast = relay.forecast(batch_of(0))
        assert sum(e.nbytes for e in forecast.trace.lanes["d2h"] if e.kind == "push") == expected
        first, then = relay.step(batch_of(0)), relay.step(batch_of(1))
        for result in (first, then):
            assert result.bytes_pushed == expected
            assert sum(e.nbytes for e in result.trace.lanes["d2h"] if e.kind == "push") == expected
        assert device.ledger.by_category() == {"gradients": 4 * trained}
        assert device.ledger.by_owner("gradients") == {"residuals": 4 * trained}
        assert forecast.peak_device_bytes == then.peak_device_bytes == relay.forecast(batch_of(2)).peak_device_bytes
        assert device.ledger.by_owner("gradients") == {"residuals": 4 * trained}  # rehearsals have left nothing
    assert device.ledger.by_category() == {}


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("compress", ["int4", Compress("bf16", feedback=False)], ids=str)
def test_a_forecast_without_a_model_has_the_same_bytes(compress: Any, update: Any) -> None:
    config = RelayConfig(seed=0, micro_batches=2, compress=compress, update=update)
    with Relay(make_gpt(4), partial(torch.optim.AdamW, lr=1e-2), EmulatedDevice(), config=config) as relay:
        real = relay.forecast(make_batch())
        machine = Machine(1e9, 1e8, 1e9, 1e9)
        told = {"micro_batches": 2, "batch": 4, "sequence": 8, "relay_config": config, "emulated": True}
        formula = forecast_config(relay.model.config, machine, **told)
    assert formula.device_bytes["gradients"] == real.device_bytes["gradients"]
    assert pushed(formula.trace) == pushed(real.trace)


def pushed(trace: Trace) -> int:
    return sum(event.nbytes for event in trace.lanes["d2h"] if event.kind == "push")


def test_a_recorded_step_is_replayed_to_the_byte() -> None:
    config = RelayConfig(seed=0, micro_batches=2, compress="int8", stash="host")
    with relay_of(make_model(), config) as relay:
        for step in range(2):
            trace = relay.step(batch_of(step)).trace
        replayed = simulate(Profile.of(trace), config)
        assert pushed(replayed) == pushed(trace)
        assert replayed.peak_bytes("device") == trace.peak_bytes("device")
        with pytest.raises(ValueError, match=r"compress=Compress\(format='int8'.* pushes other bytes"):
            simulate(Profile.of(trace), RelayConfig(seed=0, micro_batches=2, stash="host"))


def test_without_feedback_nothing_stays_on_the_device() -> None:
    device = EmulatedDevice()
    with relay_of(make_model(), RelayConfig(seed=0, compress=Compress("int8", feedback=False)), device) as relay:
        relay.step(batch_of(0))
        assert device.ledger.by_category() == {}


def test_residuals_count_in_the_budget() -> None:
    with relay_of(make_model(), RelayConfig(seed=0, compress="int8")) as relay:
        for step in range(2):
            need = relay.step(batch_of(step)).peak_device_bytes
    with relay_of(make_model(), RelayConfig(seed=0, compress="int8"), EmulatedDevice(need - 1)) as relay:
        relay.step(batch_of(0))
        before = [p.clone() for p in relay.model.parameters()]
        with pytest.raises(DeviceOutOfMemory):
            relay.step(batch_of(1))
        assert all(map(torch.equal, before, relay.model.parameters()))


# -- what is not finite, failures ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("update", ["eager", "deferred"])
@pytest.mark.parametrize("compress", FORMS, ids=str)
@pytest.mark.parametrize("value", [float("inf"), float("nan"), "bits"], ids=str)
def test_what_is_not_finite_is_refused_as_without_compression(compress: Compress, value: Any, update: Any) -> None:
    config = RelayConfig(seed=0, micro_batches=2, compress=compress, update=update)
    bad = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32) if value == "bits" else torch.tensor(value)

    def spoil(grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[3] = bad
        return grad

    with relay_of(make_model(), config) as relay, relay_of(make_model(), config) as twin:
        for each in (relay, twin):
            each.step(batch_of(0))
        hook = relay.model.layers[2].back.weight.register_hook(spoil)
        with pytest.raises(NonFiniteError, match=r"layers\.2\.back\.weight"):
            relay.step(batch_of(1))
        hook.remove()
        for each in (relay, twin):  # what the failed step has left out is forgotten with it
            each.step(batch_of(1))
        assert equal_weights(relay.model, twin.model)


@pytest.mark.all_cases
@pytest.mark.parametrize("more", [{"rollback": True}, {"update": "deferred"}], ids=str)
def test_a_step_that_is_taken_back_takes_residuals_back(more: dict[str, Any]) -> None:
    config = RelayConfig(seed=0, micro_batches=2, compress="int4", **more)
    with relay_of(make_model(), config) as relay, relay_of(make_model(), config) as twin:
        for each in (relay, twin):
            each.step(batch_of(0))

        def fail(grad: Tensor) -> None:
            raise RuntimeError("on purpose")

        hook = relay.model.layers[0].norm.weight.register_hook(fail)  # the last one of backward
        with pytest.raises(RuntimeError, match="on purpose"):
            relay.step(batch_of(1))
        hook.remove()
        for each in (relay, twin):
            each.step(batch_of(1))
        assert equal_weights(relay.model, twin.model)


def test_verify_leaves_residuals_alone() -> None:
    config = RelayConfig(seed=0, micro_batches=2, compress="int4")
    with relay_of(make_model(), config) as relay, relay_of(make_model(), config) as twin:
        for step in range(3):
            assert not relay.verify(batch_of(9)).equal  # it shows what compression costs
            for each in (relay, twin):
                each.step(batch_of(step))
        assert equal_weights(relay.model, twin.model)


# -- layers come and go, saves ---------------------------------------------------------------------------------------------


def residuals_of(relay: Relay) -> dict[str, dict[int, Tensor]]:
    return {unit.key: {i: r.clone() for i, r in unit.blocks[0].residuals.items()} for unit in relay.stack}


def same(one: dict[int, Tensor], other: dict[int, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[i], other[i]) for i in one)


def test_residuals_follow_their_layer() -> None:
    with relay_of(make_model(), RelayConfig(seed=0, micro_batches=2, compress="int4")) as relay:
        relay.step(batch_of(0))
        before = residuals_of(relay)
        relay.apply(Move(0, 2))
        relay.apply(Drop(1))
        relay.undo()
        assert all(same(held, before[key]) for key, held in residuals_of(relay).items())
        relay.apply(Duplicate(0))
        assert [bool(held) for held in residuals_of(relay).values()].count(False) == 1  # a new layer owes nothing
        relay.step(batch_of(1))
        assert all(residuals_of(relay).values())


def test_what_is_frozen_keeps_what_it_owes() -> None:
    with relay_of(make_model(), RelayConfig(seed=0, micro_batches=2, compress="int4")) as relay:
        relay.step(batch_of(0))
        before = residuals_of(relay)
        relay.apply(Freeze(2))
        relay.step(batch_of(1))
        assert same(residuals_of(relay)["L002"], before["L002"])
        relay.apply(Unfreeze(2))
        relay.step(batch_of(2))
        assert not same(residuals_of(relay)["L002"], before["L002"])


def test_a_loaded_relay_goes_on_to_the_bit(tmp_path: Any) -> None:
    config = RelayConfig(seed=0, micro_batches=2, compress=Compress("int4"))
    with relay_of(make_model(), config) as relay:
        relay.step(batch_of(0))
        relay.apply(Drop(1))
        relay.step(batch_of(1))
        relay.save(tmp_path)
        with Relay.load(tmp_path, make_model(), partial(torch.optim.AdamW, lr=1e-2), objective=loss_of) as loaded:
            assert loaded.config == config
            for each in (relay, loaded):
                each.undo()  # the dropped layer still owes what it owed
                each.step(batch_of(2))
            assert equal_weights(relay.model, loaded.model)
            assert all(same(held, residuals_of(loaded)[key]) for key, held in residuals_of(relay).items())


class Wide(nn.Module):
    """Takes a layer's place, and is like none in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(20, 9), nn.Linear(9, 20)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def test_a_parked_layer_that_nobody_can_build_keeps_no_save_from_loading(tmp_path: Any) -> None:
    with relay_of(make_model(), RelayConfig(seed=0, micro_batches=2, compress="int4")) as relay:
        relay.apply(Replace(1, Wide()), force=True)
        relay.step(batch_of(0))
        relay.apply(Drop(1), force=True)
        relay.save(tmp_path)
        with Relay.load(tmp_path, make_model(), partial(torch.optim.AdamW, lr=1e-2), objective=loss_of) as loaded:
            for each in (relay, loaded):
                each.step(batch_of(1))
            assert equal_weights(relay.model, loaded.model)


def test_other_settings_let_residuals_go() -> None:
    device = EmulatedDevice()
    with relay_of(make_model(), RelayConfig(seed=0, compress="int8"), device) as relay:
        relay.step(batch_of(0))
        relay.config = RelayConfig(seed=0)
        relay.step(batch_of(1))
        assert device.ledger.by_category() == {}


# -- what is refused -------------------------------------------------------------------------------------------------------


def test_what_is_no_format_is_refused() -> None:
    with pytest.raises(ValueError, match="compress='int2': must be one of 'bf16', 'int8', 'int4'"):
        RelayConfig(seed=0, compress="int2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="feedback=1: must be True or False"):
        Compress("int8", feedback=1)  # type: ignore[arg-type]


def test_feedback_and_branches_refuse_each_other() -> None:
    with relay_of(make_model(), RelayConfig(seed=0, compress="int8")) as relay:
        with pytest.raises(ValueError, match=r"branches \(other\).*feedback=False"):
            relay.fork("other")
        relay.config = RelayConfig(seed=0, compress=Compress("int8", feedback=False))
        relay.fork("other")
        with pytest.raises(ValueError, match=r"branches \(main\)"):
            relay.config = RelayConfig(seed=0, compress="int8")


def test_a_fleet_is_refused() -> None:
    with relay_of(make_model(), RelayConfig(seed=0, compress="int8", micro_batches=2)) as relay:
        with pytest.raises(ValueError, match="compress='int8' is not there for several workers"):
            relay.forecast(batch_of(0), workers=2)


def test_weights_in_files_are_refused(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="compress='int8' is not possible for a relay with weights in files"):
        relay_of(
            make_model(),
            RelayConfig(seed=0, compress="int8"),
            shelf=FileShelf(folder=tmp_path / "shelf", memory_bytes=10**6),
        )
    with (
        relay_of(
            make_model(), RelayConfig(seed=0), shelf=FileShelf(folder=tmp_path / "other", memory_bytes=10**6)
        ) as relay,
        pytest.raises(ValueError, match="compress='int8' is not possible for a relay with weights in files"),
    ):
        relay.forecast(
            batch_of(0), RelayConfig(seed=0, compress="int8"), disk=Disk(read_bytes_per_s=1e9, write_bytes_per_s=1e9)
        )
