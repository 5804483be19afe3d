"""The doctor judges facts without looking at the machine, and looks without failing."""

from dataclasses import replace
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import workbench
from workbench.__main__ import main
from workbench.commands import doctor
from workbench.commands.doctor import (
    GIB,
    CheckResult,
    EnvironmentFacts,
    RequiredPackage,
    diagnose,
    format_rows,
    gather_facts,
    read_pins,
    read_project,
)
from workbench.commands.import_time import ImportTimes, measure_imports

IPYKERNEL = RequiredPackage("ipykernel", SpecifierSet(">=7.1,<8"), Version("7.4.0"))
JUPYTERLAB = RequiredPackage("jupyterlab", SpecifierSet(">=4.4"), Version("4.6.6"))
TORCH = RequiredPackage("torch", SpecifierSet(">=2.11"), Version("2.13.0"))
HEALTHY = EnvironmentFacts(
    python="3.11.7",
    python_range=SpecifierSet(">=3.11,<3.14"),
    wanted=(TORCH,),
    extra=(IPYKERNEL, JUPYTERLAB),
    installed={"torch": "2.13.0+cpu", "ipykernel": "7.4.0", "jupyterlab": "4.6.6"},
    widget_manager=Path("package.json"),
    kernel=".venv/bin/python",
    this_python=".venv/bin/python",
    torch_error=None,
    cuda="H200",
    imports=ImportTimes(torch_s=0.8, engine_s=0.95, heavy=()),
    ram_bytes=32 * GIB,
    free_ram_bytes=16 * GIB,
    cores=8,
    free_disk_bytes=100 * GIB,
)


def row(facts: EnvironmentFacts, check: str) -> CheckResult:
    (found,) = (each for each in diagnose(facts) if each.check == check)
    return found


def with_ipykernel(version: str | None) -> EnvironmentFacts:
    return replace(HEALTHY, installed={**HEALTHY.installed, "ipykernel": version})


def test_a_healthy_machine_is_all_ok() -> None:
    rows = diagnose(HEALTHY)
    assert [each.check for each in rows] == [
        "Python", "torch", "ipykernel", "jupyterlab", "kernel", "widget manager", "device", "import", "RAM", "cores", "disk",
    ]  # fmt: skip
    assert {each.status for each in rows} == {"ok"}
    assert all(each.advice and "\n" not in each.advice for each in rows)


@pytest.mark.parametrize(
    ("kernel", "status", "advice"),
    [(None, "fail", "could not start"), ("elsewhere/python", "note", "start another Python")],
)
def test_the_kernel_is_this_python(kernel: str | None, status: str, advice: str) -> None:
    found = row(replace(HEALTHY, kernel=kernel), "kernel")
    assert found.status == status and advice in found.advice and "-m ipykernel install --sys-prefix" in found.advice


@pytest.mark.parametrize(
    ("version", "status"),
    [("7.4.0", "ok"), ("7.1.0", "note"), ("7.0.1", "fail"), ("8.0.0", "fail"), ("6.30.1", "fail"), (None, "fail")],
)
def test_ipykernel_range(version: str | None, status: str) -> None:
    assert row(with_ipykernel(version), "ipykernel").status == status


def test_what_is_missing_comes_with_the_command_that_brings_it() -> None:
    assert "pip install -c constraints.txt 'ipykernel<8,>=7.1'" in row(with_ipykernel(None), "ipykernel").advice


def test_outside_a_clone_the_command_names_no_file_of_one() -> None:
    outside = replace(with_ipykernel(None), extra=(replace(IPYKERNEL, tested=None), JUPYTERLAB))
    assert row(outside, "ipykernel").advice == "pip install 'ipykernel<8,>=7.1'"


def test_without_the_notebook_one_row_says_how_to_install_it() -> None:
    engine = replace(HEALTHY, installed={"torch": "2.13.0", "ipykernel": None, "jupyterlab": None}, kernel=None)
    checks = [each.check for each in diagnose(engine)]
    assert checks == ["Python", "torch", "notebook", "device", "import", "RAM", "cores", "disk"]
    assert row(engine, "notebook").status == "note"
    assert row(engine, "notebook").advice.endswith('pip install "l2l-workbench[workbench]"')


def test_a_version_without_a_tested_one_is_ok_in_range() -> None:
    untested = replace(IPYKERNEL, tested=None)
    assert row(replace(with_ipykernel("7.2.0"), extra=(untested,)), "ipykernel").status == "ok"


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("facts", "check", "status"),
    [
        (replace(HEALTHY, python="3.10.9"), "Python", "fail"),
        (replace(HEALTHY, python="3.14.1"), "Python", "fail"),
        (replace(HEALTHY, widget_manager=None), "widget manager", "fail"),
        (replace(HEALTHY, torch_error="libc10.so: no such file\nmore", cuda=None), "device", "fail"),
        (replace(HEALTHY, cuda=None), "device", "note"),
        (replace(HEALTHY, imports=ImportTimes(0.8, 1.2, ())), "import", "note"),
        (replace(HEALTHY, imports=ImportTimes(0.8, 0.9, ("IPython",))), "import", "note"),
        (replace(HEALTHY, free_ram_bytes=1 * GIB), "RAM", "note"),
        (replace(HEALTHY, ram_bytes=None, free_ram_bytes=None), "RAM", "note"),
        (replace(HEALTHY, cores=1), "cores", "note"),
        (replace(HEALTHY, free_disk_bytes=GIB // 2), "disk", "note"),
    ],
)
def test_one_thing_wrong_shows_in_its_row_alone(facts: EnvironmentFacts, check: str, status: str) -> None:
    assert row(facts, check).status == status
    assert "\n" not in row(facts, check).advice
    assert all(each.status == "ok" for each in diagnose(facts) if each.check != check)


def test_both_imports_are_told_with_what_the_engine_adds() -> None:
    found = row(HEALTHY, "import")
    assert found.found == "torch 0.80 s, l2l_core 0.95 s"
    assert found.advice == "l2l_core adds 0.15 s of processor time, and imports neither transformers nor IPython"
    without = diagnose(replace(HEALTHY, torch_error="no torch", imports=None))
    assert "import" not in {each.check for each in without}


def test_imports_are_measured_in_fresh_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("torch", ""), ("l2l_core", "import IPython"), ("IPython", "")):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)  # where `python -c` looks first
    times = measure_imports()
    assert times.torch_s > 0 and times.engine_s > 0 and times.heavy == ("IPython",)
    (tmp_path / "torch.py").write_text("raise ImportError('no libc10')")
    with pytest.raises(RuntimeError, match="import torch failed: ImportError: no libc10"):
        measure_imports()


def test_room_is_told_in_parameters() -> None:
    assert row(HEALTHY, "RAM").found == "16.0 of 32.0 GiB free"
    assert row(HEALTHY, "RAM").advice.startswith("room for 1.07 G parameters")  # 16 GiB / 16 bytes


def test_the_table_has_one_line_per_row_in_columns() -> None:
    lines = format_rows(diagnose(with_ipykernel(None))).splitlines()
    assert len(lines) == len(diagnose(HEALTHY))
    assert len({line.index(each.advice) for line, each in zip(lines, diagnose(with_ipykernel(None)), strict=True)}) == 1


def test_this_environment_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    assert "jupyterlab" in capsys.readouterr().out


def test_status_is_1_when_something_required_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "gather_facts", lambda: with_ipykernel(None))
    assert main(["doctor"]) == 1
    assert "needs ipykernel" in capsys.readouterr().out


def test_gather_reads_ranges_and_pins_of_the_clone() -> None:
    facts = gather_facts()
    by_name = {wanted.name: wanted for wanted in (*facts.wanted, *facts.extra)}
    assert {"torch", "greenlet"} <= {wanted.name for wanted in facts.wanted}
    assert by_name["ipykernel"].specifier == SpecifierSet(">=7.1,<8")
    assert by_name["torch"].tested == Version("2.13.0")
    assert facts.cores >= 1 and facts.free_disk_bytes > 0


def test_without_constraints_nothing_counts_as_tested(tmp_path: Path) -> None:
    assert read_pins(tmp_path / "constraints.txt") == {}


def test_outside_a_clone_the_installed_package_says_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "l2l_workbench-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: l2l-workbench\nVersion: 9\nRequires-Python: >=3.11\n"
        "Requires-Dist: torch>=2.11\nRequires-Dist: pytest>=8; extra == 'test'\n"
        "Requires-Dist: plotly>=6.0; extra == 'workbench'\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    python_range, requirements, extra = read_project(tmp_path)
    assert python_range == SpecifierSet(">=3.11")
    assert [str(each) for each in requirements] == ["torch>=2.11"]
    assert [each.name for each in extra] == ["plotly"]


def test_what_the_package_imports_on_first_use_is_there() -> None:
    for name in workbench._MODULE_OF:
        assert getattr(workbench, name).__name__ in (name, f"{name}Bench")
    assert dir(workbench) == sorted(workbench.__all__) == sorted(workbench._MODULE_OF), "no internals"


def test_no_name_of_the_package_is_hidden_by_a_folder() -> None:
    """A folder of that name would take its place as soon as something imports it."""
    assert not {path.stem for path in Path(workbench.__file__).parent.iterdir()} & {*workbench._MODULE_OF}
