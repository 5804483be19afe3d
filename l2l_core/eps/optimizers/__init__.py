"""Block-by-block updates with any torch optimizer: parts of it, settings, state, and a trial of their equality.

May import `eps.blocks`, `model`. Begin reading at `factory.py`, `partial_optimizer.py`.

Where an optimizer is refused, or what is done to it:

optimizers/factory.py                parameters that are not the model's; LBFGS, SparseAdam, two gradients per step
optimizers/optimizer_conformance.py  a trial on a few parameters: what couples layers, draws random numbers, has a hidden state
optimizers/partial_optimizer.py      step hooks, a replaced `step`, and `step()` where nothing has a gradient
optimizers/wrapped_optimizer.py      wrappers of other libraries; those of accelerate and Fabric are taken off
optimizers/optimizer_list.py         lists of optimizers: parameters given twice, filters that accept none, groups for the list
optimizers/optimizer_settings.py     settings that a step changes otherwise for one layer than for another
eps/masters.py                       groups that were changed between steps
eps/updater.py                       a parameter whose first gradient is in a later step
eps/blocks/used_gradients.py         reading `param.grad` after a step
batches/loss_modules.py              gradient scalers in the loss

Shelves, edits and trainers have refusals too: `shelf/`, `edits/`, `integrations/`.
"""

from l2l_core.eps.optimizers.factory import OptimizerFactory as OptimizerFactory
from l2l_core.eps.optimizers.factory import make_optimizer as make_optimizer
from l2l_core.eps.optimizers.factory import rounds_weights as rounds_weights
from l2l_core.eps.optimizers.group_order import GroupOrder as GroupOrder
from l2l_core.eps.optimizers.group_order import ParameterIndex as ParameterIndex
from l2l_core.eps.optimizers.optimizer_conformance import Findings as Findings
from l2l_core.eps.optimizers.optimizer_list import ListEntry as ListEntry
from l2l_core.eps.optimizers.optimizer_list import OptimizerList as OptimizerList
from l2l_core.eps.optimizers.optimizer_list import members_of as members_of
from l2l_core.eps.optimizers.optimizer_list import with_members as with_members
from l2l_core.eps.optimizers.optimizer_settings import OptimizerSettings as OptimizerSettings
from l2l_core.eps.optimizers.optimizer_settings import SettingChanges as SettingChanges
from l2l_core.eps.optimizers.optimizer_settings import apply_changes as apply_changes
from l2l_core.eps.optimizers.optimizer_settings import clone_state as clone_state
from l2l_core.eps.optimizers.optimizer_settings import differing_settings as differing_settings
from l2l_core.eps.optimizers.optimizer_settings import differing_state as differing_state
from l2l_core.eps.optimizers.optimizer_settings import is_same as is_same
from l2l_core.eps.optimizers.optimizer_settings import load_settings as load_settings
from l2l_core.eps.optimizers.optimizer_settings import merge_changes as merge_changes
from l2l_core.eps.optimizers.optimizer_settings import settings_of as settings_of
from l2l_core.eps.optimizers.optimizer_settings import settings_to_save as settings_to_save
from l2l_core.eps.optimizers.optimizer_settings import snapshot_optimizer as snapshot_optimizer
from l2l_core.eps.optimizers.optimizer_settings import state_bytes as state_bytes
from l2l_core.eps.optimizers.optimizer_settings import tensors_of as tensors_of
from l2l_core.eps.optimizers.optimizer_settings import user_objects_of as user_objects_of
from l2l_core.eps.optimizers.partial_optimizer import StepGuard as StepGuard
from l2l_core.eps.optimizers.partial_optimizer import call_after as call_after
from l2l_core.eps.optimizers.partial_optimizer import call_before as call_before
from l2l_core.eps.optimizers.partial_optimizer import call_torchs as call_torchs
from l2l_core.eps.optimizers.partial_optimizer import check_hooks as check_hooks
from l2l_core.eps.optimizers.partial_optimizer import check_own_step as check_own_step
from l2l_core.eps.optimizers.partial_optimizer import clone_deep as clone_deep
from l2l_core.eps.optimizers.partial_optimizer import clone_shallow as clone_shallow
from l2l_core.eps.optimizers.partial_optimizer import hooks_take_turns as hooks_take_turns
from l2l_core.eps.optimizers.partial_optimizer import refuse_other_params as refuse_other_params
from l2l_core.eps.optimizers.partial_optimizer import replace_params as replace_params
from l2l_core.eps.optimizers.partial_optimizer import replaced_step as replaced_step
from l2l_core.eps.optimizers.partial_optimizer import restrict_optimizer as restrict_optimizer
from l2l_core.eps.optimizers.partial_optimizer import step_part as step_part
from l2l_core.eps.optimizers.partial_optimizer import update_part as update_part
from l2l_core.eps.optimizers.partial_optimizer import user_hooks as user_hooks
from l2l_core.eps.optimizers.partial_optimizer import without_step_hooks as without_step_hooks
from l2l_core.eps.optimizers.wrapped_optimizer import unwrap_optimizer as unwrap_optimizer
