"""What may change between two steps, and the way back.

May import `eps`, `surgery`, `devices`, `batches`, `model`, `trace`.
Begin reading at `edit.py`, `editor.py`.
"""

from l2l_core.edits.branches import FIRST as FIRST
from l2l_core.edits.branches import Branch as Branch
from l2l_core.edits.branches import Branches as Branches
from l2l_core.edits.branches import State as State
from l2l_core.edits.branches import Values as Values
from l2l_core.edits.change import Barred as Barred
from l2l_core.edits.change import Change as Change
from l2l_core.edits.delink import Delink as Delink
from l2l_core.edits.depth import Depth as Depth
from l2l_core.edits.depth import dropping_by_influence as dropping_by_influence
from l2l_core.edits.depth import gradual_stacking as gradual_stacking
from l2l_core.edits.depth import growing_by_identity as growing_by_identity
from l2l_core.edits.depth import stacking_by_doubling as stacking_by_doubling
from l2l_core.edits.edit import Drop as Drop
from l2l_core.edits.edit import Duplicate as Duplicate
from l2l_core.edits.edit import Edit as Edit
from l2l_core.edits.edit import Freeze as Freeze
from l2l_core.edits.edit import Insert as Insert
from l2l_core.edits.edit import Interpolate as Interpolate
from l2l_core.edits.edit import Move as Move
from l2l_core.edits.edit import Replace as Replace
from l2l_core.edits.edit import Swap as Swap
from l2l_core.edits.edit import Unfreeze as Unfreeze
from l2l_core.edits.editor import Editor as Editor
from l2l_core.edits.freezing import Freezing as Freezing
from l2l_core.edits.history import Entry as Entry
from l2l_core.edits.history import History as History
from l2l_core.edits.history import Inverse as Inverse
from l2l_core.edits.history import Turn as Turn
from l2l_core.edits.layer_drop import LayerDrop as LayerDrop
from l2l_core.edits.lineup import Built as Built
from l2l_core.edits.lineup import Lineup as Lineup
from l2l_core.edits.optimizer_state import Held as Held
from l2l_core.edits.parked import Parked as Parked
from l2l_core.edits.schedules import Schedule as Schedule
from l2l_core.edits.schedules import Steerable as Steerable
