"""A session on disk: recorded, read, reported, compared.

May import `pictures`, `readings`, `session`.
Begin reading at `recorder.py`, `load.py`, `recorded.py`.
"""

from workbench.runs.comparison import Comparison as Comparison
from workbench.runs.comparison import Named as Named
from workbench.runs.comparison import compare_runs as compare_runs
from workbench.runs.exports import EXPORTS as EXPORTS
from workbench.runs.exports import Exported as Exported
from workbench.runs.exports import export as export
from workbench.runs.load import load_run as load_run
from workbench.runs.look_lines import Look as Look
from workbench.runs.recorded import RecordedRun as RecordedRun
from workbench.runs.recorded import Recording as Recording
from workbench.runs.recorded import name_runs as name_runs
from workbench.runs.recorder import Recorder as Recorder
from workbench.runs.report import write_report as write_report
from workbench.runs.report import write_session_report as write_session_report
