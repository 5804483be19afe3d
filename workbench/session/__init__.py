"""Training in a thread, snapshots of it, and the words of edits; no widgets.

May import `readings`.
Begin reading at `session.py`, `snapshot.py`.
"""

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
from workbench.session.journal_state import turns_of as turns_of
from workbench.session.loggers import Logger as Logger
from workbench.session.rows import snapshot_of as snapshot_of
from workbench.session.rows import step_row as step_row
from workbench.session.session import Session as Session
from workbench.session.snapshot import Snapshot as Snapshot
from workbench.session.source import Source as Source
from workbench.session.statistics import FIGURES as FIGURES
from workbench.session.statistics import Statistics as Statistics
from workbench.session.statistics import Track as Track
from workbench.session.trainer import Scheduler as Scheduler
from workbench.session.values import Change as Change
from workbench.session.values import Failure as Failure
from workbench.session.values import LayerRow as LayerRow
from workbench.session.values import StepRow as StepRow
