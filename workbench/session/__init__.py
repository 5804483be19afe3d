"""Training in a thread, snapshots of it, and the words of edits; no widgets.

May import `readings`.
Begin reading at `session.py`, `snapshot.py`.
"""

from workbench.session.batches import Batches as Batches
from workbench.session.batches import BatchSource as BatchSource
from workbench.session.branch_history import Pasts as Pasts
from workbench.session.edit_form import END as END
from workbench.session.edit_form import NEEDS_CODE as NEEDS_CODE
from workbench.session.edit_form import PREVIOUS as PREVIOUS
from workbench.session.edit_form import QUESTIONS as QUESTIONS
from workbench.session.edit_form import foresee as foresee
from workbench.session.edit_form import make_edit as make_edit
from workbench.session.edit_words import edit_words as edit_words
from workbench.session.edit_words import entry_words as entry_words
from workbench.session.facts import LayerFacts as LayerFacts
from workbench.session.flop import FORMULA as FORMULA
from workbench.session.journal_state import turns_of as turns_of
from workbench.session.judgement import NOT_MEASURED as NOT_MEASURED
from workbench.session.judgement import PENDING as PENDING
from workbench.session.judgement import Judged as Judged
from workbench.session.judgement import Measured as Measured
from workbench.session.judgement import change_words as change_words
from workbench.session.judgement import judged_words as judged_words
from workbench.session.layer_edits import code_of as code_of
from workbench.session.layer_edits import edits_of as edits_of
from workbench.session.loggers import Logger as Logger
from workbench.session.loggers import TensorBoard as TensorBoard
from workbench.session.probe import Given as Given
from workbench.session.race_values import Race as Race
from workbench.session.race_values import Racer as Racer
from workbench.session.rates import Scheduler as Scheduler
from workbench.session.rows import snapshot_of as snapshot_of
from workbench.session.rows import step_row as step_row
from workbench.session.run import Run as Run
from workbench.session.run import checked_steps as checked_steps
from workbench.session.script import apply_code as apply_code
from workbench.session.session import Session as Session
from workbench.session.shown_step import ShownStep as ShownStep
from workbench.session.snapshot import Snapshot as Snapshot
from workbench.session.source import Source as Source
from workbench.session.source import Steered as Steered
from workbench.session.statistics import FIGURES as FIGURES
from workbench.session.statistics import Statistics as Statistics
from workbench.session.statistics import StatisticsLog as StatisticsLog
from workbench.session.statistics import Track as Track
from workbench.session.steering import TRAIN as TRAIN
from workbench.session.steering import Steering as Steering
from workbench.session.trial import TRIED as TRIED
from workbench.session.trial import How as How
from workbench.session.trial import Moment as Moment
from workbench.session.trial import Trial as Trial
from workbench.session.values import Change as Change
from workbench.session.values import During as During
from workbench.session.values import Failure as Failure
from workbench.session.values import LayerRow as LayerRow
from workbench.session.values import ProbeRow as ProbeRow
from workbench.session.values import Progress as Progress
from workbench.session.values import Remedy as Remedy
from workbench.session.values import StepRow as StepRow
from workbench.session.worker import Command as Command
from workbench.session.worker import Worker as Worker
