"""The best few values for a derivative: a function of one variable as so many constant pieces, by dynamic programming.

Source: Novikov et al., "Few-Bit Backward: Quantized Gradients of Activation Functions", arXiv 2202.00441. Best means the least
integral of the squared error over an interval; pieces end at points of a grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

FIT_RANGE = 10.0  # derivatives are fitted on [-10, 10]; what lies outside takes the outermost piece
GRID_POINTS = 2000


@dataclass(frozen=True)
class DerivativeLevels:
    """A piecewise constant function.

    Attributes:
        borders: where one piece ends and the next begins, ascending.
        values: one more than borders.
        error: integral of the squared error over the interval.
    """

    borders: tuple[float, ...]
    values: tuple[float, ...]
    error: float


def derivative(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    """Return the derivative of an elementwise function at every point, in float64."""
    with torch.enable_grad():
        x = at.detach().double().requires_grad_()
        (slope,) = torch.autograd.grad(function(x).sum(), x)
    return slope


def fit_levels(slopes: np.ndarray, pieces: int, fit_range: float = FIT_RANGE) -> DerivativeLevels:
    """Fit so many pieces to a function on [-reach, reach], given at the middles of equal cells.

    `least[j]` is the least error of the first j cells with the pieces so far; one piece more ends at j and begins at the i
    where `least[i]` and its own error, the spread of the cells around their mean, are least together.
    """
    n, cell = len(slopes), 2 * fit_range / len(slopes)
    total, square = (np.concatenate([[0.0], np.cumsum(slopes**power)]) for power in (1, 2))
    ends = np.arange(n + 1)

    def spread(i: np.ndarray, j: int) -> np.ndarray:
        return np.maximum(square[j] - square[i] - (total[j] - total[i]) ** 2 / (j - i), 0.0)

    least = np.concatenate([[0.0], [spread(np.array([0]), j)[0] for j in range(1, n + 1)]])
    begins = []
    for piece in range(1, pieces):
        following, begin = np.full(n + 1, np.inf), np.zeros(n + 1, dtype=int)
        for j in range(piece + 1, n + 1):
            tried = least[piece:j] + spread(ends[piece:j], j)
            at = int(tried.argmin())
            following[j], begin[j] = tried[at], piece + at
        least = following
        begins.append(begin)
    cuts = [n]
    for begin in reversed(begins):
        cuts.append(int(begin[cuts[-1]]))
    cuts = [0, *reversed(cuts)]
    values = [float((total[b] - total[a]) / (b - a)) for a, b in zip(cuts, cuts[1:], strict=False)]
    return DerivativeLevels(tuple(-fit_range + cell * cut for cut in cuts[1:-1]), tuple(values), float(least[n] * cell))


def derivative_levels(
    function: Callable[[torch.Tensor], torch.Tensor], bits: int, points: int = GRID_POINTS
) -> DerivativeLevels:
    """Fit 2 ** bits levels to the derivative of an elementwise function."""
    middles = (torch.arange(points, dtype=torch.float64) + 0.5) * (2 * FIT_RANGE / points) - FIT_RANGE
    return _fit_cached(derivative(function, middles).numpy().tobytes(), 2**bits)


@lru_cache(maxsize=32)
def _fit_cached(slopes: bytes, pieces: int) -> DerivativeLevels:
    """Fit once what many layers of a model ask for."""
    return fit_levels(np.frombuffer(slopes), pieces)
