"""Device memory as it is counted while forwards pause: flat, and the same when it is booked from what was counted."""

import pytest
from by_hand import kind_of
from zoo import Chain, Mlp, ResidualOutside

from l2l_core import EmulatedDevice, Relay, RelayConfig


def peak_of(depth: int, micro_batches: int, shell: type[Chain] = ResidualOutside) -> tuple[int, int]:
    """Peak device bytes of the metered first step and of the second; two rows per micro-batch."""
    kind = kind_of(lambda: shell([Mlp() for _ in range(depth)]))
    config = RelayConfig(micro_batches=micro_batches, stash="host")
    with Relay(
        kind.make_model(), loss=kind.loss, loss_over=kind.loss_over, device=EmulatedDevice(), config=config
    ) as relay:
        first, second = (relay.step(kind.make_batch(2 * micro_batches, seed)) for seed in range(2))
    return first.peak_device_bytes, second.peak_device_bytes


@pytest.mark.parametrize("shell", [Chain, ResidualOutside])
def test_peak_is_flat(shell: type[Chain]) -> None:
    """R19, R20: in depth and in the number of micro-batches, one included."""
    reference = peak_of(4, 1, shell)
    for depth, micro_batches in [(4, 2), (4, 8), (16, 1), (16, 3)]:
        assert peak_of(depth, micro_batches, shell) == pytest.approx(reference, rel=0.01)


def test_metering_on_change() -> None:
    """R21: counted once, then replayed: the second step books what the first one counted."""
    first, second = peak_of(4, 3)
    assert first == second
