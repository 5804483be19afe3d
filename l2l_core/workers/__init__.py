"""Training of one model by several processes, each with its own rows, device, and shard of weights and optimizer state.

May import `eps`, `eps.blocks`, `devices`, `batches`, `trace`, `config`.
Begin reading at `channel.py` (why no collective hangs) and `worker_group.py`, then `sharded_weight_source.py` and
`distributed_reducer.py`, which the EPS calls.
"""

from l2l_core.workers.backend import DistributedBackend as DistributedBackend
from l2l_core.workers.backend import FactsFn as FactsFn
from l2l_core.workers.backend import WorkerBackend as WorkerBackend
from l2l_core.workers.backend import make_backend as make_backend
from l2l_core.workers.backend import numbered_keys as numbered_keys
from l2l_core.workers.channel import handshake_traffic as handshake_traffic
from l2l_core.workers.health_monitor import WorkerError as WorkerError
from l2l_core.workers.health_monitor import WorkerLostError as WorkerLostError
from l2l_core.workers.network import FRAME_BYTES as FRAME_BYTES
from l2l_core.workers.network import Network as Network
from l2l_core.workers.network import Traffic as Traffic
from l2l_core.workers.network import all_gather_traffic as all_gather_traffic
from l2l_core.workers.network import all_to_all_traffic as all_to_all_traffic
from l2l_core.workers.network import broadcast_traffic as broadcast_traffic
from l2l_core.workers.rendezvous import find_launcher as find_launcher
from l2l_core.workers.rendezvous import init_process_group as init_process_group
from l2l_core.workers.shard_layout import ShardLayout as ShardLayout
from l2l_core.workers.worker_settings import Workers as Workers
