"""Simulation of pipelines: unequal stages, stragglers, links, copies to the host, and exact bytes."""

from l2l_core.pipelines import (
    RankSpeeds,
    StageCost,
    gpipe,
    one_forward_one_backward,
    relay_over_ranks,
    simulate_pipeline,
    varuna,
    zero_bubble_h1,
)


def test_the_slowest_stage_sets_the_pace() -> None:
    """In a long step of GPipe every micro-batch waits for it twice; the others pass once."""
    costs = [StageCost(forward_s=f, backward_s=2 * f) for f in (1.0, 1.0, 3.0, 1.0)]
    simulated = simulate_pipeline(gpipe(4, 32), costs)
    assert simulated.seconds == 3 * (32 * 3.0 + 1 + 1 + 1)
    slow = simulate_pipeline(gpipe(4, 32), speeds=RankSpeeds(slowdown=(1, 1, 3, 1)))
    assert slow.seconds == simulated.seconds and slow.compute_s(2) == 3 * slow.compute_s(0)


def test_a_link_delays_the_first_and_the_last_message() -> None:
    cost, speeds = StageCost(output_bytes=10), RankSpeeds(latency_s=0.25, bytes_per_s=40)
    simulated = simulate_pipeline(gpipe(4, 8), cost, speeds)
    assert simulated.seconds == 33 + 2 * 3 * 0.5  # messages overlap with compute in between
    assert simulated.wire_bytes == (80, 160, 160, 80)


def test_a_slow_link_is_a_serial_lane() -> None:
    """The last of 8 messages of 10 s arrives at 81 s; the first gradient leaves 1 + 2 s later, each of the others waits."""
    simulated = simulate_pipeline(gpipe(2, 8), StageCost(output_bytes=10), RankSpeeds(bytes_per_s=1))
    assert simulated.seconds == 1 + 8 * 10 + 1 + 2 + 8 * 10 + 2


def test_records_on_the_host_free_the_rank_and_cost_nothing_on_a_fast_link() -> None:
    plan, record = one_forward_one_backward(8, 16), 100
    kept = simulate_pipeline(plan, StageCost(record_bytes=record))
    assert kept.peak_bytes == (800, 700, 600, 500, 400, 300, 200, 100)
    moved = StageCost(record_bytes=record, host_bytes=90)
    fast = simulate_pipeline(plan, moved, RankSpeeds(host_bytes_per_s=90))
    assert fast.seconds == kept.seconds and fast.peak_bytes[0] < kept.peak_bytes[0]
    slow = simulate_pipeline(plan, moved, RankSpeeds(host_bytes_per_s=9))
    assert slow.seconds > 2 * kept.seconds
    lanes = {event.lane for event in fast.trace(0).events}
    assert lanes == {"compute", "d2h", "h2d"} and fast.trace(0).worker.count == 8


def test_recomputed_records_are_short() -> None:
    cost = StageCost(record_bytes=100, input_bytes=10)
    simulated = simulate_pipeline(varuna(4, 5), cost)
    assert simulated.peak_bytes[0] == 5 * 10 + 90 and simulated.peak_bytes[3] == 100 == simulated.peak_bytes[3]
    # GPipe keeps the record of the last micro-batch beside the inputs of the others.
    assert simulate_pipeline(gpipe(4, 5, recompute=True), cost).peak_bytes == (140,) * 4


def test_weight_gradients_read_a_part_of_the_record() -> None:
    whole = simulate_pipeline(zero_bubble_h1(4, 8), StageCost(record_bytes=100))
    part = simulate_pipeline(zero_bubble_h1(4, 8), StageCost(record_bytes=100, weight_record_bytes=40))
    assert whole.peak_bytes == (400,) * 4 and part.peak_bytes == (400, 340, 280, 220)


def test_a_relay_holds_two_stages_whatever_the_depth() -> None:
    cost = StageCost(weight_bytes=1000, record_bytes=10, input_bytes=1)
    peaks = {simulate_pipeline(relay_over_ranks(4, 8, depth), cost).peak_bytes for depth in (16, 32, 64)}
    assert peaks == {(2010,) * 4}
    assert simulate_pipeline(gpipe(4, 8), cost).peak_bytes == (1080,) * 4


def test_stages_share_no_bytes_with_extra() -> None:
    cost = StageCost(record_bytes=10, forward_extra_bytes=3, backward_extra_bytes=7, weight_bytes=100)
    assert simulate_pipeline(gpipe(2, 4), cost).peak_bytes == (147, 147)
