"""Recorded runs of a session: files, replay values, reports, comparisons and exports.

May import `pictures`, `readings`, `session`.
Begin reading at `recorder.py`, `run_loader.py`, `recorded_run.py`.
"""

from workbench.runs.exports import EXPORTS as EXPORTS
from workbench.runs.exports import ExportedFile as ExportedFile
from workbench.runs.exports import export as export
from workbench.runs.html_report import write_report as write_report
from workbench.runs.html_report import write_session_report as write_session_report
from workbench.runs.look_lines import RecordedLook as RecordedLook
from workbench.runs.player_script import write_player as write_player
from workbench.runs.recorded_run import RecordedRun as RecordedRun
from workbench.runs.recorded_run import RunCursor as RunCursor
from workbench.runs.recorded_run import name_runs as name_runs
from workbench.runs.recorder import Recorder as Recorder
from workbench.runs.run_comparison import Comparison as Comparison
from workbench.runs.run_comparison import NamedRun as NamedRun
from workbench.runs.run_comparison import compare_runs as compare_runs
from workbench.runs.run_loader import load_run as load_run
