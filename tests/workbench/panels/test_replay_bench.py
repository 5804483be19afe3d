"""Replays of recorded runs: panels, slider, comparison and notebooks, without building a model."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ipywidgets
import nbformat
import pytest
from patience import HANG_S
from recordings import record
from sessions import make_batches, make_relay, threads_named, train, wait_until

import workbench
from l2l_core import Drop
from workbench.commands.replay import write_replay_notebook
from workbench.panels.display import WIDGET_VIEW_TYPE
from workbench.panels.edits_panel import EditsPanel
from workbench.panels.header_panel import HeaderPanel
from workbench.panels.recorded_run_panels import FactsPanel, JournalPanel, RecordedRelayPanel
from workbench.panels.timeline_panel import TimelinePanel
from workbench.pictures.loss_chart import draw_loss
from workbench.replay_bench import ReplayBench
from workbench.runs.html_report import render_report
from workbench.runs.recorded_run import RunCursor
from workbench.runs.recorder import Recorder
from workbench.runs.run_loader import load_run
from workbench.session.session import Session

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("run") / "run.jsonl.gz", title="a <run>")


@pytest.fixture
def replay(path: Path) -> Iterator[ReplayBench]:
    made = workbench.replay(path)
    yield made
    made.close()
    wait_until(lambda: not threads_named("refresh loop"))


def words_of(widget: ipywidgets.Widget) -> str:
    """Return the HTML of a widget and its children."""
    parts = [widget.value] if isinstance(widget, ipywidgets.HTML) else []
    return "".join([*parts, *(words_of(child) for child in getattr(widget, "children", ()))])


# The widget ----------------------------------------------------------------------------------------------------------


def test_replay_starts_at_the_end(replay: ReplayBench, path: Path) -> None:
    bundle = replay._repr_mimebundle_()
    now = load_run(path).snapshot()
    assert WIDGET_VIEW_TYPE in bundle and now.step == replay.snapshot().step == 10
    assert draw_loss(now.steps, now.changes, branch=now.branch, others=now.elsewhere) in bundle["text/html"]
    assert "Journal of edits" in bundle["text/plain"] and "Relay" in bundle["text/html"]
    assert "a &lt;run&gt;" in words_of(replay.widget) and "<run>" not in words_of(replay.widget)


def test_slider_has_the_completely_recorded_steps(replay: ReplayBench) -> None:
    assert [name for name, _ in replay.slider.options] == ["1", "2", "4", "5", "6", "7", "8", "10"]
    replay.slider.value = dict(replay.slider.options)["5"]
    now = replay.snapshot()
    assert now.step == 5 and len(now.steps) == 5 and now.last is not None and now.last.step == 4
    replay._show(now)
    output = words_of(replay.widget)
    assert "step 5" in output and "micro_batches 2 → 3" not in output
    replay.slider.value = dict(replay.slider.options)["8"]
    replay.views.show_view("loss")
    assert "micro_batches 2 → 3" in words_of(replay.widget)


def test_replay_has_no_controls_of_the_training(replay: ReplayBench) -> None:
    assert not any(isinstance(panel, HeaderPanel | EditsPanel) for panel in replay.panels)
    (player,) = [panel for panel in replay.panels if isinstance(panel, RecordedRelayPanel)]
    assert player._live.layout.display == "none" and not player._live.value


def test_player_replays_the_step(replay: ReplayBench) -> None:
    replay._show(replay.snapshot())
    (player,) = [panel for panel in replay.panels if isinstance(panel, RecordedRelayPanel)]
    before = player._picture.value
    assert f"event {player._slider.value + 1} of" in before
    player._slider.value = 0
    assert "event 1 of" in player._picture.value != before
    replay._show(replay.snapshot())  # the same moment: the player keeps its position
    assert "event 1 of" in player._picture.value
    replay.slider.value = dict(replay.slider.options)["1"]
    replay._show(replay.snapshot())
    assert "event 1 of" not in player._picture.value


def test_displayed_replay_follows_the_slider(replay: ReplayBench, capsys: pytest.CaptureFixture[str]) -> None:
    replay._ipython_display_()
    assert "Loss" in capsys.readouterr().out  # outside of notebooks, text is printed
    (facts,) = [panel for panel in replay.panels if isinstance(panel, FactsPanel)]
    wait_until(lambda: "step 10" in facts._title.value)
    replay.slider.value = dict(replay.slider.options)["2"]
    wait_until(lambda: "step 2" in facts._title.value)


def test_replay_is_a_source_for_panels_without_controls(replay: ReplayBench) -> None:
    panel = TimelinePanel(replay)
    panel.show(replay.snapshot())
    assert "<svg" in words_of(panel.widget)
    for kind in (HeaderPanel, EditsPanel):
        with pytest.raises(TypeError, match=f"{kind.__name__} takes a Session or a Workbench, not a Replay"):
            kind(replay)


def test_removed_layers_are_shown_in_their_step(tmp_path: Path) -> None:
    with make_relay() as relay:
        with Session(relay, make_batches(), loggers=[Recorder(tmp_path / "run.jsonl")]) as session:
            train(session, 2)
            session.edit(Drop(3)).result(HANG_S)
    run = load_run(tmp_path)
    assert len(run.snapshot().layers) == 3 and len(run.snapshot(run.traced_moment()).layers) == 4
    panel = RecordedRelayPanel(RunCursor(run))
    panel.show(run.snapshot())
    assert "keeps 4 layers" in words_of(panel.widget)
    assert "keeps 4 layers" in render_report([run])
    assert [name for name, _ in workbench.replay(tmp_path).slider.options] == ["1", "2", "2, changed"]


def test_moments_out_of_range_are_refused(path: Path) -> None:
    recording = RunCursor(load_run(path))
    with pytest.raises(ValueError, match="number=12: .* moments 0 to 11"):
        recording.select(12)
    assert recording.number == 11
    recording.wait_for_change(11, 0.01)


def test_without_edits_the_journal_is_empty(tmp_path: Path, path: Path) -> None:
    run = load_run(path)
    panel = JournalPanel(RunCursor(run))
    assert panel.still(run.snapshot(3)) == [] and len(panel.still(run.snapshot())) == 1


# Without a model -----------------------------------------------------------------------------------------------------

NO_MODEL = """
import sys, torch, l2l_core
def refuse(self, *args, **kwargs):
    raise AssertionError("a module is built")
torch.nn.Module.__init__ = refuse
import workbench
from workbench.runs.html_report import write_report
replay = workbench.replay(sys.argv[1])
replay.slider.value = replay.slider.options[0][1]
replay._show(replay.snapshot())
assert "svg" in replay._repr_mimebundle_()["text/html"]
assert "svg" in workbench.compare(sys.argv[1], sys.argv[1])._repr_mimebundle_()["text/html"]
write_report([workbench.load_run(sys.argv[1])], sys.argv[2])
replay.close()
print("transformers" in sys.modules, "shown")
"""


def test_no_module_is_built(path: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", NO_MODEL, str(path), str(tmp_path / "report.html")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=HANG_S)
    assert done.stdout.strip() == "False shown", done.stderr
    assert (tmp_path / "report.html").is_file()


# Two runs ------------------------------------------------------------------------------------------------------------


def test_two_runs_side_by_side(path: Path, tmp_path: Path) -> None:
    other = record(tmp_path / "run.jsonl", micro_batches=1, title="other")
    bundle = workbench.compare(path, other)._repr_mimebundle_()
    assert "a &lt;run&gt; and other: losses " in bundle["text/html"]
    assert bundle["text/html"].count("<svg") == 5 and "Losses of all runs" in bundle["text/plain"]
    assert "micro-batches" in bundle["text/plain"]
    with pytest.raises(ValueError, match=r"two recorded runs or more, not 1; replay\(path\) shows one"):
        workbench.compare(path)


def test_equal_losses_are_reported(path: Path, tmp_path: Path) -> None:
    again = record(tmp_path / "run.jsonl", title="again")
    (output,) = workbench.compare(path, again).comparison.said
    assert output == "a <run> and again: losses are equal, to the bit, in all 10 steps that both made."
    lines = again.read_text(encoding="utf-8").splitlines()
    loss = load_run(again).snapshot().steps[6].loss
    changed = [line.replace(repr(loss), repr(loss * 2)) for line in lines]
    again.write_text("\n".join(changed) + "\n", encoding="utf-8")
    (output,) = workbench.compare(path, again).comparison.said
    assert output == (
        f"a <run> and again: losses are equal, to the bit, before step 7; after that they differ by {loss:.2g} at most."
    )


# The command ---------------------------------------------------------------------------------------------------------


def test_the_notebook_replays_the_run_beside_it(path: Path, tmp_path: Path) -> None:
    one = write_replay_notebook([load_run(path)])
    assert one == path.parent / "replay.ipynb"
    cells = nbformat.read(one, as_version=4).cells
    assert [cell.source for cell in cells if cell.cell_type == "code"] == [
        "import workbench\n\nworkbench.replay('run.jsonl.gz')"
    ]
    other = load_run(record(tmp_path / "run.jsonl"))
    cells = nbformat.read(write_replay_notebook([load_run(path), other]), as_version=4).cells
    assert [cell.source.splitlines()[-1] for cell in cells if cell.cell_type == "code"] == [
        f"workbench.compare('run.jsonl.gz', {str(other.path)!r})",
        "workbench.replay('run.jsonl.gz')",
        f"workbench.replay({str(other.path)!r})",
    ]


def test_a_missing_run_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from workbench.__main__ import main

    assert main(["replay", str(tmp_path / "none.jsonl")]) == 2
    assert "there is no recorded run" in capsys.readouterr().err
