"""The table: rows are what steps needed, the front is what nothing beats."""

from collections.abc import Callable

from zoo import BY_NAME

from l2l_core import EmulatedDevice, Relay, RelayConfig
from l2l_core.strategies import Full, Lab, Plain, RelayPolicy, Rotor, Row, SelectiveCheckpoint, Table
from l2l_core.strategies.ways import default_ways


def test_rows_are_what_steps_needed(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2", rows=6, micro_batches=2)
    before = {name: value.clone() for name, value in lab.model.state_dict().items()}
    table = lab.compare([Plain(), Full(), RelayPolicy(), RelayPolicy(keep=3, stash="device")])
    plain, full, relay, kept = table.rows
    assert all(bool((value == before[name]).all()) for name, value in lab.model.state_dict().items()) and lab.steps == 0
    for row, policy in ((plain, Plain()), (full, Full())):
        plan = lab.plan(policy)
        assert (row.peak_device_bytes, row.peak_host_bytes) == (plan.peak_device_bytes, plan.peak_host_bytes)
        assert row.layer_forwards == 2 * plan.layer_forwards and row.seconds == plan.seconds
    layers = len(lab._layers)
    assert relay.layer_forwards == 2 * (2 * layers - 1) and kept.layer_forwards == 2 * (2 * layers - 3)
    assert relay.peak_device_bytes < kept.peak_device_bytes < plain.peak_device_bytes
    assert relay.peak_host_bytes > 12 * sum(param.numel() for param in lab.model.parameters())  # the EPS is there
    kind = BY_NAME["gpt2"]
    settings = RelayConfig(micro_batches=2, stash="device", keep=3, resident=1)
    with Relay(
        kind.make_model(), device=EmulatedDevice(), config=settings, loss=kind.loss, layers=kind.layers
    ) as alone:
        batch = kind.make_batch(6, 0)
        alone.step(batch)
        assert alone.step(batch).peak_device_bytes == kept.peak_device_bytes


def test_a_way_without_a_plan_says_why(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2", device=EmulatedDevice(100_000))
    table = lab.compare([Rotor(), Full()])
    assert "smallest budget" in table.rows[0].why and table.pareto() == [table.rows[1]]
    assert "smallest budget" in str(table) and "does not fit" in str(table)


def test_the_front_is_what_nothing_beats() -> None:
    rows = [
        Row("a", 10, seconds=3),
        Row("b", 20, seconds=1),
        Row("c", 20, seconds=3),
        Row("d", 15, seconds=2),
        Row("e", why="no"),
    ]
    table = Table(rows, memory_bytes=15)
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
    layers = len(lab._layers)
    assert some.layer_forwards == nothing.layer_forwards == 2 * 2 * layers
    assert nothing.peak_device_bytes < some.peak_device_bytes < plain.peak_device_bytes
    assert nothing.peak_host_bytes == 0 and some.seconds > 0


def test_without_names_there_is_one_of_each_kind(lab_of: Callable[..., Lab]) -> None:
    names = [row.name for row in lab_of("norm_outside").compare().rows]
    assert names[:5] == ["Plain", "Full", "Periodic", "Rotor", "Selective checkpoint"]
    assert names[5:] == ["Offload", "Combined", "Karma", "Relay, stash on the host"]
    assert len(default_ways(9)) == len(default_ways(8)) - 1  # all choices of nine layers are too many
