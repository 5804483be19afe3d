"""Export buttons of the views Time and Memory, and of replays."""

from __future__ import annotations

import base64
import json
import platform
import re
from pathlib import Path

import pytest
from panel_reading import find, html_of, shown
from recordings import record
from sessions import make_batches, train

from l2l_core import Relay
from workbench.app import VIEWS, Workbench
from workbench.panels.export_panel import ExportPanel
from workbench.replay_bench import replay
from workbench.runs import EXPORTS, load_run
from workbench.runs.html_report import render_report
from workbench.session import Session


@pytest.fixture
def panel(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExportPanel:
    monkeypatch.chdir(tmp_path)
    panel = ExportPanel(session)
    shown(panel)
    return panel


def words(panel: ExportPanel) -> str:
    return re.sub("<[^>]+>", " ", html_of(panel))


def test_time_and_memory_have_export_buttons() -> None:
    assert [name for name, kinds in VIEWS.items() if ExportPanel in kinds] == ["time", "memory"]


def test_button_writes_files_and_names_the_next_step(panel: ExportPanel, tmp_path: Path) -> None:
    train(panel.session, 2)
    for name in EXPORTS:
        find(panel, name).click()
        assert "Step 2 written" in words(panel) or "2 steps written" in words(panel), words(panel)
    assert {path.name for path in (tmp_path / "exports").iterdir()} == {
        "step_2.json.gz",
        "step_2_memory.pickle",
        "step_2_report.html",
        "tensorboard",
    }
    find(panel, "Perfetto").click()
    assert str(tmp_path / "exports" / "step_2-2.json.gz") in words(panel)
    assert '<a href="https://ui.perfetto.dev" target="_blank" rel="noopener">' in html_of(panel)
    page = html_of(panel)
    shown(panel)
    assert html_of(panel) == page, "the status stays"


def test_link_downloads_the_written_file(panel: ExportPanel, tmp_path: Path) -> None:
    train(panel.session, 1)
    find(panel, next(name for name in EXPORTS if "eport" in name)).click()
    (link,) = re.findall('<a download="step_1_report.html" href="data:text/html;base64,([^"]+)">', html_of(panel))
    assert base64.b64decode(link) == (tmp_path / "exports" / "step_1_report.html").read_bytes()


def test_folder_can_be_changed(panel: ExportPanel, tmp_path: Path) -> None:
    train(panel.session, 1)
    find(panel, "into the folder").value = " here/<b>deep "
    find(panel, "Perfetto").click()
    assert (tmp_path / "here" / "<b>deep" / "step_1.json.gz").is_file() and "&lt;b&gt;deep" in html_of(panel)
    find(panel, "into the folder").value = ""
    find(panel, "Memory viewer").click()
    assert (tmp_path / "step_1_memory.pickle").is_file()


def test_export_before_the_first_step_is_refused(panel: ExportPanel, tmp_path: Path) -> None:
    find(panel, "Report").click()
    assert "Report: there is no step to write yet: press Run or Step first" in words(panel)
    assert not list(tmp_path.iterdir())


def test_failed_export_shows_the_reason(panel: ExportPanel, tmp_path: Path) -> None:
    train(panel.session, 1)
    (tmp_path / "exports").write_text("in the way")
    find(panel, "Perfetto").click()
    assert "Perfetto: File exists" in words(panel) and "name another folder" in words(panel)
    find(panel, "into the folder").value = "elsewhere"
    find(panel, "Perfetto").click()
    assert "Step 1 written" in words(panel) and 'role="alert"' not in html_of(panel)


def test_missing_package_is_named(panel: ExportPanel, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    train(panel.session, 1)
    find(panel, "TensorBoard").click()
    assert "pip install tensorboard" in words(panel)


def recorded_elsewhere(path: Path) -> Path:
    """Record a run, and change its machine and date; add two held-out losses and a fact."""
    lines = [json.loads(line) for line in record(path, title="far away").read_text(encoding="utf-8").splitlines()]
    lines[0] |= {"began": "2020-01-02T03:04:05+00:00"}
    lines[0]["machine"] = {"platform": "A machine elsewhere", "cores": 1234, "torch": "1.2.3"}
    lines[-1:-1] = [{"type": "fact", "name": "found", "words": "It was cold there."}]
    moments = [at for at, line in enumerate(lines) if line["type"] == "moment"]
    for number, step, loss in ((-1, 9, 66.125), (3, 4, 77.25)):  # the last moment first: lines move
        lines.insert(moments[number] + 1, {"type": "held_out", "step": step, "values": {"loss": loss}})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_replay_exports_the_recorded_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = recorded_elsewhere(tmp_path / "run.jsonl")
    board = replay(path)
    panel = next(panel for panel in board.panels if isinstance(panel, ExportPanel))
    board._show(board.snapshot())
    find(panel, "Report").click()
    report = tmp_path / "exports" / "step_10_report.html"
    assert report.is_file(), words(panel)
    assert report.read_text(encoding="utf-8") == render_report([load_run(path)])
    text = " ".join(re.sub("<[^>]+>", " ", report.read_text(encoding="utf-8")).split())
    for output in (
        "A machine elsewhere",
        "1234",
        "1.2.3",
        "It was cold there.",
        "held out 66.12",
        "began 2020-01-02 03:04",
    ):
        assert output in text, output
    assert "Made from run.jsonl, recorded 2020-01-02T03:04:05+00:00." in text and platform.platform() not in text
    board.close()


def test_replay_exports_the_selected_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    board = replay(recorded_elsewhere(tmp_path / "run.jsonl"))
    panel = next(panel for panel in board.panels if isinstance(panel, ExportPanel))
    board.slider.value = 3  # after the fourth step
    find(panel, "Report").click()
    text = (tmp_path / "exports" / "step_4_report.html").read_text(encoding="utf-8")
    assert "far away, after step 4" in text and "A machine elsewhere" in text
    assert (
        "held out 77.25" in text
        and "held out 66.12" not in text
        and "10 steps" not in text
        and "Step 4, event by event" in text
    )
    find(panel, "Perfetto").click()
    assert (tmp_path / "exports" / "step_4.json.gz").is_file()
    board.close()


def test_workbench_draws_export_panels(relay: Relay) -> None:
    bench = Workbench(relay, make_batches(), view=["time", "memory"])
    bench._show(bench.snapshot())
    assert sum(isinstance(panel, ExportPanel) for panel in bench.panels) == 2
    assert "could not be drawn" not in "".join(html_of(panel) for panel in bench.panels)
    bench.close()
