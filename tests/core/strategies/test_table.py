"""Table of strategies: metered rows, the Pareto front, and simulated steps."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
from zoo import BY_NAME

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig
from l2l_core.strategies import (
    Full,
    Karma,
    Lab,
    Offload,
    Periodic,
    Plain,
    RelayPolicy,
    Rotor,
    SelectiveCheckpoint,
    StrategyResult,
    StrategyTable,
)
from l2l_core.strategies.lab import default_strategies


def test_rows_have_the_needs_of_steps(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2", rows=6, micro_batches=2)
    before = {name: value.clone() for name, value in lab.model.state_dict().items()}
    table = lab.compare([Plain(), Full(), RelayPolicy(), RelayPolicy(keep=3, stash="device")])
    plain, full, relay, kept = table.rows
    assert all(bool((value == before[name]).all()) for name, value in lab.model.state_dict().items()) and lab.steps == 0
    for row, policy in ((plain, Plain()), (full, Full())):
        plan = lab.plan(policy)
        assert (row.peak_device_bytes, row.peak_host_bytes) == (plan.peak_device_bytes, plan.peak_host_bytes)
        assert row.layer_forwards == 2 * plan.layer_forwards and row.seconds == plan.seconds
    layers = len(lab.layers)
    assert relay.layer_forwards == 2 * (2 * layers - 1) and kept.layer_forwards == 2 * (2 * layers - 3)
    assert relay.peak_device_bytes < kept.peak_device_bytes < plain.peak_device_bytes
    assert relay.peak_host_bytes > 12 * sum(param.numel() for param in lab.model.parameters())  # includes the EPS
    kind = BY_NAME["gpt2"]
    settings = RelayConfig(micro_batches=2, stash="device", keep=3, resident=1)
    with Relay(
        kind.make_model(),
        device=EmulatedDevice(),
        config=settings,
        loss=kind.loss,
        loss_over=kind.loss_over,
        layers=kind.layers,
    ) as alone:
        batch = kind.make_batch(6, 0)
        alone.step(batch)
        assert alone.step(batch).peak_device_bytes == kept.peak_device_bytes


def test_a_strategy_without_a_plan_has_the_reason(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2", device=EmulatedDevice(100_000))
    table = lab.compare([Rotor(), Full()])
    assert "smallest budget" in table.rows[0].why and table.pareto() == [table.rows[1]]
    assert "smallest budget" in str(table) and "does not fit" in str(table)


def test_the_front_has_the_rows_that_no_row_dominates() -> None:
    rows = [
        StrategyResult("a", 10, seconds=3),
        StrategyResult("b", 20, seconds=1),
        StrategyResult("c", 20, seconds=3),
        StrategyResult("d", 15, seconds=2),
        StrategyResult("e", why="no"),
    ]
    table = StrategyTable(rows, memory_bytes=15)
    assert [row.name for row in table.pareto()] == ["a", "b", "d"]
    assert [table.fits(row) for row in rows] == [True, False, False, True, False]
    lines = str(table).splitlines()
    assert "15 bytes" in lines[0] or "15 B" in lines[0]
    assert (
        "metered" in lines[1] and "simulated" in lines[1] and lines[-1].split()[0] == "e" and lines[-1].endswith("no")
    )


def test_torchs_selective_checkpoint_is_measured(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2", micro_batches=2)
    plain, some, nothing = lab.compare([Plain(), SelectiveCheckpoint(), SelectiveCheckpoint(save=())]).rows
    layers = len(lab.layers)
    assert some.layer_forwards == nothing.layer_forwards == 2 * 2 * layers
    assert nothing.peak_device_bytes < some.peak_device_bytes < plain.peak_device_bytes
    assert nothing.peak_host_bytes == 0 and some.seconds > 0


def test_the_default_has_one_strategy_of_each_kind(lab_of: Callable[..., Lab]) -> None:
    names = [row.name for row in lab_of("norm_outside").compare().rows]
    assert names[:5] == ["Plain", "Full", "Periodic", "Rotor", "Selective checkpoint"]
    assert names[5:] == ["Offload", "Combined", "Karma", "Relay, stash on the host"]
    assert len(default_strategies(9)) == len(default_strategies(8)) - 1  # nine layers are too many for Combined


@pytest.mark.parametrize(("name", "count"), [("norm_outside", 2), ("tied_layers", 3)])
def test_the_simulated_step_of_a_row_has_its_seconds_and_its_bytes(
    lab_of: Callable[..., Lab], name: str, count: int
) -> None:
    lab = lab_of(name, rows=6, micro_batches=count, device=EmulatedDevice(d2h_bytes_per_s=1e8, h2d_bytes_per_s=1e8))
    for row in lab.compare([Plain(), Periodic(2), Offload(ahead=1), Offload(ahead=0), RelayPolicy()]).rows:
        trace = row.trace
        assert trace is not None and trace.span_s == pytest.approx(row.seconds, rel=1e-12), row.name
        assert trace.peak_bytes("device") == row.peak_device_bytes, row.name
        # The number of gradient buffers of a relay's EPS depends on real time.
        assert row.plan is None or trace.peak_bytes("host") == row.peak_host_bytes, row.name
        assert all(nbytes >= 0 for sample in trace.memory for nbytes in sample.bytes_by_category.values())
        times = [sample.t_s for sample in trace.memory]
        assert times == sorted(times)
        for events in trace.lanes.values():  # events of a lane do not overlap
            assert all(one.stop_s <= other.start_s + 1e-12 for one, other in pairwise(events))
        forwards = sum(event.kind == "forward" for event in trace.lanes["compute"])
        loss = count  # the last stage is a forward without a layer
        assert row.plan is None or forwards == row.layer_forwards + loss


def test_copies_cost_time_only_if_compute_does_not_hide_them(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("norm_outside", rows=6)
    operations = lab.plan(Offload(ahead=1)).operations
    fast = replace(lab.cost_model, figures={"d2h_bytes_per_s": 1e15, "h2d_bytes_per_s": 1e15})
    slow = replace(lab.cost_model, figures={"d2h_bytes_per_s": 1e3, "h2d_bytes_per_s": 1e3})
    compute_s = sum(lab.cost_model.costs[0].seconds_of(*each) for each in operations if each.kind in ("Fall", "B"))
    assert fast.seconds(operations) == pytest.approx(compute_s, rel=1e-6)
    moved = sum(event.nbytes for event in slow.trace(operations).lanes["d2h"])
    assert slow.seconds(operations) == pytest.approx(2 * moved / 1e3, rel=1e-2)


def test_a_lab_on_another_device_has_the_same_stages_and_another_budget_and_link(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("norm_outside", rows=6)
    other = lab.on_device(EmulatedDevice(10_000, d2h_bytes_per_s=1e3, h2d_bytes_per_s=1e3))
    one, two = lab.plan(Offload()), other.plan(Offload())
    assert one.peak_device_bytes == two.peak_device_bytes and two.seconds > 10 * one.seconds
    lab.plan(Rotor())
    with pytest.raises(DeviceOutOfMemory, match="10 kB"):
        other.plan(Rotor())


def test_names_in_a_table_include_settings() -> None:
    policies = [Offload(), Offload(ahead=0), Periodic(4), Rotor(8_000_000), Karma()]
    assert [each.name for each in policies] == [
        "Offload", "Offload, ahead=0", "Periodic, length=4", "Rotor, within 8 MB", "Karma",
    ]  # fmt: skip
