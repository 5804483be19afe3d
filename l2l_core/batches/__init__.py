"""The user's batch: how it is cut, how outputs are joined, and the divisors of micro-batches' losses.

May import `model`.
Begin reading at `batch.py`, `batch_split.py`, `loss_normaliser.py`.
"""

from l2l_core.batches.batch import Batch as Batch
from l2l_core.batches.batch import BatchRows as BatchRows
from l2l_core.batches.batch import RowsOfBatch as RowsOfBatch
from l2l_core.batches.batch import join_batches as join_batches
from l2l_core.batches.batch import num_rows as num_rows
from l2l_core.batches.batch import split as split
from l2l_core.batches.batch_split import RowsRule as RowsRule
from l2l_core.batches.batch_split import Split as Split
from l2l_core.batches.batch_split import rows_rule as rows_rule
from l2l_core.batches.containers import leaves_in as leaves_in
from l2l_core.batches.containers import map_leaves as map_leaves
from l2l_core.batches.containers import map_tensors as map_tensors
from l2l_core.batches.containers import refuse_gradients as refuse_gradients
from l2l_core.batches.containers import shapes_of as shapes_of
from l2l_core.batches.containers import structure_of as structure_of
from l2l_core.batches.loss_modules import snapshot_modules as snapshot_modules
from l2l_core.batches.loss_normaliser import LossNormaliser as LossNormaliser
from l2l_core.batches.loss_normaliser import LossOver as LossOver
from l2l_core.batches.loss_normaliser import NoPeers as NoPeers
from l2l_core.batches.loss_normaliser import Peers as Peers
from l2l_core.batches.loss_normaliser import Weight as Weight
from l2l_core.batches.loss_normaliser import weighted_divisors as weighted_divisors
from l2l_core.batches.loss_refusals import LossError as LossError
from l2l_core.batches.lru_cache import LRUCache as LRUCache
from l2l_core.batches.objective import Loss as Loss
from l2l_core.batches.objective import ModelCall as ModelCall
from l2l_core.batches.objective import Objective as Objective
from l2l_core.batches.objective import UserObjective as UserObjective
from l2l_core.batches.objective import divide_loss as divide_loss
from l2l_core.batches.output_join import Join as Join
from l2l_core.batches.packed_sequences import Sequences as Sequences
from l2l_core.batches.view_rows import Views as Views
