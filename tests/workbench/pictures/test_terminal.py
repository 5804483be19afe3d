"""The text view contains the session's numbers, fits its columns, and is encodable for any terminal."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sessions import held, make_batches, make_relay, train, wait_until
from torch import nn

import l2l_core
from l2l_core import (
    Delink,
    Drop,
    Duplicate,
    EmulatedDevice,
    Freeze,
    Insert,
    Interpolate,
    Loops,
    Move,
    Relay,
    Replace,
    Swap,
    Unfreeze,
    Unroll,
)
from l2l_core.edits import Edit
from l2l_core.trace import format_bytes
from workbench.pictures.terminal_view import ALL_UP_TO, ENDS, LEVELS, encodable, print_view, sparkline, text_view
from workbench.session import Session, Snapshot
from workbench.session.edit_text import describe_edit

ROOT = Path(__file__).resolve().parents[3]
SOURCES = [path for room in ("l2l_core", "workbench") for path in sorted((ROOT / room).rglob("*.py"))]


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with make_relay(device=EmulatedDevice(memory_bytes=10_000)) as made:
        yield made


@pytest.fixture(scope="module")
def now(relay: Relay) -> Snapshot:
    with Session(relay, make_batches()) as session:
        train(session, 6)
        return session.snapshot()


def test_the_view_has_a_line_for_every_layer(now: Snapshot) -> None:
    output = text_view(now)
    flat = " ".join(output.split())  # without line breaks
    assert "Sequential · 4 layers" in flat and f"loss {now.steps[-1].loss:.4g}" in flat
    assert "Step 6: " in flat and "of copies hidden" in flat and "of budget" in flat
    assert now.last is not None
    for bound in now.last.bound_by():
        assert str(bound) in flat
    rows = re.findall(r"^ +(\d)  (\d) .*?(\d+ B)  .*?([\d.]+ k?B)  (█*)$", output, flags=re.MULTILINE)
    assert [(row[0], row[1]) for row in rows] == [(str(i), str(i + 1)) for i in range(4)]
    peak = max(sample.total for sample in now.last.memory if sample.place == "device")
    assert any(row[3] == format_bytes(peak) and len(row[4]) == round(12 * peak / 10_000) for row in rows)
    assert re.search(rf"Loss {now.steps[0].loss:.4g} [{LEVELS}]{{6}} {now.steps[-1].loss:.4g}  steps 1 to 6", output)


@pytest.mark.parametrize("columns", [76, 80, 100])
def test_no_line_exceeds_the_width_or_ends_in_blanks(now: Snapshot, columns: int) -> None:
    lines = text_view(now, columns=columns).splitlines()
    assert all(len(line) <= columns and line == line.rstrip() for line in lines) and len(lines) > 10


def test_where_only_ascii_can_be_written_every_letter_stays_one_letter(now: Snapshot) -> None:
    wide, narrow = text_view(now), text_view(now, encoding="ascii")
    assert narrow.isascii() and not wide.isascii() and "?" not in narrow
    assert [len(line) for line in narrow.splitlines()] == [len(line) for line in wide.splitlines()]
    assert encodable("Größe ▁█", "latin-1") == "Gr??e _#" and encodable("Größe", "latin-1") == "Größe"
    assert encodable("·", "no such encoding") == "|"


def test_signs_of_edits_have_a_letter_of_ascii_each(now: Snapshot) -> None:
    edits = [
        Insert(5, module=nn.Tanh()),
        Insert("L003", like="L002", init="copy"),
        Duplicate(slice(1, 3), mode="interleaved"),
        Drop(("L001", "L003")),
        Swap(3, 4),
        Move("L001", "L003"),
        Replace(2, nn.Tanh()),
        Interpolate("L001", "L002"),
        Freeze(slice(2, None)),
        Unfreeze(2),
        Delink(slice(1, 3)),
        Loops(2),
        Unroll(),
    ]
    kinds = {name for name, value in vars(l2l_core).items() if isinstance(value, type) and issubclass(value, Edit)}
    assert {type(edit).__name__ for edit in edits} == kinds - {"Edit", "InverseEdit"}, "one of every kind"
    numbers = {layer.key: i for i, layer in enumerate(now.layers)}
    output = text_view(replace(now, queued=[describe_edit(edit, numbers) for edit in edits]), encoding="ascii")
    waiting = " ".join(output[output.index("Waiting: ") : output.index("\nStep 6")].split())
    assert output.isascii() and "?" not in waiting
    assert "; drop 1 to 3; swap 3 and 4; " in waiting and "mix 50 % of 2 | L002 into 1 | L001" in waiting


def test_every_sign_that_the_workbench_writes_has_a_letter_of_ascii() -> None:
    signs = {sign: path for path in SOURCES for words in texts_in(path) for sign in words if not sign.isascii()}
    assert {"−", "→", "▲"} <= signs.keys()
    assert {sign: path.name for sign, path in signs.items() if encodable(sign, "ascii") == "?"} == {}


def texts_in(path: Path) -> Iterator[str]:
    """Return the strings of a Python file without its docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.value


@pytest.mark.parametrize("name", ["h[/b]", "h[red]", ":smile:", "[bold]h"])
def test_names_are_shown_as_they_are(now: Snapshot, name: str) -> None:
    assert now.shown is not None
    layers = [replace(layer, name=name) for layer in now.layers]
    branches = [replace(now.branches[0], name=name), now.branches[0]]
    shown = replace(now.shown, layers=layers, branch=name)
    mine = replace(now, layers=layers, shown=shown, branch=name, branches=branches, model=name, queued=[name])
    output = text_view(mine)
    rows = [line for line in output.splitlines() if re.match(r" +\d  ", line)]
    assert len(rows) == 4 and all(f"  {name} " in row for row in rows)
    for words in (
        f": {name} · 4 layers",
        f"step 6 of {name} ·",
        f"Waiting: {name}.",
        f"Step 6 of {name}: ",
    ):
        assert words in " ".join(output.split()), words


def test_a_console_without_colour_support_gets_no_codes(now: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("rich.console.detect_legacy_windows", lambda: True)
    old = Terminal()
    print_view(now, old)
    assert "\x1b" not in old.getvalue() and "Step 6: " in old.getvalue()


def test_a_file_gets_no_colour_and_a_terminal_does(now: Snapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    plain, coloured, uncoloured = io.StringIO(), Terminal(), Terminal()
    print_view(now, plain)
    print_view(now, coloured)
    monkeypatch.setenv("NO_COLOR", "1")
    print_view(now, uncoloured)
    assert "\x1b[" not in plain.getvalue() + uncoloured.getvalue() and "\x1b[" in coloured.getvalue()
    assert plain.getvalue() == text_view(now) + "\n"


def test_before_the_first_step_the_view_names_a_command(relay: Relay) -> None:
    with make_relay() as fresh, Session(fresh, make_batches()) as session:
        output = text_view(session.snapshot())
        assert "step 0" in output and "run(10)" in output and "Loss" not in output
        assert repr(session) == "<Session of Sequential: idle before the first step>"
    assert "closed" in text_view(session.snapshot()) and repr(session).startswith("<Session of Sequential: closed")


def test_of_many_layers_the_ends_are_shown_and_the_others_counted(now: Snapshot) -> None:
    assert now.shown is not None
    rows = [replace(now.layers[0], key=f"L{i:03d}", name=f"a.very.long.name.of.a.block.{i}") for i in range(300)]
    output = text_view(replace(now, layers=rows, shown=replace(now.shown, layers=rows)))
    assert (
        f"{300 - 2 * ENDS} more" in output
        and "\n    7  " in output
        and "\n  292  " in output
        and "\n    8  " not in output
    )
    assert all(len(line) <= 80 for line in output.splitlines())
    few = replace(now, shown=replace(now.shown, layers=rows[:ALL_UP_TO]))
    assert " more\n" not in text_view(few)


def test_a_failure_has_its_remedy_and_the_present_state() -> None:
    with make_relay() as relay, Session(relay, make_batches()) as session:
        train(session, 1)
        model: Any = relay.model
        model[2].error = ZeroDivisionError("no [red]scale[/red] at all")
        session.run(1)
        session.wait()
        output = text_view(session.snapshot())
        assert "Step 2 failed: ZeroDivisionError" in output and "no [red]scale[/red] at all" in output
        assert "Run tries the same batch again" in " ".join(output.split()) and "Step 1: " in output
        model[2].error = None


def test_a_running_step_and_the_queue_are_shown() -> None:
    with make_relay() as relay, Session(relay, make_batches()) as session:
        train(session, 1)
        with held(relay):
            session.run(3)
            wait_until(lambda: session.snapshot().progress is not None)
            session.edit(Drop("L001"))
            output = text_view(session.snapshot())
            assert "running" in output and "0 of 3 steps of this run" in output and "Waiting: " in output
        session.wait()


def test_a_curve_has_a_letter_per_group_of_steps() -> None:
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == LEVELS
    assert sparkline([8, 6, 4, 2], 2) == "█▁" and sparkline([3.0], 8) == "▁" and sparkline([2.0, 2.0], 8) == "▁▁"
    assert sparkline([1.0, float("nan"), 2.0, float("inf")], 4) == "▁x█x"
    assert len(sparkline(range(1000), 48)) == 48


SCRIPT = """
import sys; sys.path.insert(0, "tests/support")
from sessions import make_batches, make_relay
from workbench import Workbench
with make_relay() as relay:
    bench = Workbench(relay, make_batches())
    bench.run(3)
    bench.wait(progress=True)
    print(bench)
    bench.close()
"""


@pytest.mark.parametrize("encoding", ["utf-8", pytest.param("ascii", marks=pytest.mark.slow)])
def test_a_script_whose_output_is_piped(encoding: str) -> None:
    env = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=env, capture_output=True, check=True)
    output = done.stdout.decode(encoding)
    assert "Step 3: " in output and "Loss " in output and "\x1b" not in output and "<workbench" not in output
    assert "3/3" in done.stderr.decode(encoding), "the bar counts steps"
