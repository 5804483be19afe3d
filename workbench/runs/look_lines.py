"""Conversion of a look inside to a JSON row and back (see `run_lines.py`); tensors are bytes in base64."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from l2l_core import Inside
from l2l_core.inside import ActivationStats, Continuation, LayerObservation, LensResult
from workbench.runs.run_lines import JsonRow, build_record

Decode = Callable[[Sequence[int]], str]
_DTYPES = ("float32", "int64", "int32", "int16", "int8", "uint8")  # of the tensors in a look


@dataclass(frozen=True, eq=False)
class RecordedLook:
    """A look inside from a recorded run.

    Attributes:
        inside: the observations.
        token_text: text of the tokens, by token; empty without a tokenizer.
    """

    inside: Inside
    token_text: Mapping[int, str]

    @property
    def decode(self) -> Decode | None:
        """A function that decodes tokens to text; None without token texts."""
        return (lambda tokens: "".join(self.token_text[token] for token in tokens)) if self.token_text else None


def look_row(inside: Inside, decode: Decode | None) -> JsonRow:
    """Convert a look to a row that includes the text of its tokens, because a recorded run has no tokenizer."""
    row = {name: getattr(inside, name) for name in _plain_fields(Inside)}
    parts = {name: [_part_row(one) for one in getattr(inside, name)] for name in ("passings", "depths", "written")}
    tokens = [[at, _tensor_row(found)] for at, found in inside.tokens.items()]
    words = [] if decode is None else [[token, decode([token])] for token in _all_tokens(inside)]
    return {**row, **parts, "tokens": tokens, "words": words}


def look_from_row(row: Mapping[str, Any]) -> RecordedLook:
    """Convert a row of `look_row` back.

    Raises:
        KeyError, TypeError, ValueError: the row is malformed.
    """
    lists = {"keys": tuple(row["keys"]), "micro_batches": tuple(map(int, row["micro_batches"]))}
    inside = Inside(
        **{name: row[name] for name in _plain_fields(Inside) if name not in lists},
        **lists,
        tokens={int(at): _tensor_from_row(found) for at, found in row["tokens"]},
        passings=tuple(map(_passing_from_row, row["passings"])),
        depths=tuple(
            build_record(LensResult, one | _tensors_from_row(one, ("tokens", "chances"))) for one in row["depths"]
        ),
        written=tuple(
            build_record(Continuation, one | {"tokens": tuple(map(int, one["tokens"]))}) for one in row["written"]
        ),
    )
    words = {int(token): str(text) for token, text in row["words"]}
    # Checked here, where the error has a line number, because pictures rely on it.
    if not inside.micro_batches or (words and set(_all_tokens(inside)) - set(words)):
        raise ValueError("a look inside without a micro-batch, or without the text of a token")
    return RecordedLook(inside, words)


def _plain_fields(record: type) -> list[str]:
    """Return the fields of a look that are JSON values."""
    return [one.name for one in fields(record) if one.name not in ("tokens", "passings", "depths", "written")]


def _all_tokens(inside: Inside) -> list[int]:
    tensors = [*inside.tokens.values(), *(one.tokens for one in inside.depths if one.tokens is not None)]
    found = {token for tensor in tensors for token in tensor.flatten().tolist()}
    return sorted(found | {token for one in inside.written for token in one.tokens})


def _part_row(one: Any) -> JsonRow:
    """Convert an observation, a lens result or a continuation to a row."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return _tensor_row(value)
        if isinstance(value, ActivationStats):
            return {field.name: getattr(value, field.name) for field in fields(value)}
        return list(map(plain, value)) if isinstance(value, tuple) else value

    return {field.name: plain(getattr(one, field.name)) for field in fields(one)}


def _passing_from_row(row: JsonRow) -> LayerObservation:
    spreads = {name: None if row[name] is None else _spread_from_row(row[name]) for name in ("entered", "left")}
    maps = {"attention": tuple(map(_tensor_from_row, row["attention"]))}
    return build_record(LayerObservation, row | spreads | maps | _tensors_from_row(row, ("added_at",)))


def _spread_from_row(row: JsonRow) -> ActivationStats:
    return build_record(ActivationStats, row | {"counts": tuple(map(int, row["counts"]))})


def _tensors_from_row(row: JsonRow, names: Sequence[str]) -> JsonRow:
    return {name: None if row[name] is None else _tensor_from_row(row[name]) for name in names}


def _tensor_row(tensor: torch.Tensor) -> JsonRow:
    numbers = tensor.numpy()
    assert numbers.dtype.name in _DTYPES, f"a look with {numbers.dtype.name}"
    little = numbers.astype(numbers.dtype.newbyteorder("<"))
    return {
        "kind": numbers.dtype.name,
        "shape": list(numbers.shape),
        "data": base64.b64encode(little.tobytes()).decode(),
    }


def _tensor_from_row(row: JsonRow) -> torch.Tensor:
    if row["kind"] not in _DTYPES:
        raise ValueError(f"a tensor of {row['kind']}")
    kind = np.dtype(row["kind"]).newbyteorder("<")
    numbers = np.frombuffer(base64.b64decode(row["data"], validate=True), kind).reshape(row["shape"])
    return torch.from_numpy(numbers.astype(row["kind"]))
