"""Edits of a model's architecture between two steps, with undo, branches and schedules.

May import `eps`, `eps.optimizers`, `eps.blocks`, `surgery.identity`, `surgery`, `devices`, `batches`, `model`, `trace`,
`config`.
Begin reading at `edit.py`, `editor.py`.
"""

from l2l_core.edits.branches import MAIN_BRANCH as MAIN_BRANCH
from l2l_core.edits.branches import BlockSnapshot as BlockSnapshot
from l2l_core.edits.branches import Branch as Branch
from l2l_core.edits.branches import Branches as Branches
from l2l_core.edits.branches import BranchState as BranchState
from l2l_core.edits.commands import EditCommand as EditCommand
from l2l_core.edits.commands import ImpossibleCommand as ImpossibleCommand
from l2l_core.edits.delink import Delink as Delink
from l2l_core.edits.depth import Depth as Depth
from l2l_core.edits.detached_layers import DetachedLayer as DetachedLayer
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
from l2l_core.edits.history import History as History
from l2l_core.edits.history import InverseEdit as InverseEdit
from l2l_core.edits.history import JournalEntry as JournalEntry
from l2l_core.edits.history import UndoStep as UndoStep
from l2l_core.edits.layer_factory import SampleRun as SampleRun
from l2l_core.edits.layer_registry import LayerRegistry as LayerRegistry
from l2l_core.edits.layer_registry import ModelStructure as ModelStructure
from l2l_core.edits.loops import Looping as Looping
from l2l_core.edits.loops import Loops as Loops
from l2l_core.edits.loops import Unroll as Unroll
from l2l_core.edits.observed_positions import UsedOutputs as UsedOutputs
from l2l_core.edits.optimizer_state import ParameterSnapshot as ParameterSnapshot
from l2l_core.edits.recipes import LOOPED_RECIPES as LOOPED_RECIPES
from l2l_core.edits.recipes import RECIPES as RECIPES
from l2l_core.edits.recipes import Recipe as Recipe
from l2l_core.edits.schedules import Freezing as Freezing
from l2l_core.edits.schedules import SchedulableRelay as SchedulableRelay
from l2l_core.edits.schedules import Schedule as Schedule
from l2l_core.edits.schedules import Schedules as Schedules
from l2l_core.edits.schedules import WarmupStableDecay as WarmupStableDecay
from l2l_core.edits.schedules import refuse_own_step as refuse_own_step
from l2l_core.edits.skip_schedules import ActiveLayers as ActiveLayers
from l2l_core.edits.skip_schedules import LayerDrop as LayerDrop
from l2l_core.edits.stand_ins import LayerReturn as LayerReturn
from l2l_core.edits.stand_ins import Place as Place
from l2l_core.edits.stand_ins import ReturnForm as ReturnForm
from l2l_core.edits.stand_ins import StandIn as StandIn
from l2l_core.edits.stand_ins import tensor_arguments as tensor_arguments
