"""A glance at what a run left behind finds what a whole look finds."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from l2l_core.step.guards.state_diff import StateDiffs


class Keeping(nn.Module):
    """A layer that keeps things of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
        self.count, self.word, self.nothing = 3, "x", None
        self.noted, self.queue, self.table, self.names = [1], deque([1]), {"a": 1}, {"a"}
        self.tensor, self.array = torch.zeros(2), np.zeros(2)


CHANGES: dict[str, Callable[[Keeping], object]] = {
    "nothing": lambda layer: None,
    "a number": lambda layer: setattr(layer, "count", 4),
    "an attribute of a module inside": lambda layer: setattr(layer.inner[0], "count", 4),
    "a new attribute": lambda layer: setattr(layer, "other", 4),
    "one less": lambda layer: delattr(layer, "nothing"),
    "another for one that went": lambda layer: (delattr(layer, "nothing"), setattr(layer, "other", 7)),
    "a list": lambda layer: layer.noted.append(2),
    "a queue": lambda layer: layer.queue.append(2),
    "a dictionary": lambda layer: layer.table.update(b=2),
    "a set": lambda layer: layer.names.add("b"),
    "a tensor in place": lambda layer: layer.tensor.add_(1),
    "another tensor": lambda layer: setattr(layer, "tensor", torch.zeros(2)),
    "NumPy draws": lambda layer: np.random.rand(),
    "NumPy draws a normal number": lambda layer: np.random.randn(),
    "NumPy is seeded": lambda layer: np.random.seed(5),
    "weights in place": lambda layer: layer.inner[0].weight.data.add_(1),
}


def numpy_draws() -> Callable[[], bool]:
    """Whether NumPy's state is another one than now, seen in all of it."""
    before = pickle.dumps(np.random.get_state(legacy=False))
    return lambda: pickle.dumps(np.random.get_state(legacy=False)) != before


@pytest.mark.parametrize("drawn", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_glance_differs_where_a_look_does(change: str, drawn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever came before; one normal number that is drawn leaves another one, which comes without a trace in the memory."""
    before = np.random.get_state()
    try:
        layer, glances, looks = Keeping(), StateDiffs(), StateDiffs()
        monkeypatch.setattr(looks._numpy, "watch", numpy_draws)
        np.random.seed(0)
        for _ in range(drawn):
            np.random.randn()
        for _ in range(3):
            look, glance = looks.full_diff(layer), glances.quick_diff(layer)
            assert not glance()[0] and not look()[0]
            CHANGES[change](layer)
            assert glance()[0] == look()[0]
            if change in ("one less", "another for one that went"):
                layer.nothing = None
    finally:
        np.random.set_state(before)


def test_other_generators_are_seen_too() -> None:
    layer, glances, before = Keeping(), StateDiffs(), np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(1))
    try:
        glance = glances.quick_diff(layer)
        assert not glance()[0]
        np.random.rand()
        assert glance()[0]
    finally:
        np.random.set_bit_generator(before)
