"""One micro-batch: its suspended forward, its layer calls, and the segments of shell code between them.

May import `step.guards`, `step.traffic`, `step.graph`, `eps.blocks`, `model`.
Begin reading at `suspended_forward.py`, `layer_call.py`, `graph_segmenter.py`.
"""

from l2l_core.step.micro_batch.activation_policy import POLICIES as POLICIES
from l2l_core.step.micro_batch.compiled_regions import CompiledRegionGuard as CompiledRegionGuard
from l2l_core.step.micro_batch.fast_pytree import flatten as flatten
from l2l_core.step.micro_batch.graph_segmenter import GraphSegmenter as GraphSegmenter
from l2l_core.step.micro_batch.graph_segmenter import layer_parameter_message as layer_parameter_message
from l2l_core.step.micro_batch.graph_segmenter import patch_function_apply as patch_function_apply
from l2l_core.step.micro_batch.influence import Influence as Influence
from l2l_core.step.micro_batch.influence import hidden_states as hidden_states
from l2l_core.step.micro_batch.layer_call import LayerCall as LayerCall
from l2l_core.step.micro_batch.layer_call import suspend_all as suspend_all
from l2l_core.step.micro_batch.step_context import CallObserver as CallObserver
from l2l_core.step.micro_batch.step_context import StepContext as StepContext
from l2l_core.step.micro_batch.suspended_forward import SuspendedForward as SuspendedForward
from l2l_core.step.micro_batch.suspended_forward import patch_layers as patch_layers
from l2l_core.step.micro_batch.suspended_forward import suspending_forward as suspending_forward
