"""States of the random generators that a source of batches may draw from: the global ones and its own."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from l2l_core.model import RandomState
from l2l_core.saves import plain_random, read_random

# Attributes of a DataLoader, and of its samplers, that may hold generators
_PARTS = ("dataset", "sampler", "batch_sampler", "batch_sampler.sampler")


@dataclass(frozen=True)
class RandomStates:
    """States of the global generators of torch, Python and NumPy, and of other generators.

    Attributes:
        common: torch and Python.
        numpy: the global generator of NumPy.
        others: states of other generators, in order.
    """

    common: RandomState
    numpy: Any
    others: tuple[Any, ...] = ()

    @staticmethod
    def capture(others: Sequence[Any] = ()) -> RandomStates:
        """Read the current states; `others` are generators, as from `generators_of`."""
        states = tuple(_read_state(each) for each in others)
        return RandomStates(RandomState.capture(), numpy.random.get_state(legacy=False), states)

    def restore(self, others: Sequence[Any] = ()) -> None:
        """Restore the states; `others` are as in `capture`."""
        self.common.restore()
        numpy.random.set_state(self.numpy)
        for each, state in zip(others, self.others, strict=True):
            _write_state(each, state)

    def to_plain(self) -> dict[str, Any]:
        """Return plain data with tensors and arrays; the inverse of `of_plain`."""
        return {"common": plain_random(self.common), "numpy": self.numpy, "others": self.others}

    @staticmethod
    def of_plain(plain: dict[str, Any]) -> RandomStates:
        """Return the states from `to_plain`."""
        return RandomStates(read_random(plain["common"]), plain["numpy"], tuple(plain["others"]))


def generators_of(source: object) -> list[Any]:
    """Return the generators that are attributes of a source of batches, its data set or its samplers, each once."""
    found: dict[int, Any] = {}
    for part in ("", *_PARTS):
        holder: Any = source
        for name in filter(None, part.split(".")):
            holder = getattr(holder, name, None)
        for value in getattr(holder, "__dict__", {}).values():
            if isinstance(value, torch.Generator | numpy.random.Generator | numpy.random.RandomState | random.Random):
                found[id(value)] = value
    return list(found.values())


def _read_state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    return (
        generator.get_state(legacy=False) if isinstance(generator, numpy.random.RandomState) else generator.getstate()
    )


def _write_state(generator: Any, state: Any) -> None:
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
