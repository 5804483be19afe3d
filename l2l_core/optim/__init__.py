"""Optimizers with fewer bits, for small hosts; each is a plain torch optimizer, in a relay or without one.

May import `rounding` and nothing else of the engine, so that an optimizer trains with a relay or without one.
Begin reading at `in_bf16.py`.
"""

from l2l_core.optim.in_bf16 import in_bf16 as in_bf16
