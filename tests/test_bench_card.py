"""Every measured figure in README.md stands in the bench card or names its command; so do the tables of docs/."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CARD = (ROOT / "docs" / "BENCH_CARD.md").read_text(encoding="utf-8")

sys.path.insert(0, str(ROOT / "benchmarks"))
import card  # noqa: E402 - a program, which is found beside those that it imports
import gpu_day  # noqa: E402
from _steps import Outcome, Step, run_steps  # noqa: E402

MEASURED = (
    r"\d (?:MB|GB|TFLOP/s|nats|bytes per|ms)\b|\d(?:<!--card:\w+-->)? times\b|takes? [\d.]+(?:<!--card:\w+-->)? s\b"
)
COMMAND = r"`(?:make|pytest|python|\w+\.py)[^`]*`|\w+\.py"
SOURCE = rf"<!--card:\w+-->|{COMMAND}|(?:BENCHMARKS|BENCH_CARD|CAPACITY|DEPTH|SCALE)\.md"


def is_measured(text: str) -> bool:
    """True for a figure outside of code, where it would be a setting."""
    return re.search(MEASURED, re.sub("`[^`]*`", "", text)) is not None


def blocks(text: str) -> list[str]:
    """Paragraphs, items of lists and rows of tables, without code."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return re.split(r"\n\n+|\n(?=[-*#] )", text)


def test_every_measured_figure_in_the_readme_is_of_the_card_or_names_its_command() -> None:
    found = [block for block in blocks(README) if is_measured(block)]
    assert len(found) > 5, "the pattern finds figures"
    without = [block for block in found if not re.search(rf"<!--card:\w+-->|{COMMAND}", block)]
    assert not without, "name the command, or mark the figure of the card:\n" + "\n".join(without)


def test_figures_of_the_card_are_marked_in_the_readme_and_equal_to_it() -> None:
    marked = [(name, value) for value, _, name in re.findall(card.MARK, README)]
    assert len(marked) > 5, "figures are marked"
    assert marked == [(name, card.values(CARD)[name]) for name, _ in marked], "run `python benchmarks/card.py --readme`"
    programs = "|".join({each for step in card.STEPS for each in re.findall(r"\w+\.py", str(step))})
    unmarked = [block for block in blocks(README) if re.search(programs, block) and "<!--card:" not in block]
    assert not unmarked, "the card has figures of this program: mark them, without the command\n" + "\n".join(unmarked)


def test_every_section_of_the_documents_with_measured_figures_in_a_table_has_a_command() -> None:
    found, without = 0, []
    for path in sorted((ROOT / "docs").glob("*.md")):
        for section in re.split(r"(?m)^(?=## )", path.read_text(encoding="utf-8"))[1:]:
            if "\n|--" in section and (path.name == "BENCHMARKS.md" or is_measured(section)):
                found += 1
                without += [] if re.search(SOURCE, section) else [f"{path.name}: {section.partition(chr(10))[0]}"]
    assert found > 20 and not without, without


def test_the_card_has_fifteen_figures_of_benchmarks_that_exist() -> None:
    assert len(card.FIGURES) == 15 == len({figure.name for figure in card.FIGURES})
    steps = {step.name: step for step in card.STEPS}
    assert {figure.step for figure in card.FIGURES} == {*steps}
    assert sum(step.limit_s for step in steps.values()) < 4 * 20 * 60, "limits are of a machine four times as slow"
    assert [name for name in re.findall(r"^\| `(\w+)` \|", CARD, flags=re.MULTILINE)][:15] == [
        f.name for f in card.FIGURES
    ]


def test_a_section_replaces_that_of_its_machine_and_no_other() -> None:
    page = card.replace_section("", "## A\n\nold\n")
    page = card.replace_section(card.replace_section(page, "## B\n\nother\n"), "## A\n\nnew\n")
    assert page == f"{card.HEAD}\n## A\n\nnew\n\n## B\n\nother\n"
    assert card.values("head\n## A\n\n| `x` | text | **1.5** | | | |\n## B\n\n| `x` | text | **2** | | | |") == {
        "x": "1.5"
    }


def test_the_plan_for_a_gpu_fits_its_25_minutes_and_has_a_dry_run_of_each_step() -> None:
    assert sum(each.step.limit_s for each in gpu_day.PLAN) <= gpu_day.LIMIT_S
    assert all("double" in str(each.dry) for each in gpu_day.PLAN if "gpu.py" in str(each.step))
    assert {step for _, _, step, _, _ in gpu_day.FIGURES} == {step.name for step in gpu_day.SPEED}


REPORTS = (
    "from pathlib import Path; (out := Path('out/benchmarks')).mkdir(parents=True); (out / 'x.json').write_text('{}')"
)


def test_steps_that_ended_well_are_kept_and_others_run_again(tmp_path: Path) -> None:
    steps = [
        Step("well", ("-c", REPORTS), 60),
        Step("failed", ("-c", "raise SystemExit(3)"), 60),
        Step("hung", ("-c", "import time; time.sleep(600)"), 0.2),
    ]
    first = run_steps(steps, tmp_path)
    assert [each.ended for each in first.values()] == ["well", "with status 3", "after the limit of 0 s"]
    assert first["well"].record == {} and first["failed"].record is None
    second = run_steps([*steps[:1], Step("failed", ("-c", REPORTS), 60)], tmp_path)
    assert second["well"].seconds == first["well"].seconds and second["failed"].ended == "well"
    assert run_steps(steps[:1], tmp_path, again=True)["well"].seconds != first["well"].seconds


@pytest.mark.slow
def test_the_plan_for_a_gpu_runs_on_the_double(tmp_path: Path) -> None:
    settings = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_day.py"), "--dry", "--out", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr
    assert "nothing measured" in done.stdout and done.stdout.count("| well") == len(gpu_day.PLAN)


def test_a_row_says_what_was_not_measured() -> None:
    def row(ended: str, record: dict[str, Any] | None) -> str:
        outcome = Outcome("", {}, ended, 1.0, (1.0, 1.0), record, [])
        return card.row(card.FIGURES[0], card.STEPS[0], outcome)

    assert "| not yet measured | | 1 | `python benchmarks/depth.py" in card.row(card.FIGURES[0], card.STEPS[0], None)
    assert "| not measured: ended after the limit of 60 s |" in row("after the limit of 60 s", None)
    found = {"peak_ratio_in_depth": 1.0, "peak_ratio_in_micro_batches": 1.0}
    assert "| **1** |  | 1 |" in row("well", found)
    assert row("with status 1", found).endswith(", which ended with status 1 |")
