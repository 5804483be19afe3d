"""Training of one segment, from its last save up to the budget or until its variants differ."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from l2l_core import NonFiniteError, Relay, Schedule, StepResult
from l2l_core.model import preserve_random_state
from workbench.session import CountedShapes, FlopCounter, LRSchedulerAdapter, count_tokens
from workbench.study.segment import Counts, SharedSegment
from workbench.study.segment_relay import BatchStream, MakeRelay, open_relay, recipe_random_state, scheduler_file
from workbench.study.variants import Variant, group_by_next_step

DIVERGED = "diverged"  # split of the row of a step whose loss or gradient is not finite


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
        folder: of the study.
        variants: by name.
        make_relay: ``make_relay(seed, **factors)``, returns a relay, or a pair of relay and learning rate scheduler.
        batches: ``batches(seed)``, or an iterable that can be iterated again.
        held_out: batches whose mean loss is measured every `evaluate_every` steps and at the end.
        autosave_s: seconds from one save to the next.
        keep_models: keep the save of each run's end.
        counted: operations of each shape of the batch, by factors.
    """

    folder: Path
    variants: Mapping[str, Variant]
    make_relay: MakeRelay
    batches: Any
    held_out: Sequence[Any]
    budget: Budget
    evaluate_every: int
    autosave_s: float
    keep_models: bool = False
    counted: dict[str, CountedShapes] = field(default_factory=dict)

    def budget_of(self, name: str) -> Budget:
        """Return the budget of the runs of a variant."""
        steps = self.variants[name].steps
        return self.budget if steps is None else Budget(steps, None)


class StudyStopped(Exception):
    """The user has stopped the study; it resumes after the last step."""


def train_segment(
    segment: SharedSegment, names: Sequence[str], plan: TrainingPlan, report: Callable[[Counts, float | None], None]
) -> None:
    """Train a segment to its end; `report` gets the counts and the loss after every step.

    Args:
        segment: the segment.
        names: variants that share it.
        plan: of the study.

    Raises:
        StudyStopped: raised by `report`; the segment is saved.
        Exception: a step failed; its notes name the variants and the seed. Runs whose loss or gradient is not finite end instead.
    """
    variants = {name: plan.variants[name] for name in names}
    factors = variants[names[0]].factors
    try:
        with preserve_random_state():
            relay, scheduler = open_relay(plan.make_relay, segment.seed, factors, segment)
            with relay:
                where = {"settings": repr(relay.config), "device": str(relay.device.torch_device)}
                segment.write_header({**_describe_run(names, variants[names[0]]), **where})
                segment.drop_after(relay.steps)
                _SegmentTrainer(segment, variants, plan, relay, scheduler).train(report)
    except StudyStopped:
        raise
    except Exception as error:
        error.add_note(
            f"in the study in {plan.folder}, variants {', '.join(names)}, seed {segment.seed}; run() resumes there"
        )
        raise


class _SegmentTrainer:
    """A segment, the relay that trains it, and its counts."""

    def __init__(
        self,
        segment: SharedSegment,
        variants: Mapping[str, Variant],
        plan: TrainingPlan,
        relay: Relay,
        scheduler: LRSchedulerAdapter,
    ) -> None:
        self._segment, self._variants, self._plan = segment, variants, plan
        self._relay, self._scheduler = relay, scheduler
        first = next(iter(variants.values()))
        self._schedule: Any = first.schedule
        self._flop = FlopCounter(relay, plan.counted.setdefault(repr(first.columns), {}))
        self._stream = BatchStream(plan.batches, segment.seed)
        for _ in range(relay.steps):
            self._stream.draw()
        self._counts, rows = segment.last(), segment.rows()
        self._is_measured = not rows or rows[-1]["split"] != "train"  # after the last step
        self._saved_s = time.monotonic()

    def train(self, report: Callable[[Counts, float | None], None]) -> None:
        """Train until the budget is spent, or until the variants differ."""
        report(self._counts, None)
        while running := {name: v for name, v in self._variants.items() if not self._is_spent(name)}:
            spent = [name for name in self._variants if name not in running]
            groups = [*([spent] if spent else []), *group_by_next_step(self._relay, running, self._segment.seed)]
            if len(groups) > 1:
                if spent:  # their last loss
                    self._measure()
                self._save()
                self._segment.finish(self._counts, self._flop.formula, groups)
                return
            try:
                loss = self._train_step()
            except Exception as error:
                if not isinstance(error, NonFiniteError) and not isinstance(error.__cause__, NonFiniteError):
                    raise
                self._end_diverged(error)
                return
            try:
                report(self._counts, loss)
            except StudyStopped:
                self._save()
                raise
        self._measure()
        if self._plan.keep_models:
            self._save()
        self._segment.finish(self._counts, self._flop.formula)
        if not self._plan.keep_models:
            self._segment.drop_state()

    def _end_diverged(self, error: Exception) -> None:
        """End these runs, since the loss or a gradient of the next step is not finite."""
        row = {**vars(self._counts), "step": self._counts.step + 1, "split": DIVERGED, "loss": None}
        group = self._relay.optimizer.param_groups[0]
        self._segment.add_row({**row, "lr": float(group["lr"]), "layers": len(self._relay.stack)})
        self._segment.finish(self._counts, self._flop.formula, diverged=str(error))
        self._segment.drop_state()

    def _is_spent(self, name: str) -> bool:
        return self._plan.budget_of(name).is_spent(self._counts)

    def _train_step(self) -> float:
        batch, group = self._stream.draw(), self._relay.optimizer.param_groups[0]
        rate = group["lr"]
        result = self._apply_schedule(batch)
        if self._schedule.lr_factor(self._relay) is not None:
            rate = group["lr"]  # the schedule has set it before the step
        before, samples = self._counts, result.samples
        flop = before.flop + self._flop.count(batch, result.trace, samples)
        self._counts = Counts(self._relay.steps, flop, before.tokens + count_tokens(batch, samples))
        self._segment.add_seconds(self._counts.step, result.seconds)
        self._add_row("train", result.loss, rate)
        self._scheduler.step(result.loss)
        if self._counts.step % self._plan.evaluate_every == 0:
            self._measure()
        if time.monotonic() - self._saved_s >= self._plan.autosave_s:
            self._save()
        return result.loss

    def _apply_schedule(self, batch: Any) -> StepResult:
        """Make the schedule's edits and train, as `Schedule.step`; edits get the random numbers of the seed and the step."""
        schedule, relay = self._schedule, self._relay
        if type(schedule).step is not Schedule.step:
            return schedule.step(relay, batch)
        with relay.expect(batch):
            with recipe_random_state(self._segment.seed, relay.steps):
                schedule.prepare(relay)
                skipped, forced = schedule.skip(relay), schedule.is_forced(relay)
            return relay.step(batch, skip=skipped, force=forced)

    def _measure(self) -> None:
        if self._plan.held_out and not self._is_measured:
            skip = self._schedule.skip_in_evaluation(self._relay)
            losses = self._relay.probe(self._plan.held_out, skip=skip, force=self._schedule.is_forced(self._relay))
            self._add_row("held out", sum(losses) / len(losses), self._relay.optimizer.param_groups[0]["lr"])

    def _add_row(self, split: str, loss: float, rate: float) -> None:
        row = {**vars(self._counts), "split": split, "loss": loss, "lr": float(rate)}
        skipped = self._schedule.skip_in_evaluation(self._relay)
        self._segment.add_row({**row, "layers": len(self._relay.stack) - len(skipped)})
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


# -- circumstances -----------------------------------------------------------------------------------------------------


def _describe_run(names: Sequence[str], variant: Variant) -> dict[str, Any]:
    """Return what a reader of the folder needs in order to repeat a run."""
    return {
        "variants": [*names],
        "factors": variant.columns,
        "schedule": variant.describe()["schedule"],
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "l2l-workbench": _read_version(),
        "threads": torch.get_num_threads(),
        "commit": _read_commit(),
    }


def _read_version() -> str | None:
    """Return the version of this package; None if it is not installed."""
    try:
        return version("l2l-workbench")
    except PackageNotFoundError:
        return None


def _read_commit() -> str | None:
    """Return the commit of the working directory's repository; None if there is none."""
    run = partial(subprocess.run, capture_output=True, text=True, timeout=10, check=False)
    try:
        commit = run(["git", "rev-parse", "--short=12", "HEAD"])
        changed = run(["git", "status", "--porcelain", "--untracked-files=no"])
    except (OSError, subprocess.TimeoutExpired):
        return None
    if commit.returncode:
        return None
    return commit.stdout.strip() + (" with changes" if changed.stdout.strip() else "")
