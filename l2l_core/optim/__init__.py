"""Optimizers with fewer bits, for small hosts; each is a plain torch optimizer, in a relay or without one.

Imports nothing of the engine, so that what trains in a relay trains anywhere.
Begin reading at `in_bf16.py`.
"""

from l2l_core.optim.in_bf16 import in_bf16 as in_bf16
from l2l_core.optim.in_bf16 import round_at_random as round_at_random
