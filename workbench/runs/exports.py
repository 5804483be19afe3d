"""The step that is seen, and the run that led to it, as files for other programs: what a page's buttons write.

The formats are those of `Trace`, of the logger for TensorBoard and of the report; here is what a file is called, that none is
ever written over nor left half written, and what to do with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from l2l_core import Trace
from workbench.pictures import failed_trace
from workbench.runs.html_report import write_report, write_session_report
from workbench.runs.recorded_run import RunCursor
from workbench.session import Snapshot, SnapshotSource, TensorBoard


class ExportedFile(NamedTuple):
    """A file or folder that was written.

    Attributes:
        path: where it is.
        what: what is in it, as "step 12 of wide".
        then: what to do with it.
        site: a page that opens it; "" if none is needed.
    """

    path: Path
    description: str
    next_step: str
    viewer_url: str = ""


class ExportTarget(NamedTuple):
    """A program that something can be written for.

    Attributes:
        tip: what is written, for the pointer that rests on its button.
        write: takes a session or a recording, of which it writes what is seen now, and a folder that is there. It raises
            a ValueError where there is nothing to write, an OSError where it cannot be written, and a
            ModuleNotFoundError where a package is missing.
    """

    tip: str
    write: Callable[[SnapshotSource, Path], ExportedFile]


def export(name: str, source: SnapshotSource, folder: str | Path) -> ExportedFile:
    """Write what `EXPORTS` has under this name into a folder, which is made.

    All is written or nothing: what fails half way leaves no file.

    Args:
        name: of `EXPORTS`.
        source: a session, or a recorded run at one of its moments.
        folder: where to.

    Raises:
        ValueError: nothing has run yet, with the remedy.
        OSError: it cannot be written there.
        ModuleNotFoundError: it takes a package that is not installed.
    """
    where, now = Path(folder).expanduser(), source.snapshot()
    if failed_trace(now) is None:
        _shown_step(now)  # raises before a folder is made that would stay empty
    where.mkdir(parents=True, exist_ok=True)
    return EXPORTS[name].write(source, where)


def _shown_step(snapshot: Snapshot) -> Trace:
    if snapshot.last is None:
        raise ValueError("there is no step to write yet: press Run or Step first")
    return snapshot.last


def _write_perfetto(source: SnapshotSource, folder: Path) -> ExportedFile:
    snapshot = source.snapshot()  # one for all of the file: a run goes on meanwhile
    trace = _shown_step(snapshot)
    path = _unused_path(folder, _step_stem(snapshot), ".json.gz")
    with _atomic_path(path, folder) as part:
        trace.to_chrome(part)
    then = 'press "Open trace file"; the file is read in your browser and not uploaded'
    return ExportedFile(path, snapshot.shown_words, then, "https://ui.perfetto.dev")


def _write_memory(source: SnapshotSource, folder: Path) -> ExportedFile:
    snapshot = source.snapshot()
    failed, failure = failed_trace(snapshot), snapshot.failure
    if failed is not None and failure is not None:  # what the view of memory shows then
        trace, what = failed, snapshot.failed_words
        stem = _file_stem(snapshot, failure.branch, f"failed_step_{failure.step}")
    else:
        trace, what, stem = _shown_step(snapshot), snapshot.shown_words, _step_stem(snapshot)
    path = _unused_path(folder, f"{stem}_memory", ".pickle")
    with _atomic_path(path, folder) as part:
        trace.to_memory_snapshot(part)
    then = "drag the file onto that page; device 0 is the device, device 1 the host"
    return ExportedFile(path, what, then, "https://pytorch.org/memory_viz")


def _write_tensorboard(source: SnapshotSource, folder: Path) -> ExportedFile:
    snapshot = source.snapshot()
    _shown_step(snapshot)
    runs = folder / "tensorboard"
    path = _unused_path(runs, _run_stem(snapshot), "")
    with _atomic_path(path, folder) as part:
        logger = TensorBoard(part)
        for row in snapshot.steps:
            logger.log_step(row)
        for change in snapshot.changes:
            logger.log_change(change)
        logger.close()
    return ExportedFile(path, _step_range(snapshot), f'Type in a terminal: tensorboard --logdir "{runs.resolve()}"')


def _write_report(source: SnapshotSource, folder: Path) -> ExportedFile:
    snapshot = source.snapshot()
    _shown_step(snapshot)
    path = _unused_path(folder, f"{_run_stem(snapshot)}_report", ".html")
    with _atomic_path(path, folder) as part:
        if isinstance(source, RunCursor):
            write_report(
                [source.run.truncated(snapshot.number)], part
            )  # what came after the moment that is seen is left out
        else:
            write_session_report(snapshot, part)
    return ExportedFile(path, _step_range(snapshot), "Open it in a browser; it is one page that needs no network")


def _step_range(snapshot: Snapshot) -> str:
    return f"{len(snapshot.steps)} step{'s' if len(snapshot.steps) != 1 else ''}"


def _run_stem(snapshot: Snapshot) -> str:
    """A name for the run so far."""
    return _file_stem(snapshot, snapshot.branch, f"step_{snapshot.step}")


def _step_stem(snapshot: Snapshot) -> str:
    """A name for the step that is shown, which may be one of the branch that this one was forked from."""
    assert snapshot.shown is not None
    return _file_stem(snapshot, snapshot.shown.branch, f"step_{snapshot.shown.number}")


def _file_stem(snapshot: Snapshot, branch: str, step: str) -> str:
    # A branch may have any name, "wide / 2" too.
    return "_".join([re.sub(r"[^\w.-]+", "_", branch), step]) if len(snapshot.branches) > 1 else step


def _unused_path(folder: Path, stem: str, ending: str) -> Path:
    """A path at which nothing is yet: what was written before stays."""
    names = (f"{stem}{f'-{number}' if number > 1 else ''}{ending}" for number in count(1))
    return next(path for name in names if not (path := folder / name).exists())


@contextmanager
def _atomic_path(path: Path, folder: Path) -> Iterator[Path]:
    """A place for what is to lie at a path: it goes there when all is written, and is gone after an error.

    The place is in a folder of its own inside `folder`, so that moving it copies nothing.
    """
    with TemporaryDirectory(prefix=".unfinished-", dir=folder) as own:
        yield (part := Path(own) / path.name)
        path.parent.mkdir(exist_ok=True)  # only now: after an error it would be left empty
        part.rename(path)


EXPORTS: Mapping[str, ExportTarget] = {
    "Perfetto": ExportTarget("Events and bytes of this step as a Chrome trace, for Perfetto", _write_perfetto),
    "Memory viewer": ExportTarget("Bytes of this step as a snapshot, for PyTorch's memory viewer", _write_memory),
    "TensorBoard": ExportTarget("Figures of every step so far, for TensorBoard", _write_tensorboard),
    "Report": ExportTarget("The run so far as one HTML page, with this step in pictures", _write_report),
}
