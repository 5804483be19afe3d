"""Relay and batches of a segment, in the state of its last save, its parent's end, or the beginning."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from l2l_core import Relay
from l2l_core.model import RandomState, preserve_random_state
from workbench.session import Batches, LRSchedulerAdapter, RandomStates
from workbench.study.segment import SharedSegment

MakeRelay = Callable[..., Any]


def open_relay(
    make_relay: MakeRelay, seed: int, factors: Mapping[str, Any], segment: SharedSegment
) -> tuple[Relay, LRSchedulerAdapter]:
    """Make the relay of a seed, in the state of the segment's last save, its parent's end, or the beginning.

    Raises:
        TypeError: `make_relay` returned neither a relay nor a pair of a relay and a scheduler.
        ValueError: the relay has trained already.
    """
    seed_all(seed)
    made = make_relay(seed, **factors)
    relay, scheduler = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(relay, Relay):
        raise TypeError(f"make_relay returned a {type(relay).__name__}: return a Relay, or a pair (relay, scheduler)")
    if relay.steps:
        raise ValueError(f"make_relay returned a relay after {relay.steps} steps: make a new model and a new relay")
    adapter = LRSchedulerAdapter(scheduler)
    if why := adapter.why_not_restorable:
        raise ValueError(f"{why}: a study saves and restores it; add these methods, as in torch's schedulers")
    saves = [segment.state, *([segment.parent.state] if segment.parent else [])]
    state = next((each for each in saves if (each / "relay").exists()), None)
    if state is None:
        return relay, adapter
    relay.restore(state / "relay")
    adapter.load_state_dict(torch.load(scheduler_file(state, relay.steps)))
    return relay, adapter


def scheduler_file(state: Path, steps: int) -> Path:
    """Return the file with the scheduler's state after a number of steps."""
    return state / f"scheduler-{steps}.pt"


def seed_all(seed: int) -> None:
    """Seed the generators of torch, NumPy and Python."""
    RandomState.from_seed(seed).restore()
    numpy.random.seed(seed % 2**32)


@contextmanager
def recipe_random_state(seed: int, step: int) -> Iterator[None]:
    """Give a recipe the random numbers of a seed and a step; a second call draws the same."""
    with preserve_random_state():
        seed_all(zlib.crc32(f"{seed}/{step}/recipe".encode()))
        yield


# -- batches -----------------------------------------------------------------------------------------------------------


class BatchStream:
    """Batches of a seed; they and their order depend on the seed alone, since it has random generators to itself.

    Args:
        batches: ``batches(seed)``, or an iterable.
        seed: seeds the generators of torch, NumPy and Python while batches are drawn.
    """

    def __init__(self, batches: Any, seed: int) -> None:
        self.seed, self.drawn = seed, 0
        with preserve_random_state():
            seed_all(seed)
            source: Any = batches(seed) if callable(batches) else batches
            self._batches = Batches(source)
            self._random = RandomStates.capture()

    def draw(self) -> Any:
        """Return the next batch.

        Raises:
            ValueError: the batches have ended.
        """
        with preserve_random_state():
            self._random.restore()
            try:
                batch = self._batches.next_batch()
            except StopIteration:
                raise ValueError(
                    f"batches of seed {self.seed} ended after {self.drawn}: return a list or a loader, which restarts, "
                    "a generator without an end, or shorten the study"
                ) from None
            self._batches.mark_used()
            self._random = RandomStates.capture()
        self.drawn += 1
        return batch
