"""Several processes that train one model: each with its own rows, its own device, and a part of the weights and their state.

May import `eps`, `eps.blocks`, `devices`, `batches`, `trace`, `config`.
Begin reading at `channel.py` (why nothing hangs), `crew.py`, then `place.py` and `reducer.py`, which stand at the EPS's seams.
"""

from l2l_core.workers.errors import WorkerError as WorkerError
from l2l_core.workers.errors import WorkerLostError as WorkerLostError
from l2l_core.workers.team import Company as Company
from l2l_core.workers.team import Workers as Workers
from l2l_core.workers.team import company as company
