"""Tasks in the panels: each is done by its own action alone, and stays done; no schedule undoes them."""

from functools import partial

import torch
from torch import nn

from l2l_core import Depth, Drop, Insert, Relay, Swap
from workbench.commands.notebook_runner import FOLDER, read_notebook
from workbench.lessons.recipe_races import ByBranch
from workbench.lessons.tasks import EDIT, FORK, RACE, UNDO, Tasks
from workbench.session import Session

IDENTITY = Insert(1, init="identity")


class Residual(nn.Module):
    """A block that can become the identity."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(x)


def make_session(**settings: ByBranch) -> Session:
    model = nn.Sequential(*(Residual() for _ in range(3)))
    relay = Relay(model, partial(torch.optim.SGD, lr=0.01), device="cpu", loss=lambda y, _: y.square().mean())
    session = Session(relay, [(torch.ones(2, 4),)] * 200, probe=False, **settings)
    train(session, 1)  # the identity is found by running layers
    return session


def train(session: Session, steps: int) -> None:
    session.run(steps)
    assert session.wait(30).failure is None


def test_each_task_is_done_by_what_it_asks_for() -> None:
    with make_session() as session:
        session.edit(IDENTITY).result(30)
        session.undo().result(30)
        tasks = Tasks(session, EDIT, UNDO, FORK, RACE)
        assert tasks.check() == [False] * 4, "what was done before does not count"
        session.edit(IDENTITY).result(30)
        assert tasks.check() == [True, False, False, False]
        session.undo().result(30)
        assert tasks.check() == [True, True, False, False]
        session.fork("other").result(30)
        session.edit(Drop(0)).result(30)
        assert tasks.check() == [True, True, True, False]
        session.race("other", "main", steps=20).result(30)
        assert tasks.check() == [True] * 4
        session.switch("main").result(30)
        session.discard("other").result(30)
        assert tasks.check() == [True] * 4, "done is done"


def test_nothing_else_does_a_task() -> None:
    with make_session() as session:
        session.fork("older").result(30)
        for _ in range(3):  # its journal is longer than that of the branch on which the tasks are set
            session.edit(IDENTITY, Drop(0)).result(30)
        session.undo().result(30)
        session.switch("main").result(30)
        tasks = Tasks(session, EDIT, UNDO, FORK, RACE)
        train(session, 1)
        assert not any(tasks.check()), "a step is none of them"
        session.edit(Drop(0)).result(30)
        assert not any(tasks.check()), "a drop is no insert, and was not made on a new branch"
        session.undo().result(30)
        assert not any(tasks.check()), "what was undone is no identity"
        session.edit(Insert(1, init="copy")).result(30)
        assert not any(tasks.check()), "a copy is no identity"
        session.switch("older").result(30)
        assert not any(tasks.check()), "what an older branch has was done before"
        session.switch("main").result(30)
        session.race("main", "older", steps=20).result(30)
        assert not any(tasks.check()), "a race of branches that were there before"
        session.fork("other").result(30)
        assert not any(tasks.check()), "a fork alone"
        session.edit(Swap(0, 1)).result(30)
        assert not any(tasks.check()), "another edit on the new branch"
        session.race("main", "other", steps=19).result(30)
        assert not any(tasks.check()), "a race of fewer steps"
        session.race("older", "other", steps=20).result(30)
        assert not any(tasks.check()), "a race without the new branch's parent"


def test_no_schedule_undoes_what_is_done_in_the_notebook() -> None:
    """The cell of notebook 05 that sets the tasks, run where a schedule keeps `main` at its depth."""
    cells = read_notebook(FOLDER / "05_dynamic_depth.ipynb").cells
    (sets_tasks,) = (cell.source for cell in cells if cell.cell_type == "code" and "tasks = Tasks(" in cell.source)
    with make_session(schedule=ByBranch({"main": Depth({0: 3}, shrink="top")})) as session:
        names = {"wb": session, "Tasks": Tasks, "EDIT": EDIT, "UNDO": UNDO, "FORK": FORK, "RACE": RACE}
        exec(compile(sets_tasks, "05_dynamic_depth", "exec"), names)
        session.edit(IDENTITY).result(30)
        train(session, 1)
        assert len(session.snapshot().layers) == 4
        session.undo().result(30)
        assert len(session.snapshot().layers) == 3
        tasks = names["tasks"]
        assert isinstance(tasks, Tasks) and tasks.check() == [True, True, False, False]


def test_the_list_says_what_is_left() -> None:
    with make_session() as session:
        tasks = Tasks(session, EDIT, UNDO)
        assert "○ undo it" in tasks._repr_mimebundle_()["text/plain"]
        assert "2 of 2 to do" in tasks._repr_mimebundle_()["text/html"]
        session.edit(IDENTITY).result(30)
        assert "1 of 2 to do" in tasks._repr_mimebundle_()["text/plain"]
        session.undo().result(30)
        shown = tasks._repr_mimebundle_()
        assert "✓ undo it" in shown["text/html"] and "All done." in shown["text/plain"]
