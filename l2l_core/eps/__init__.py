"""Where weights, gradients and optimizer state live, and who updates them; knows no order of layers.

May import `eps.blocks`, `eps.optimizers`, `devices`, `model`, `rounding`, `trace`.
Begin reading at `store.py`; `updates.py`, `places.py`, `reducer.py`, `custody.py` and `wire.py` say what could be done otherwise.
"""

from l2l_core.eps.at_hand import Contents as Contents
from l2l_core.eps.at_hand import InOptimizer as InOptimizer
from l2l_core.eps.at_hand import Notes as Notes
from l2l_core.eps.clock import Clock as Clock
from l2l_core.eps.custody import Custody as Custody
from l2l_core.eps.custody import Known as Known
from l2l_core.eps.errors import NonFiniteError as NonFiniteError
from l2l_core.eps.errors import TornStep as TornStep
from l2l_core.eps.gradients import Gradients as Gradients
from l2l_core.eps.masters import Masters as Masters
from l2l_core.eps.masters import Side as Side
from l2l_core.eps.places import InHostMemory as InHostMemory
from l2l_core.eps.places import Place as Place
from l2l_core.eps.reducer import Alone as Alone
from l2l_core.eps.reducer import AloneApart as AloneApart
from l2l_core.eps.reducer import Reducer as Reducer
from l2l_core.eps.residuals import Residuals as Residuals
from l2l_core.eps.residuals import ScratchResiduals as ScratchResiduals
from l2l_core.eps.scratch import dry_store as dry_store
from l2l_core.eps.store import LayerStore as LayerStore
from l2l_core.eps.updates import ByOptimizer as ByOptimizer
from l2l_core.eps.updates import Update as Update
from l2l_core.eps.updates import Whole as Whole
from l2l_core.eps.updates import check_newcomers as check_newcomers
from l2l_core.eps.updates import let_have as let_have
