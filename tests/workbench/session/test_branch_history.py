"""Branches in a session: each has a separate history, and trains as if it were alone."""

from __future__ import annotations

from patience import HANG_S
from sessions import assert_equal, changes_of, make_batches, make_relay, train, weights_of

from l2l_core import Drop, Insert, Relay
from workbench.session.session import Session
from workbench.session.snapshot_values import Change, StepRow


class Log:
    """Logger that keeps rows and changes."""

    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        self.changes: list[Change] = []

    def log_step(self, row: StepRow) -> None:
        self.rows.append(row)

    def log_change(self, change: Change) -> None:
        self.changes.append(change)

    def close(self) -> None: ...


def test_every_branch_has_a_separate_history(relay: Relay) -> None:
    with Session(relay, make_batches(), loggers=[log := Log()]) as session:
        train(session, 2)
        session.fork("wide")
        session.edit(Insert(2))
        train(session, 2)
        wide = session.wait(HANG_S)
        assert (wide.branch, wide.step, len(wide.layers)) == ("wide", 4, 5)
        assert [(row.step, row.branch) for row in wide.steps] == [(1, "main"), (2, "main"), (3, "wide"), (4, "wide")]
        assert changes_of(wide) == [(2, "forked wide"), (2, "inserted at 2 (identity)")]
        assert {change.branch for change in wide.changes} == {"wide"}
        assert wide.elsewhere == {}, "the history of main is part of that of its fork"
        assert [(branch.name, branch.active, branch.steps) for branch in wide.branches] == [
            ("main", False, 2),
            ("wide", True, 4),
        ]

        session.switch("main")
        now = session.wait(HANG_S)
        assert (now.branch, now.step, len(now.layers), now.journal) == ("main", 2, 4, ())
        assert now.steps == wide.steps[:2] and now.changes == () and not now.can_undo
        assert now.statistics.last.tolist() == [1, 2] and wide.statistics.last.tolist() == [1, 2, 3, 4]
        assert now.elsewhere == {"wide": wide.steps[1:]}, "from the last common step"
        train(session, 1)
        now = session.wait(HANG_S)
        assert [(row.step, row.branch) for row in now.steps] == [(1, "main"), (2, "main"), (3, "main")]
        assert now.elsewhere == {"wide": wide.steps[1:]}

        session.switch("wide")
        train(session, 1)
        again = session.wait(HANG_S)
        assert [row.step for row in again.steps] == [1, 2, 3, 4, 5] and again.steps[:4] == wide.steps
        assert again.elsewhere == {"main": now.steps[1:]} and again.can_undo
        session.discard("main")
        now = session.wait(HANG_S)
        assert now.elsewhere == {} and [branch.name for branch in now.branches] == ["wide"]
        assert now.failure is None and now.refusal is None
    assert [(row.step, row.branch) for row in log.rows] == [
        (1, "main"), (2, "main"), (3, "wide"), (4, "wide"), (3, "main"), (5, "wide"),
    ]  # fmt: skip
    assert Change(4, "switch to wide", "wide") in log.changes


def test_branch_trains_as_without_the_other_one(relay: Relay) -> None:
    batch = make_batches()[0]
    with make_relay() as plain:
        losses = [plain.step(batch).loss for _ in range(5)]
        expected = weights_of(plain)
    with Session(relay, lambda: batch) as session:
        train(session, 3)
        session.fork("aside")
        session.edit(Drop(0))
        session.reconfigure(micro_batches=3)
        train(session, 2)
        session.switch("main")
        train(session, 2)
        now = session.wait(HANG_S)
    assert [row.loss for row in now.steps] == losses and now.config.micro_batches == 2
    assert_equal(weights_of(relay), expected)


def test_invalid_branch_is_refused_and_the_run_continues(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        session.run()
        for future in (session.fork("main"), session.fork(" "), session.switch("nowhere"), session.discard("main")):
            assert isinstance(future.exception(20), ValueError)
        now = session.snapshot()
        assert now.state == "running" and now.failure is None and now.refusal is not None
        assert now.branch == "main" and now.changes == ()
        session.stop()


def test_branches_made_by_a_function_have_histories(relay: Relay) -> None:
    with Session(relay, make_batches()) as session:
        train(session, 2)
        session.edit(lambda relay: (relay.fork("a"), relay.fork("b")))
        train(session, 1)
        session.reconfigure(micro_batches=3)
        session.edit(lambda relay: relay.switch("a"))
        session.reconfigure(ahead=2)
        now = session.wait(HANG_S)
        assert now.failure is None and [change.what for change in now.changes] == ["ahead 1 → 2"]
        assert now.branch == "a" and [row.branch for row in now.steps] == ["main", "main"]
        assert list(now.elsewhere) == ["b"]
