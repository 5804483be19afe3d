"""The script of a session in a notebook: it runs as it was copied, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from IPython.core.interactiveshell import InteractiveShell
from patience import HANG_S
from tiny import RELAY

from workbench.session.notebook_source import source_of_cells

TRAIN = f"""
from l2l_core import Drop
from workbench.session import Session
unneeded = open("a file that does not exist") if False else None
session = Session(relay, batches, probe=False)
session.run(2)
session.wait({HANG_S})
session.edit(Drop(1)).result({HANG_S})
session.step()
session.wait({HANG_S})
"""
FUNCTION = TRAIN.replace("Session(relay, batches,", "Session(relay, draw,").replace(
    "unneeded", "generator = torch.Generator().manual_seed(3)\ndef draw():\n    return batches[0]\nunneeded"
)


@pytest.mark.parametrize("train", [TRAIN, pytest.param(FUNCTION, marks=pytest.mark.slow)], ids=["list", "function"])
def test_copied_script_runs_as_it_is(train: str, tmp_path: Path) -> None:
    shell = InteractiveShell.instance()
    try:
        for cell in (RELAY.replace("batches = [", "torch.manual_seed(5)\nbatches = ["), "%precision 3", train):
            shell.run_cell(cell, store_history=True).raise_error()
        session = shell.user_ns["session"]
        script, losses = session.script(), [row.loss for row in session.snapshot().steps]
        session.close()
        shell.user_ns["relay"].close()
    finally:
        InteractiveShell.clear_instance()
    assert "NotImplementedError" not in script.partition("def by_hand")[0].partition('"""\n')[2]
    assert "unneeded" not in script and "session.run" not in script
    (tmp_path / "script.py").write_text(script)
    command = [sys.executable, "-W", "error", str(tmp_path / "script.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"3 steps were repeated; the last loss is {losses[-1]!r}" in ended.stdout


def test_only_needed_statements_are_kept() -> None:
    cells = [
        "import torch, os\nfrom l2l_core import Relay\ntorch.manual_seed(0)\nwidth = 3\nother = os.getcwd()",
        "broken (",
        "model = build(width)\nmodel.apply(init)\nprint('hello')\nrelay = Relay(model)\nwb = Workbench(relay, [batch])\nwb",
        "wb.run(3)",
    ]
    found = source_of_cells(cells)
    assert found is not None and (found.relay, found.batches) == ("relay", "[batch]")
    assert found.code.splitlines() == [
        "import torch, os", "from l2l_core import Relay", "torch.manual_seed(0)", "width = 3", "model = build(width)",
        "model.apply(init)", "relay = Relay(model)",
    ]  # fmt: skip
    assert source_of_cells(["relay = 3"]) is None
