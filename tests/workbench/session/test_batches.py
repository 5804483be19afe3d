"""Sources of batches: loaders, lists, generators, functions; every row is trained once."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from patience import HANG_S
from sessions import Batch, assert_equal, make_batches, make_relay, weights_of
from torch.utils.data import DataLoader, TensorDataset

from l2l_core import Relay
from workbench.session.session import Session


def test_data_loader_restarts_and_generator_ends(relay: Relay) -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 4), torch.randn(8, 1)), batch_size=4)
    with Session(relay, loader) as session:
        session.run(5)
        assert session.wait(HANG_S).done == 5
    with Session(relay, iter(make_batches(2))) as session:
        session.run()
        now = session.wait(HANG_S)
        assert (now.state, now.done, now.failure) == ("idle", 2, None)


def test_function_is_called_for_every_batch(relay: Relay) -> None:
    made: list[int] = []

    def batch() -> Batch:
        made.append(len(made))
        return make_batches(1)[0]

    with Session(relay, batch) as session:
        session.run(3)
        session.wait(HANG_S)
    assert made == [0, 1, 2]


def test_empty_source_fails_with_remedy(relay: Relay) -> None:
    loader = DataLoader(TensorDataset(torch.randn(3, 4), torch.randn(3, 1)), batch_size=4, drop_last=True)
    for source in (loader, []):
        with Session(relay, source) as session:
            session.run(2)
            now = session.wait(HANG_S)
            assert now.failure is not None and now.failure.during == "batch"
            assert "no batch" in now.failure.message and "drop_last" in now.failure.message


class Columns(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor | None = None


def test_rows_of_a_custom_batch_type_are_trained_once(relay: Relay) -> None:
    plain, types = make_batches(), list[type]()
    loss = relay._model_call._loss
    relay._model_call._loss = lambda outputs, batch: types.append(type(batch)) or loss(outputs, batch)
    loader = DataLoader([Columns(x, y) for x, y in plain], batch_size=None)
    with Session(relay, loader) as session:
        session.run(5)
        now = session.wait(HANG_S)
    with make_relay() as other:
        assert [row.loss for row in now.steps] == [other.step(batch).loss for batch in plain]
        assert_equal(weights_of(relay), weights_of(other))
    assert (now.step, now.failure, {row.samples for row in now.steps}) == (5, None, {6})
    assert types == [Columns] * 10


ONE_BATCH = [{"input_ids": torch.zeros(2, 2)}, UserDict(input_ids=torch.zeros(2, 2)), Columns(torch.zeros(2, 2))]


@pytest.mark.parametrize("source", [3, torch.zeros(2, 2), *ONE_BATCH])
def test_invalid_source_of_batches_is_refused(relay: Relay, source: Any) -> None:
    with pytest.raises(TypeError, match="an iterable of batches"):
        Session(relay, source)
