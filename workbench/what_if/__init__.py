"""From a question about other settings to an answer and its picture; no widgets.

May import `pictures`, `readings`, `session`.
Begin reading at `question.py`, `what_if.py`.
"""

from workbench.what_if.depth import DepthEdit as DepthEdit
from workbench.what_if.depth import depth_edits as depth_edits
from workbench.what_if.differences import changed_settings as changed_settings
from workbench.what_if.differences import differences as differences
from workbench.what_if.differences import forecast_error as forecast_error
from workbench.what_if.differences import show as show
from workbench.what_if.differences import what_if_table as what_if_table
from workbench.what_if.guess import Guess as Guess
from workbench.what_if.guess import guess as guess
from workbench.what_if.known_steps import KnownSteps as KnownSteps
from workbench.what_if.measured_step import DepthFirstStep as DepthFirstStep
from workbench.what_if.measured_step import MeasuredStep as MeasuredStep
from workbench.what_if.picture import draw_what_if as draw_what_if
from workbench.what_if.picture import row_of as row_of
from workbench.what_if.question import CONFIG as CONFIG
from workbench.what_if.question import Question as Question
from workbench.what_if.what_if import Answer as Answer
from workbench.what_if.what_if import answer as answer
from workbench.what_if.what_if import fitting as fitting
from workbench.what_if.what_if import measured as measured
