"""Policies compared with one another, under several links and budgets."""

from collections.abc import Callable

import pytest

from l2l_core import EmulatedDevice
from l2l_core.strategies import Combined, Full, Karma, Lab, Offload, Periodic, Plain, Rotor
from l2l_core.strategies.plan import OFF, OFFX

SLOW, FAST = EmulatedDevice(h2d_bytes_per_s=1e4, d2h_bytes_per_s=1e4), EmulatedDevice()


def test_rotor_needs_less_memory_and_fewer_forwards_than_periodic_where_stages_are_unlike(
    lab_of: Callable[..., Lab],
) -> None:
    lab = lab_of("resnet")
    periodic = lab.plan(Periodic())
    found = lab.plan(Rotor(periodic.peak_device_bytes - 1))
    assert found.peak_device_bytes < periodic.peak_device_bytes
    assert found.layer_forwards < periodic.layer_forwards


@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_a_step_by_rotor_stays_within_its_budget(lab_of: Callable[..., Lab], name: str) -> None:
    lab = lab_of(name)
    most, least = lab.plan(Plain()).peak_device_bytes, lab.plan(Full()).peak_device_bytes
    for share in (0.2, 0.5, 0.9):
        budget = round(least + share * (most - least))
        result = lab.step(lab.plan(Rotor(budget)))
        assert result.peak_device_bytes <= budget


def test_offload_saves_device_bytes_and_ahead_hides_the_copies(lab_of: Callable[..., Lab]) -> None:
    lab = lab_of("gpt2", device=EmulatedDevice(h2d_bytes_per_s=1e8, d2h_bytes_per_s=1e8))
    plain, late, ahead = (lab.plan(policy) for policy in (Plain(), Offload(ahead=0), Offload(ahead=1)))
    assert late.peak_device_bytes <= ahead.peak_device_bytes < plain.peak_device_bytes
    assert plain.seconds < ahead.seconds <= late.seconds
    assert lab.verify(ahead).equal
    result = lab.step(ahead)
    sent = sum(event.nbytes for event in result.trace.events if event.lane == "d2h")
    fetched = sum(event.nbytes for event in result.trace.events if event.lane == "h2d")
    assert sent == fetched == result.peak_host_bytes == ahead.peak_host_bytes > 0  # all of it is there at one time


@pytest.mark.parametrize("device", [SLOW, FAST], ids=["slow link", "fast link"])
def test_combined_follows_the_link(lab_of: Callable[..., Lab], device: EmulatedDevice) -> None:
    lab = lab_of("gpt2", device=device)
    budget = (lab.plan(Plain()).peak_device_bytes + lab.plan(Full()).peak_device_bytes) // 2
    found = lab.plan(Combined(budget))
    either = [lab.plan(Combined(budget, choices=choices)).seconds for choices in ("KR", "KO")]
    assert found.seconds <= min(either) and found.peak_device_bytes <= budget
    offloads = any(kind in (OFF, OFFX) for kind, _ in found.operations)
    assert offloads == (device is FAST)


@pytest.mark.parametrize("speed", [1e6, 1e8, 1e9])
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_karma_lies_between_swapping_alone_and_the_best_of_all_choices(
    lab_of: Callable[..., Lab], name: str, speed: float
) -> None:
    lab = lab_of(name, device=EmulatedDevice(h2d_bytes_per_s=speed, d2h_bytes_per_s=speed))
    most, least = lab.plan(Plain()).peak_device_bytes, lab.plan(Offload(ahead=1)).peak_device_bytes
    for share in (0.1, 0.5):
        budget = round(least + share * (most - least))
        found = lab.plan(Karma(budget))
        swaps = [lab.plan(Offload(ahead=1, keep=keep)) for keep in range(lab.cost_model.stages)]
        swap_s = min(plan.seconds for plan in swaps if plan.peak_device_bytes <= budget)
        assert lab.plan(Combined(budget)).seconds <= found.seconds <= swap_s
        assert found.peak_device_bytes <= budget
        if speed == 1e6:
            assert found.seconds < swap_s  # with such a slow link, recompute is faster
    assert lab.verify(found).equal
