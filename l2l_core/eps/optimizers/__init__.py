"""Updates of any torch optimizer block by block: parts of it, its settings and state, and the check that it works.

May import `eps.blocks`, `surgery`, `model`.
Begin reading at `optimizers.py`, `parts.py`.
"""

from l2l_core.eps.optimizers.group_order import GroupOrder as GroupOrder
from l2l_core.eps.optimizers.group_order import Places as Places
from l2l_core.eps.optimizers.optimizer_conformance import Findings as Findings
from l2l_core.eps.optimizers.optimizers import OptimizerFactory as OptimizerFactory
from l2l_core.eps.optimizers.optimizers import make_optimizer as make_optimizer
from l2l_core.eps.optimizers.optimizers import rounds_weights as rounds_weights
from l2l_core.eps.optimizers.parts import copy_over as copy_over
from l2l_core.eps.optimizers.parts import over as over
from l2l_core.eps.optimizers.parts import replace_params as replace_params
from l2l_core.eps.optimizers.parts import slice_of as slice_of
from l2l_core.eps.optimizers.parts import update_part as update_part
from l2l_core.eps.optimizers.settings import Changes as Changes
from l2l_core.eps.optimizers.settings import Settings as Settings
from l2l_core.eps.optimizers.settings import differing_settings as differing_settings
from l2l_core.eps.optimizers.settings import is_same as is_same
from l2l_core.eps.optimizers.settings import merge as merge
from l2l_core.eps.optimizers.settings import put as put
from l2l_core.eps.optimizers.settings import settings_of as settings_of
from l2l_core.eps.optimizers.settings import settle as settle
from l2l_core.eps.optimizers.settings import to_save as to_save
from l2l_core.eps.optimizers.states import Tally as Tally
from l2l_core.eps.optimizers.states import clone_state as clone_state
from l2l_core.eps.optimizers.states import differing as differing
from l2l_core.eps.optimizers.states import state_bytes as state_bytes
from l2l_core.eps.optimizers.states import tensors_of as tensors_of
from l2l_core.eps.optimizers.step_hooks import call_after as call_after
from l2l_core.eps.optimizers.step_hooks import call_before as call_before
from l2l_core.eps.optimizers.step_hooks import call_torchs as call_torchs
from l2l_core.eps.optimizers.step_hooks import check_hooks as check_hooks
from l2l_core.eps.optimizers.step_hooks import silent as silent
from l2l_core.eps.optimizers.step_hooks import step_alone as step_alone
from l2l_core.eps.optimizers.step_hooks import user_hooks as user_hooks
