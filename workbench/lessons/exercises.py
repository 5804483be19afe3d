"""Predictions and exercises of the lessons: a number locked before it is computed, and code that is checked with hints.

Both also work without an answer, so a notebook runs from top to bottom and is readable without a kernel. Nothing here
depends on relays.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from html import escape
from typing import Any

import ipywidgets as widgets

from workbench.panels.display import Bundle, StillDisplay
from workbench.pictures import Picture, Scale, Table, svg

_PLAIN = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d+)?")  # three digits after each comma
_HINT = "Please type a number, such as 12 or 3.5e6."

# Prediction ----------------------------------------------------------------------------------------------------------


class Prediction:
    """A number that the learner commits to before it is computed.

    At the end of a cell it is shown as a box with a Lock button. A locked answer cannot be changed.

    Args:
        question: text of the question.
        answer: answer that is locked from the start; None if there is none yet.
        unit: unit of the answer, as "loads", for display.
        signed: True if the answer is a change, which may be negative; otherwise it is a number or size of something.
    """

    def __init__(self, question: str, answer: float | None = None, unit: str = "", *, signed: bool = False) -> None:
        self.question, self.unit, self.signed = question, unit, signed
        self._answer: float | None = None
        self._parts: tuple[_PredictionBox, StillDisplay] | None = None
        if answer is not None:
            self.lock(answer)

    @property
    def answer(self) -> float | None:
        """The locked number; None before."""
        return self._answer

    def lock(self, answer: float) -> None:
        """Commit to a number.

        Raises:
            ValueError: the number is not finite, or negative where none can be, or another one is locked already.
        """
        value = float(answer)
        if not math.isfinite(value):
            raise ValueError(f"answer={answer!r}: give a finite number")
        if value < 0 and not self.signed:
            raise ValueError(f"{_format_value(value)} is negative: give 0 or more {self.unit}".rstrip())
        if self._answer not in (None, value):
            raise ValueError(
                f"{_format_value(self._answer)} is locked already: run the cell of the question again to start anew"
            )
        self._answer = value
        if self._parts is not None:
            box, display = self._parts
            box.close()
            display.update()

    def compare(self, formula: float, measured: float) -> Picture:
        """Return a picture of the prediction, the formula's value and the measured value, with their relative errors."""
        return _compare(self, float(formula), float(measured))

    @property
    def box(self) -> _PredictionBox:
        """The widgets, made when they are first needed."""
        return self._make_parts()[0]

    def still(self) -> Bundle:
        """Return the question and the answer as text for a page without a kernel."""
        locked = "not answered yet" if self._answer is None else f"locked: {_with_unit(self._answer, self.unit)}"
        return {
            "text/html": f"<p><strong>Predict first.</strong> {escape(self.question)}<br><em>{escape(locked)}</em></p>",
            "text/plain": f"Predict first. {self.question}\n({locked})",
        }

    def _make_parts(self) -> tuple[_PredictionBox, StillDisplay]:
        if self._parts is None:
            box = _PredictionBox(self)
            # a name that is the same in each run, so that a stored notebook can be compared with a new run
            name = f"l2l-predict-{zlib.crc32(self.question.encode()):08x}"
            self._parts = box, StillDisplay(box.widget, self.still, name)
        return self._parts

    def _ipython_display_(self) -> None:
        self._make_parts()[1].open()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Bundle:
        return self._make_parts()[1].bundle()


def predict(question: str, unit: str = "", *, signed: bool = False) -> Prediction:
    """Return a new prediction, whose box is shown at the end of a cell; with `signed` it may be negative."""
    return Prediction(question, unit=unit, signed=signed)


def parse_number(typed: str) -> float:
    """Return the number in a text; commas are accepted only between groups of three digits.

    Raises:
        ValueError: the text is no number, or its commas may be decimal ones; the message is a hint.
    """
    text = typed.strip()
    if _PLAIN.fullmatch(text):
        return float(text)
    if _THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    if re.fullmatch(r"[+-]?\d*,\d+", text):
        raise ValueError(f"{text} is ambiguous: please type {text.replace(',', '.')} with a point, or no comma.")
    raise ValueError(_HINT)


class _PredictionBox:
    """The widgets of one prediction."""

    def __init__(self, prediction: Prediction) -> None:
        self._prediction = prediction
        self.number = widgets.Text(placeholder="your number", layout=widgets.Layout(width="12em"))
        self.button = widgets.Button(description="Lock", tooltip="Commit to this number", icon="lock")
        self.status = widgets.Label()
        question = widgets.HTML(f"<strong>Predict first.</strong> {escape(prediction.question)}")
        line = widgets.HBox([self.number, widgets.Label(prediction.unit), self.button, self.status])
        self.widget = widgets.VBox([question, line])
        self.button.on_click(self._lock)
        if prediction.answer is not None:
            self.close()

    def _lock(self, button: widgets.Button) -> None:
        try:
            self._prediction.lock(parse_number(self.number.value))
        except ValueError as error:
            self.status.value = str(error)

    def close(self) -> None:
        """Show the locked answer, which can no longer be changed."""
        assert self._prediction.answer is not None
        self.number.value = _format_value(self._prediction.answer)
        self.number.disabled = self.button.disabled = True
        self.status.value = "locked; now run the next cells"


def _compare(prediction: Prediction, formula: float, measured: float) -> Picture:
    rows = [("your prediction", prediction.answer), ("formula", formula), ("measured", measured)]
    cells = [(name, _with_unit(value, prediction.unit), _relative_error(value, measured)) for name, value in rows]
    cells[2] = (*cells[2][:2], "")  # no error of the measured value against itself
    note = "" if prediction.answer is not None else "Lock a number in the box above, then run this cell again."
    table = Table(f"In numbers: {prediction.question}", ("", "value", "off by"), cells, note)
    return Picture(_draw(prediction.question, table.rows, [value for _, value in rows]), table)


def _draw(title: str, rows: Sequence[Sequence[str]], values: Sequence[float | None]) -> str:
    """Draw three bars on one scale: the prediction outlined and hatched, the formula light, the measurement dark."""
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value)]
    x = Scale(0.0, max(sizes, default=0.0), 152.0, 600.0)
    parts = [svg.text(16, 22, title, style="strong")]
    for i, (cells, value) in enumerate(zip(rows, values, strict=True)):
        y = 36 + 26 * i
        name, shown, error = cells
        width = x(abs(value)) - x(0.0) if value is not None and math.isfinite(value) else 0.0
        parts.append(svg.text(144, y + 14, name, anchor="end"))
        parts.append(_bar(i, x(0.0), y, width))
        parts.append(svg.text(x(0.0) + width + 8, y + 14, shown, style="strong" if value is not None else "dim"))
        off = f"off by {error}" if error.startswith(("+", "-")) else error
        parts.append(svg.text(780, y + 14, off, style="dim"))
    description = ". ".join(", ".join(filter(None, row)) for row in rows)
    return svg.document(960, 122, title, description, parts)


def _bar(i: int, x: float, y: float, width: float) -> str:
    if width <= 0:
        return svg.path(f"M{x:.1f} {y}V{y + 20}", style="axis")
    if i == 0:
        strokes = svg.hatch(x, y, width, 20)
        return svg.path(strokes, style="rule") + svg.path(f"M{x:.1f} {y}h{width:.1f}v20h-{width:.1f}z", style="axis")
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="20" fill-opacity="{0.3 if i == 1 else 0.6}"/>'


def _format_value(value: float | None) -> str:
    """Format whole numbers in full, others to four digits."""
    if value is None:
        return "not answered"
    return f"{value:,.0f}" if value == round(value, 0) and abs(value) < 1e15 else f"{value:.4g}"


def _with_unit(value: float | None, unit: str) -> str:
    return f"{_format_value(value)} {unit}" if value is not None and unit else _format_value(value)


def _relative_error(value: float | None, measured: float) -> str:
    """Return the error of `value` relative to `measured` as text; "" without a value."""
    if value is None:
        return ""
    if value == measured:
        return "exact"
    if not measured or not math.isfinite(value - measured):
        return f"{value - measured:+.4g}"
    return f"{(value - measured) / abs(measured):+.1%}"


# Exercises -----------------------------------------------------------------------------------------------------------


class NotImplementedYet(Exception):
    """Raised if the learner's code still contains a `...`."""


@dataclass(frozen=True)
class ExerciseSolution:
    """The code of a solution, folded where HTML is displayed."""

    name: str
    code: str

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        summary = f"<summary>Solution of {escape(self.name)}</summary>"
        return {
            "text/html": f'<details class="l2l-fold">{summary}<pre>{escape(self.code)}</pre></details>',
            "text/plain": f"Solution of {self.name}:\n{self.code}",
        }


@dataclass
class Exercise:
    """An exercise that checks an answer; each wrong answer gets the next hint, and no exception is raised.

    Attributes:
        name: name of the exercise.
        test: takes the answer; False, an AssertionError (its message is shown) or another exception means wrong.
        hints: hints, from the gentlest to the plainest.
        code: code of the solution.
    """

    name: str
    test: Callable[[Any], bool | None]
    hints: Sequence[str] = ()
    code: str = ""
    tries: int = field(default=0, init=False)  # wrong answers so far

    def check(self, answer: Any) -> None:
        """Print whether the answer is right, and a hint if not; an answer that contains `...` does not count."""
        print(self.feedback_for(answer))

    def feedback_for(self, answer: Any) -> str:
        """Return the text that `check` prints."""
        try:
            if answer is ...:
                raise NotImplementedYet
            wrong = "" if self.test(_watch_for_ellipsis(answer)) is not False else "the answer does not pass the test"
        except (NotImplementedYet, NotImplementedError):
            return f"not yet: put your answer to {self.name} in place of the `...`, then run this cell again"
        except AssertionError as error:
            wrong = str(error) or "the answer does not pass the test"
        except Exception as error:
            wrong = f"your code raised {type(error).__name__}: {error}"
        if not wrong:
            return f"right: {self.name}"
        self.tries += 1
        return f"wrong: {wrong}{self._hint()}"

    @property
    def solution(self) -> ExerciseSolution:
        """The solution, shown folded at the end of a cell."""
        return ExerciseSolution(self.name, self.code)

    def _hint(self) -> str:
        if not self.hints:
            return ""
        level = min(self.tries, len(self.hints))
        last = " (the last one; the solution is below)" if level == len(self.hints) and self.code else ""
        return f"\nhint {level} of {len(self.hints)}{last}: {self.hints[level - 1]}"


def _watch_for_ellipsis(answer: Any) -> Any:
    """Return the answer; a function is wrapped so that it raises NotImplementedYet if it returns `...`."""
    if not callable(answer):
        return answer

    @wraps(answer)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = answer(*args, **kwargs)
        if result is ...:
            raise NotImplementedYet
        return result

    return call
