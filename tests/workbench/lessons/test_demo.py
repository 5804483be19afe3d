"""The demo, run whole in its quick version and in smaller ones: its files, its output and its exit status."""

import csv
import io
import json
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from l2l_core import Trace
from workbench.__main__ import main
from workbench.lessons import demo
from workbench.lessons.demo_charts import format_table
from workbench.lessons.demo_values import FULL, QUICK, DemoStep
from workbench.lessons.plain_training import PlainTrainer, StorageMeter
from workbench.runs.run_loader import load_run

SMALL = ("--layers", "2", "--width", "8", "--steps", "2", "--device", "cpu")


@dataclass(frozen=True)
class Outcome:
    status: int | None
    text: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def losses(self) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO((self.folder / "loss.csv").read_text())))


def run_demo(folder: Path, *options: str) -> Outcome:
    with redirect_stdout(io.StringIO()) as text:
        status = main(["demo", "--out", str(folder), *options])
    return Outcome(status, text.getvalue(), folder)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_demo(tmp_path_factory.mktemp("demo") / "new" / "folder", "--quick")


# A whole run ---------------------------------------------------------------------------------------------------------


def test_relay_and_in_core_are_equal(quick: Outcome) -> None:
    assert quick.status == 0
    assert quick.summary["equal"] is True
    assert len(quick.summary["compared"]) == QUICK.compared
    for one in quick.summary["compared"]:
        assert one["relay_loss"] == one["in_core_loss"]
        assert one["unequal_weights"] == 0 and one["max_abs_diff"] == 0.0
    assert f"steps 1 to {QUICK.compared} by relay and in core gave equal losses and weights, bit by bit" in quick.text


def test_relay_fits_where_in_core_does_not(quick: Outcome) -> None:
    peaks = quick.summary["peak_device_bytes"]
    assert peaks["relay"] < QUICK.budget_bytes < peaks["in_core"]
    assert peaks["in_core"] > 16 * quick.summary["num_params"]  # weight, gradient, two moments, and activations
    assert quick.summary["in_core_fits"] is False
    assert "in core is OUT OF MEMORY" in quick.text and "emulated device" in quick.text


def test_gain_and_cost_come_before_the_details(quick: Outcome) -> None:
    first, details = quick.text.split("In detail\n")
    gain, cost = first.split("Costs\n")
    assert "times as much" in gain and "OUT OF MEMORY" in gain and "the same bits as in core" in gain
    assert "times as long as in core" in cost and "in core needs none" in cost
    assert "loss of step 1" in details


def test_the_full_model_does_not_fit_even_as_weights_alone() -> None:
    assert 4 * demo.count_params(demo.make_model(FULL)) > FULL.budget_bytes


def test_training_learns(quick: Outcome) -> None:
    losses = [float(row["loss"]) for row in quick.losses]
    assert len(losses) == QUICK.steps and losses[-1] < losses[0] - 0.5
    held_out = {int(row["step"]): float(row["held_out"]) for row in quick.losses if row["held_out"]}
    assert list(held_out) == [10, 20, 30]
    assert held_out[30] == quick.summary["held_out_loss"] < held_out[10]
    assert quick.summary["held_out_share"] == held_out[30] / quick.summary["entropy"]


def test_quick_says_that_it_checks_no_target(quick: Outcome) -> None:
    assert quick.summary["target_reached"] is None
    assert "not checked: --quick" in quick.text


def test_traces_are_of_the_last_step(quick: Outcome) -> None:
    trace = Trace.from_jsonl(quick.folder / "trace.jsonl")
    assert trace.step == QUICK.steps - 1
    assert {event.layer for event in trace.events if event.kind == "forward"} == {f"L{i:03d}" for i in range(6)}
    chrome = json.loads((quick.folder / "trace.json").read_text())["traceEvents"]
    assert sum(row["ph"] == "X" for row in chrome) == len(trace.events)
    assert "perfetto" in quick.text


def test_every_file_is_named(quick: Outcome) -> None:
    written = sorted(path.name for path in quick.folder.iterdir())
    assert written == [
        *("loss.csv", "loss.svg", "report.html", "run.jsonl.gz", "summary.json"),
        *("trace.json", "trace.jsonl", "trace.pickle"),
    ]
    assert all(str(quick.folder / name) in quick.text for name in written)


def test_it_ends_with_the_report(quick: Outcome) -> None:
    assert quick.text.splitlines()[-1] == f"Report: {quick.folder / 'report.html'}"
    page = (quick.folder / "report.html").read_text(encoding="utf-8")
    assert len(page) < 2_000_000
    said = f"steps 1 to {QUICK.compared} by relay and in core gave equal losses and weights, bit by bit"
    assert said in page and "OUT OF MEMORY" in page and "entropy of single bytes" in page


def test_the_run_is_recorded(quick: Outcome) -> None:
    run = load_run(quick.folder)
    now = run.snapshot()
    assert run.complete and len(now.steps) == QUICK.steps and len(now.layers) == QUICK.layers
    assert [f"{row.loss:.9g}" for row in now.steps] == [f"{float(row['loss']):.9g}" for row in quick.losses]
    assert [row.step for _, row in run.held_out] == [10, 20, 30] and len(run.levels) == 2
    assert now.in_core_bytes == quick.summary["peak_device_bytes"]["in_core"]
    trace = Trace.from_jsonl(quick.folder / "trace.jsonl")
    assert (
        now.last is not None and now.last.events_since(0) == trace.events_since(0) and now.last.memory == trace.memory
    )


def test_loss_curve_has_words_for_everything(quick: Outcome) -> None:
    root = ElementTree.parse(quick.folder / "loss.svg").getroot()
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    texts = " ".join(root.itertext())
    assert names.count("circle") == 3 + 1  # three evaluations on held-out text, one in the legend
    for word in ("step", "loss (nats per byte)", "training", "held out", "entropy of single bytes", "target, 0.85"):
        assert word in texts
    assert names[1:3] == ["title", "desc"] and "Held-out loss" in root[1].text


def test_lines_are_not_too_long(quick: Outcome) -> None:
    lines = [line for line in quick.text.splitlines() if str(quick.folder) not in line]
    assert max(map(len, lines)) <= 120


def test_threads_are_as_before(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run_demo(tmp_path, "--quick", *SMALL)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


# How it ends ---------------------------------------------------------------------------------------------------------


def test_a_difference_is_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = PlainTrainer.step

    def step_and_spoil(self: PlainTrainer, batch: demo.Batch) -> float:
        loss = step(self, batch)
        with torch.no_grad():
            self.model.transformer.h[0].ln_1.bias[3] += 1e-7
        return loss

    monkeypatch.setattr(PlainTrainer, "step", step_and_spoil)
    outcome = run_demo(tmp_path, "--quick", *SMALL)
    assert outcome.status == 1 and outcome.summary["equal"] is False
    assert [one["unequal_weights"] > 0 for one in outcome.summary["compared"]] == [True, True]
    assert "NO: relay and in core DIFFER, see below" in outcome.text and "same bits" not in outcome.text
    assert "relay and in core DIFFER after step 1, 2" in outcome.text
    assert any("weights after step 2" in line and "DIFFERENT" in line for line in outcome.text.splitlines())


def test_a_missed_target_fails(tmp_path: Path) -> None:
    outcome = run_demo(tmp_path, *SMALL)
    assert outcome.status == 1
    assert outcome.summary["equal"] is True and outcome.summary["target_reached"] is False
    assert "FAILED  held-out loss" in outcome.text


def test_same_seed_same_run(tmp_path: Path) -> None:
    losses = []
    for name, seed in [("a", "1"), ("b", "1"), ("c", "2")]:
        outcome = run_demo(tmp_path / name, "--quick", *SMALL, "--seed", seed)
        losses.append([(row["loss"], row["held_out"]) for row in outcome.losses])
    assert losses[0] == losses[1] != losses[2]


def test_without_a_budget_nothing_is_out_of_memory(tmp_path: Path) -> None:
    outcome = run_demo(tmp_path, "--quick", *SMALL)
    assert outcome.status == 0 and outcome.summary["in_core_fits"] is True
    assert "no budget" in outcome.text and "OUT OF MEMORY" not in outcome.text


def test_a_budget_for_both_is_reported(tmp_path: Path) -> None:
    outcome = run_demo(tmp_path, "--quick", *SMALL, "--device", "emulated", "--budget", "100")
    assert outcome.status == 0 and "both fit into the budget of 100 MB" in outcome.text


def test_a_budget_too_small_for_the_relay_ends_with_advice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(tmp_path, "--quick", "--budget", "0.5").status == 1
    said = capsys.readouterr().err
    assert "emulated device of 500 kB is full" in said and "a larger --budget" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--width", "30"], "the number of heads, 4, must divide it; try --width 32"),
        (["--device", "abacus"], "device='abacus' does not exist"),
        (["--out", f"{__file__}/below"], "Not a directory"),
    ],
)
def test_what_cannot_start_says_why(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path), *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--steps", "0"], ["--layers", "x"], ["--budget", "0"], ["--budget", "nan"]])
def test_options_out_of_range_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", *option])
    assert option[0] in capsys.readouterr().err


# The parts -----------------------------------------------------------------------------------------------------------


def test_meter_counts_storages_while_they_live() -> None:
    x = torch.zeros(1000)  # 4000 bytes
    meter = StorageMeter([x, x])
    assert meter.total == 4000
    with meter:
        y = x + 1
        z = y.view(10, 100)[0]  # the same storage
        y.add_(1)
        assert meter.total == 8000
        del y
        assert meter.total == 8000  # z holds it
        w = (z * 2).double()  # 100 float32, then 100 float64; the first is freed
        assert meter.total == 8800
        del z
        assert meter.total == 4800
    assert meter.peak == 9200 and w.dtype == torch.double


def test_meter_sees_gradients_optimizer_state_and_activations() -> None:
    model = torch.nn.Linear(100, 100, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    meter = StorageMeter(model.parameters())
    with meter:
        model(torch.zeros(1, 100)).sum().backward()
        optimizer.step()
    assert 16 * 10_000 <= meter.total <= 16 * 10_000 + 100


def test_schedule_warms_up_and_falls_to_a_tenth() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=FULL.learning_rate)
    schedule = demo.make_schedule(optimizer, FULL)
    rates = []
    for _ in range(FULL.steps + 1):
        rates.append(schedule.get_last_lr()[0] / FULL.learning_rate)
        optimizer.step()
        schedule.step()
    assert rates[0] == pytest.approx(1 / FULL.warm_up) and rates.index(max(rates)) == FULL.warm_up - 1
    assert max(rates) > 0.9 and rates[-1] == pytest.approx(0.1)


def test_table_is_aligned() -> None:
    assert format_table([("a", "1", "x"), ("bbb", "22"), ("", "3", "long")]) == "a    1   x\nbbb  22\n     3   long"


def test_a_log_gets_lines_and_no_progress_bar(capsys: pytest.CaptureFixture[str]) -> None:
    done: list[DemoStep] = []
    for step in demo.show_progress(3, done):
        done.append(DemoStep(**{field.name: step for field in fields(DemoStep)}))
    assert capsys.readouterr().err == "step 3 of 3: loss 3.00, held out 3.00; 0 s left\n"
