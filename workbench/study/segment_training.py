"""Training of one segment, from its last save up to the budget or until its variants differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from l2l_core import Relay
from l2l_core.model import RandomState, preserve_random_state
from workbench.session import Batches, LRSchedulerAdapter, RandomStates, count_flop, count_tokens
from workbench.study.segment import Counts, SharedSegment
from workbench.study.variants import Variant, group_by_next_step

MakeRelay = Callable[..., Any]


@dataclass(frozen=True)
class Budget:
    """End of a run: a number of steps, or an amount of compute."""

    steps: int | None
    flop: float | None

    def is_spent(self, counts: Counts) -> bool:
        """Return True if a run with these counts has ended."""
        return counts.step >= self.steps if self.steps is not None else counts.flop >= (self.flop or 0)

    def left(self, counts: Counts) -> float:
        """Return the steps or the FLOP that are left."""
        return max(0.0, self.steps - counts.step if self.steps is not None else (self.flop or 0) - counts.flop)


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that the segments of a study share.

    Attributes:
        make_relay: ``make_relay(seed, **factors)``, returns a relay, or a pair of relay and learning rate scheduler.
        batches: ``batches(seed)``, or an iterable that can be iterated again.
        held_out: batches whose mean loss is measured every `evaluate_every` steps and at the end.
        autosave_s: seconds from one save to the next.
    """

    make_relay: MakeRelay
    batches: Any
    held_out: Sequence[Any]
    budget: Budget
    evaluate_every: int
    autosave_s: float


class StudyStopped(Exception):
    """The user has stopped the study; it resumes after the last step."""


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


def train_segment(
    segment: SharedSegment,
    variants: Mapping[str, Variant],
    seed: int,
    plan: TrainingPlan,
    header: Mapping[str, Any],
    report: Callable[[Counts, float | None], None],
) -> None:
    """Train a segment to its end; `report` gets the counts and the loss after every step.

    Raises:
        ValueError, TypeError: `make_relay` or the batches are not usable.
    """
    factors = next(iter(variants.values())).factors
    with preserve_random_state():
        relay, scheduler = open_relay(plan.make_relay, seed, factors, segment)
        with relay:
            segment.write_header({"variants": [*variants], "seed": seed, "settings": repr(relay.config), **header})
            segment.drop_after(relay.steps)
            _SegmentTrainer(segment, variants, seed, plan, relay, scheduler).train(report)


class _SegmentTrainer:
    """A segment, the relay that trains it, and its counts."""

    def __init__(
        self,
        segment: SharedSegment,
        variants: Mapping[str, Variant],
        seed: int,
        plan: TrainingPlan,
        relay: Relay,
        scheduler: LRSchedulerAdapter,
    ) -> None:
        self._segment, self._variants, self._plan = segment, variants, plan
        self._relay, self._scheduler = relay, scheduler
        self._schedule: Any = next(iter(variants.values())).schedule
        self._stream = BatchStream(plan.batches, seed)
        for _ in range(relay.steps):
            self._stream.draw()
        self._counts, rows = segment.last(), segment.rows()
        self._is_measured = not rows or rows[-1]["split"] != "train"  # after the last step
        self._saved_s = time.monotonic()

    def train(self, report: Callable[[Counts, float | None], None]) -> None:
        """Train until the budget is spent, or until the variants differ."""
        report(self._counts, None)
        while not self._plan.budget.is_spent(self._counts):
            groups = group_by_next_step(self._relay, self._variants)
            if len(groups) > 1:
                self._save()
                self._segment.finish(self._counts, groups)
                return
            loss = self._train_step()
            try:
                report(self._counts, loss)
            except StudyStopped:
                self._save()
                raise
        self._measure()
        self._segment.finish(self._counts)

    def _train_step(self) -> float:
        batch, rate = self._stream.draw(), self._relay.optimizer.param_groups[0]["lr"]
        result = self._schedule.step(self._relay, batch)
        before, samples = self._counts, result.samples
        flop = before.flop + count_flop(self._relay, batch, result.trace, samples)
        self._counts = Counts(self._relay.steps, flop, before.tokens + count_tokens(batch, samples))
        self._segment.add_seconds(self._counts.step, result.seconds)
        self._add_row("train", result.loss, rate)
        self._scheduler.step(result.loss)
        if self._counts.step % self._plan.evaluate_every == 0:
            self._measure()
        if time.monotonic() - self._saved_s >= self._plan.autosave_s:
            self._save()
        return result.loss

    def _measure(self) -> None:
        if self._plan.held_out and not self._is_measured:
            losses = self._relay.probe(self._plan.held_out)
            self._add_row("held out", sum(losses) / len(losses), self._relay.optimizer.param_groups[0]["lr"])

    def _add_row(self, split: str, loss: float, rate: float) -> None:
        row = {**vars(self._counts), "split": split, "loss": loss, "lr": float(rate)}
        self._segment.add_row({**row, "layers": len(self._relay.stack)})
        self._is_measured = split != "train"

    def _save(self) -> None:
        """Save the relay; the scheduler's state is written first, under the number of steps."""
        self._saved_s = time.monotonic()
        if self._relay.steps == 0:
            return  # `make_relay` makes this state
        self._segment.state.mkdir(exist_ok=True)
        path, new = scheduler_file(self._segment.state, self._relay.steps), self._segment.state / "scheduler.new"
        torch.save(self._scheduler.state_dict(), new)
        new.replace(path)
        self._relay.save(self._segment.state / "relay")
        for old in self._segment.state.glob("scheduler-*.pt"):
            if old != path:
                old.unlink()


# -- relays ------------------------------------------------------------------------------------------------------------


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
