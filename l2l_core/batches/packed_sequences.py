"""Packed tokens: sequences without padding, one behind another, which are cut only where one ends.

`transformers.DataCollatorWithFlattening` packs so, with a batch dimension of 1; code for FlashAttention has tensors of
(tokens, ...) and cumulative lengths. One sequence is one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from l2l_core.batches.batch import (
    Batch,
    PartChange,
    RowChoice,
    RowSelection,
    RowsOfBatch,
    check_enough_rows,
    check_record,
    copied,
)
from l2l_core.batches.containers import is_sequence, open_container
from l2l_core.batches.output_join import GetDivisors, OutputJoin, Placing, first_fitting
from l2l_core.batches.row_count import has_rows
from l2l_core.batches.target_counts import ROWS, count_targets, count_tokens

_LONGEST = ("max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k")
_REMEDY = "or pass split=lambda batch, k: ..., a function that returns k micro-batches"


@dataclass(frozen=True, slots=True, init=False)
class Sequences:
    """Packed sequences, by their cumulative lengths or by positions that begin anew.

    ``Sequences("cu_seq_lens_q", "cu_seq_lens_k")`` and ``Sequences(position_ids="position_ids")`` cut what
    `transformers.DataCollatorWithFlattening` packs. Micro-batches have about equally many tokens, in order; their cumulative
    lengths start at 0 again.

    Args:
        cumulative: keys (or positions, for a tuple batch) of the cumulative lengths, (sequences + 1,), all equal. Other tensors
            with the same values are found.
        position_ids: key of the positions, (tokens,) or (1, tokens), which begin anew in every sequence. Not needed with
            cumulative lengths.
        longest: keys of the length of the longest sequence, computed anew for every micro-batch unless it is a larger
            bound. Default: those of `max_length_q`, `max_length_k`, `max_seqlen`, `max_seqlen_q`, `max_seqlen_k` in the batch.

    Raises:
        ValueError: neither cumulative lengths nor positions are named, or both.

    Example:
        >>> from l2l_core import Sequences
        >>> packed = {"x": torch.randn(8, 16), "y": torch.randint(4, (8,)), "lengths": torch.tensor([0, 2, 8])}
        >>> def objective(model, part):
        ...     return nn.functional.cross_entropy(model(part["x"]), part["y"], reduction="sum") / 8
        >>> relay.close()  # a model belongs to one relay
        >>> options = {"objective": objective, "loss_over": "sum", "split": Sequences("lengths")}
        >>> with Relay(model, device="cpu", config=RelayConfig(micro_batches=2), **options) as relay:
        ...     relay.step(packed).samples  # sequences: each is a micro-batch here
        2
    """

    cumulative: tuple[str | int, ...]
    position_ids: str | int | None
    longest: tuple[str | int, ...] | None

    def __init__(
        self,
        *cumulative: str | int,
        position_ids: str | int | None = None,
        longest: Sequence[str | int] | None = None,
    ) -> None:
        if bool(cumulative) == (position_ids is not None):
            raise ValueError(
                "Sequences() needs the key of cumulative lengths, as Sequences('cu_seq_lens_q', 'cu_seq_lens_k'), or that of "
                "positions, as Sequences(position_ids='position_ids'), and not both"
            )
        object.__setattr__(self, "cumulative", cumulative)
        object.__setattr__(self, "position_ids", position_ids)
        object.__setattr__(self, "longest", None if longest is None else tuple(longest))


class SequenceRows(RowsOfBatch):
    """The sequences of a packed batch as its rows.

    Raises:
        TypeError: the batch is not a mapping, sequence or dataclass.
        ValueError: a key is unknown, or a tensor has another number of tokens than the sequences.
    """

    def __init__(self, batch: Batch, sequences: Sequences, output_join: OutputJoin) -> None:
        check_record(batch)
        self.batch, self._sequences, self._output_join = batch, sequences, output_join
        entries = _entries(batch)
        self._entries = {key: name for key, (name, _) in entries.items()}
        borders = [self._given(entries, key) for key in sequences.cumulative]
        if sequences.position_ids is None:
            self._starts = self._by_lengths(borders)
        else:
            self._starts = self._by_positions(*self._given(entries, sequences.position_ids))
        self.count, self._tokens = len(self._starts) - 1, self._starts[-1]
        self._lengths = [stop - start for start, stop in pairwise(self._starts)]
        self._cumulative = {name for name, _ in borders} | {*self._find_cumulative()}
        self._longest = self._find_longest(entries)
        found = {dim for _, value in _tensors(batch) if has_rows(value) and (dim := self._token_dim(value)) is not None}
        if not found:
            raise ValueError(
                f"split={sequences}: the sequences have {self._tokens} tokens in all, but no tensor of the batch has as many: "
                f"{_shapes(batch)}"
            )
        self._batch_dim = 1 in found  # tensors are (1, tokens, ...)

    def split(self, micro_batches: int) -> list[Any]:
        """Cut the batch into `micro_batches` parts.

        Raises:
            ValueError: fewer sequences than micro-batches, or a tensor that has neither tokens nor sequences.
        """
        bounds = self._bounds(micro_batches)
        return [copied(self.batch)] if micro_batches == 1 else self.select([slice(*each) for each in bounds])

    def most_parts(self, micro_batches: int) -> int:
        """Return `micro_batches`, or the number of sequences if there are fewer."""
        return min(micro_batches, self.count)

    def sizes(self, micro_batches: int) -> list[int]:
        """Return the sequences of every micro-batch."""
        return [stop - start for start, stop in self._bounds(micro_batches)]

    def select(self, choices: Sequence[RowChoice], change: PartChange | None = None) -> list[Any]:
        """Return one batch for each choice of sequences."""
        rows = [list(range(self.count)[each]) if isinstance(each, slice) else list(each) for each in choices]
        tokens = [self._tokens_of(each) for each in rows]

        def cut(where: str, value: Any) -> list[Any] | None:
            if where in self._cumulative:
                lengths = [[self._lengths[row] for row in each] for each in rows]
                return [_like(value, [0, *accumulate(each)]) for each in lengths]
            if where in self._longest:
                return [self._longest_in(value, each) for each in rows]
            if not has_rows(value):
                return (
                    [[value[i] for i in each] for each in map(_indices, tokens)] if self._is_token_list(value) else None
                )
            dim = self._token_dim(value)
            if dim is not None:
                parts = [value[:, each] if dim else value[each] for each in tokens]
            elif len(value) == self.count:
                parts = [value[each] for each in rows]
                parts = parts if change is None else [change(where, part, k) for k, part in enumerate(parts)]
            elif len(value) == 1 and self._tokens not in value.shape:
                parts = [value] * len(rows)
            else:
                raise ValueError(
                    f"split={self._sequences}: {where} has the shape {tuple(value.shape)}, which is neither that of "
                    f"{self._tokens} tokens, (tokens, ...) or (1, tokens, ...), nor of {self.count} sequences. Leave it out, "
                    f"{_REMEDY}"
                )
            return parts

        return RowSelection(self.count, rows, change, cut).select(self.batch, "batch", is_root=True)

    def columns(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value of all tensors and arrays with one entry per sequence."""
        for name, value in _tensors(self.batch):
            if (
                has_rows(value)
                and self._token_dim(value) is None
                and len(value) == self.count
                and not self._is_named(name)
            ):
                yield name, value

    def item_counts(self) -> dict[str, list[int]]:
        """Return the counts of every sequence: itself, targets among its tokens, targets of the sequence."""
        found = {ROWS: [1] * self.count}
        for name, column in self.columns():
            found |= count_targets(name, column)
        for name, value in _tensors(self.batch):
            if has_rows(value) and (dim := self._token_dim(value)) is not None and not self._is_named(name):
                found |= count_tokens(name, value[0] if dim else value, self._starts)
        return found

    def of(self, batch: Batch) -> RowsOfBatch:
        """Return the sequences of another batch."""
        return SequenceRows(batch, self._sequences, self._output_join)

    def leading(self, size: int) -> int | None:
        """Return None: dim 0 holds tokens, or nothing."""
        return None

    def join(self, outputs: Sequence[Any], divisors: GetDivisors | None = None) -> Any:
        """Concatenate outputs along their tokens, (tokens, ...) or (1, tokens, ...), or along their sequences."""
        bounds = self._bounds(len(outputs))
        tokens = [self._starts[stop] - self._starts[start] for start, stop in bounds]
        sizes = [stop - start for start, stop in bounds]

        def place(where: str, parts: Sequence[torch.Tensor], dim: int | None) -> Placing | None:
            if dim is not None:
                return first_fitting([Placing(dim, tokens), Placing(dim, sizes)], parts)
            inner = [Placing(1, tokens)] if all(part.shape[0] == 1 for part in parts) else []
            outer = [Placing(0, tokens)]
            return first_fitting([*(inner + outer if self._batch_dim else outer + inner), Placing(0, sizes)], parts)

        return self._output_join(outputs, place, divisors)

    # -- sequences -----------------------------------------------------------------------------------------------------

    def _bounds(self, parts: int) -> list[tuple[int, int]]:
        """Return the sequences of every part, from start to stop; the largest part has as few tokens as possible."""
        check_enough_rows(self.count, parts, "sequence(s)")
        low, high = max(self._lengths), self._tokens
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if _parts_needed(self._lengths, middle) <= parts else (middle + 1, high)
        bounds, start = list[tuple[int, int]](), 0
        for left in reversed(range(parts)):
            stop, tokens = start + 1, self._lengths[start]
            while stop < self.count - left and (left == 0 or tokens + self._lengths[stop] <= low):
                tokens += self._lengths[stop]
                stop += 1
            bounds.append((start, stop))
            start = stop
        return bounds

    def _tokens_of(self, rows: Sequence[int]) -> slice | list[int]:
        """Return the tokens of sequences; a slice if they are neighbours."""
        if list(rows) == list(range(rows[0], rows[-1] + 1)):
            return slice(self._starts[rows[0]], self._starts[rows[-1] + 1])
        return [token for row in rows for token in range(self._starts[row], self._starts[row + 1])]

    def _token_dim(self, value: Any) -> int | None:
        """Return the dim of a tensor that holds the tokens: 0, 1 of (1, tokens, ...), or None."""
        if len(value) == self._tokens:
            return 0
        return 1 if value.ndim > 1 and len(value) == 1 and value.shape[1] == self._tokens else None

    def _is_token_list(self, value: Any) -> bool:
        return is_sequence(value) and value is not self.batch and len(value) == self._tokens != self.count

    def _is_named(self, name: str) -> bool:
        return name in self._cumulative or name in self._longest

    def _given(self, entries: Mapping[Any, tuple[str, Any]], key: Any) -> tuple[str, Any]:
        """Return the name and value of an entry of the batch."""
        if key not in entries:
            raise ValueError(
                f"split={self._sequences}: {key!r} is not in the batch, which has {', '.join(map(repr, entries))}"
            )
        return entries[key]

    def _by_lengths(self, borders: Sequence[tuple[str, Any]]) -> list[int]:
        """Return the first token of every sequence, and the number of tokens."""
        name, first = borders[0]
        starts = _whole_numbers(name, first, self._sequences).tolist()
        if len(starts) < 2 or starts[0] != 0 or any(stop <= start for start, stop in pairwise(starts)):
            raise ValueError(
                f"split={self._sequences}: {name} must be the cumulative lengths of sequences, 0 first and then larger each "
                f"time, and is {_shown(starts)}"
            )
        for other, value in borders[1:]:
            if (unlike := _whole_numbers(other, value, self._sequences).tolist()) != starts:
                raise ValueError(
                    f"split={self._sequences}: {name} and {other} disagree: {_shown(starts)} and "
                    f"{_shown(unlike)}. Name those of one kind of tokens only, {_REMEDY}"
                )
        return starts

    def _find_cumulative(self) -> Iterator[str]:
        """Yield the names of tensors that are not named, but have the cumulative lengths of the sequences."""
        named = [self._entries[key] for key in self._sequences.cumulative]
        for name, value in _tensors(self.batch):
            if (
                name in named
                or not has_rows(value)
                or value.shape != (self.count + 1,)
                or value.tolist() != self._starts
            ):
                continue
            if len(value) == self._tokens:
                raise ValueError(
                    f"split={self._sequences}: {name} may be tokens or the cumulative lengths of the sequences: give a larger "
                    f"batch, or name it, as Sequences({name.removeprefix('batch').strip('[].')})"
                )
            yield name

    def _by_positions(self, name: str, value: Any) -> list[int]:
        """Return the same from positions: a sequence begins where they do not grow."""
        if has_rows(value) and value.ndim == 2 and len(value) == 1:
            value = value[0]
        positions = _whole_numbers(name, value, self._sequences)
        begins = (positions.diff() <= 0).nonzero().flatten() + 1
        return [0, *begins.tolist(), len(positions)]

    def _find_longest(self, entries: Mapping[Any, tuple[str, Any]]) -> dict[str, int]:
        """Return the names of the lengths of the longest sequence, with their values."""
        keys = self._sequences.longest
        chosen = [key for key in _LONGEST if key in entries] if keys is None else keys
        found = {}
        for name, value in (self._given(entries, key) for key in chosen):
            number = value if isinstance(value, int) else int(torch.as_tensor(value).max())
            if number < max(self._lengths):
                raise ValueError(
                    f"split={self._sequences}: {name} is {number}, but the longest sequence has {max(self._lengths)} tokens"
                )
            found[name] = number
        return found

    def _longest_in(self, value: Any, rows: Sequence[int]) -> Any:
        """Return the longest length among sequences, in the type of `value`; a larger bound stays."""
        whole = value if isinstance(value, int) else int(torch.as_tensor(value).max())
        if whole > max(self._lengths):
            return value
        number = max(self._lengths[row] for row in rows)
        if isinstance(value, int):
            return number
        return torch.full_like(value, number) if isinstance(value, torch.Tensor) else value * 0 + number


def _parts_needed(lengths: Sequence[int], most: int) -> int:
    """Return the number of parts of at most `most` tokens into which sequences are cut, in order."""
    parts, tokens = 1, 0
    for length in lengths:
        tokens += length
        if tokens > most:
            parts, tokens = parts + 1, length
    return parts


def _entries(batch: Batch) -> dict[Any, tuple[str, Any]]:
    """Return name and value of the entries of a batch, by key, position or attribute."""
    if isinstance(batch, Mapping):
        return {key: (f"batch[{key!r}]", value) for key, value in batch.items()}
    opened = open_container(batch)
    assert opened is not None
    by_name = {name.strip("."): ("batch" + name, part) for name, part in zip(opened.names, opened.parts, strict=True)}
    return by_name | (dict(enumerate(by_name.values())) if isinstance(batch, Sequence) else {})


def _tensors(value: Any, where: str = "batch", is_root: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of all leaves outside of lists."""
    opened = open_container(value)
    if opened is None or (is_sequence(value) and not is_root):
        yield where, value
        return
    for part, name in zip(opened.parts, opened.names, strict=True):
        yield from _tensors(part, where + name, is_root=False)


def _whole_numbers(name: str, value: Any, sequences: Sequences) -> torch.Tensor:
    numbers = torch.as_tensor(value)
    if numbers.ndim != 1 or numbers.is_floating_point() or not len(numbers):
        raise ValueError(
            f"split={sequences}: {name} has the shape {tuple(numbers.shape)} and type {numbers.dtype}: give one dimension of "
            "whole numbers (or (1, tokens) for positions). A batch of several packed rows has its rows along dim 0: leave "
            "split out"
        )
    return numbers


def _like(value: Any, numbers: Sequence[int]) -> Any:
    """Return numbers in the type of `value`."""
    if isinstance(value, torch.Tensor):
        return value.new_tensor(numbers)
    if not has_rows(value):
        return list(numbers)
    import numpy as np

    return np.array(numbers, dtype=value.dtype)


def _indices(tokens: slice | list[int]) -> Sequence[int]:
    return range(tokens.start, tokens.stop) if isinstance(tokens, slice) else tokens


def _shown(numbers: Sequence[int]) -> str:
    return f"[{', '.join(map(str, numbers[:8]))}{', ...' if len(numbers) > 8 else ''}]"


def _shapes(batch: Batch) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in _tensors(batch) if has_rows(value))
