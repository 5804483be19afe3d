"""Calibration: figures that a forecast can use, kept for this machine alone. Nothing here is timed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import platformdirs
import pytest
from transformers import BertConfig

from l2l_core import EmulatedDevice, RelayConfig, forecast_config
from workbench import __main__ as command_line
from workbench.commands import calibrate
from workbench.commands.calibrate import (
    Calibration,
    cache_path,
    load_calibration,
    measure,
    save_calibration,
    table_rows,
)

KNOWN = Calibration(
    hardware="some machine",
    flops_per_s={"fp32": {"256": 1e11, "512": 2e11}, "bf16": {"256": 4e11}},
    memory_bytes_per_s=2e10,
    update_params_per_s=3e8,
    h2d_bytes_per_s=1e10,
    d2h_bytes_per_s=2e10,
    latency_s=1e-5,
    overhead_s=1e-4,
    seconds=12.5,
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    return tmp_path


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    device = EmulatedDevice()
    yield device
    device.close()


def here(device: EmulatedDevice) -> Calibration:
    return replace(KNOWN, hardware=calibrate.name_hardware(device))


def test_every_figure_is_measured_and_positive(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SIZES", (16, 32))
    monkeypatch.setattr(calibrate, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(calibrate, "PARAMS", 1 << 10)
    found = measure(device, share_s=0.0)
    assert set(found.flops_per_s) == {"fp32", "bf16"} and set(found.flops_per_s["fp32"]) == {"16", "32"}
    figures = [*found.flops_per_s["fp32"].values(), *found.flops_per_s["bf16"].values(), found.memory_bytes_per_s]
    figures += [found.update_params_per_s, found.h2d_bytes_per_s, found.d2h_bytes_per_s, found.latency_s]
    assert all(0 < figure < math.inf for figure in [*figures, found.overhead_s, found.seconds])
    assert not device._lanes or all(not lane._shutdown for lane in device._lanes.values())


def test_work_is_warmed_up_and_waited_for() -> None:
    done: list[str] = []
    calibrate.median_seconds(lambda: done.append("work"), 0.0, lambda: done.append("wait"))
    assert done == ["work", "wait"] * (1 + calibrate.MIN_REPEATS)


def test_a_machine_is_the_best_of_its_precision() -> None:
    assert KNOWN.machine().flops_per_s == 2e11 and KNOWN.machine("bf16").flops_per_s == 4e11
    machine = KNOWN.machine()
    assert (machine.h2d_bytes_per_s, machine.d2h_bytes_per_s, machine.update_params_per_s) == (1e10, 2e10, 3e8)
    assert (machine.latency_s, machine.overhead_s, machine.name) == (1e-5, 1e-4, "some machine")
    with pytest.raises(ValueError, match="precision='fp8'.*fp32, bf16"):
        KNOWN.machine("fp8")


def test_a_machine_feeds_a_forecast() -> None:
    config = BertConfig(num_hidden_layers=3, hidden_size=64, intermediate_size=128, num_attention_heads=2)
    slow = replace(KNOWN, flops_per_s={"fp32": {"256": 1e10}})
    options = {"micro_batches": 2, "batch": 4, "sequence": 16, "relay_config": RelayConfig()}
    fast_s, slow_s = (forecast_config(config, c.machine(), **options).seconds for c in (KNOWN, slow))  # type: ignore[arg-type]
    assert slow_s > fast_s
    assert "some machine" in forecast_config(config, KNOWN.machine(), **options).basis  # type: ignore[arg-type]


def test_what_was_saved_is_found_again(cache: Path, device: EmulatedDevice) -> None:
    assert load_calibration(device) is None
    path = save_calibration(here(device), device)
    assert cache in path.parents and list(path.parent.iterdir()) == [path]
    assert load_calibration(device) == here(device)


def test_figures_of_another_machine_or_version_do_not_count(cache: Path, device: EmulatedDevice) -> None:
    save_calibration(KNOWN, device)
    assert load_calibration(device) is None, "the file names other hardware"
    path = save_calibration(here(device), device)
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    assert load_calibration(device) is None


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 1, "hardware": "x", "other": 2}'])
def test_a_damaged_file_is_named_with_the_remedy(cache: Path, device: EmulatedDevice, text: str) -> None:
    path = save_calibration(here(device), device)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"calibration-.*--force"):
        load_calibration(device)


def test_the_device_is_closed_when_the_file_is_damaged(
    cache: Path, device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_calibration(here(device), device).write_text("")
    closed: list[EmulatedDevice] = []
    with monkeypatch.context() as patched:
        patched.setattr(EmulatedDevice, "close", lambda device: closed.append(device))
        assert command_line.main(["calibrate", "--device", "cpu"]) == 1
    assert "--force" in capsys.readouterr().out and len(closed) == 1


def test_another_number_of_threads_is_another_file(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    one = cache_path(device)
    monkeypatch.setattr(calibrate.torch, "get_num_threads", lambda: 77)
    assert cache_path(device) != one and "77 threads" in calibrate.name_hardware(device)


def test_the_command_measures_once(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured: list[str] = []

    def count(device: EmulatedDevice) -> Calibration:
        measured.append(device.name)
        return here(device)

    monkeypatch.setattr(calibrate, "measure", count)
    for arguments in (["calibrate"], ["calibrate", "--device", "cpu"], ["calibrate", "--force"]):
        assert command_line.main(arguments) == 0
    assert len(measured) == 2
    text = capsys.readouterr().out
    assert text.count("measured in 12.5 s") == 2 and text.count("measured before") == 1
    assert "300 M parameters/s" in text and "torch" in text and str(cache) in text


def test_a_device_that_is_not_there_is_named(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["calibrate", "--device", "cuda"]) == 1
    assert "device='cuda' does not exist" in capsys.readouterr().out


def test_the_table_has_every_figure() -> None:
    rows = dict(table_rows(KNOWN))
    assert rows["matrix products, bf16, 256 x 256"] == "400 GFLOP/s" and rows["latency of a copy"] == "10 µs"
    lines = calibrate.format_table(rows.items()).splitlines()
    assert len(lines) == 9 and len({len(line) for line in lines}) == 1
    assert json.loads(json.dumps(KNOWN.flops_per_s)) == KNOWN.flops_per_s
