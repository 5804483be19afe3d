"""Margins of forecasts: how far the forecasts of recent steps were from the steps as measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import NamedTuple

from l2l_core.trace import CATEGORIES, LANES, format_bytes
from workbench.pictures import LANE_NAMES, format_seconds
from workbench.what_if.answer import Answer, TracedStep, answer_question, measured_answer
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import Question

NUM_FORECASTS = 8  # forecasts that a margin covers at most


def format_percent(share: float) -> str:
    """Format a share in [0, 1] as a percentage."""
    return f"{share:.0%}"


class Figure(NamedTuple):
    """A figure of a step.

    Attributes:
        name: name in the table.
        read: returns the figure of a step.
        format: formats it with its unit.
        whole: returns the total of a step to which errors of the figure are relative.
    """

    name: str
    read: Callable[[TracedStep], float]
    format: Callable[[float], str]
    whole: Callable[[TracedStep], float]


def _seconds(answer: TracedStep) -> float:
    return answer.seconds


def _device_bytes(answer: TracedStep) -> float:
    return answer.peak_device_bytes


def _exposed_s(lane: str, answer: TracedStep) -> float:
    return answer.summary.exposed_s[lane]


def _category_bytes(category: str, answer: TracedStep) -> float:
    return answer.device_bytes.get(category, 0)


SECONDS = Figure("step", _seconds, format_seconds, _seconds)
HIDDEN = Figure("copies hidden", lambda answer: answer.overlap, format_percent, lambda _: 1.0)
DEVICE = Figure("device at its peak", _device_bytes, format_bytes, _device_bytes)
HOST = Figure(
    "host at its peak", lambda answer: answer.peak_host_bytes, format_bytes, lambda answer: answer.peak_host_bytes
)
FIGURES: Sequence[Figure] = (
    SECONDS,
    Figure("compute at work", lambda answer: answer.summary.busy_s["compute"], format_seconds, _seconds),
    *(
        Figure(f"{LANE_NAMES[lane]}, exposed", partial(_exposed_s, lane), format_seconds, _seconds)
        for lane in LANES[1:]
    ),
    HIDDEN,
    DEVICE,
    *(Figure(f"· {name}", partial(_category_bytes, name), format_bytes, _device_bytes) for name in CATEGORIES),
    HOST,
)


@dataclass(frozen=True)
class ForecastMargin:
    """Mean absolute error of recent forecasts, for every figure.

    Attributes:
        shares: by name of the figure, the error as a share of `Figure.whole`.
        source: forecasts that the errors are of.
    """

    shares: Mapping[str, float]
    source: str

    @classmethod
    def of(cls, errors: Sequence[Mapping[str, float]], source: str) -> ForecastMargin:
        """Combine the errors of several forecasts."""
        return cls({f.name: fmean(abs(each[f.name]) for each in errors) for f in FIGURES}, source)

    def text(self, figure: Figure, answer: Answer) -> str:
        """Format the margin of a figure, as "± 12 ms"; "± 0" if it is too small to see."""
        whole = figure.whole(answer)
        share = self.shares[figure.name]
        return "± 0" if share < 0.0005 or not whole else f"± {figure.format(share * whole)}"

    @property
    def explanation(self) -> str:
        """Sentence that explains the sign ±."""
        return f"±: mean error of {self.source}."


def with_margin(figure: Figure, answer: Answer, margin: ForecastMargin | None) -> str:
    """Format a figure of an answer with its margin, if that is known."""
    words = figure.format(figure.read(answer))
    return words if margin is None else f"{words} {margin.text(figure, answer)}"


class ForecastRecord:
    """Errors of the forecasts of the last `NUM_FORECASTS` steps that were forecast.

    Invariant: `_errors` is replaced, never changed in place, since another thread may read it.
    """

    def __init__(self) -> None:
        self._errors: tuple[Mapping[str, float], ...] = ()

    def add(self, forecast: Answer, step: Answer) -> None:
        """Add the error of a forecast; not of a guess, nor of a step with other settings."""
        if not forecast.guessed and forecast.question == step.question:
            self._errors = (*self._errors, _errors_of(forecast, step))[-NUM_FORECASTS:]

    def clear(self) -> None:
        """Forget all errors."""
        self._errors = ()

    def margin(self, simulated: Answer, step: Answer) -> ForecastMargin:
        """Return the margin of the recorded forecasts; before the first one, that of a simulation of the measured step."""
        errors = self._errors
        if errors:
            source = f"the last {len(errors)} forecasts" if len(errors) > 1 else "the last forecast"
            return ForecastMargin.of(errors, f"{source} against the measured steps")
        return ForecastMargin.of([_errors_of(simulated, step)], f"the simulation against {step.basis}")


def _errors_of(forecast: Answer, step: Answer) -> Mapping[str, float]:
    return {f.name: (f.read(forecast) - f.read(step)) / (f.whole(step) or 1.0) for f in FIGURES}


@dataclass(frozen=True, eq=False)
class ComparedAnswer:
    """A simulated step beside the simulation of the last measured step, so that equal settings give equal figures.

    Attributes:
        now: the simulated step.
        was: simulation of the settings of the measured step; None before the first step.
        measured: the measured step; None before the first step.
        margin: margin of every simulated figure; None if nothing was measured.
    """

    now: Answer
    was: Answer | None = None
    measured: Answer | None = None
    margin: ForecastMargin | None = None

    @property
    def was_title(self) -> str:
        """Title of `was`."""
        assert self.measured is not None
        return f"settings of {self.measured.basis.removesuffix(', measured')}, simulated"


def compare_with_step(step: MeasuredStep, question: Question) -> ComparedAnswer:
    """Answer a question beside the simulation of the step's own settings; a profile without a trace has only the answer."""
    now = answer_question(step, question)
    if step.trace is None:
        return ComparedAnswer(now)
    measured, was = measured_answer(step), answer_question(step, Question.of(step))
    return ComparedAnswer(now, was, measured, ForecastRecord().margin(was, measured))
