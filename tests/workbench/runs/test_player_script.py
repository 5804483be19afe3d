"""A recorded step with its player as one script: its size, what it holds, and what it refuses."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from recordings import record
from sessions import make_batches, make_relay

import workbench
from l2l_core import Trace
from workbench.__main__ import main
from workbench.pictures.packed_frames import relay_frames
from workbench.runs.run_loader import load_run

TITLE = "</script><b>a & b</b>\nrun"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("player") / "run.jsonl.gz", title=TITLE)


def frames_of(script: str) -> dict[str, Any]:
    (markup,) = re.findall(r"^shadow\.innerHTML = (\".*\");$", script, re.MULTILINE)
    (packed,) = re.findall(r'octet-stream">([^<]+)<', json.loads(markup))
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def test_the_command_writes_every_event_of_the_last_step(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["player", str(path)]) == 0
    script = (path.parent / "player.js").read_text(encoding="ascii")  # whatever the encoding of the page
    assert '<script src="player.js"></script>' in capsys.readouterr().out
    assert len(script) < 300_000 and "</script>" not in script.partition("(() =>")[2]
    shown = load_run(path).snapshot().shown
    assert shown is not None
    drawn = relay_frames(shown.trace, shown.layers, 10_000)
    assert frames_of(script) == json.loads(json.dumps(drawn._asdict()))


def test_a_trace_has_a_player_too(tmp_path: Path) -> None:
    with make_relay() as relay:
        result = relay.step(next(iter(make_batches())))
    workbench.write_player(result.trace, tmp_path / "of" / "one" / "step.js")
    assert 'src="step.js"' in (script := (tmp_path / "of" / "one" / "step.js").read_text())
    assert frames_of(script)["events"] == result.trace.counts[0]


def test_events_are_left_out_until_it_fits(path: Path, tmp_path: Path) -> None:
    workbench.write_player(load_run(path), tmp_path / "all.js")
    whole = (tmp_path / "all.js").stat().st_size
    workbench.write_player(load_run(path), tmp_path / "some.js", max_bytes=whole - 1000)
    script = (tmp_path / "some.js").read_text()
    found = frames_of(script)
    assert len(script) <= whole - 1000 and 2 < len(found["frames"]) < found["events"]
    assert f"{len(found['frames'])} of {found['events']} events, evenly spaced." in script


def test_what_cannot_be_played_is_refused(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"max_bytes=10: two frames of this step take .* fewer layers"):
        workbench.write_player(load_run(path), tmp_path / "step.js", max_bytes=10)
    with pytest.raises(ValueError, match="no events: pass that of a step which ran"):
        workbench.write_player(Trace(), tmp_path / "step.js")
    assert main(["player", str(tmp_path)]) == 2 and str(tmp_path) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
