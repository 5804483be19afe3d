"""One micro-batch: its paused forward, its calls of layers, the shell code between them.

May import `step.traffic`, `step.graph`, `surgery`, `eps.blocks`, `devices`, `model`, `trace`.
Begin reading at `forward.py`, `call.py`, `crossing.py`.
"""

from l2l_core.step.micro_batch.attributes import Attributes as Attributes
from l2l_core.step.micro_batch.call import Call as Call
from l2l_core.step.micro_batch.crossing import Crossing as Crossing
from l2l_core.step.micro_batch.crossing import functions_seen as functions_seen
from l2l_core.step.micro_batch.forward import Forward as Forward
from l2l_core.step.micro_batch.forward import Shadows as Shadows
from l2l_core.step.micro_batch.hooks import SideOutputs as SideOutputs
from l2l_core.step.micro_batch.hooks import UserHooks as UserHooks
from l2l_core.step.micro_batch.influence import Influence as Influence
from l2l_core.step.micro_batch.influence import hidden_states as hidden_states
from l2l_core.step.micro_batch.keepers import KEEP as KEEP
from l2l_core.step.micro_batch.keepers import KEEP_AT_THE_TURN as KEEP_AT_THE_TURN
from l2l_core.step.micro_batch.keepers import RECOMPUTE as RECOMPUTE
from l2l_core.step.micro_batch.keepers import Keeper as Keeper
from l2l_core.step.micro_batch.keepers import all_give_way as all_give_way
from l2l_core.step.micro_batch.shared import Observer as Observer
from l2l_core.step.micro_batch.shared import Pass as Pass
from l2l_core.step.micro_batch.sight import OutOfSight as OutOfSight
from l2l_core.step.micro_batch.trees import flatten as flatten
