"""Frame, table and figure of a recorded study, without a model: the statistics against scipy by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from workbench.study import RecordedStudy, Study
from workbench.study.segment import Counts, SharedSegment, write_json
from workbench.study.study_records import SCHEMA, VERSION, require
from workbench.study.study_table import paired_interval, saved_share

stats = pytest.importorskip("scipy.stats")
ENDS = {"deep": (5.0, 0.50), "50% & more": (4.0, 0.40)}  # FLOP of a step, slope of the loss


def write_study(
    folder: Path,
    seeds: int,
    unfinished: str = "",
    first: int = 0,
    rate: Callable[[int], float] = lambda step: 0.1,
    every: int = 2,
    steps: int = 10,
    ends: Mapping[str, tuple[float, float]] = ENDS,
    **changes: Any,
) -> RecordedStudy:
    """A study of 10 steps with a held-out loss at every second one, each run alone."""
    variants = {
        name: {"schedule": name, "columns": {"factor_lr": 0.1}, "factors": ["lr"], "group": i}
        for i, name in enumerate(ends)
    }
    folder.mkdir()
    spec = {"schema": SCHEMA, "version": VERSION, "variants": variants, "seeds": [*range(first, first + seeds)]}
    write_json(folder / "study.json", {**spec, "held_out": "1 batches", "steps": steps, "flop": None, **changes})
    for i, (name, (flop, slope)) in enumerate(ends.items()):
        for seed in range(first, first + seeds):
            segment = SharedSegment(folder, f"s{seed}-g{i}")
            segment.write_header({"variants": [name], "torch": "2.13.0", "commit": "abc"})
            noise = np.random.default_rng([i, seed])
            for step in range(1, steps + 1):
                row = {
                    "step": step,
                    "flop": int(flop * step),
                    "tokens": 8 * step,
                    "split": "train",
                    "loss": 1.0,
                    "lr": rate(step),
                }
                segment.add_row({**row, "layers": 2})
                segment.add_seconds(step, 0.5)
                if step % every == 0:
                    loss = 9 - slope * step + 0.1 * noise.random()
                    segment.add_row({**row, "split": "held out", "loss": loss, "layers": 2})
            if name != unfinished:
                segment.finish(Counts(steps, int(flop * steps), 8 * steps), "FLOP: counted.")
    return Study.load(folder)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedStudy:
    return write_study(tmp_path_factory.mktemp("recorded") / "study", 4)


def test_frame_has_a_row_per_step_and_measurement(recorded: RecordedStudy) -> None:
    frame = recorded.frame()
    columns = ["variant", "factor_lr", "seed", "step", "flop", "tokens", "split", "loss", "lr", "layers", "seconds"]
    assert [*frame.columns] == columns
    assert len(frame) == 2 * 4 * 15
    last = frame.iloc[-1]
    assert (last["variant"], last["seed"], last["step"], last["flop"]) == ("50% & more", 3, 10, 40)
    assert (last["tokens"], last["split"], last["seconds"]) == (80, "held out", 5.0)
    assert "seconds" not in recorded.frame(seconds=False)


def test_difference_and_interval_are_those_of_scipy_by_hand(recorded: RecordedStudy) -> None:
    frame = recorded.frame(seconds=False).query("split == 'held out'")
    deep, other = (frame[frame["variant"] == name] for name in ENDS)
    # At 40 FLOP, where the second variant ends, the first has made 8 steps.
    first = [deep[(deep["seed"] == seed) & (deep["step"] == 8)]["loss"].item() for seed in range(4)]
    second = [other[(other["seed"] == seed) & (other["step"] == 10)]["loss"].item() for seed in range(4)]
    differences = np.subtract(second, first)
    half = stats.t.ppf(0.975, 3) * differences.std(ddof=1) / 2
    baseline, row = recorded.table().rows
    assert baseline.difference is None and baseline.n == row.n == row.pairs == 4
    assert row.difference == pytest.approx(differences.mean())
    assert (row.low, row.high) == pytest.approx((differences.mean() - half, differences.mean() + half))
    assert (row.mean, row.spread) == pytest.approx((np.mean(second), np.std(second, ddof=1)))
    turned = recorded.table(baseline="50% & more").rows[0]
    assert turned.low == pytest.approx(-row.high) and turned.difference == pytest.approx(-row.difference)
    with pytest.raises(ValueError, match="baseline='x': there are 'deep', '50% & more'"):
        recorded.table(baseline="x")


def test_runs_are_compared_at_equal_tokens_and_steps_too(recorded: RecordedStudy) -> None:
    ends = (
        recorded.frame(seconds=False).query("split == 'held out' and step == 10").pivot(index="seed", columns="variant")
    )
    differences = ends["loss"]["50% & more"] - ends["loss"]["deep"]
    for by, words in {"tokens": "tokens", "step": "steps"}.items():
        table = recorded.table(by=by)
        assert table.rows[1].difference == pytest.approx(differences.mean())
        assert (table.rows[1].low, table.rows[1].high) == pytest.approx(
            stats.ttest_1samp(differences, 0).confidence_interval(0.95)
        )
        assert f"| 95 % interval | {words} saved |" in str(table) and f"at equal {words}; interval" in str(table)
    assert recorded.table(by="seconds").rows[1].pairs == 4
    with pytest.raises(ValueError, match="x='epochs' is not an axis: pass 'step', 'flop', 'tokens' or 'seconds'"):
        recorded.table(by="epochs")


def test_a_run_in_the_middle_of_its_schedule_is_noted(tmp_path: Path) -> None:
    falling = write_study(tmp_path / "falling", 3, rate=lambda step: 0.1 * (11 - step))
    note = "Runs compared in the middle of their learning rate's schedule: deep after 8 of 10 steps. The other run has finished"
    remedy = (
        """add a variant of deep that ends there, as Variant(schedule, {**factors, "length": 8}, steps=8); or compare"""
    )
    for baseline in ENDS:
        assert note in str(falling.table(baseline)) and remedy in str(falling.table(baseline))
    for by in ("step", "tokens"):
        assert "schedule" not in str(falling.table(by=by))
    warmed_up = write_study(tmp_path / "warmed up", 3, rate=lambda step: min(1.0, step / 8))
    late_decay = write_study(tmp_path / "late decay", 3, rate=lambda step: 0.5 if step == 10 else 1.0)
    assert "schedule" not in str(warmed_up.table()) and note in str(late_decay.table())
    # Steps have the FLOP that they have: runs of equal compute end within a step of one another.
    for name, flop, noted in (("all but ends", 102.0, False), ("is cut", 105.0, True)):
        ends = {"even": (100.0, 0.01), "longer": (flop, 0.01)}
        long = write_study(tmp_path / name, 3, rate=lambda step: 0.1 * (101 - step), steps=100, ends=ends)
        assert ("schedule" in str(long.table())) == noted


def test_losses_interpolated_between_distant_measurements_are_noted(recorded: RecordedStudy, tmp_path: Path) -> None:
    note = "Losses are interpolated linearly between measurements that are up to 62% of the compared distance apart"
    coarse = write_study(tmp_path / "coarse", 3, every=5)
    assert note in str(coarse.table()) and "pass a smaller evaluate_every= and another folder=" in str(coarse.table())
    fine = write_study(tmp_path / "fine", 3, every=1)
    alone = write_study(tmp_path / "training losses", 3, every=99, held_out="")
    for table in (alone.table(), coarse.table(by="step"), fine.table(), recorded.table()):  # measured there
        assert "interpolated" not in str(table)


def test_equal_differences_have_an_interval_without_width() -> None:
    assert paired_interval([1.0, 2.0, 3.0], [0.5, 1.5, 2.5]) == (0.5, 0.5)
    assert paired_interval([1.0, 2.0], [0.5, 1.4]) is None


def test_saved_compute_is_interpolated() -> None:
    baseline = ([10, 100], [5.0, 2.0])
    assert saved_share(([10, 20, 40], [4.0, 3.0, 1.0]), baseline) == pytest.approx(0.7)  # 2.0 is reached at 30
    assert saved_share(([10, 20], [2.0, 1.0]), baseline) == pytest.approx(0.9)
    assert saved_share(([10, 20], [4.0, 3.0]), baseline) is None


def test_fewer_than_three_seeds_have_no_interval(tmp_path: Path) -> None:
    table = write_study(tmp_path / "two", 2).table()
    assert table.rows[1].pairs == 2 and table.rows[1].low is None
    assert "There is no interval with fewer than three seeds: run the study with seeds=range(3)" in table.to_markdown()
    assert write_study(tmp_path / "one", 1).table().rows[0].spread is None


def test_unfinished_runs_are_left_out(tmp_path: Path) -> None:
    table = write_study(tmp_path / "study", 3, unfinished="deep").table()
    assert [row.n for row in table.rows] == [0, 3] and table.rows[1].difference is None
    assert "3 of 6 runs are finished; the others are not in the table." in table.notes


def test_several_folders_are_one_study(tmp_path: Path) -> None:
    four, one = write_study(tmp_path / "four", 4), write_study(tmp_path / "one", 2)
    write_study(tmp_path / "two", 3, first=1)  # seed 1 is in both
    both = Study.load(tmp_path / "one", tmp_path / "two")
    assert both.frame().equals(four.frame()) and str(both.table()) == str(four.table()) != str(one.table())
    runs = both.run_frame()
    assert [*runs["folder"].map(lambda folder: Path(folder).name)] == ["one", "one", "two", "two"] * 2
    assert {*runs["torch"]} == {"2.13.0"} and runs["finished"].all() and [*runs["seed"]] == [*range(4)] * 2


def test_variants_of_one_name_that_differ_are_kept_apart(tmp_path: Path) -> None:
    write_study(tmp_path / "one", 3)
    write_study(tmp_path / "longer", 3, steps=20)
    (tmp_path / "longer" / "segments" / "s0-g0" / "segment.json").write_text('{"torch": "2.14.0", "commit": "abc"}')
    both = Study.load(tmp_path / "one", tmp_path / "longer")
    assert both.names == [*ENDS, *(f"{name} (longer)" for name in ENDS)]
    assert [row.n for row in both.table().rows] == [3, 3, 3, 3]
    assert "Runs differ in torch: 2.13.0, 2.14.0." in both.table().notes
    write_study(tmp_path / "other", 3, held_out="2 batches")
    with pytest.raises(
        ValueError, match="measured different held-out batches, so their losses cannot be compared: read"
    ):
        Study.load(tmp_path / "one", tmp_path / "other")


def test_table_is_written_as_markdown_latex_and_html(recorded: RecordedStudy) -> None:
    table = recorded.table()
    markdown, latex, page = table.to_markdown(), table.to_latex(), table._repr_html_()
    header = "| variant | n | steps | FLOP | loss | difference to deep | 95 % interval | compute saved |"
    assert markdown.splitlines()[0] == header and "| 50% & more | 4 | 10 | 40 |" in markdown
    assert latex.splitlines()[-8:-5] == [
        r"\begin{tabular}{lrrrrrrr}",
        r"\toprule",
        r"variant & n & steps & FLOP & loss & difference to deep & 95 \% interval & compute saved \\",
    ]
    assert (
        r"50\% \& more & 4 & 10 & 40 & 5.0" in latex and r" $\pm$ 0.0" in latex and latex.endswith("\\end{tabular}\n")
    )
    assert '<th scope="row">50% &amp; more</th><td>4</td>' in page
    assert [*table.frame()["variant"]] == [*ENDS]
    assert table.rows[1].reached == 0 and "| reached by 0 of 4 |" in markdown and "reached by 0 of 4 " in latex


def test_figure_is_the_same_bytes_each_time(recorded: RecordedStudy, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for suffix, begin in {"pdf": b"%PDF", "svg": b"<?xml", "png": b"\x89PNG"}.items():
        one, two = (recorded.save(tmp_path / f"{name}.{suffix}", x="tokens") for name in ("one", "two"))
        assert one.read_bytes() == two.read_bytes() and one.read_bytes().startswith(begin)
    assert (
        "50% &amp; more" in (tmp_path / "one.svg").read_text()
        and "s.d. of 4 seeds" in (tmp_path / "one.svg").read_text()
    )
    with pytest.raises(ValueError, match=r"fig.jpg': pass a name that ends in .pdf, .svg, .png"):
        recorded.save(tmp_path / "fig.jpg")
    with pytest.raises(ValueError, match="x='epochs' is not an axis: pass 'step', 'flop', 'tokens' or 'seconds'"):
        recorded.save(tmp_path / "fig.png", x="epochs")


def test_folders_without_a_readable_study_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no study: pass the folder= of a Study"):
        Study.load(tmp_path)
    (tmp_path / "study.json").write_text(json.dumps({"schema": SCHEMA, "version": 99}))
    with pytest.raises(ValueError, match="written by another version: run the study in a new folder"):
        Study.load(tmp_path)


def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r'no_such_package.*pip install "l2l-workbench\[study\]"'):
        require("no_such_package")
