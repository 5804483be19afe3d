"""The eager param-server: weights, gradients and optimizer state on the host, and their updates.

May import `eps.optimizers`, `eps.blocks`, `devices`, `model`, `rounding`, `trace`, `config`, `schedule_rules`. Begin reading at
`store.py`. `updater.py`, `block_storage.py` and `gradient_buffers.py` have the bases of other implementations.
"""

from l2l_core.eps.block_storage import BlockContents as BlockContents
from l2l_core.eps.block_storage import BlockStates as BlockStates
from l2l_core.eps.block_storage import BlockStorage as BlockStorage
from l2l_core.eps.block_storage import LeaseMode as LeaseMode
from l2l_core.eps.block_storage import Notes as Notes
from l2l_core.eps.block_storage import StateView as StateView
from l2l_core.eps.block_storage import WeightSource as WeightSource
from l2l_core.eps.dry_run import DryRunResiduals as DryRunResiduals
from l2l_core.eps.dry_run import dry_run_store as dry_run_store
from l2l_core.eps.gradient_buffers import GradientBuffers as GradientBuffers
from l2l_core.eps.gradient_buffers import NonFiniteError as NonFiniteError
from l2l_core.eps.gradient_buffers import PerMicroBatchReducer as PerMicroBatchReducer
from l2l_core.eps.gradient_buffers import Reducer as Reducer
from l2l_core.eps.gradient_codec import Residuals as Residuals
from l2l_core.eps.masters import Masters as Masters
from l2l_core.eps.masters import OptimizerEntry as OptimizerEntry
from l2l_core.eps.store import LayerStore as LayerStore
from l2l_core.eps.updater import BlockGradients as BlockGradients
from l2l_core.eps.updater import EPSClock as EPSClock
from l2l_core.eps.updater import TornStep as TornStep
from l2l_core.eps.updater import Updater as Updater
from l2l_core.eps.updater import check_newcomers as check_newcomers
from l2l_core.eps.updater import set_grads as set_grads
