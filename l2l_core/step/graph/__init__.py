"""Autograd graph boundaries, guarded tensors and the order of buffer accesses.

May import `eps.blocks`, `model`.
Begin reading at `boundary.py`, `guarded_tensor.py`.
"""

from l2l_core.step.graph.boundary import BoundaryGradient as BoundaryGradient
from l2l_core.step.graph.boundary import Root as Root
from l2l_core.step.graph.boundary import Segment as Segment
from l2l_core.step.graph.boundary import Subgraph as Subgraph
from l2l_core.step.graph.boundary import detach_in_place as detach_in_place
from l2l_core.step.graph.boundary import detach_to as detach_to
from l2l_core.step.graph.boundary import is_segment_input as is_segment_input
from l2l_core.step.graph.boundary import reentrant_message as reentrant_message
from l2l_core.step.graph.boundary import run_backward as run_backward
from l2l_core.step.graph.boundary import sequence_number as sequence_number
from l2l_core.step.graph.boundary import take_gradients as take_gradients
from l2l_core.step.graph.boundary import walk_graph as walk_graph
from l2l_core.step.graph.buffer_order import BufferOrder as BufferOrder
from l2l_core.step.graph.buffer_order import OutsideOrder as OutsideOrder
from l2l_core.step.graph.buffer_order import written_by as written_by
from l2l_core.step.graph.guarded_tensor import GuardedTensor as GuardedTensor
from l2l_core.step.graph.guarded_tensor import TensorGuard as TensorGuard
from l2l_core.step.graph.guarded_tensor import unguarded as unguarded
