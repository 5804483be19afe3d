"""Run of a study from a file: `python -m workbench study`."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

from workbench.study import RecordedStudy, Study


def main(path: Path, out: Path | None = None) -> int:
    """Run or resume the study of a Python file; return 0, 2 if there is none, or 130 if interrupted.

    For the folder of a study, only print its table.
    """
    if path.is_dir():
        return _print_table(path, out)
    if not path.is_file():
        print(f"{path} does not exist: pass a Python file that defines `study`", file=sys.stderr)
        return 2
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does
    study = runpy.run_path(str(path), run_name="__study__").get("study")
    if not isinstance(study, Study):
        print(f"{path} defines no `study`: add study = workbench.Study(make_relay, {{...}}, ...)", file=sys.stderr)
        return 2
    try:
        study.run(report=partial(print, flush=True))
    except KeyboardInterrupt:
        print("interrupted: the same command resumes the study", file=sys.stderr)
        return 130
    print()
    return _print_table(study.folder, out)


def _print_table(folder: Path, out: Path | None) -> int:
    try:
        study = RecordedStudy(folder)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(study.table())
    if out is not None:
        print(f"Figure: {study.save(out)}")
    return 0
