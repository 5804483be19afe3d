"""Steps of several workers on a virtual clock: times that can be checked by hand, and what must hold whatever the costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from l2l_core import Machine, Network, Profile, RelayConfig, Shapes, Trace, simulate
from l2l_core.simulator import Cluster
from l2l_core.workers.network import all_gather_traffic, all_to_all_traffic, broadcast_traffic

P = 1600  # parameters of a layer: 800 of two workers, 400 of four
COMPUTE_S, LINK_S, UPDATE_S = 4.0, 0.25, 0.5  # of a layer's forward, of a copy of a layer, of a whole layer's update
CONFIG = RelayConfig(micro_batches=1)


def profile(layers: int) -> Profile:
    """Layers of P parameters and nothing else; forward takes 4 s, backward 12 s with recompute and 8 s without."""
    flops_per_s, bytes_per_s = 2 * P / COMPUTE_S, 4 * P / LINK_S
    machine = Machine(flops_per_s, P / UPDATE_S, bytes_per_s, bytes_per_s)
    return Profile.of_shapes(Shapes(layer_params=[P] * layers, shell_params=0, tokens=1, boundary_bytes=4), machine)


def end_s(trace: Trace) -> float:
    return max(event.stop_s for event in trace.events)


def test_two_layers_by_hand() -> None:
    """Both fit the two slots, so each is gathered once, before anything is computed; gradients go when their visits end."""
    gather_s, exchange_s, latency_s = 2.0, 2.0, 0.125
    network = Network(bytes_per_s=800 * 4 / gather_s, latency_s=latency_s)
    head_s = latency_s + 32 / network.bytes_per_s
    trace = simulate(profile(2), CONFIG, workers=2, network=network)
    there_s = 2 * (head_s + gather_s + latency_s)  # one after another, and compute waits for the layer ahead, too
    compute = trace.lanes["compute"]
    assert compute[1].start_s == pytest.approx(there_s)  # after the shell's code, which takes no time
    done_s = (
        there_s + COMPUTE_S + (COMPUTE_S + 8.0) + 12.0
    )  # the second layer's load hides under the first one's forward
    assert compute[-1].stop_s == pytest.approx(done_s)
    reduce_s = head_s + exchange_s + latency_s
    assert end_s(trace) == pytest.approx(done_s + LINK_S + reduce_s + UPDATE_S / 2 + head_s)


def test_a_slow_network_is_what_binds() -> None:
    """Layers come and gradients go as fast as a link carries them; compute hides under it but for the last layer's."""
    network = Network(bytes_per_s=10.0)
    trace = simulate(profile(8), CONFIG, workers=2, network=network)
    moved_s = sum(event.nbytes for lane in ("gather", "reduce") for event in trace.lanes[lane]) / 10.0
    assert trace.lanes["gather"] and moved_s <= end_s(trace) <= moved_s * 1.2
    busy_s = trace.busy_s("gather") + trace.busy_s("reduce")
    assert busy_s >= moved_s  # both share the link
    binding = {bound.phase: bound.lane for bound in trace.bound_by()}
    assert binding["forward"] == "gather" and binding["backward"] in ("gather", "reduce"), binding


def test_without_limits_nothing_but_updates_changes() -> None:
    alone = simulate(profile(6), CONFIG)
    for workers in (2, 4):
        trace = simulate(profile(6), CONFIG, workers=workers)
        assert trace.lanes["compute"] == alone.lanes["compute"]
        assert trace.busy_s("eps") == pytest.approx(alone.busy_s("eps") / workers)
    assert simulate(profile(6), CONFIG, workers=1).events == alone.events


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize("update", ["eager", "deferred"])
def test_all_workers_meet_at_the_same_instants(ahead: int, update: Any) -> None:
    """Also where some are slower, and links carry what they can."""
    config, network = replace(CONFIG, ahead=ahead, update=update), Network(bytes_per_s=1000.0, latency_s=0.01)
    slow = {1: 1.5, 3: 3.0}
    traces = [simulate(profile(5), config, workers=4, network=network, stragglers=slow, rank=r) for r in range(4)]
    for lane in ("gather", "reduce"):
        each = [[(e.kind, e.layer, e.start_s) for e in trace.lanes[lane]] for trace in traces]
        assert len(each[0]) > 5 and each[1:] == each[:-1]
        waited = zip(*([e.stalled_s for e in trace.lanes[lane]] for trace in traces), strict=True)
        assert all(min(row) == 0 for row in waited)  # somebody comes last
    assert len({end_s(trace) for trace in traces}) == 1


def test_everybody_waits_for_a_straggler() -> None:
    usual = simulate(profile(6), CONFIG, workers=8)
    for rank in (0, 5):
        trace = simulate(profile(6), CONFIG, workers=8, stragglers={5: 1.5}, rank=rank)
        assert trace.busy_s("compute") == pytest.approx(usual.busy_s("compute") * (1.5 if rank == 5 else 1.0))
        assert end_s(trace) == pytest.approx(1.5 * usual.busy_s("compute"), rel=0.05)
        assert trace.lanes["reduce"][-1].last == 5
    waited = {
        rank: sum(
            e.stalled_s for e in simulate(profile(6), CONFIG, workers=8, stragglers={5: 1.5}, rank=rank).lanes["reduce"]
        )
        for rank in (0, 5)
    }
    assert waited[0] > 1.0 and waited[5] == 0


@pytest.mark.parametrize("count", [2, 3, 5, 8, 512])
def test_what_some_send_others_receive(count: int) -> None:
    goes = [100 + rank for rank in range(count)]
    for source in (0, count // 2, count - 1):
        spread = [broadcast_traffic(100, count, source, rank) for rank in range(count)]
        assert [each.received for each in spread] == [100 * (rank != source) for rank in range(count)]
        assert sum(each.sent for each in spread) == 100 * (count - 1)
        assert sum(each.messages_sent for each in spread) == sum(each.messages_received for each in spread) == count - 1
    exchange = [all_to_all_traffic(goes, rank) for rank in range(count)]
    assert sum(each.sent for each in exchange) == sum(each.received for each in exchange) == (count - 1) * sum(goes)
    assert all_gather_traffic(100, count).received == 100 * (count - 1)


def test_gradients_in_bfloat16_are_half_the_bytes() -> None:
    whole, half = (simulate(profile(3), CONFIG, workers=4, wire=wire) for wire in ("fp32", "bf16"))
    sizes = [[event.nbytes for event in trace.lanes["reduce"]] for trace in (whole, half)]
    assert sizes[0] == [2 * nbytes for nbytes in sizes[1]] and sum(sizes[1])
    assert half.lanes["gather"] == whole.lanes["gather"]


def test_five_hundred_workers_and_a_deep_model() -> None:
    """As many as anybody asks for; each worker's share is padded, so all together hold a little more than there is."""
    trace = simulate(profile(48), CONFIG, workers=512, network=Network(bytes_per_s=1e9, latency_s=1e-5))
    loaded = sum(event.nbytes for event in trace.lanes["h2d"] if event.kind == "load")
    gathered = sum(event.nbytes for event in trace.lanes["gather"])
    assert gathered >= loaded * 511 / 512
    assert trace.worker.count == 512 and trace.settings["workers"] == 512


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "arguments, error, words",
    [
        ({"workers": 0}, ValueError, "workers=0: must be an integer of at least 1"),
        ({"workers": 2, "rank": 2}, ValueError, "worker 2 of 2: must be a number from 0 to 1"),
        ({"workers": 2, "stragglers": {5: 2.0}}, ValueError, "worker 5 of 2: must be a number from 0 to 1"),
        ({"workers": 2, "stragglers": {1: 0.0}}, ValueError, "must be positive"),
        ({"workers": 2, "wire": "fp16"}, ValueError, "wire='fp16': must be one of"),
        ({"workers": 2, "reduce": "mean"}, ValueError, "reduce='mean': must be one of"),
        ({"workers": 2, "network": 1e9}, TypeError, "give a Network"),
    ],
)
def test_fleets_that_cannot_be(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        simulate(profile(2), CONFIG, **arguments)


@pytest.mark.parametrize("figures", [{"bytes_per_s": 0.0}, {"latency_s": -1.0}, {"latency_s": float("nan")}])
def test_networks_that_cannot_be(figures: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(figures))):
        Network(**figures)


def test_a_profile_is_of_sums_or_of_the_gradients_of_every_micro_batch() -> None:
    one = profile(2)
    ordered = replace(one, settings={**one.settings, "workers": 2, "reduce": "ordered"})
    for known, asked in (
        (one, {"workers": 2, "reduce": "ordered"}),
        (ordered, {"reduce": "sum"}),
        (ordered, {"workers": 1}),
    ):
        with pytest.raises(ValueError, match=r"record a step with Workers\(reduce=|relay\.forecast\(batch"):
            simulate(known, CONFIG, **asked)
    assert simulate(one, CONFIG, workers=1, reduce="ordered").events == simulate(one, CONFIG).events


def test_a_worker_of_every_kind_is_replayed() -> None:
    assert Cluster(count=512, stragglers={7: 2.0, 9: 2.0, 11: 3.0}, rank=9).simulated_ranks == [9, 11, 0]
    assert Cluster(count=2, stragglers={0: 2.0, 1: 3.0}).simulated_ranks == [0, 1]
