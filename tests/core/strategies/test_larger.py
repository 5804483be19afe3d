"""benchmarks/larger.py on short sequences: the largest that fit, both sides of each limit tried, bits compared."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import larger

PART = replace(larger.PARTS["length"], plain=3, sizes=(1, 3), most=5)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(larger.Unrolled, "STEPS", 2)
    monkeypatch.setitem(larger.PARTS, "length", PART)
    monkeypatch.chdir(tmp_path)


def test_the_largest_that_fits_is_found_and_a_second_run_continues(capsys: pytest.CaptureFixture[str]) -> None:
    larger.measure("length", list(larger.WAYS), again=False)
    path = Path("out", "benchmarks", "larger_length.json")
    record = json.loads(path.read_text())
    found = {way: each["most"] for way, each in record["results"].items()}
    assert 3 == found["in core"] <= found["swap"] < found["relay"] == found["both"] == PART.most, found
    for way, each in record["results"].items():
        tried = {int(size): steps for size, steps in each["tried"].items()}
        assert all(tried[3]["losses"] == other["tried"]["3"]["losses"] for other in record["results"].values())
        assert not tried[found[way]]["raised"] and tried[found[way]]["host_bytes"] <= record["host_bytes"]
        assert found[way] == PART.most or found[way] + 1 in tried
    del record["results"]["both"]
    path.write_text(json.dumps(record))
    capsys.readouterr()
    larger.measure("length", list(larger.WAYS), again=False)
    out = capsys.readouterr().out
    assert "both: " in out and "swap: " not in out and "| swap " in out


def test_other_bits_than_in_core_are_an_error() -> None:
    machine = larger.Machine(PART, 10**9, 1.0)
    slower = replace(PART, optimizer=lambda params: PART.optimizer(params, lr=2e-3))
    with pytest.raises(RuntimeError, match="other bits than in core"):
        machine.run(lambda part, made, device: larger.WAYS["both"](slower, made, device), PART.plain, PART.rows)
