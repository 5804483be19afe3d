"""The view of a study in a notebook, without a page: buttons, axes, and what is drawn."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from patience import wait_until
from study_program import make_study

from workbench import Study
from workbench.study.study_picture import draw_study, show_study
from workbench.study.study_view import StudyView


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return make_study(tmp_path / "study", ["plain", "grown"], seeds=[0, 1], autosave_s=1e9)


def test_run_trains_on_a_thread_and_the_view_draws_it(study: Study) -> None:
    view = StudyView(study)
    view._draw()
    assert "no loss yet" in view._picture.value and "0 of 4 runs finished" in view._state.value
    assert "No step is trained yet." in view._table.value
    assert view._cancel_button.disabled and not view._run_button.disabled
    view._run_button.click()
    wait_until(lambda: "4 of 4 runs finished" in study.progress_line and not study.is_running)
    view._draw()
    assert "4 of 4 runs finished. Common beginnings" in view._state.value
    assert view._picture.value.count('fill-opacity=".18"') == 2 and "plain (2 seeds)" in view._picture.value
    assert 'aria-valuenow="100"' in view._state.value
    tip = re.search(r"<title>plain\n([\d.]+ MFLOP): loss [\d.]+ ± [\d.]+ \(2 seeds\)</title>", view._picture.value)
    assert tip is not None
    assert "compute (FLOP)" in view._picture.value and "difference to plain" in view._table.value
    view._axis.value = "tokens"
    assert ">tokens</text>" in view._picture.value
    view.close()
    view._axis.value = "step"  # closed: nothing is drawn
    assert ">tokens</text>" in view._picture.value


def test_a_failing_run_is_shown(tmp_path: Path) -> None:
    study = Study(lambda seed: None, {"a": None}, steps=2, batches=[1], folder=tmp_path)
    view = StudyView(study)
    view._run_button.click()
    wait_until(lambda: bool(view._failure))
    view._draw()
    assert "make_relay returned a NoneType" in view._state.value and "run() resumes there" in view._state.value


def test_outside_of_a_notebook_the_comparison_is_printed(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    study._ipython_display_()
    assert "Variants compared" in capsys.readouterr().out


def test_a_study_does_not_run_twice_at_a_time(study: Study) -> None:
    with (
        study._running(),
        pytest.raises(RuntimeError, match=r"the study is running: wait for it, or stop\(\) it first"),
    ):
        study.run()


def test_every_axis_is_drawn(study: Study) -> None:
    study.run(report=None)
    for axis, words in {"step": "steps", "flop": "compute (FLOP)", "tokens": "tokens", "seconds": "seconds"}.items():
        assert f">{words}</text>" in draw_study(study, axis)
    described = show_study(study, "tokens").svg
    assert "At the end: plain at 192 tokens: loss 2." in described and "<title>grown\n64 tokens: loss " in described
    assert "<title>plain\nstep 2: loss " in draw_study(study, "step")
