"""Relay and batches of a segment, in the state of its last save, its parent's end, or the beginning."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch

from l2l_core import Relay
from l2l_core.model import RandomState, preserve_random_state
from workbench.session import Batches, LRSchedulerAdapter
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
    with recorded_arguments() as recorded:
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
    relay = _load(state / "relay", relay, recorded)
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
def recorded_arguments() -> Iterator[list[tuple[Relay, dict[str, Any]]]]:
    """Record the arguments of relays that are made in a block, since a save is loaded with the same ones."""
    made: list[tuple[Relay, dict[str, Any]]] = []
    relays: Any = Relay
    plain, signature = Relay.__init__, inspect.signature(Relay.__init__)

    def recording(self: Relay, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        arguments = dict(signature.bind(self, *args, **options).arguments)
        del arguments["self"]
        made.append((self, arguments))

    relays.__init__ = recording
    try:
        yield made
    finally:
        relays.__init__ = plain


def _load(folder: Path, relay: Relay, recorded: Sequence[tuple[Relay, dict[str, Any]]]) -> Relay:
    """Return a relay like this one, in the state of a save; this one is closed."""
    options = next((arguments for one, arguments in recorded if one is relay), None)
    if options is None:
        raise ValueError(
            "make_relay returned a relay that it did not make: a study makes a new model and a new relay for every run"
        )
    model, optimizer = options.pop("model"), options.pop("optimizer", None)
    for name in ("layers", "config"):  # as saved: edits have changed the layers
        options.pop(name, None)
    if optimizer is None or callable(optimizer):  # a scheduler refers to the optimizer that a factory made
        optimizer = relay.optimizer
    relay.close()
    return Relay.load(folder, model, optimizer, **options)


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
            self._keep_random()

    def draw(self) -> Any:
        """Return the next batch.

        Raises:
            ValueError: the batches have ended.
        """
        with preserve_random_state():
            self._random.restore()
            numpy.random.set_state(self._numpy)
            try:
                batch = self._batches.next_batch()
            except StopIteration:
                raise ValueError(
                    f"batches of seed {self.seed} ended after {self.drawn}: return a list or a loader, which restarts, "
                    "a generator without an end, or shorten the study"
                ) from None
            self._batches.mark_used()
            self._keep_random()
        self.drawn += 1
        return batch

    def _keep_random(self) -> None:
        self._random, self._numpy = RandomState.capture(), numpy.random.get_state(legacy=False)
