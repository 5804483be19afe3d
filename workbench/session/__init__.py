"""Sessions: training in a thread, snapshots of it, and descriptions of edits; no widgets.

May import `readings`.
Begin reading at `session.py`, `snapshot.py`.
"""

from workbench.session.batches import Batches as Batches
from workbench.session.batches import BatchSource as BatchSource
from workbench.session.branch_history import BranchHistories as BranchHistories
from workbench.session.command_thread import Command as Command
from workbench.session.edit_form import END as END
from workbench.session.edit_form import FORM_FIELDS as FORM_FIELDS
from workbench.session.edit_form import NEEDS_CODE as NEEDS_CODE
from workbench.session.edit_form import PREVIOUS as PREVIOUS
from workbench.session.edit_form import make_edit as make_edit
from workbench.session.edit_form import preview_edit as preview_edit
from workbench.session.edit_text import describe_edit as describe_edit
from workbench.session.edit_text import describe_entry as describe_entry
from workbench.session.layer_edits import edit_code as edit_code
from workbench.session.layer_edits import edits_for_layer as edits_for_layer
from workbench.session.layer_facts import LayerFacts as LayerFacts
from workbench.session.layer_trial import TRIAL_EDITS as TRIAL_EDITS
from workbench.session.layer_trial import LayerTrial as LayerTrial
from workbench.session.layer_trial import StateVersion as StateVersion
from workbench.session.layer_trial import TrialKind as TrialKind
from workbench.session.loggers import Logger as Logger
from workbench.session.loggers import TensorBoard as TensorBoard
from workbench.session.lr_scheduler import Scheduler as Scheduler
from workbench.session.probe import ProbeBatches as ProbeBatches
from workbench.session.probe_verdict import NOT_MEASURED as NOT_MEASURED
from workbench.session.probe_verdict import PENDING as PENDING
from workbench.session.probe_verdict import LossChange as LossChange
from workbench.session.probe_verdict import ProbeLosses as ProbeLosses
from workbench.session.probe_verdict import describe_change as describe_change
from workbench.session.probe_verdict import describe_loss_change as describe_loss_change
from workbench.session.race_result import Race as Race
from workbench.session.race_result import Racer as Racer
from workbench.session.run_controller import TRAIN as TRAIN
from workbench.session.run_controller import RunController as RunController
from workbench.session.script import apply_code as apply_code
from workbench.session.session import Session as Session
from workbench.session.settings_search import SearchCancelled as SearchCancelled
from workbench.session.settings_search import SearchRow as SearchRow
from workbench.session.snapshot import ControllableSource as ControllableSource
from workbench.session.snapshot import Snapshot as Snapshot
from workbench.session.snapshot import SnapshotSource as SnapshotSource
from workbench.session.snapshot_rows import snapshot_of as snapshot_of
from workbench.session.snapshot_rows import step_row as step_row
from workbench.session.snapshot_values import Activity as Activity
from workbench.session.snapshot_values import Change as Change
from workbench.session.snapshot_values import Failure as Failure
from workbench.session.snapshot_values import LayerRow as LayerRow
from workbench.session.snapshot_values import ProbeRow as ProbeRow
from workbench.session.snapshot_values import Progress as Progress
from workbench.session.snapshot_values import Remedy as Remedy
from workbench.session.snapshot_values import ShownStep as ShownStep
from workbench.session.snapshot_values import StepRow as StepRow
from workbench.session.snapshot_values import journal_state_of as journal_state_of
from workbench.session.statistics import FIGURES as FIGURES
from workbench.session.statistics import LayerTrack as LayerTrack
from workbench.session.statistics import Statistics as Statistics
from workbench.session.statistics import StatisticsLog as StatisticsLog
from workbench.session.step_estimates import FLOP_FORMULA as FLOP_FORMULA
