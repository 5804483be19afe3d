"""Inspection of a model: one observed pass, and shortened passes for predictions at each depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from l2l_core.batches import Objective, RowsRule
from l2l_core.eps.blocks import Unit
from l2l_core.inside.inspection_request import (
    InspectionRequest,
    MicroBatchRows,
    find_tokens,
    select_row,
    with_tokens,
)
from l2l_core.inside.inspection_result import Continuation, Inside, LensResult
from l2l_core.inside.layer_observer import InspectionTask, LayerObserver
from l2l_core.inside.logit_lens import LensTask, NextTokenTask

_NO_LOGITS = "the model's output has no logits of shape {}, or the objective does not call the model itself"
_LOGIT_TOLERANCE = 1e-4, 1e-4  # relative and absolute rounding error of logits
_LEAK_TOLERANCE = 3e-6  # rounding error from later tokens in a causal model, relative to the effect of the token itself
_Result = TypeVar("_Result", LensResult, Continuation)


@dataclass(frozen=True, slots=True)
class InspectionPasses:
    """The ways to run the model."""

    infer: Callable[[Sequence[Any], Any, Sequence[LayerObserver]], list[Any]]  # of micro-batches, task, observers
    without_layers: Callable[[Sequence[str]], AbstractContextManager[object]]  # leaves layers out for a block
    layers: Sequence[Unit]
    objective: Objective
    rows_of: RowsRule

    def without_layers_above(self, unit: Unit) -> AbstractContextManager[object]:
        """Leave out the layers after `unit` for a block."""
        return self.without_layers([each.key for each in self.layers[self.depth_of(unit) :]])

    def depth_of(self, unit: Unit) -> int:
        """Return the number of layers up to and with this one."""
        return list(self.layers).index(unit) + 1


def run_inspection(
    passes: InspectionPasses,
    units: Sequence[Unit],
    micro_batches: Sequence[Any],
    request: InspectionRequest,
    *,
    lens: bool,
    generate: int,
    top: int,
) -> Inside:
    """Run an inspection of these layers, in order; the caller sets step, branch and seconds of the result.

    Raises:
        ValueError: `generate` finds no tokens, or no room for more.
        Exception: errors of the model itself with all of its layers.
    """
    observer = LayerObserver(request)
    passes.infer(micro_batches, InspectionTask(passes.objective, request), [observer])
    count, prompt = len(micro_batches), 0
    depths: list[LensResult] = []
    written: list[Continuation] = []
    if lens:
        read = LensTask(passes.objective, request.row, request.positions, top)
        depths = [one for unit in units for one in _read_lens(passes, unit, micro_batches, read, request)]
        count += len(depths)
    if generate:
        first = select_row(micro_batches[0], request.row, passes.rows_of)
        prompt = _prompt_length(first, request.positions, generate)
        why_not = _no_generation_reason(passes, first, prompt)
        written = [_generate(passes, unit, first, prompt, generate, why_not) for unit in units]
        count += 3 + sum(len(one.tokens) for one in written)  # three in `_no_generation_reason`
    batches = zip(request.micro_batches, request.rows, map(find_tokens, micro_batches), strict=True)
    tokens = {
        k: ids[request.row].to("cpu", copy=True)  # the caller may overwrite the batch
        for k, rows, ids in batches
        if ids is not None and rows.length is not None
    }
    return Inside(
        step=0,
        branch="",
        keys=tuple(unit.key for unit in units),
        micro_batches=request.micro_batches,
        row=request.row,
        tokens=tokens,
        passings=tuple(observer.observations),
        depths=tuple(depths),
        prompt=prompt,
        written=tuple(written),
        passes=count,
        seconds=0.0,
    )


def _read_lens(
    passes: InspectionPasses, unit: Unit, micro_batches: Sequence[Any], task: LensTask, request: InspectionRequest
) -> list[LensResult]:
    """Return the predictions after a layer, for each micro-batch."""
    empty = [LensResult(passes.depth_of(unit), unit.key, unit.name, k) for k in request.micro_batches]

    def read() -> list[LensResult]:
        with passes.without_layers_above(unit):
            results = passes.infer(micro_batches, task, [])
        found = []
        for one, rows, (loss, ids, chances, shape) in zip(empty, request.rows, results, strict=True):
            why_not = _no_tokens_reason(shape, rows)
            tokens = {"why_not": why_not} if why_not else {"tokens": ids, "chances": chances}
            found.append(replace(one, loss=float(loss), **tokens))
        return found

    return _run_or_explain(empty, read)


def _no_tokens_reason(shape: Sequence[int] | None, rows: MicroBatchRows) -> str:
    """Return why logits of a shape are not those of tokens or classes; empty if they are."""
    if shape is None:
        return _NO_LOGITS.format("(rows, positions, tokens) or (rows, classes)")
    if len(shape) == 3 and rows.length is None:
        return f"the model's output has the shape {tuple(shape)}, but the batch has no tokens, so these are not logits of tokens"
    return rows.first_dim_problem(shape, "the model's output")


def _no_generation_reason(passes: InspectionPasses, row: Any, prompt_length: int) -> str:
    """Return why the model cannot continue a row; empty if it can."""
    tokens = _require_tokens(row)
    task, last = NextTokenTask(passes.objective, prompt_length - 1, len(tokens)), prompt_length - 1
    # Replaced: no token, the last one of the prompt, those after it
    changed = [_replace_tokens(tokens, part) for part in (slice(0), slice(last, last + 1), slice(last + 1, None))]
    logits = [passes.infer([with_tokens(row, each)], task, [])[0] for each in changed]
    if any(each is None for each in logits):
        return _NO_LOGITS.format("(rows, positions, tokens)")
    plain, other_last, other_later = logits
    output = f"the model's output at position {last} of the row"
    if torch.allclose(plain, other_last, *_LOGIT_TOLERANCE):
        return f"{output} does not depend on the token there, so these are not the tokens that it continues"
    if not (other_later - plain).abs().max() <= _LEAK_TOLERANCE * (other_last - plain).abs().max():
        return (
            f"{output} depends on later tokens: its attention is not causal, so it cannot generate from left to right"
        )
    return ""


def _replace_tokens(tokens: torch.Tensor, positions: slice) -> torch.Tensor:
    """Return the tokens with others of the vocabulary at these positions of the first row."""
    changed = tokens.clone()
    # One less, and 1 instead of 0: always another token, and one in the vocabulary.
    changed[0, positions] = torch.where(changed[0, positions] > 0, changed[0, positions] - 1, 1)
    return changed


def _generate(
    passes: InspectionPasses, unit: Unit, row: Any, prompt_length: int, count: int, why_not: str
) -> Continuation:
    """Continue a row greedily, one token after another; or return the reason why not."""
    empty = Continuation(passes.depth_of(unit), unit.key, unit.name, why_not=why_not)
    if why_not:
        return empty

    def generate() -> list[Continuation]:
        tokens = _require_tokens(row).clone()  # the row is a view of the caller's batch
        with passes.without_layers_above(unit):
            for position in range(prompt_length, prompt_length + count):
                task = NextTokenTask(passes.objective, position - 1, len(tokens))
                (logits,) = passes.infer([with_tokens(row, tokens)], task, [])
                tokens[0, position] = logits.argmax()
        return [replace(empty, tokens=tuple(tokens[0, prompt_length : prompt_length + count].tolist()))]

    return _run_or_explain([empty], generate)[0]


def _run_or_explain(empty: Sequence[_Result], compute: Callable[[], list[_Result]]) -> list[_Result]:
    """Return the results, or the error of a shortened model; errors restore the model."""
    try:
        return compute()
    except MemoryError:
        raise  # of the device's budget, not of this depth
    except Exception as error:
        why = str(error).partition("\n")[0]
        return [replace(one, why_not=f"{type(error).__name__}: {why}") for one in empty]


def _prompt_length(row: Any, positions: int, generate: int) -> int:
    """Return the number of tokens of the row to start with, so that the generated ones fit."""
    length = _require_tokens(row).shape[1]
    if generate >= length:
        raise ValueError(
            f"generate={generate}: the row has {length} tokens, and generated ones replace its last ones: give at most "
            f"{length - 1}"
        )
    return min(positions, length - generate)


def _require_tokens(row: Any) -> torch.Tensor:
    tokens = find_tokens(row)
    if tokens is None:
        raise ValueError(
            "generate: the batch has no tokens, neither input_ids nor another tensor of integers of shape (rows, positions): "
            "leave generate out"
        )
    return tokens
