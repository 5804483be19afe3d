"""One clock for workers whose own clocks differ: threads stand for workers, each with a skew."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from l2l_core.workers import health_monitor
from l2l_core.workers.health_monitor import SharedClock

NEAR_S = 5.0  # what a busy machine may add to a message; skews are far larger


class Room:
    """Workers that meet."""

    def __init__(self, skews_s: Sequence[float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.skews_s, self.clocks = list(skews_s), [SharedClock(rank, len(skews_s)) for rank in range(len(skews_s))]
        self._told: list[torch.Tensor] = [torch.empty(0)] * len(skews_s)
        self._barrier, self._local = threading.Barrier(len(skews_s)), threading.local()
        clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + self.skews_s[self._local.rank])
        monkeypatch.setattr(health_monitor, "time", clock)

    def together(self, do: Callable[[int], object]) -> list[object]:
        def as_worker(rank: int) -> object:
            self._local.rank = rank
            return do(rank)

        with ThreadPoolExecutor(len(self.clocks)) as pool:
            return list(pool.map(as_worker, range(len(self.clocks))))

    def agree(self) -> None:
        self.together(lambda rank: self.clocks[rank].synchronize(self._tell))

    def _tell(self, mine: torch.Tensor) -> torch.Tensor:
        self._told[self._local.rank] = mine
        self._barrier.wait(30)
        every = torch.stack(self._told)
        self._barrier.wait(30)
        return every

    def now(self) -> list[float]:
        return self.together(lambda rank: self.clocks[rank].now())  # type: ignore[return-value]


def test_clocks_that_differ_tell_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room([0.0, 1000.0, -500.0], monkeypatch)
    room.agree()
    first, *others = room.now()
    assert all(abs(each - first) < NEAR_S for each in others)
    assert len({tuple(clock.offsets_s) for clock in room.clocks}) == 1


def test_a_clock_that_has_moved_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room([0.0, 1000.0], monkeypatch)
    room.agree()
    room.skews_s[1] = -3000.0
    room.agree()
    assert abs(room.now()[1] - room.now()[0]) < NEAR_S


def test_one_counter_stays_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room([0.0, 0.0, 0.0], monkeypatch)
    for _ in range(20):
        room.agree()
    assert all(clock.offsets_s == [0.0, 0.0, 0.0] for clock in room.clocks)
