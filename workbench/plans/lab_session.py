"""Session of a lab, which trains its model in a thread, each step by the plan selected at that time.

commands ──► queue ──► thread: one command, or else one step ──► lab.step(plan, batch) ──► snapshot
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain, count
from weakref import WeakKeyDictionary, ref

from torch import nn

from l2l_core import DeviceOutOfMemory, TornStep
from l2l_core.batches import Batch
from l2l_core.edits import MAIN_BRANCH
from l2l_core.strategies import Lab, LabResult, Plain, Plan, Strategy
from l2l_core.trace import Trace
from workbench.plans.plan_choices import DEFAULT_STRATEGIES, PlanChoice, fastest_choice, make_choices
from workbench.readings import Columns, summarize_timeline
from workbench.session import (
    TRAIN,
    Activity,
    Batches,
    BatchSource,
    Change,
    Command,
    Failure,
    LayerRow,
    Progress,
    RunController,
    ShownStep,
    Snapshot,
    StatisticsLog,
    StepRow,
)

CLOSED = "This bench was closed: run its cell again, or make a new one on the lab."
TAKEN_OVER = "This bench was taken over by another one on the same model: use that one, or run this cell again."
_NOTHING_CHANGED = (
    "Weights and optimizer are as they were before this step: Run tries the same batch again, Skip leaves it out."
)


class LabSession(RunController):
    """Commands and state of a lab's training.

    Invariant: only the thread trains, and a model has one such session, which a second one takes over. A batch is used
    once, regardless of the number of failed steps on it.

    Args:
        lab: the lab whose model is trained.
        batches: batches as for `Session`, all of the shapes of the lab's batch.
        ways: policies and plans to select from.
        plan: name of the first plan; default the fastest that fits, by simulated seconds.

    Attributes:
        choices: all strategies in order, including those without a plan.
        chosen: the choice for the next step.

    Raises:
        TypeError: `lab` is not a lab, or `batches` or `ways` are of unsupported types.
        ValueError: no strategy has a plan, or there is no plan of this name.
    """

    def __init__(
        self,
        lab: Lab,
        batches: BatchSource,
        ways: Sequence[Strategy | Plan] = DEFAULT_STRATEGIES,
        plan: str | None = None,
    ) -> None:
        if not isinstance(lab, Lab):
            raise TypeError(f"lab is a {type(lab).__name__}: give l2l_core.strategies.Lab(model, batch, ...)")
        super().__init__(self._show_error)
        self.lab, self._batches = lab, Batches(batches)
        self.choices = make_choices(lab, ways)
        first = fastest_choice(self.choices, self._budget_bytes) if plan is None else self._find_choice(plan)
        if first is None:
            raise ValueError(f"ways={list(ways)!r}: none has a plan; give policies, as [Plain(), Rotor()]")
        self.chosen = first
        self._in_core_bytes = lab.plan(Plain()).peak_device_bytes
        self._steps: list[StepRow] = []
        self._changes: list[Change] = []
        self._shown_step: ShownStep | None = None
        self._layers = self._read_layers()
        self._running_trace: Callable[[], Trace | None] = lambda: None
        self._failed_trace: Trace | None = None  # of the step that has just failed
        self._activity: Activity = "step"
        earlier = _sessions[lab.model]() if lab.model in _sessions else None
        if earlier is not None:
            earlier._end_session(TAKEN_OVER)
        _sessions[lab.model] = ref(self)
        self._commands.start(lambda: earlier._commands.join() if earlier is not None else None, self._shut_down)

    def snapshot(self) -> Snapshot:
        """Return the present state, also during a step."""
        with self._changed:
            run, lab, queue, work = self._run, self.lab, [*self._commands.queue], self._commands.current
            trace, params = self._running_trace(), [*lab.model.parameters()]
            in_layers = {id(param) for name in lab.layers for param in lab.model.get_submodule(name).parameters()}
            shell = [param for param in params if id(param) not in in_layers]
            return Snapshot(
                number=self._commands.number,
                state="closed" if self._ended else run.state,
                pausing=self._is_pausing,
                model=type(lab.model).__name__,
                num_params=sum(param.numel() for param in params),
                device=lab.device.name,
                figures=lab.device.figures(),
                config=lab.config,
                queued=tuple(command.label for command in queue),
                step=lab.steps,
                done=run.done,
                target=run.target,
                dropped=run.dropped,
                steps=tuple(self._steps),
                changes=tuple(self._changes),
                layers=self._layers,
                statistics=StatisticsLog().view(),
                shell_params=sum(param.numel() for param in shell),
                shell_trained=sum(param.numel() for param in shell if param.requires_grad),
                busy="" if work is None else f"step {lab.steps + 1}" if work.what == TRAIN else work.label,
                ended=self._ended,
                shown=self._shown_step,
                progress=Progress(trace, *trace.counts, trace.now()) if trace is not None else None,
                failure=run.failure,
                tickets=tuple(command.ticket for command in queue),
            )

    def follow(self, way: str | Plan) -> Future[None]:
        """Follow another plan from the next step on; a running step is not affected.

        Args:
            way: name of a choice, or a plan, as from ``lab.plan([...])``, which becomes another choice.

        Raises:
            TypeError: `way` is neither a name nor a plan.
            ValueError: there is no such choice, or it has no plan.
        """
        if not isinstance(way, str | Plan):
            remedy = "give the name of a choice, or a plan, as lab.plan(Rotor())"
            raise TypeError(f"{way!r} is a {type(way).__name__}: {remedy}")
        with self._changed:
            if isinstance(way, Plan) and all(choice.plan != way for choice in self.choices):
                self.choices.append(PlanChoice(self._unique_name(way.name), way))
            choice = self._find_choice(way) if isinstance(way, str) else next(c for c in self.choices if c.plan == way)
        return self._commands.submit(Command(f"follow {choice.name}", lambda: self._choose_plan(choice)))

    def skip(self) -> None:
        """Leave out the batch of the failed step; the next step takes another one."""
        self._commands.submit(Command("skip the batch", lambda: self._batches.skip_failed()))

    def close(self, wait: bool = True) -> None:
        """End after the running step. Closing twice has no effect.

        Args:
            wait: True to wait for that step.
        """
        self._end_session(CLOSED)
        if wait:
            self._commands.join()

    def _end_session(self, reason: str) -> None:
        with self._changed:
            self._ended = self._ended or reason
        self._commands.close(wait=False)

    def _step(self) -> None:
        with self._changed:
            self._run.first_step_pending = False  # even if the step fails: commands wait for this one only
        self._activity = "batch"
        try:
            batch = self._batches.next_batch()
        except StopIteration:
            self._run.stop()
            return
        self._activity = "step"
        self._batches.mark_tried()
        assert self.chosen.plan is not None, self.chosen
        try:
            with self._track_step():
                result = self.lab.step(self.chosen.plan, batch)
        except TornStep:
            self._batches.mark_used()  # some weights have been updated with it
            raise
        self._batches.mark_used()
        self._record_step(result, batch)

    @contextmanager
    def _track_step(self) -> Iterator[None]:
        """Show the lab's trace as progress while entered, from the beginning of the new step."""
        old = self.lab.trace  # the lab keeps it until the step begins a new one
        self._running_trace, self._failed_trace = lambda: trace if (trace := self.lab.trace) is not old else None, None
        try:
            yield
        except BaseException:
            self._failed_trace = self._running_trace()
            raise
        finally:
            self._running_trace = lambda: None

    def _record_step(self, result: LabResult, batch: Batch) -> None:
        row = StepRow(
            step=self.lab.steps,
            loss=result.loss,
            seconds=result.seconds,
            samples=self.lab.rows_of(batch).count,
            peak_device_bytes=result.peak_device_bytes,
            bytes_loaded=0,  # weights and gradients stay on the device
            bytes_pushed=0,
            overlap=summarize_timeline(Columns.of(result.trace)).overlap,
        )
        with self._changed:
            self._steps.append(row)
            self._layers = self._read_layers()
            self._shown_step = ShownStep(MAIN_BRANCH, row.step, result.trace, self._layers, (), self._in_core_bytes)
            self._run.count_step()

    def _choose_plan(self, choice: PlanChoice) -> None:
        with self._changed:
            if choice is not self.chosen:
                self._changes.append(Change(self.lab.steps, f"plan {self.chosen.name} → {choice.name}"))
                self.chosen = choice

    def _shut_down(self) -> None:
        with self._changed:
            self._run.state = "closed"
            self._commands.notify_change()

    def _show_error(self, command: Command, error: BaseException) -> None:
        during, failed, self._failed_trace = self._activity, self._failed_trace, None
        self._run.fail(
            Failure(
                step=self.lab.steps + 1,
                during=during,
                error=type(error).__name__,
                message=str(error) or "no message",
                traceback="".join(traceback.format_exception(error)),
                after=self._state_after(error, during),
                trace=failed,
            )
        )

    def _state_after(self, error: BaseException, during: Activity) -> str:
        if during == "batch":
            return "The source of batches failed before the step began: Run tries it again."
        if isinstance(error, TornStep):
            return "Some weights are updated and the batch counts as used: Run continues with the next one."
        if not isinstance(error, DeviceOutOfMemory):
            return _NOTHING_CHANGED
        names = ", ".join(choice.name for choice in self.choices if choice.fits(self._budget_bytes))
        fitting = f"Plans that fit: {names}." if names else "None of these plans fits this device."
        return f"{_NOTHING_CHANGED} {fitting}"

    @property
    def _budget_bytes(self) -> int | None:
        return self.lab.device.figures().get("memory_bytes")

    def _find_choice(self, name: str) -> PlanChoice:
        choice = next((choice for choice in self.choices if choice.name == name), None)
        if choice is None:
            names = ", ".join(repr(choice.name) for choice in self.choices)
            raise ValueError(f"there is no plan {name!r}; give one of {names}")
        if choice.plan is None:
            raise ValueError(f"no step can follow {name!r}: {choice.reason}")
        return choice

    def _unique_name(self, name: str) -> str:
        """Return the name, with a number if another choice has it."""
        names = {choice.name for choice in self.choices}
        return next(each for each in chain([name], (f"{name} {i}" for i in count(2))) if each not in names)

    def _read_layers(self) -> tuple[LayerRow, ...]:
        rows = []
        for name in self.lab.layers:
            params = [*self.lab.model.get_submodule(name).parameters()]
            number, nbytes = sum(param.numel() for param in params), sum(param.nbytes for param in params)
            trained, steps = sum(param.numel() for param in params if param.requires_grad), self.lab.steps
            rows.append(LayerRow(name, name, number, nbytes, steps, not trained, None, None, num_trained=trained))
        return tuple(rows)


_sessions: WeakKeyDictionary[nn.Module, ref[LabSession]] = WeakKeyDictionary()
