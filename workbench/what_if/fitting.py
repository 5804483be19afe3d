"""Settings with which a step would fit its device, found among answers: nothing is run for it.

Other numbers of micro-batches are left to the step itself, which rehearses them where it does not fit: an answer stretches what
was measured to them, which is good for a picture and too little for a promise (a fifth of the bytes has been missing).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from l2l_core import RelayConfig
from l2l_core.forecast import Priced, Run, WhatFits, what_fits
from workbench.what_if.question import CONFIG, Question
from workbench.what_if.what_if import Answer


def fitting(ask: Callable[[Question], Answer], question: Question, rows: int, most_s: float = math.inf) -> WhatFits:
    """Look for layers ahead and a place of the stash with which the step asked for fits, with and without what stays.

    Args:
        ask: answers a question.
        question: of a device with a budget; the rest of its settings stay.
        rows: of the batch.
        most_s: as of `what_fits`.

    Raises:
        ValueError: the device has no budget, or no step could be made.
    """
    if question.memory_bytes is None:
        raise ValueError(
            "memory_bytes=None: a device without a limit has room for everything; ask for one with a budget"
        )

    def price(config: RelayConfig) -> Priced | None:
        if config.micro_batches != question.micro_batches:
            return None  # stands for a step that cannot be made, so that the search leaves it out
        found = ask(replace(question, **{name: getattr(config, name) for name in CONFIG}))
        return Priced(config, found.peak_device_bytes, lambda: Run(found.seconds, found.peak_host_bytes))

    asked = RelayConfig(**{name: getattr(question, name) for name in CONFIG})
    return what_fits(price, asked, rows, int(question.memory_bytes), most_s)
