"""A look inside, put together: one pass that is watched, and passes that end early for what the head makes of each depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from l2l_core.batches import Objective
from l2l_core.eps.blocks import Unit
from l2l_core.inside.inspection_request import InspectionRequest
from l2l_core.inside.inspection_result import Continuation, Inside, LensResult
from l2l_core.inside.layer_observer import InspectionTask, LayerObserver
from l2l_core.inside.logit_lens import LensTask, NextTokenTask
from l2l_core.inside.micro_batch_rows import MicroBatchRows
from l2l_core.inside.tokens import find_tokens, select_row, with_tokens

_NO_LOGITS = (
    "the model's output has no logits of shape (rows, positions, tokens) or (rows, classes), or the objective does not call "
    "the model itself"
)
_NO_TOKEN_LOGITS = (
    "the model's output has no logits of shape (rows, positions, tokens), or the objective does not call "
    "the model itself"
)
_LOGIT_TOLERANCE = 1e-4, 1e-4  # relative and absolute differences of logits that are rounding
_LEAK_TOLERANCE = (
    3e-6  # of what the token here does: so much may rounding make of tokens behind; a causal model masks them out
)
_Result = TypeVar("_Found", LensResult, Continuation)


@dataclass(frozen=True, slots=True)
class InspectionPasses:
    """How the model is run.

    Attributes:
        infer: ``infer(micro_batches, task, observers)`` gives the results of a forward in evaluation mode, on the host.
        without: ``without(keys)`` leaves layers out in a block.
        layers: in order.
        objective: gives the loss of a micro-batch.
    """

    infer: Callable[[Sequence[Any], Any, Sequence[LayerObserver]], list[Any]]
    without_layers: Callable[[Sequence[str]], AbstractContextManager[None]]
    layers: Sequence[Unit]
    objective: Objective

    def without_layers_above(self, unit: Unit) -> AbstractContextManager[None]:
        """Leave out the layers above one in a block."""
        return self.without_layers([each.key for each in self.layers[self.depth_of(unit) :]])

    def depth_of(self, unit: Unit) -> int:
        """Count the layers that run up to this one."""
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
    """Run what is asked for; step, branch and seconds of the result are for the caller to say.

    Args:
        passes: how the model is run.
        units: the layers that are looked at, in order.
        micro_batches: those that `asked` numbers, in the same order.

    Raises:
        ValueError: `generate` finds no tokens, or no room for more.
        Whatever the model raises with all of its layers.
    """
    observer = LayerObserver(request)
    passes.infer(micro_batches, InspectionTask(passes.objective, request), [observer])
    counted, depths, prompt, written = len(micro_batches), [], 0, []
    if lens:
        read = LensTask(passes.objective, request.row, request.positions, top)
        depths = [one for unit in units for one in _read_lens(passes, unit, micro_batches, read, request)]
        counted += len(depths)
    if generate:
        first = select_row(micro_batches[0], request.row)
        prompt = _prompt_length(first, request.positions, generate)
        why_not = _no_generation_reason(passes, first, prompt)
        written = [_generate(passes, unit, first, prompt, generate, why_not) for unit in units]
        counted += 3 + sum(len(one.tokens) for one in written)  # three in `_why_not_written`
    given = zip(request.micro_batches, request.rows, map(find_tokens, micro_batches), strict=True)
    tokens = {
        k: found[request.row].to("cpu", copy=True)  # a copy: whoever made the batch may fill it again
        for k, rows, found in given
        if found is not None and rows.length is not None
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
        passes=counted,
        seconds=0.0,
    )


def _read_lens(
    passes: InspectionPasses, unit: Unit, micro_batches: Sequence[Any], task: LensTask, request: InspectionRequest
) -> list[LensResult]:
    """What the head makes of the stream behind a layer, for each micro-batch."""
    nothing = [LensResult(passes.depth_of(unit), unit.key, unit.name, k) for k in request.micro_batches]

    def read() -> list[LensResult]:
        with passes.without_layers_above(unit):
            found = passes.infer(micro_batches, task, [])
        return [_lens_result(*each) for each in zip(nothing, request.rows, found, strict=True)]

    return _run_or_explain(nothing, read)


def _lens_result(empty: LensResult, rows: MicroBatchRows, found: tuple[Any, Any, Any, Any]) -> LensResult:
    """The loss that was found, and the tokens if they are those of the row."""
    loss, ids, chances, shape = found
    why_not = _no_tokens_reason(shape, rows)
    if why_not:
        return replace(empty, loss=float(loss), why_not=why_not)
    return replace(empty, loss=float(loss), tokens=ids, chances=chances)


def _no_tokens_reason(shape: Sequence[int] | None, rows: MicroBatchRows) -> str:
    """Say why logits of a shape are not read as those of tokens, or of a class for each row; empty if they are."""
    if shape is None:
        return _NO_LOGITS
    if len(shape) == 3 and rows.length is None:
        return f"the model's output has the shape {tuple(shape)}, and the batch holds no tokens: these are not logits of tokens"
    return rows.first_dim_problem(shape, "the model's output")


def _no_generation_reason(passes: InspectionPasses, row: Any, prompt_length: int) -> str:
    """Try whether the whole model can go on with a row: at a position it must read what stands there, and nothing behind."""
    tokens = _require_tokens(row)
    said = [
        passes.infer(
            [with_tokens(row, _replace_tokens(tokens, at))], NextTokenTask(passes.objective, prompt_length - 1), []
        )[0]
        for at in (
            slice(0),
            slice(prompt_length - 1, prompt_length),
            slice(prompt_length, None),
        )  # none, the one here, those behind
    ]
    if any(one is None for one in said):
        return _NO_TOKEN_LOGITS
    plain, other_here, other_behind = said
    what = f"what the model says at position {prompt_length - 1} of the row"
    if torch.allclose(plain, other_here, *_LOGIT_TOLERANCE):
        return f"{what} does not depend on the token there: these are not the tokens that the model goes on with"
    if not (other_behind - plain).abs().max() <= _LEAK_TOLERANCE * (other_here - plain).abs().max():
        return f"{what} depends on the tokens behind it: its attention is not causal, so it does not write from left to right"
    return ""


def _replace_tokens(tokens: torch.Tensor, at: slice) -> torch.Tensor:
    """Exchange tokens of the first row for others of the vocabulary."""
    changed = tokens.clone()
    # One less, and 1 in place of 0: another one for sure, and one that the vocabulary has.
    changed[0, at] = torch.where(changed[0, at] > 0, changed[0, at] - 1, 1)
    return changed


def _generate(
    passes: InspectionPasses, unit: Unit, row: Any, prompt_length: int, count: int, why_not: str
) -> Continuation:
    """Go on with a row, one token after the other, each the likeliest one; or say why not."""
    nothing = Continuation(passes.depth_of(unit), unit.key, unit.name, why_not=why_not)
    if why_not:
        return nothing

    def write() -> list[Continuation]:
        tokens = _require_tokens(row).clone()  # the row is a view of the caller's batch
        with passes.without_layers_above(unit):
            for at in range(prompt_length, prompt_length + count):
                (logits,) = passes.infer([with_tokens(row, tokens)], NextTokenTask(passes.objective, at - 1), [])
                tokens[0, at] = logits.argmax()
        return [replace(nothing, tokens=tuple(tokens[0, prompt_length : prompt_length + count].tolist()))]

    return _run_or_explain([nothing], write)[0]


def _run_or_explain(empty: Sequence[_Result], compute: Callable[[], list[_Result]]) -> list[_Result]:
    """What is found, or why a model that ends early could not be run; it is as it was then."""
    try:
        return compute()
    except MemoryError:
        raise  # a device that is too small is nothing of this depth
    except Exception as error:
        why = str(error).partition("\n")[0]
        return [replace(one, why_not=f"{type(error).__name__}: {why}") for one in empty]


def _prompt_length(row: Any, positions: int, generate: int) -> int:
    """How many tokens of the row are given, so that the others fit behind them."""
    length = _require_tokens(row).shape[1]
    if generate >= length:
        raise ValueError(
            f"generate={generate}: the row has {length} tokens, and what is written takes the places of its last ones: give at "
            f"most {length - 1}"
        )
    return min(positions, length - generate)


def _require_tokens(row: Any) -> torch.Tensor:
    tokens = find_tokens(row)
    if tokens is None:
        raise ValueError(
            "generate=: the batch holds no tokens to go on with, neither input_ids nor another tensor of whole numbers of shape "
            "(rows, positions)"
        )
    return tokens
