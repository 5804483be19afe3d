"""Where weights, gradients and optimizer state live, and who updates them; knows no order of layers.

May import `eps.blocks`, `eps.optimizers`, `devices`, `model`, `trace`.
Begin reading at `store.py`.
"""

from l2l_core.eps.casts import Wires as Wires
from l2l_core.eps.scratch import DryStore as DryStore
from l2l_core.eps.store import LayerStore as LayerStore
from l2l_core.eps.store import NonFiniteError as NonFiniteError
from l2l_core.eps.store import Side as Side
from l2l_core.eps.store import TornStep as TornStep
