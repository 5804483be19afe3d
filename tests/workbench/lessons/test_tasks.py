"""Tasks in the panels: each is done by what it asks for and by nothing else, and stays done."""

from functools import partial

import torch
from torch import nn

from l2l_core import Drop, Insert, Relay
from workbench.lessons.tasks import EDIT, FORK, RACE, UNDO, Tasks
from workbench.session import Session


def make_session() -> Session:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    relay = Relay(model, partial(torch.optim.SGD, lr=0.01), device="cpu", loss=lambda y, _: y.square().mean())
    return Session(relay, [(torch.ones(2, 4),)], probe=False)


def test_each_task_is_done_by_what_it_asks_for() -> None:
    with make_session() as session:
        session.edit(Insert(1, init="copy")).result(30)
        session.undo().result(30)
        tasks = Tasks(session, EDIT, UNDO, FORK, RACE)
        assert tasks.look() == [False] * 4, "what was done before does not count"
        session.run(1)
        assert session.wait(30).failure is None
        assert tasks.look() == [False] * 4, "a step is none of them"
        session.edit(Drop(0)).result(30)
        assert tasks.look() == [True, False, False, False]
        session.undo().result(30)
        assert tasks.look() == [True, True, False, False]
        session.fork("other").result(30)
        assert tasks.look() == [True, True, True, False]
        session.race("main", "other", steps=2).result(30)
        assert tasks.look() == [True] * 4
        session.switch("main").result(30)
        session.discard("other").result(30)
        assert tasks.look() == [True] * 4, "done is done"


def test_the_list_says_what_is_left() -> None:
    with make_session() as session:
        tasks = Tasks(session, EDIT, UNDO)
        assert "○ undo it" in tasks._repr_mimebundle_()["text/plain"]
        assert "2 of 2 to do" in tasks._repr_mimebundle_()["text/html"]
        session.edit(Drop(0)).result(30)
        assert "1 of 2 to do" in tasks._repr_mimebundle_()["text/plain"]
        session.undo().result(30)
        shown = tasks._repr_mimebundle_()
        assert "✓ undo it" in shown["text/html"] and "All done." in shown["text/plain"]
