"""Export the shown step or the run so far to files for other programs.

The formats are those of `Trace`, of the TensorBoard logger and of the report. Files are written atomically and never
overwritten.
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
        path: location.
        description: contents, for example "step 12 of wide".
        next_step: instruction for opening it.
        viewer_url: address of the viewer; "" if none is needed.
    """

    path: Path
    description: str
    next_step: str
    viewer_url: str = ""


class ExportTarget(NamedTuple):
    """An export format.

    Attributes:
        tip: tooltip of its button.
        write: writes the current snapshot of a source into an existing folder. Raises ValueError if no step has run, OSError
            if the file cannot be written, ModuleNotFoundError if a package is missing.
    """

    tip: str
    write: Callable[[SnapshotSource, Path], ExportedFile]


def export(name: str, source: SnapshotSource, folder: str | Path) -> ExportedFile:
    """Export a session to a folder, which is created. A failed export leaves no file.

    Args:
        name: key of `EXPORTS`.
        source: a session, or a recorded run at one of its moments.
        folder: destination.

    Raises:
        ValueError: no step has run yet.
        OSError: the file cannot be written.
        ModuleNotFoundError: a required package is not installed.
    """
    destination, now = Path(folder).expanduser(), source.snapshot()
    if failed_trace(now) is None:
        _shown_step(now)  # raises before an empty folder is created
    destination.mkdir(parents=True, exist_ok=True)
    return EXPORTS[name].write(source, destination)


def _shown_step(snapshot: Snapshot) -> Trace:
    if snapshot.last is None:
        raise ValueError("there is no step to write yet: press Run or Step first")
    return snapshot.last


def _write_perfetto(source: SnapshotSource, folder: Path) -> ExportedFile:
    snapshot = source.snapshot()  # only once, because training may continue meanwhile
    trace = _shown_step(snapshot)
    path = _unused_path(folder, _step_stem(snapshot), ".json.gz")
    with _atomic_path(path, folder) as part:
        trace.to_chrome(part)
    instruction = 'press "Open trace file"; the file is read in your browser and not uploaded'
    return ExportedFile(path, snapshot.shown_words, instruction, "https://ui.perfetto.dev")


def _write_memory(source: SnapshotSource, folder: Path) -> ExportedFile:
    snapshot = source.snapshot()
    failed, failure = failed_trace(snapshot), snapshot.failure
    if failed is not None and failure is not None:  # as in the memory view
        trace, description = failed, snapshot.failed_words
        stem = _file_stem(snapshot, failure.branch, f"failed_step_{failure.step}")
    else:
        trace, description, stem = _shown_step(snapshot), snapshot.shown_words, _step_stem(snapshot)
    path = _unused_path(folder, f"{stem}_memory", ".pickle")
    with _atomic_path(path, folder) as part:
        trace.to_memory_snapshot(part)
    instruction = "drag the file onto that page; device 0 is the device, device 1 the host"
    return ExportedFile(path, description, instruction, "https://pytorch.org/memory_viz")


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
        for measured in snapshot.held_out:
            logger.log_held_out(measured)
        logger.close()
    return ExportedFile(path, _step_range(snapshot), f'Type in a terminal: tensorboard --logdir "{runs.resolve()}"')


def _write_report(source: SnapshotSource, folder: Path) -> ExportedFile:
    snapshot = source.snapshot()
    _shown_step(snapshot)
    path = _unused_path(folder, f"{_run_stem(snapshot)}_report", ".html")
    with _atomic_path(path, folder) as part:
        if isinstance(source, RunCursor):
            write_report([source.run.truncated(snapshot.number)], part)  # without later moments
        else:
            write_session_report(snapshot, part)
    return ExportedFile(path, _step_range(snapshot), "Open it in a browser; it is one page that needs no network")


def _step_range(snapshot: Snapshot) -> str:
    return f"{len(snapshot.steps)} step{'s' if len(snapshot.steps) != 1 else ''}"


def _run_stem(snapshot: Snapshot) -> str:
    """Return a file stem for the run so far."""
    return _file_stem(snapshot, snapshot.branch, f"step_{snapshot.step}")


def _step_stem(snapshot: Snapshot) -> str:
    """Return a file stem for the shown step, which may belong to the parent of the current branch."""
    assert snapshot.shown is not None
    return _file_stem(snapshot, snapshot.shown.branch, f"step_{snapshot.shown.number}")


def _file_stem(snapshot: Snapshot, branch: str, step: str) -> str:
    # Branch names may contain any character, for example "wide / 2".
    return "_".join([re.sub(r"[^\w.-]+", "_", branch), step]) if len(snapshot.branches) > 1 else step


def _unused_path(folder: Path, stem: str, ending: str) -> Path:
    """Return the first path of the stem, numbered if necessary, that does not exist."""
    names = (f"{stem}{f'-{number}' if number > 1 else ''}{ending}" for number in count(1))
    return next(path for name in names if not (path := folder / name).exists())


@contextmanager
def _atomic_path(path: Path, folder: Path) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` on success and deleted on an error.

    The temporary folder is inside `folder`, so that the rename does not copy.
    """
    with TemporaryDirectory(prefix=".unfinished-", dir=folder) as temporary:
        yield (part := Path(temporary) / path.name)
        path.parent.mkdir(exist_ok=True)  # not earlier: an error would leave it empty
        part.rename(path)


EXPORTS: Mapping[str, ExportTarget] = {
    "Perfetto": ExportTarget("Events and bytes of this step as a Chrome trace, for Perfetto", _write_perfetto),
    "Memory viewer": ExportTarget("Bytes of this step as a snapshot, for PyTorch's memory viewer", _write_memory),
    "TensorBoard": ExportTarget("Figures of every step so far, for TensorBoard", _write_tensorboard),
    "Report": ExportTarget("The run so far as one HTML page, with this step in pictures", _write_report),
}
