"""Looks inside in a recorded run: rows, report, replay, and errors of damaged rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import HANG_S
from sessions import train
from small import make_batch, make_gpt
from small import make_relay as make_decoder

from l2l_core import Drop, Inside
from workbench.panels.recorded_run_panels import RecordedInsidePanel
from workbench.pictures import inside_pages
from workbench.readings import number_layers
from workbench.replay_bench import replay
from workbench.runs.html_report import render_report
from workbench.runs.look_lines import look_from_row, look_row
from workbench.runs.recorder import Recorder
from workbench.runs.run_lines import to_json
from workbench.runs.run_loader import load_run
from workbench.session.session import Session


def letters(tokens: Sequence[int]) -> str:
    return "".join(chr(97 + token % 26) for token in tokens)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("looks") / "run.jsonl"


@pytest.fixture(scope="module")
def looks(path: Path) -> list[Inside]:
    """Two looks: after one step with all options, after a drop and another step with none."""
    with make_decoder(make_gpt()) as relay:
        with Session(
            relay, [make_batch(0)], loggers=[Recorder(path)], decode=letters, probe=[make_batch(1)]
        ) as session:
            train(session, 1)
            inside = [session.look(attention=True, lens=True, generate=2, positions=4).result(HANG_S)]
            session.look(["L001"], lens=True, leave_out=["L002"]).result(HANG_S)
            session.edit(Drop("L001")).result(HANG_S)
            train(session, 1)
            return [*inside, session.look(["L002"]).result(HANG_S)]


def shown(inside: Inside, keys: Sequence[str], decode: Any) -> list[str]:
    return [page.to_html() for page in inside_pages(inside, number_layers(keys), decode)]


def test_looks_come_back_exactly(path: Path, looks: list[Inside]) -> None:
    run = load_run(path)
    assert len(run.looks) == 2, "a look with layers left out is not recorded"
    for (number, look), inside in zip(run.looks, looks, strict=True):
        keys = [row.key for row in run.snapshot(number).layers]
        assert shown(look.inside, keys, look.decode) == shown(inside, keys, letters)
        assert (look.inside.step, look.inside.branch, look.inside.passes) == (inside.step, inside.branch, inside.passes)
        for back, was in zip(look.inside.passings, inside.passings, strict=True):
            assert (back.entered, back.left, back.added, back.cosine) == (was.entered, was.left, was.added, was.cosine)
            assert all(map(torch.equal, back.attention, was.attention)) and len(back.attention) == len(was.attention)
    assert [number for number, _ in run.looks] == [0, len(run.moments) - 1]
    assert run.look(0) == run.looks[0] and run.look() == run.looks[1]
    assert run.truncated(1).looks == run.looks[:1]


def test_a_look_adds_no_moment(path: Path, looks: list[Inside]) -> None:
    lines = [json.loads(line)["type"] for line in path.read_text().splitlines()]
    assert lines.count("moment") == 3, "two steps and an edit"


def test_nan_and_missing_text_come_back(looks: list[Inside]) -> None:
    row = json.loads(to_json(look_row(looks[0], None)))
    row["passings"][0]["left"]["mean"] = "nan"
    look = look_from_row(row)
    assert look.decode is None and look.inside.passings[0].left is not None
    assert look.inside.passings[0].left.mean != look.inside.passings[0].left.mean


def test_the_report_shows_the_last_look(path: Path, looks: list[Inside]) -> None:
    page = render_report([load_run(path)])
    assert (
        "<h2>A look inside" in page
        and "It is the last of 2 looks." in page
        and 'aria-label="The stream over depth"' in page
    )
    first = render_report([load_run(path).truncated(0)])
    assert "Text at each depth" in first and letters(looks[0].written[0].tokens) in first


def test_the_replay_shows_the_look_of_that_moment(path: Path, looks: list[Inside]) -> None:
    replayed = replay(path)
    try:
        panel = RecordedInsidePanel(replayed.session)
        panel.show(replayed.session.snapshot())
        assert "after step 2 of main" in panel._pages.value and "Text at each depth" not in panel._pages.value
        replayed.session.select(0)
        panel.show(replayed.session.snapshot())
        assert "after step 1 of main" in panel._pages.value and "Text at each depth" in panel._pages.value
        assert len(panel.still(replayed.session.snapshot())) == 5
        assert "Inside" in replayed.views.buttons.options[-1]
    finally:
        replayed.close()


DAMAGE: dict[str, Any] = {
    "a tensor of complex64": lambda row: row["passings"][0]["attention"][0].update(kind="complex64"),
    "cannot reshape": lambda row: row["passings"][0]["attention"][0].update(shape=[7]),
    "without the text of a token": lambda row: row["words"].pop(),
    "passings": lambda row: row.pop("passings"),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_look_is_named(path: Path, looks: list[Inside], tmp_path: Path, message: str) -> None:
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if json.loads(line)["type"] == "look")
    row = json.loads(lines[at])
    DAMAGE[message](row)
    (tmp_path / "run.jsonl").write_text("\n".join([*lines[:at], json.dumps(row), *lines[at + 1 :], ""]))
    with pytest.raises(ValueError, match=f"line {at + 1}: .*{message}"):
        load_run(tmp_path)
