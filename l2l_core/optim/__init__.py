"""Optimizers with a small state, and groups of parameters by muP; plain torch, with or without a relay.

May import `rounding` and nothing else of the engine, so that an optimizer trains with a relay or without one.
Begin reading at `bf16_optimizers.py`.
"""

from l2l_core.optim.bf16_optimizers import in_bf16 as in_bf16
from l2l_core.optim.mup import MupScaling as MupScaling
from l2l_core.optim.mup import mup_scaling as mup_scaling
