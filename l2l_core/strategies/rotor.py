"""Rotor: the fastest memory-persistent plan for a heterogeneous chain of stages within a memory budget.

Source: Beaumont et al., "Optimal checkpointing for heterogeneous chains", arXiv 1911.13214. Persistent means that a kept
tensor stays until its backward; to drop and rebuild kept tensors can be faster, and is NP-hard. The paper has one temporary
per stage, this solver three: a run that keeps nothing makes a record and drops it, and to count that record in every run
would reject budgets that suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from l2l_core.strategies.plan import F0, FALL, FCK, B, Operation, Operations


@dataclass(frozen=True)
class Chain:
    """A chain of n stages, the last one the loss, in whole units of memory and any unit of time."""

    inputs: tuple[int, ...]  # size of the input of each stage, and 0 at the end
    records: tuple[int, ...]  # size of each record, which includes the stage's output, beyond the stage's input
    run_s: tuple[float, ...]  # of a run that keeps nothing
    keep_s: tuple[float, ...]  # of a run that keeps its record
    backward_s: tuple[float, ...]
    run_extra: tuple[int, ...]  # need of a run that keeps nothing, beyond its output
    keep_extra: tuple[int, ...]  # need of a run that keeps its record, beyond the record
    backward_extra: tuple[int, ...]  # need of backward, beyond the record and the incoming gradient

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.records)


class RotorSolution:
    """The fastest plans of a chain for every whole budget up to a limit.

    `cost[s, t][m]` is the least time of forward and backward of stages s to t within m units. The units include the
    gradient of the output of t and exclude the input of s. It is the minimum of

        s = t:       keep s, backward s                         if both fit
        keep record: keep s, then (s+1, t) within m - record of s, then backward s
        keep input:  run s to j-1, then (j, t) within m - input of j, then (s, j-1) within m
    """

    def __init__(self, chain: Chain, limit: int) -> None:
        self.chain = chain
        self._units = np.arange(limit + 1)
        self.cost: dict[tuple[int, int], np.ndarray] = {}
        self._choice: dict[tuple[int, int], np.ndarray] = {}
        for length in range(chain.stages):
            for s in range(chain.stages - length):
                self._solve(s, s + length)

    def seconds(self, budget: int) -> float:
        """Return the least time within a budget; infinite if no plan fits."""
        return float(self.cost[0, self.chain.stages - 1][budget])

    def plan(self, budget: int) -> Operations:
        """Return the plan of that time."""
        return tuple(self._build_plan(0, self.chain.stages - 1, budget))

    def _solve(self, s: int, t: int) -> None:
        c, units = self.chain, self._units
        gradient = c.inputs[t + 1]
        best = self._cost_keeping_record(s, t, gradient)
        choice = np.full(len(units), s)
        need, run_s = 0, 0.0
        for j in range(s + 1, t + 1):
            q = j - 1
            need = max(need, gradient + (c.inputs[q] if q > s else 0) + c.inputs[j] + c.run_extra[q])
            run_s += c.run_s[q]
            value = run_s + _shift_budget(self.cost[j, t], c.inputs[j]) + self.cost[s, q]
            value[units < need] = np.inf
            choice[value < best] = j
            best = np.minimum(best, value)
        self.cost[s, t], self._choice[s, t] = best, choice

    def _cost_keeping_record(self, s: int, t: int, gradient: int) -> np.ndarray:
        c = self.chain
        value = np.full(len(self._units), float(c.keep_s[s] + c.backward_s[s]))
        value[self._units < gradient + c.records[s] + c.keep_extra[s]] = np.inf
        value[self._units < c.inputs[s + 1] + c.records[s] + c.backward_extra[s]] = np.inf
        return value + _shift_budget(self.cost[s + 1, t], c.records[s]) if t > s else value

    def _build_plan(self, s: int, t: int, m: int) -> list[Operation]:
        j = int(self._choice[s, t][m])
        if j == s:
            inner = self._build_plan(s + 1, t, m - self.chain.records[s]) if t > s else []
            return [Operation(FALL, s), *inner, Operation(B, s)]
        runs = [Operation(FCK, s), *(Operation(F0, q) for q in range(s + 1, j))]
        return [*runs, *self._build_plan(j, t, m - self.chain.inputs[j]), *self._build_plan(s, j - 1, m)]


@lru_cache(maxsize=8)
def solve(chain: Chain, limit: int) -> RotorSolution:
    """Return the solution of a chain for all budgets up to `limit` units, from a cache if possible."""
    return RotorSolution(chain, limit)


def _shift_budget(cost: np.ndarray, units: int) -> np.ndarray:
    """Return the costs after `units` have been taken from every budget."""
    shifted = np.full(len(cost), np.inf)
    if units < len(cost):
        shifted[units:] = cost[: len(cost) - units]
    return shifted


def round_up_to_units(nbytes: Sequence[int], unit: float) -> tuple[int, ...]:
    """Return sizes in units, rounded up."""
    return tuple(int(np.ceil(each / unit - 1e-12)) for each in nbytes)
