"""Python's collector of reference cycles in the course of a pass.

A pass makes thousands of small objects that live until backward. The collector takes them for objects that stay, and goes through
all that the process holds every few passes: a tenth of a step with small layers. In a pass it looks at young objects alone, after
each visit, so that a cycle that a layer leaves behind does not hold its tensors for longer than that.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial


@contextmanager
def manual_gc() -> Iterator[Callable[[], object]]:
    """Keep the collector from running by itself in the block; yields what collects young garbage.

    Where it is off already, be it by the user or by a pass in another thread, it is left to those, and nothing is collected.
    """
    if not gc.isenabled():
        yield lambda: None
        return
    gc.disable()
    try:
        yield partial(gc.collect, 0)
    finally:
        gc.enable()
