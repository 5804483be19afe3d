"""Run of a study from a file: `python -m workbench study`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from workbench.study import RecordedStudy, Study


def main(paths: Sequence[Path], out: Path | None = None, accept_changes: bool = False) -> int:
    """Run or resume the study of a Python file; return 0, 2 if there is none, or 130 if interrupted.

    For one or more folders of studies, only print the table of them together.
    """
    if len(paths) > 1 or paths[0].is_dir():
        return _print_table(paths, out)
    path = paths[0]
    if not path.is_file():
        print(f"{path} does not exist: pass a Python file that defines `study`", file=sys.stderr)
        return 2
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does
    study = runpy.run_path(str(path), run_name="__study__").get("study")
    if not isinstance(study, Study):
        print(f"{path} defines no `study`: add study = workbench.Study(make_relay, {{...}}, ...)", file=sys.stderr)
        return 2
    try:
        study.run(report=partial(print, flush=True), accept_changes=accept_changes)
    except KeyboardInterrupt:
        print("interrupted: the same command resumes the study", file=sys.stderr)
        return 130
    print()
    return _print_table([study.folder], out)


def _print_table(folders: Sequence[Path], out: Path | None) -> int:
    try:
        study = RecordedStudy(*folders)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(study.table())
    if out is not None:
        print(f"Figure: {study.save(out)}")
    return 0
