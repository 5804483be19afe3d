"""The user's batch: rows, micro-batches cut along them, and what the loss is a mean over.

May import `model`.
Begin reading at `batch.py`, `mean.py`.
"""

from l2l_core.batches.batch import Batch as Batch
from l2l_core.batches.batch import RowsOf as RowsOf
from l2l_core.batches.batch import rows_of as rows_of
from l2l_core.batches.batch import split as split
from l2l_core.batches.mean import Alone as Alone
from l2l_core.batches.mean import Mean as Mean
from l2l_core.batches.mean import Others as Others
from l2l_core.batches.mean import Weight as Weight
from l2l_core.batches.mean import shares as shares
from l2l_core.batches.nested import form_of as form_of
from l2l_core.batches.nested import leaves_in as leaves_in
from l2l_core.batches.nested import map_tensors as map_tensors
from l2l_core.batches.nested import mapped as mapped
from l2l_core.batches.nested import structure_of as structure_of
from l2l_core.batches.objective import ModelCall as ModelCall
from l2l_core.batches.objective import Objective as Objective
from l2l_core.batches.objective import join as join
from l2l_core.batches.recent import Recent as Recent
