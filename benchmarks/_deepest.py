"""The most layers that a budget allows, found by trying."""

from __future__ import annotations

import math
from collections.abc import Callable


def deepest(bytes_of: Callable[[int], float], first: int, budget: float, most: int) -> int:
    """Return the most layers, from 1 to `most`, whose bytes are within the budget; 0 if one is too many.

    The next try is where a line through the last two meets the budget, kept between the deepest that fitted and the shallowest
    that did not. It ends when these are neighbours, so the result was tried on both sides.

    Args:
        bytes_of: returns the bytes of a number of layers, growing with them or staying flat; infinite where even trying failed.
        first: layers to try first.
        budget: bytes.
        most: largest number of layers to try.
    """
    fits, fails, guess = 0, most + 1, first
    last, last_bytes = 0, 0.0
    while fails - fits > 1:
        layers = min(max(guess, fits + 1), fails - 1)
        nbytes = bytes_of(layers)
        fits, fails = (layers, fails) if nbytes <= budget else (fits, layers)
        per_layer = (nbytes - last_bytes) / (layers - last)
        sloped = 0 < per_layer < math.inf  # not where bytes stay flat, or before or after trying failed
        guess = layers + math.floor((budget - nbytes) / per_layer) if sloped else (fits + fails) // 2
        last, last_bytes = layers, nbytes
    return fits
