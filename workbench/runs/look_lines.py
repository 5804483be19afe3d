"""The line of a look inside, as plain values for JSON, and back: see `lines.py`. Tensors are their bytes in base64."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from l2l_core import Inside
from l2l_core.inside import Depth, Passing, Spread, Written
from workbench.runs.lines import Row, build

Decode = Callable[[Sequence[int]], str]
_KINDS = ("float32", "int64", "int32", "int16", "int8", "uint8")  # of the numbers in a look's tensors


@dataclass(frozen=True, eq=False)
class Look:
    """A look inside, as it is recorded.

    Attributes:
        seen: what was seen.
        words: text of the tokens in it, by token; empty where nobody could decode them.
    """

    seen: Inside
    words: Mapping[int, str]

    @property
    def decode(self) -> Decode | None:
        """Write tokens as text, one after the other; None where their text is not known."""
        return (lambda tokens: "".join(self.words[token] for token in tokens)) if self.words else None


def look_row(seen: Inside, decode: Decode | None) -> Row:
    """Make the row of a look; the text of its tokens is in it, since a recorded run has no tokenizer."""
    row = {name: getattr(seen, name) for name in _plain_names(Inside)}
    parts = {name: [_part(one) for one in getattr(seen, name)] for name in ("passings", "depths", "written")}
    tokens = [[at, _tensor(found)] for at, found in seen.tokens.items()]
    words = [] if decode is None else [[token, decode([token])] for token in _tokens_in(seen)]
    return {**row, **parts, "tokens": tokens, "words": words}


def look_of(row: Mapping[str, Any]) -> Look:
    """Make the look that `look_row` was given.

    Raises:
        KeyError, TypeError, ValueError: it is no such row.
    """
    lists = {"keys": tuple(row["keys"]), "micro_batches": tuple(map(int, row["micro_batches"]))}
    seen = Inside(
        **{name: row[name] for name in _plain_names(Inside) if name not in lists},
        **lists,
        tokens={int(at): _tensor_of(found) for at, found in row["tokens"]},
        passings=tuple(map(_passing_of, row["passings"])),
        depths=tuple(build(Depth, one | _tensors_of(one, ("tokens", "chances"))) for one in row["depths"]),
        written=tuple(build(Written, one | {"tokens": tuple(map(int, one["tokens"]))}) for one in row["written"]),
    )
    words = {int(token): str(text) for token, text in row["words"]}
    # Pictures read all of these: what is missing is named with its line here, and breaks no picture later.
    if not seen.micro_batches or (words and set(_tokens_in(seen)) - set(words)):
        raise ValueError("a look at no micro-batch, or without the text of a token")
    return Look(seen, words)


def _plain_names(record: type) -> list[str]:
    """The fields of a look that are plain values."""
    return [one.name for one in fields(record) if one.name not in ("tokens", "passings", "depths", "written")]


def _tokens_in(seen: Inside) -> list[int]:
    tensors = [*seen.tokens.values(), *(one.tokens for one in seen.depths if one.tokens is not None)]
    found = {token for tensor in tensors for token in tensor.flatten().tolist()}
    return sorted(found | {token for one in seen.written for token in one.tokens})


def _part(one: Any) -> Row:
    """A layer, a depth or a text as a row."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _tensor(value)
        if isinstance(value, Spread):
            return {field.name: getattr(value, field.name) for field in fields(value)}
        return list(map(plain, value)) if isinstance(value, tuple) else value

    return {field.name: plain(getattr(one, field.name)) for field in fields(one)}


def _passing_of(row: Row) -> Passing:
    spreads = {name: None if row[name] is None else _spread_of(row[name]) for name in ("entered", "left")}
    maps = {"attention": tuple(map(_tensor_of, row["attention"]))}
    return build(Passing, row | spreads | maps | _tensors_of(row, ("added_at",)))


def _spread_of(row: Row) -> Spread:
    return build(Spread, row | {"counts": tuple(map(int, row["counts"]))})


def _tensors_of(row: Row, names: Sequence[str]) -> Row:
    return {name: None if row[name] is None else _tensor_of(row[name]) for name in names}


def _tensor(tensor: torch.Tensor) -> Row:
    numbers = tensor.numpy()
    assert numbers.dtype.name in _KINDS, f"a look with {numbers.dtype.name}"
    little = numbers.astype(numbers.dtype.newbyteorder("<"))
    return {
        "kind": numbers.dtype.name,
        "shape": list(numbers.shape),
        "data": base64.b64encode(little.tobytes()).decode(),
    }


def _tensor_of(row: Row) -> torch.Tensor:
    if row["kind"] not in _KINDS:
        raise ValueError(f"a tensor of {row['kind']}")
    kind = np.dtype(row["kind"]).newbyteorder("<")
    numbers = np.frombuffer(base64.b64decode(row["data"], validate=True), kind).reshape(row["shape"])
    return torch.from_numpy(numbers.astype(row["kind"]))
