"""What `make test-fast` runs: something in every folder but those left out, and a share that cannot creep up; and rare cases."""

import ast
from pathlib import Path

import pytest
from fast import FEW, FOLDERS, ONE_OF, changing_names, further_cases, is_left_out, rare_cases, sample

TESTS = Path(__file__).resolve().parent


def names_in(file: Path) -> list[str]:
    """Node ids of a file's functions, read without importing it."""
    found = ast.parse(file.read_text(encoding="utf-8")).body
    functions = [node.name for node in found if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return [f"{file.relative_to(TESTS.parent).as_posix()}::{name}" for name in functions]


FILES = sorted(TESTS.rglob("test_*.py"))


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Of all functions but those left out."""
    return [name for file in FILES if not is_left_out(file) for name in names_in(file)]


def test_every_folder_is_touched_but_those_left_out(names: list[str]) -> None:
    touched = {TESTS.parent / name.partition("::")[0] for name in sample(names)}
    assert touched == {file for file in FILES if not is_left_out(file)}
    folders = {file.parent for file in FILES}
    assert {file.parent for file in touched} == folders - {TESTS / name for name in FOLDERS}
    assert {TESTS / name for name in FOLDERS} < folders


def test_few_files_are_left_out_for_their_processes() -> None:
    others = [file for file in FILES if file.parent.name not in FOLDERS]
    left_out = {file.name for file in others if is_left_out(file)}
    assert "test_compile.py" in left_out  # by an import of its own
    assert "test_programs.py" in left_out  # by one of tests/support/program_batch.py
    assert len(left_out) < len(others) / 6


def test_the_share_of_functions_is_as_said(names: list[str]) -> None:
    assert 0.85 / ONE_OF < len(sample(names)) / len(names) < 1.3 / ONE_OF


def test_of_a_function_one_case_runs() -> None:
    cases = [f"tests/a/test_a.py::test_one[{case}]" for case in range(50)]
    (taken,) = sample(cases)
    assert taken in cases


@pytest.mark.parametrize("order", [1, -1])
def test_it_does_not_depend_on_order_or_on_other_functions(order: int, names: list[str]) -> None:
    new = "tests/core/step/test_new.py::test_new"
    assert sample([*names, new][::order]) == {*sample(names), new}
    file = names[0].partition("::")[0]
    more = {f"{file}::test_more_{i}" for i in range(40)}
    ours = sample([*names, *more])
    assert ours & more and sample([*names, *more][::order]) == ours
    drawn_elsewhere = {name for name in sample(names) if not name.startswith(f"{file}::")}
    assert {name for name in ours if not name.startswith(f"{file}::")} == drawn_elsewhere


def test_of_many_cases_one_runs_by_default_and_functions_draw_different_ones() -> None:
    few, *sweeps = (
        [f"tests/a/test_a.py::test_{f}[{case}]" for case in range(n)]
        for f, n in (("few", FEW), ("more", FEW + 1), *((f"many_{i}", 30) for i in range(30)))
    )
    rare = rare_cases([*few, "tests/a/test_a.py::test_alone", *(name for cases in sweeps for name in cases)])
    assert not rare & {*few, "tests/a/test_a.py::test_alone"}
    drawn = [[name for name in cases if name not in rare] for cases in sweeps]
    assert {len(each) for each in drawn} == {1}
    assert len({name.partition("[")[2] for (name,) in drawn}) > 10


def test_a_case_that_is_not_slow_runs_if_there_is_one() -> None:
    for file in range(10):
        cases = [f"tests/a/test_{file}.py::test_many[{case}]" for case in range(30)]
        assert {*cases} - rare_cases(cases, cases[1:]) == {cases[0]}
        assert {*cases} - rare_cases(cases, cases) == {*cases} - rare_cases(cases)


def test_later_draws_run_every_case_that_is_not_slow_once() -> None:
    cases = [f"tests/a/test_a.py::test_many[{case}]" for case in range(30)]
    names, slow = [*cases, "tests/a/test_a.py::test_alone"], cases[20:]
    first = {*cases} - rare_cases(names, slow)
    later = [further_cases(names, slow, draw) for draw in range(1, 40)]
    assert sorted(first | set().union(*later)) == sorted(cases[:20])
    assert [len(each) for each in later] == [1] * 19 + [0] * 20
    assert all(not each & rare_cases(names, slow, draw) for draw, each in enumerate(later, 1))


def test_a_case_that_is_asked_for_by_name_runs() -> None:
    assert not rare_cases(["tests/a/test_a.py::test_one[29]"])


def test_names_with_addresses_are_noticed() -> None:
    name = f"tests/a/test_a.py::test_one[{test_names_with_addresses_are_noticed}]"
    assert changing_names(["tests/a/test_a.py::test_one[0x12]", name]) == [name]
