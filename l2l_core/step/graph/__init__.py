"""Tensors of micro-batches that take turns: where their graph is cut, and who may touch them when.

May import `eps.blocks`, `model`.
Begin reading at `cut.py`, `aside.py`.
"""

from l2l_core.step.graph.aside import Aside as Aside
from l2l_core.step.graph.aside import Asides as Asides
from l2l_core.step.graph.aside import unasked as unasked
from l2l_core.step.graph.buffer_order import BufferOrder as BufferOrder
from l2l_core.step.graph.buffer_order import written_by as written_by
from l2l_core.step.graph.cut import Reach as Reach
from l2l_core.step.graph.cut import Root as Root
from l2l_core.step.graph.cut import Segment as Segment
from l2l_core.step.graph.cut import Sink as Sink
from l2l_core.step.graph.cut import Start as Start
from l2l_core.step.graph.cut import edge_of as edge_of
from l2l_core.step.graph.cut import enter as enter
from l2l_core.step.graph.cut import enter_in_place as enter_in_place
from l2l_core.step.graph.cut import is_entry as is_entry
from l2l_core.step.graph.cut import is_leaf as is_leaf
from l2l_core.step.graph.cut import nested as nested
from l2l_core.step.graph.cut import reach as reach
from l2l_core.step.graph.cut import run_backward as run_backward
from l2l_core.step.graph.cut import sequence_number as sequence_number
from l2l_core.step.graph.cut import start_of as start_of
from l2l_core.step.graph.cut import taken as taken
from l2l_core.step.graph.cut import uses_of as uses_of
