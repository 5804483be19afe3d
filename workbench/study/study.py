"""Studies: variants x factors x seeds, trained, resumed and compared. `recorded_study.py` reads the results.

Runs that begin alike are trained once: a segment ends where its variants would do different things, its relay is saved, and
each group of variants continues from that save, which is exact to the bit. The folder alone decides what is left to do, so
that an interrupted study continues where it was.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from l2l_core import Relay
from l2l_core.batches import leaves_in
from l2l_core.model import preserve_random_state
from workbench.study.code_fingerprint import PYTHON, describe_change, fingerprint
from workbench.study.recorded_study import RecordedStudy
from workbench.study.segment import Counts, read_json, write_json
from workbench.study.segment_queue import SegmentQueue, SegmentTask
from workbench.study.segment_relay import MakeRelay, open_relay
from workbench.study.segment_training import Budget, StudyStopped, TrainingPlan, train_segment
from workbench.study.study_progress import StudyProgress
from workbench.study.study_records import SCHEMA, VERSION
from workbench.study.variants import check_factors, check_variants
from workbench.study.worker_pool import WorkerPool, Workers, check_workers, most_workers

MEASUREMENTS = 20  # of the held-out loss per run, by default
ALWAYS_EQUAL = ("variants", "steps", "flop", "evaluate_every", "held_out")  # when a study is resumed


class Study(RecordedStudy):
    """Variants of training, each with several seeds, compared at equal compute.

    Args:
        make_relay: ``make_relay(seed, **factors)`` makes a new model and a new relay, or a pair of relay and learning rate
            scheduler. Generators of torch, NumPy and Python are seeded before.
        variants: by name, a schedule as ``Depth({0: 2, 300: 4})``, a function ``(relay, step) -> edits``, a `Variant`, or None
            for no edits; or the result of `grid`. The first is the baseline.
        seeds: a run of every variant for each.
        steps, flop: the budget of a run, one of the two. With `flop` it ends after the step that reaches it.
        batches: ``batches(seed)``, which returns an iterable, or an iterable that restarts: a list or a loader. All variants of a
            seed train on the same batches.
        held_out: batches whose mean loss is measured; the comparison rests on it.
        folder: where runs are recorded. `run` refuses one whose steps were trained by other code.
        evaluate_every: steps between held-out measurements; default a twentieth of `steps`, or 25.
        autosave_s: seconds between saves. A killed study repeats the steps since the last one.
        workers: number of processes that train runs at the same time, with the bits of training alone; "auto": as many as
            cores (divided by `torch.get_num_threads()`) and free memory allow. 1: train in this process.
        keep_models: keep the weights and the optimizer's state at the end of each run, for `relay`.

    Raises:
        ValueError, TypeError: an argument is not usable, `make_relay` has no such factor, or the folder holds another study.

    Example:
        >>> from l2l_core import Depth
        >>> from workbench import Study
        >>> def make_relay(seed, layers=4):
        ...     torch.manual_seed(seed)
        ...     model = nn.Sequential(*(Block() for _ in range(layers)), nn.Linear(16, 4))
        ...     return Relay(model, device="cpu", loss=nn.CrossEntropyLoss())
        >>> variants = {"4 layers": None, "2, then 4": Depth({0: 2, 2: 4})}
        >>> study = Study(make_relay, variants, seeds=[0, 1], steps=3, batches=[batch], folder="study")
        >>> study.run()
        0 of 4 runs finished: ...
        4 of 4 runs finished. Common beginnings were trained once: ...
        >>> print(study.table().to_markdown())
        | variant | n | steps | FLOP | loss | difference to 4 layers | 95 % interval | compute saved |
        ...
    """

    def __init__(
        self,
        make_relay: MakeRelay,
        variants: Any,
        *,
        seeds: Sequence[int] = range(3),
        steps: int | None = None,
        flop: float | None = None,
        batches: Any,
        held_out: Sequence[Any] = (),
        folder: str | Path,
        evaluate_every: int | None = None,
        autosave_s: float = 30.0,
        workers: Workers = 1,
        keep_models: bool = False,
    ) -> None:
        self.folder = Path(folder)
        self._workers: Workers = check_workers(workers)
        if not callable(make_relay):
            raise TypeError(
                f"make_relay={make_relay!r}: pass a function make_relay(seed, **factors) that returns a Relay"
            )
        if isinstance(batches, Iterator):
            raise TypeError("batches can be iterated only once: pass a function of the seed, a list or a loader")
        budget = _check_budget(steps, flop)
        every = _default_every(steps) if evaluate_every is None else evaluate_every
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"evaluate_every={every!r}: pass a positive number of steps")
        held_out = _check_held_out(held_out)
        described = check_variants(variants)
        check_factors(described, make_relay)
        self._plan = TrainingPlan(
            self.folder, described, make_relay, batches, held_out, budget, every, autosave_s, keep_models
        )
        self._spec = {
            "schema": SCHEMA,
            "version": VERSION,
            "variants": self._describe_variants(),
            "seeds": _check_seeds(seeds),
            "steps": steps,
            "flop": flop,
            "evaluate_every": every,
            "held_out": digest(held_out),
            "code": self._describe_code(),
        }
        self._specs = {self.folder: self._spec}
        self._check_folder()

    @staticmethod
    def load(*folders: str | Path) -> RecordedStudy:
        """Read one or more studies from their folders, without a model: one table, frame and figure.

        Variants with the same name, schedule, factors and budget are one, with the seeds of all studies.

        Raises:
            FileNotFoundError: a folder holds no study.
            ValueError: the studies measured different held-out batches.
        """
        return RecordedStudy(*folders)

    def run(self, report: Callable[[str], object] | None = print, *, accept_changes: bool = False) -> None:
        """Train what is left of the study; a line of progress is reported every few seconds.

        Args:
            report: gets each line.
            accept_changes: go on although functions or objects of the study have changed since its first runs, as after a mistake
                in them that does not concern the steps trained so far. Those steps keep their results.

        Raises:
            ValueError: `make_relay`, `batches`, or a variant's schedule or factors have other code or other values than when the
                folder's runs were trained.
            Exception: a step failed; its notes name the variants and the seed. Calling `run` again resumes. Runs whose loss or
                gradient is not finite end as diverged instead, and the others go on.
        """
        self._check_folder()
        if not accept_changes:
            self._check_code()
        self.folder.mkdir(parents=True, exist_ok=True)
        progress = StudyProgress(self, self._plan.budget, partial(self._report, report or (lambda _: None)))
        with self._running(), locked(self.folder), suppress(StudyStopped):
            write_json(self.folder / "study.json", self._spec)
            segments = SegmentQueue(self.folder, self._roots())
            if most_workers(self._workers) > 1:
                WorkerPool(self._plan, self._workers, segments, progress, lambda: self._stops).run()
            else:
                self._train(segments, progress)
        progress.finish()

    def _train(self, segments: SegmentQueue, progress: StudyProgress) -> None:
        """Train in this process."""
        while task := segments.take():
            progress.begin(task)

            def update(counts: Counts, loss: float | None, task: SegmentTask = task) -> None:
                progress.update(task, counts, loss)
                if self._stops:
                    raise StudyStopped

            train_segment(task.segment, task.names, self._plan, update)
            progress.end(task)
            segments.finish(task)

    def stop(self) -> None:
        """End `run`, which may be on another thread, after the current step; the next `run` resumes there."""
        self._stops = True

    def relay(self, variant: str, seed: int) -> Relay:
        """Make the relay at the end of a run: `make_relay`, with the layers, weights and optimizer state of that run.

        Its `model` is the trained model; close it to use the model alone.

        Raises:
            ValueError: there is no such run, it has not ended or has diverged, or its state was not kept.

        Example:
            >>> study = Study(make_relay, {"grown": Depth({0: 2, 2: 4})}, seeds=[0], steps=3, batches=[batch],
            ...               folder="models", keep_models=True)
            >>> study.run(report=None)
            >>> with study.relay("grown", 0) as relay:
            ...     print(relay.steps, len(relay.stack))
            3 4
        """
        if (variant, seed) not in self.runs:
            raise ValueError(
                f"variant={variant!r}, seed={seed!r}: there are the variants {self.names}, seeds {self._spec['seeds']}"
            )
        if (step := self.diverged_at(variant, seed)) is not None:
            raise ValueError(
                f"the run of {variant!r}, seed {seed}, diverged at step {step}, so there is no state at its end"
            )
        if not self.is_complete(variant, seed):
            raise ValueError(f"the run of {variant!r}, seed {seed}, has not ended: call run() first")
        segment = self.segments_of(variant, seed)[-1]
        if not (segment.state / "relay").exists():
            raise ValueError(
                f"the state at the end of the run of {variant!r}, seed {seed}, was not kept: train it with keep_models=True in "
                "another folder="
            )
        with preserve_random_state():
            return open_relay(self._plan.make_relay, seed, self._plan.variants[variant].factors, segment)[0]

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Mark the study as running in a block.

        Raises:
            RuntimeError: it runs on another thread.
        """
        if self.is_running:
            raise RuntimeError("the study is running: wait for it, or stop() it first")
        self.is_running, self._stops = True, False
        try:
            yield
        finally:
            self.is_running = False

    def _report(self, report: Callable[[str], object], line: str) -> None:
        self.progress_line = line
        report(line)

    def _roots(self) -> dict[str, list[str]]:
        """Return the variants of the first segments, by name."""
        roots: dict[str, list[str]] = {}
        for seed in self._spec["seeds"]:
            for name, variant in self._spec["variants"].items():
                roots.setdefault(f"s{seed}-g{variant['group']}", []).append(name)
        return roots

    # -- description ---------------------------------------------------------------------------------------------------

    def _describe_variants(self) -> dict[str, Any]:
        """Return the variants as JSON, each with the number of its group: those with the same factors begin alike."""
        groups: list[dict[str, Any]] = []
        described = {}
        for name, variant in self._plan.variants.items():
            factors = dict(variant.factors)
            if factors not in groups:
                groups.append(factors)
            described[name] = {**variant.describe(), "group": groups.index(factors)}
        return described

    def _describe_code(self) -> dict[str, Any]:
        """Return fingerprints of the user's functions and objects, as JSON."""
        shared = {name: getattr(self._plan, name) for name in ("make_relay", "batches")}
        variants = {
            name: (getattr(one.schedule, "function", one.schedule), one.factors)
            for name, one in self._plan.variants.items()
        }
        return {
            "python": PYTHON,
            "shared": {name: fingerprint(value, name) for name, value in shared.items()},
            "variants": {
                name: {**fingerprint(recipe, "schedule"), **fingerprint(factors, "factors")}
                for name, (recipe, factors) in variants.items()
            },
        }

    def _check_code(self) -> None:
        """Refuse functions and objects that have changed since a step of theirs was recorded, if the same Python wrote them."""
        before, now = (read_json(self.folder / "study.json") or {}).get("code"), self._spec["code"]
        if before is None or before["python"] != now["python"]:
            return
        recorded = RecordedStudy(self.folder)
        trained = {name for name, seed in recorded.runs if recorded.last_counts(name, seed).step}
        changes = [
            *(describe_change(before["shared"][name], now["shared"][name]) for name in now["shared"] if trained),
            *(
                f"variant {name!r}: {change}"
                for name in now["variants"]
                if name in trained and (change := describe_change(before["variants"][name], now["variants"][name]))
            ),
        ]
        if found := [change for change in changes if change]:
            raise ValueError(
                f"{self.folder} holds runs of other code. {'; '.join(found)}. Pass another folder= to train again, restore the "
                "code, or keep the steps that are trained: run(accept_changes=True), on the command line --accept-changes"
            )

    def _check_folder(self) -> None:
        before = read_json(self.folder / "study.json")
        if before is None:
            return
        for name in ("schema", "version", *ALWAYS_EQUAL):
            old, new = before.get(name), self._spec[name]
            if old != new:
                if isinstance(old, dict):  # the first variant that differs
                    name, old, new = next(
                        (key, old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)
                    )
                raise ValueError(
                    f"{self.folder} holds another study: {name} was {old!r} and is {new!r}; pass another folder=, or restore "
                    "the argument to go on. Only seeds may change"
                )


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder for one process; the lock of a process that has ended does not count.

    Raises:
        RuntimeError: another process runs the study.
    """
    path = folder / "running"
    owner = path.read_text() if path.exists() else ""
    if owner.isdigit() and int(owner) != os.getpid() and _is_alive(int(owner)):
        raise RuntimeError(
            f"process {owner} runs the study in {folder}: wait for it, or end it and run again; remove {path} if that "
            "process is another program"
        )
    path.write_text(str(os.getpid()))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _check_budget(steps: int | None, flop: float | None) -> Budget:
    if (steps is None) == (flop is None):
        raise ValueError(f"steps={steps!r}, flop={flop!r}: pass one of them, as steps=900 or flop=1e12")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ValueError(f"steps={steps!r}: pass a positive integer")
    if flop is not None and not flop > 0:
        raise ValueError(f"flop={flop!r}: pass a positive number of floating-point operations, as 1e12")
    return Budget(steps, flop)


def _check_seeds(seeds: Any) -> list[int]:
    if isinstance(seeds, int):
        raise ValueError(f"seeds={seeds!r}: pass range({seeds}) for {seeds} seeds, or [{seeds}] for the seed {seeds}")
    found = [*seeds] if isinstance(seeds, Sequence) else [seeds]
    if not found or not all(isinstance(seed, int) and seed >= 0 for seed in found) or len({*found}) < len(found):
        raise ValueError(f"seeds={seeds!r}: pass different integers of at least 0, as range(3)")
    return found


def _check_held_out(held_out: Any) -> list[Any]:
    if isinstance(held_out, dict | torch.Tensor | str) or not isinstance(held_out, Sequence):
        raise TypeError(f"held_out is a {type(held_out).__name__}: pass a list of batches, as [batch]")
    return [*held_out]


def digest(batches: Sequence[Any]) -> str:
    """Return a text that differs for different batches; empty for none."""
    found = hashlib.sha256()
    for leaf in leaves_in([*batches]):
        if isinstance(leaf, torch.Tensor):
            found.update(f"{leaf.dtype} {[*leaf.shape]}".encode())
            found.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return f"{len(batches)} batches, {found.hexdigest()[:16]}" if batches else ""


def _default_every(steps: int | None) -> int:
    return 25 if steps is None else max(1, steps // MEASUREMENTS)
