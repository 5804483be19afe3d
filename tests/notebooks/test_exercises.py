"""The exercises of the lessons: their own solution is right, a stub is no try, a plausible mistake is wrong."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from l2l_core.plan import Action, ScheduleSettings, SlotTable, visits_of_step
from workbench.commands.notebook_runner import FOLDER, read_notebook
from workbench.lessons.exercises import Exercise


def load_exercise(notebook: str) -> tuple[Exercise, Callable[..., object]]:
    """The exercise of a notebook, whose cell needs nothing from other cells, and its solution."""
    cells = [cell.source for cell in read_notebook(FOLDER / f"{notebook}.ipynb").cells if cell.cell_type == "code"]
    (source,) = (source for source in cells if "= Exercise(" in source)
    names: dict[str, Any] = {"Exercise": Exercise}
    exec(compile(source, notebook, "exec"), names)
    exercise = names["exercise"]
    assert isinstance(exercise, Exercise)
    solved: dict[str, Any] = {"math": math}
    exec(compile(exercise.code, f"solution of {notebook}", "exec"), solved)
    return exercise, next(value for value in solved.values() if callable(value))


def weight_bytes(V: int, P: int, ahead: int = 1) -> int:
    return 8 * V * P  # every layer twice, also the last ones


def deepest(budget_bytes: int, P: int, S: int, entering_bytes: int, other_bytes: int) -> int:
    return (budget_bytes - 16 * P - 8 * S - other_bytes) // entering_bytes  # below 0 where nothing fits


def smallest(nbytes: int, bytes_per_s: float, compute_s: float) -> float:
    return nbytes / bytes_per_s / compute_s  # no whole number


def choose(N: float, device_bytes: float, host_bytes: float) -> str:
    return (
        "relay" if 14 * N <= host_bytes else "in core" if 16 * N <= device_bytes else "neither"
    )  # the slower one first


def plan(n: int) -> list[tuple[str, int]]:
    return [("Fall", i) for i in range(n)] + [("B", i) for i in reversed(range(n))]  # plain training


def two_slots(settings: ScheduleSettings, visits: Sequence[str]) -> Iterator[Action]:
    slots, order, previous = SlotTable(2), visits_of_step(settings, visits), None
    for i, visit in enumerate(order):  # prefetch, whatever the settings
        for later in order[i : i + 2]:
            yield from slots.load(later.layer, instead_of=previous)
        yield from visit.actions
        previous = visit.layer


def verdict(mine: Sequence[float], theirs: Sequence[float]) -> str:
    """The interval of two independent samples, not of pairs."""
    from scipy.stats import ttest_ind

    if len(mine) < 3:
        return "not shown"
    interval = ttest_ind(mine, theirs).confidence_interval(0.95)
    return "better" if interval.high < 0 else "worse" if interval.low > 0 else "not shown"


def micro_batches(p: int, v: int, share: float) -> int:
    return math.ceil((p - 1) / (v * share))  # no multiple of p


@pytest.mark.parametrize(
    "notebook, mistaken",
    [
        ("01_the_relay", weight_bytes),
        ("02_memory", deepest),
        ("03_overlap", smallest),
        ("06_when_to_relay", choose),
        ("07_memory_strategies", plan),
        ("08_your_own_schedule", two_slots),
        ("09_your_own_depth_experiment", verdict),
        ("10_how_large_models_are_trained", micro_batches),
    ],
)
def test_exercise(notebook: str, mistaken: Callable[..., object]) -> None:
    exercise, solution = load_exercise(notebook)
    assert exercise.feedback_for(solution).startswith("right: ")
    assert exercise.feedback_for(lambda *args: ...).startswith("not yet: ") and exercise.tries == 0
    said = [exercise.feedback_for(mistaken) for _ in exercise.hints]
    assert len(exercise.hints) == 3 and all(text.startswith("wrong: ") for text in said)
    assert [hint in text for hint, text in zip(exercise.hints, said, strict=True)] == [True] * 3
