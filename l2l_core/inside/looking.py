"""A look inside, put together: one pass that is watched, and passes that end early for what the head makes of each depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from l2l_core.batches import Objective
from l2l_core.eps.blocks import Unit
from l2l_core.inside.asked import Asked
from l2l_core.inside.head import Next, Read
from l2l_core.inside.observer import Observer, Watched
from l2l_core.inside.rows import Rows
from l2l_core.inside.tokens import one_row, tokens_of, with_tokens
from l2l_core.inside.values import Depth, Inside, Written

_NO_TOKENS = (
    "the model's output has no logits of shape (rows, positions, tokens) or (rows, classes), or the objective does not call "
    "the model itself"
)
_NOTHING_TO_WRITE = (
    "the model's output has no logits of shape (rows, positions, tokens), or the objective does not call "
    "the model itself"
)
_SAME = 1e-4, 1e-4  # relative and absolute differences of logits that are rounding
_BEHIND = 3e-6  # of what the token here does: so much may rounding make of tokens behind; a causal model masks them out
_Found = TypeVar("_Found", Depth, Written)


@dataclass(frozen=True, slots=True)
class Passes:
    """How the model is run.

    Attributes:
        infer: ``infer(micro_batches, task, observers)`` gives the results of a forward in evaluation mode, on the host.
        without: ``without(keys)`` leaves layers out in a block.
        layers: in order.
        objective: gives the loss of a micro-batch.
    """

    infer: Callable[[Sequence[Any], Any, Sequence[Observer]], list[Any]]
    without: Callable[[Sequence[str]], AbstractContextManager[None]]
    layers: Sequence[Unit]
    objective: Objective

    def until(self, unit: Unit) -> AbstractContextManager[None]:
        """Leave out the layers above one in a block."""
        return self.without([each.key for each in self.layers[self.depth(unit) :]])

    def depth(self, unit: Unit) -> int:
        """Count the layers that run up to this one."""
        return list(self.layers).index(unit) + 1


def look(
    passes: Passes,
    units: Sequence[Unit],
    micro_batches: Sequence[Any],
    asked: Asked,
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
    observer = Observer(asked)
    passes.infer(micro_batches, Watched(passes.objective, asked), [observer])
    counted, depths, prompt, written = len(micro_batches), [], 0, []
    if lens:
        read = Read(passes.objective, asked.row, asked.positions, top)
        depths = [one for unit in units for one in _read_head(passes, unit, micro_batches, read, asked)]
        counted += len(depths)
    if generate:
        first = one_row(micro_batches[0], asked.row)
        prompt = _room(first, asked.positions, generate)
        why_not = _why_not_written(passes, first, prompt)
        written = [_write(passes, unit, first, prompt, generate, why_not) for unit in units]
        counted += 3 + sum(len(one.tokens) for one in written)  # three in `_why_not_written`
    given = zip(asked.micro_batches, asked.rows, map(tokens_of, micro_batches), strict=True)
    tokens = {
        k: found[asked.row].to("cpu", copy=True)  # a copy: whoever made the batch may fill it again
        for k, rows, found in given
        if found is not None and rows.length is not None
    }
    return Inside(
        step=0,
        branch="",
        keys=tuple(unit.key for unit in units),
        micro_batches=asked.micro_batches,
        row=asked.row,
        tokens=tokens,
        passings=tuple(observer.seen),
        depths=tuple(depths),
        prompt=prompt,
        written=tuple(written),
        passes=counted,
        seconds=0.0,
    )


def _read_head(passes: Passes, unit: Unit, micro_batches: Sequence[Any], task: Read, asked: Asked) -> list[Depth]:
    """What the head makes of the stream behind a layer, for each micro-batch."""
    nothing = [Depth(passes.depth(unit), unit.key, unit.name, k) for k in asked.micro_batches]

    def read() -> list[Depth]:
        with passes.until(unit):
            found = passes.infer(micro_batches, task, [])
        return [_depth(*each) for each in zip(nothing, asked.rows, found, strict=True)]

    return _or_why_not(nothing, read)


def _depth(nothing: Depth, rows: Rows, found: tuple[Any, Any, Any, Any]) -> Depth:
    """The loss that was found, and the tokens if they are those of the row."""
    loss, ids, chances, shape = found
    why_not = _why_no_tokens(shape, rows)
    if why_not:
        return replace(nothing, loss=float(loss), why_not=why_not)
    return replace(nothing, loss=float(loss), tokens=ids, chances=chances)


def _why_no_tokens(shape: Sequence[int] | None, rows: Rows) -> str:
    """Say why logits of a shape are not read as those of tokens, or of a class for each row; empty if they are."""
    if shape is None:
        return _NO_TOKENS
    if len(shape) == 3 and rows.length is None:
        return f"the model's output has the shape {tuple(shape)}, and the batch holds no tokens: these are not logits of tokens"
    return rows.why_not_first(shape, "the model's output")


def _why_not_written(passes: Passes, row: Any, prompt: int) -> str:
    """Try whether the whole model can go on with a row: at a position it must read what stands there, and nothing behind."""
    tokens = _tokens_in(row)
    said = [
        passes.infer([with_tokens(row, _with_others(tokens, at))], Next(passes.objective, prompt - 1), [])[0]
        for at in (slice(0), slice(prompt - 1, prompt), slice(prompt, None))  # none, the one here, those behind
    ]
    if any(one is None for one in said):
        return _NOTHING_TO_WRITE
    plain, other_here, other_behind = said
    what = f"what the model says at position {prompt - 1} of the row"
    if torch.allclose(plain, other_here, *_SAME):
        return f"{what} does not depend on the token there: these are not the tokens that the model goes on with"
    if not (other_behind - plain).abs().max() <= _BEHIND * (other_here - plain).abs().max():
        return f"{what} depends on the tokens behind it: its attention is not causal, so it does not write from left to right"
    return ""


def _with_others(tokens: torch.Tensor, at: slice) -> torch.Tensor:
    """Exchange tokens of the first row for others of the vocabulary."""
    changed = tokens.clone()
    # One less, and 1 in place of 0: another one for sure, and one that the vocabulary has.
    changed[0, at] = torch.where(changed[0, at] > 0, changed[0, at] - 1, 1)
    return changed


def _write(passes: Passes, unit: Unit, row: Any, prompt: int, count: int, why_not: str) -> Written:
    """Go on with a row, one token after the other, each the likeliest one; or say why not."""
    nothing = Written(passes.depth(unit), unit.key, unit.name, why_not=why_not)
    if why_not:
        return nothing

    def write() -> list[Written]:
        tokens = _tokens_in(row).clone()  # the row is a view of the caller's batch
        with passes.until(unit):
            for at in range(prompt, prompt + count):
                (logits,) = passes.infer([with_tokens(row, tokens)], Next(passes.objective, at - 1), [])
                tokens[0, at] = logits.argmax()
        return [replace(nothing, tokens=tuple(tokens[0, prompt : prompt + count].tolist()))]

    return _or_why_not([nothing], write)[0]


def _or_why_not(nothing: Sequence[_Found], find: Callable[[], list[_Found]]) -> list[_Found]:
    """What is found, or why a model that ends early could not be run; it is as it was then."""
    try:
        return find()
    except MemoryError:
        raise  # a device that is too small is nothing of this depth
    except Exception as error:
        why = str(error).partition("\n")[0]
        return [replace(one, why_not=f"{type(error).__name__}: {why}") for one in nothing]


def _room(row: Any, positions: int, generate: int) -> int:
    """How many tokens of the row are given, so that the others fit behind them."""
    length = _tokens_in(row).shape[1]
    if generate >= length:
        raise ValueError(
            f"generate={generate}: the row has {length} tokens, and what is written takes the places of its last ones: give at "
            f"most {length - 1}"
        )
    return min(positions, length - generate)


def _tokens_in(row: Any) -> torch.Tensor:
    tokens = tokens_of(row)
    if tokens is None:
        raise ValueError(
            "generate=: the batch holds no tokens to go on with, neither input_ids nor another tensor of whole numbers of shape "
            "(rows, positions)"
        )
    return tokens
