"""A prediction is locked once and compared; an exercise judges, hints one level more each time, and never raises."""

import math
from typing import Any
from xml.etree import ElementTree

import pytest

from workbench.lessons.exercises import Exercise, Prediction, predict
from workbench.panels import display
from workbench.panels.display import WIDGET_VIEW_TYPE
from workbench.pictures.picture import Picture

SVG = "{http://www.w3.org/2000/svg}"


def texts(picture: Picture) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


def bar_widths(picture: Picture) -> list[float]:
    """Of the formula and the measurement."""
    return [float(rect.attrib["width"]) for rect in ElementTree.fromstring(picture.svg).iter(f"{SVG}rect")]


def type_and_lock(prediction: Prediction, typed: str) -> Any:
    box = prediction.box
    box.number.value = typed
    box.button.click()
    return box


# Prediction ----------------------------------------------------------------------------------------------------------


def test_a_question_shows_with_and_without_widgets() -> None:
    shown = predict("How many <loads>?", "loads")._repr_mimebundle_()
    assert WIDGET_VIEW_TYPE in shown
    assert "How many &lt;loads&gt;?" in shown["text/html"] and "not answered yet" in shown["text/html"]
    assert shown["text/plain"] == "Predict first. How many <loads>?\n(not answered yet)"


@pytest.mark.parametrize(
    "typed, answer",
    [
        ("10", 10),
        ("10.5", 10.5),
        (".5", 0.5),
        (" 1,500 ", 1500),
        ("1,000", 1000),
        ("12,345,678.5", 12345678.5),
        ("3.5e6", 3.5e6),
        ("+2", 2),
        ("0", 0),
        ("-1,000.5", -1000.5),
    ],
)
def test_the_button_locks_what_was_typed(typed: str, answer: float) -> None:
    prediction = predict("By how much does it change?", signed=True)
    box = type_and_lock(prediction, typed)
    assert prediction.answer == answer
    assert box.number.disabled and box.button.disabled and box.status.value.startswith("locked")


@pytest.mark.parametrize(
    "typed", ["", "ten", "nan", "inf", "1e", "1_0", "1.000,5", "1,00,000", "12,34.5", "0x10", "10 5", ",", "."]
)
def test_what_is_no_number_is_not_locked(typed: str) -> None:
    prediction = predict("How many?")
    box = type_and_lock(prediction, typed)
    assert prediction.answer is None and not box.button.disabled
    assert box.status.value == "Please type a number, such as 12 or 3.5e6."


@pytest.mark.parametrize(
    "typed, better", [("10,5", "10.5"), ("1,0000", "1.0000"), ("0,500", "0.500"), ("-0,5", "-0.5")]
)
def test_a_comma_that_may_be_a_decimal_one_is_refused(typed: str, better: str) -> None:
    prediction = predict("By how much?", signed=True)
    box = type_and_lock(prediction, typed)
    assert prediction.answer is None and not box.button.disabled
    assert box.status.value == f"{typed} is ambiguous: please type {better} with a point, or no comma."
    box.number.value = better  # as the hint says
    box.button.click()
    assert prediction.answer == float(better)


def test_a_negative_number_of_things_is_refused() -> None:
    prediction = predict("How many?", "loads")
    box = type_and_lock(prediction, "-3")
    assert prediction.answer is None and box.status.value == "-3 is negative: give 0 or more loads"
    with pytest.raises(ValueError, match="0 or more"):
        prediction.lock(-3)
    box.number.value = "0"
    box.button.click()
    assert prediction.answer == 0


def test_a_page_without_a_kernel_shows_the_question_with_the_locked_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []

    class Output:
        display_id = "one"

        def update(self, bundle: dict[str, Any], raw: bool) -> None:
            shown[-1] = bundle

    def show(bundle: dict[str, Any], raw: bool, display_id: Any = None) -> Output:
        shown.append(bundle)
        return Output()

    monkeypatch.setattr(display, "display", show)
    monkeypatch.setattr(display, "is_notebook", lambda: True)
    prediction = predict("How many?", "loads")
    prediction._ipython_display_()
    assert list(shown[0]) == [WIDGET_VIEW_TYPE] and WIDGET_VIEW_TYPE not in shown[1], (
        "two outputs: the error stands alone"
    )
    assert "not answered yet" in shown[1]["text/html"]
    again = predict("How many?", "loads").still()
    assert again == prediction.still() and "-still" in shown[1]["text/html"]
    prediction.box.number.value = "12"
    prediction.box.button.click()
    assert "locked: 12 loads" in shown[1]["text/html"] and len(shown) == 2


def test_a_locked_answer_stays() -> None:
    prediction = Prediction("How many?", answer=12)
    prediction.lock(12)
    with pytest.raises(ValueError, match="12 is locked already: run the cell"):
        prediction.lock(10)
    assert prediction.answer == 12


def test_the_box_says_when_another_answer_is_locked() -> None:
    prediction = predict("How many?")
    box = prediction.box
    prediction.lock(3)
    assert box.button.disabled and box.number.value == "3"
    box.number.value = "4"
    box.button.click()
    assert "3 is locked already" in box.status.value and prediction.answer == 3


def test_an_answer_given_from_the_start_is_shown_locked() -> None:
    prediction = Prediction("How many?", answer=12, unit="loads")
    assert prediction._repr_mimebundle_()["text/plain"].endswith("(locked: 12 loads)")
    assert prediction.box.button.disabled


def test_comparing_shows_the_three_numbers_and_their_errors() -> None:
    picture = Prediction("How many loads?", answer=12, unit="loads").compare(10, 10)
    assert list(picture.table.rows) == [
        ("your prediction", "12 loads", "+20.0%"),
        ("formula", "10 loads", "exact"),
        ("measured", "10 loads", ""),
    ]
    for words in ("How many loads?", "12 loads", "10 loads", "off by +20.0%", "exact"):
        assert words in texts(picture)
    assert bar_widths(picture)[0] == bar_widths(picture)[1]
    assert "How many loads?" in picture._repr_mimebundle_()["text/plain"]


def test_bars_are_in_proportion() -> None:
    formula, measured = bar_widths(Prediction("q", answer=0).compare(50, 200))
    assert measured == pytest.approx(4 * formula)


def test_without_an_answer_the_comparison_says_so() -> None:
    picture = predict("How many?").compare(10, 8)
    assert picture.table.rows[0] == ("your prediction", "not answered", "")
    assert picture.table.rows[1] == ("formula", "10", "+25.0%")
    assert "Lock a number" in picture.table.note and "not answered" in texts(picture)


@pytest.mark.parametrize("numbers", [(0, 0, 0), (1, 2, 0), (-3, -3, -2), (1, math.nan, 1), (1, 1, math.inf)])
def test_odd_numbers_are_drawn(numbers: tuple[float, float, float]) -> None:
    answer, formula, measured = numbers
    picture = Prediction("q", answer=answer, signed=True).compare(formula, measured)
    for rect in ElementTree.fromstring(picture.svg).iter(f"{SVG}rect"):
        assert all(math.isfinite(float(rect.attrib[name])) for name in ("x", "y", "width", "height"))


def test_what_the_author_writes_is_escaped() -> None:
    picture = Prediction("a < b & c", answer=1, unit="<b>").compare(1, 1)
    assert "a < b & c" in texts(picture) and "1 <b>" in texts(picture)
    assert "<b>" not in picture._repr_mimebundle_()["text/html"]


# Exercises -----------------------------------------------------------------------------------------------------------


def exercise() -> Exercise:
    return Exercise("doubling", lambda f: f(3) == 6, ["think of a sum", "x + x"], code="def f(x): return 2 * x  # <")


def test_a_right_answer() -> None:
    assert exercise().feedback_for(lambda x: 2 * x) == "right: doubling"


def test_hints_grow_with_every_wrong_try(capsys: pytest.CaptureFixture[str]) -> None:
    asked = exercise()
    for expected in ("hint 1 of 2: think", "hint 2 of 2 (the last one; the solution is below): x + x", "hint 2 of 2"):
        asked.check(lambda x: x)
        said = capsys.readouterr().out
        assert said.startswith("wrong: ") and expected in said
    assert asked.feedback_for(lambda x: x + x) == "right: doubling"


def test_dots_are_not_a_try() -> None:
    def not_written(x: int) -> Any: ...

    def dots(x: int) -> Any:
        return ...

    asked = exercise()
    for answer in (..., dots):
        assert asked.feedback_for(answer).startswith("not yet: put your answer to doubling")
    assert asked.tries == 0
    assert asked.feedback_for(not_written).startswith("wrong")  # it returns None, which is an answer


def test_what_the_learners_code_raises_is_told() -> None:
    assert "your code raised ZeroDivisionError: division by zero" in exercise().feedback_for(lambda x: x / 0)


def test_a_failing_assertion_tells_what_it_says() -> None:
    def test(answer: int) -> None:
        if answer != 4:
            raise AssertionError(f"{answer} is not 4")  # pytest would add to the message of an `assert`

    asked = Exercise("four", test)
    assert asked.feedback_for(5) == "wrong: 5 is not 4"
    assert asked.feedback_for(4) == "right: four"


def test_the_solution_is_folded() -> None:
    shown = exercise().solution._repr_mimebundle_()
    assert shown["text/html"].startswith("<details") and "2 * x  # &lt;" in shown["text/html"]
    assert "open" not in shown["text/html"].partition(">")[0]
    assert "def f(x)" in shown["text/plain"]
