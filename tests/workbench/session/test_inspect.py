"""Facts and trials of a layer between two steps, without an effect on training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from patience import HANG_S
from sessions import Layer, assert_equal, enter, held, make_batches, mse, train, weights_of
from torch import nn

from l2l_core import Drop, Duplicate, EmulatedDevice, Freeze, Insert, Relay, RelayConfig
from workbench.session.layer_edits import edit_code, edits_for_layer
from workbench.session.layer_facts import BINS
from workbench.session.layer_trial import TRIAL_EDITS
from workbench.session.session import Session


def test_facts_match_the_weights(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        train(session, 2)
        session.edit(Freeze("L001"))
        found = session.inspect("L001").result(HANG_S)
        layer: Any = relay.stack[1].module
        flat = torch.cat([param.detach().flatten() for param in layer.parameters()]).double()
    assert found is not None and (found.module, found.step, found.branch) == ("Layer", 2, "main")
    parameters = [(part.name, part.shape, part.dtype, part.trained) for part in found.parameters]
    assert parameters == [("linear.weight", (8, 8), "float32", False), ("linear.bias", (8,), "float32", False)]
    assert (found.low, found.high) == (float(flat.min()), float(flat.max())) and found.non_finite == 0
    assert found.mean == pytest.approx(float(flat.mean()))
    assert found.deviation == pytest.approx(float(flat.std(correction=0)))
    assert found.counts == tuple(map(int, flat.histc(BINS, found.low, found.high).tolist())) and sum(found.counts) == 72


def test_non_finite_weights_are_counted_separately_and_equal_ones_fill_a_bin(relay: Relay) -> None:
    with torch.no_grad():
        for param in relay.stack[0].params:
            param.fill_(3.0)
        relay.stack[0].params[0][0, :2] = torch.tensor([float("nan"), float("inf")])
        for param in relay.stack[1].params:
            param.fill_(float("nan"))
    with Session(relay, make_batches()) as session:
        equal, none = (session.inspect(key).result(HANG_S) for key in ("L000", "L001"))
    assert equal is not None and equal.non_finite == 2 and max(equal.counts) == sum(equal.counts) == 70
    assert equal.low < 3 < equal.high and equal.deviation == 0
    assert none is not None and none.non_finite == 72 and none.counts == ()


def test_facts_of_a_removed_layer_are_none(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        with held(relay):
            session.step()
            enter(relay)
            session.edit(Drop("L002"))
            looked = session.inspect("L002")
            assert not looked.done(), "the query waits, the caller does not"
        assert looked.result(HANG_S) is None
        assert session.wait(HANG_S).refusal is None


def with_dropout() -> Relay:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(4, 8), *(nn.Sequential(Layer(), nn.Dropout(0.3)) for _ in range(3)), nn.Linear(8, 1)
    )
    return Relay(model, torch.optim.AdamW, EmulatedDevice(), list(model)[1:4], mse, config=RelayConfig(micro_batches=2))


def test_queries_do_not_change_training() -> None:
    def trained(look: Callable[[Session, str], list[Future[Any]]]) -> tuple[list[float], list[torch.Tensor], Any]:
        with with_dropout() as relay, Session(relay, make_batches()) as session:
            losses = []
            for _ in range(4):
                torch.manual_seed(11)
                train(session, 1)
                for key in ("L000", "L001", "L002"):
                    for future in look(session, key):
                        assert future.result(HANG_S) is not None
                now = session.wait(HANG_S)
                losses.append(now.steps[-1].loss)
                losses.append(float(torch.rand(1)))  # of the generator that the next step uses
            session.edit(Insert("L001")).result(HANG_S)
            keys = [row.key for row in session.wait(HANG_S).layers]
            return losses, weights_of(relay), (keys, copy.deepcopy(relay.optimizer.state_dict()["state"][0]["step"]))

    plain = trained(lambda session, key: [])
    seen = trained(
        lambda session, key: [
            session.inspect(key),
            *(session.measure(tried(key)) for tried in TRIAL_EDITS.values()),
            session.look([key], attention=True, lens=True),
        ]
    )
    assert plain[0] == seen[0] and plain[2] == seen[2]
    assert_equal(plain[1], seen[1])


def test_code_of_an_edit_makes_an_equal_edit(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        rows = session.snapshot().layers
    assert edit_code(Drop("L006")) == "Drop(layers='L006')" and edit_code(Duplicate()) == "Duplicate()"
    for row in rows:
        edits = edits_for_layer(row, rows)
        moves = ["Move earlier"] * (row is not rows[0]) + ["Move later"] * (row is not rows[-1])
        assert [*edits] == ["Drop", "Duplicate", "Freeze", "Insert before", "Insert after", *moves]
        for edit in edits.values():
            assert eval(edit_code(edit), vars(__import__("l2l_core"))) == edit


@pytest.mark.parametrize("words, place", [("Insert before", 0), ("Insert after", 1)])
@pytest.mark.parametrize("number", [0, 3])
def test_new_layer_is_at_the_requested_place(relay: Relay, number: int, words: str, place: int) -> None:
    with Session(relay, make_batches()) as session:
        train(session, 1)  # `init="identity"` needs a step
        rows = session.snapshot().layers
        session.edit(edits_for_layer(rows[number], rows)[words]).result(HANG_S)
        assert [row.key for row in session.wait(HANG_S).layers].index("L004") == number + place
