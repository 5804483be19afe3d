"""Several processes that train one model: each with its own rows, its own device, and a part of the weights and their state.

May import `eps`, `eps.blocks`, `devices`, `batches`, `trace`, `config`.
Begin reading at `channel.py` (why nothing hangs), `crew.py`, then `place.py` and `reducer.py`, which stand at the EPS's seams.
"""

from l2l_core.workers.channel import meeting_traffic as meeting_traffic
from l2l_core.workers.cuts import Cut as Cut
from l2l_core.workers.errors import WorkerError as WorkerError
from l2l_core.workers.errors import WorkerLostError as WorkerLostError
from l2l_core.workers.network import Network as Network
from l2l_core.workers.network import Traffic as Traffic
from l2l_core.workers.network import exchange_traffic as exchange_traffic
from l2l_core.workers.network import gather_traffic as gather_traffic
from l2l_core.workers.network import spread_traffic as spread_traffic
from l2l_core.workers.settings import Workers as Workers
from l2l_core.workers.team import Company as Company
from l2l_core.workers.team import Solo as Solo
from l2l_core.workers.team import company as company
from l2l_core.workers.team import numbered as numbered
