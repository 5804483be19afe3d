"""The eager param-server: weights, gradients and optimizer state on the host, and their updates.

May import `eps.optimizers`, `eps.blocks`, `devices`, `model`, `rounding`, `trace`, `config`,
`schedule_rules`. Begin reading at `store.py`. The interfaces to
other implementations are in `updater.py`, `weight_source.py`, `reducer.py`, `block_storage.py` and `gradient_codec.py`.
"""

from l2l_core.eps.block_storage import BlockStates as BlockStates
from l2l_core.eps.block_storage import BlockStorage as BlockStorage
from l2l_core.eps.dry_run import dry_run_store as dry_run_store
from l2l_core.eps.edit_storage import BlockContents as BlockContents
from l2l_core.eps.edit_storage import Notes as Notes
from l2l_core.eps.edit_storage import StateView as StateView
from l2l_core.eps.eps_clock import EPSClock as EPSClock
from l2l_core.eps.gradient_buffers import GradientBuffers as GradientBuffers
from l2l_core.eps.gradient_buffers import NonFiniteError as NonFiniteError
from l2l_core.eps.masters import Masters as Masters
from l2l_core.eps.masters import OptimizerEntry as OptimizerEntry
from l2l_core.eps.reducer import LocalReducer as LocalReducer
from l2l_core.eps.reducer import PerMicroBatchReducer as PerMicroBatchReducer
from l2l_core.eps.reducer import Reducer as Reducer
from l2l_core.eps.residuals import DryRunResiduals as DryRunResiduals
from l2l_core.eps.residuals import Residuals as Residuals
from l2l_core.eps.store import LayerStore as LayerStore
from l2l_core.eps.updater import BlockGradients as BlockGradients
from l2l_core.eps.updater import OptimizerUpdater as OptimizerUpdater
from l2l_core.eps.updater import TornStep as TornStep
from l2l_core.eps.updater import Updater as Updater
from l2l_core.eps.updater import check_newcomers as check_newcomers
from l2l_core.eps.updater import set_grads as set_grads
from l2l_core.eps.weight_source import MemoryWeightSource as MemoryWeightSource
from l2l_core.eps.weight_source import WeightSource as WeightSource
