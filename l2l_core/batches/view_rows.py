"""Batches of blocks that belong together, such as two views of each image: ``split=Views(n)`` of a relay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from l2l_core.batches.batch import Batch, BatchRows, PartChange, RowChoice, RowsOfBatch
from l2l_core.batches.output_join import GetDivisors, OutputJoin, Placing, first_fitting
from l2l_core.batches.row_count import has_rows
from l2l_core.batches.target_counts import ROWS, fold_counts


@dataclass(frozen=True, slots=True)
class Views:
    """Blocks of equal rows along dim 0 that belong together: two views of each image, chosen and rejected answers.

    "Row" i of a batch of N rows is the rows i, i + N/n, ... A micro-batch has its rows of every block, block after block.

    Attributes:
        count: the number n of blocks.

    Raises:
        ValueError: `count` is no whole number of at least 2.

    Example:
        >>> from l2l_core import Views
        >>> images = torch.randn(8, 16)  # two views of four images: row i and row 4 + i belong together
        >>> targets = torch.randint(4, (8,))
        >>> relay.close()  # a model belongs to one relay
        >>> config = RelayConfig(micro_batches=4)
        >>> with Relay(model, device="cpu", loss=nn.CrossEntropyLoss(), split=Views(2), config=config) as relay:
        ...     relay.step((images, targets)).samples
        4
    """

    count: int

    def __post_init__(self) -> None:
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 2:
            raise ValueError(f"Views({self.count!r}): give the number of blocks, a whole number of at least 2")


class ViewRows(RowsOfBatch):
    """The rows of a batch of blocks: each stands for one row of every block.

    Raises:
        TypeError: the batch is not a mapping, sequence or dataclass.
        ValueError: the rows along dim 0 are no multiple of the number of blocks.
    """

    def __init__(self, batch: Batch, views: Views, output_join: OutputJoin) -> None:
        self.batch, self._views, self._output_join = batch, views, output_join
        self._rows = BatchRows(batch)
        if self._rows.count % views.count:
            raise ValueError(
                f"split={views}: the batch has {self._rows.count} row(s), which is no multiple of {views.count}: give blocks of "
                "equal rows, one behind another along dim 0"
            )
        self.count = self._rows.count // views.count
        self._of_view = BatchRows((torch.empty(self.count),))  # cuts the rows of one block

    def split(self, micro_batches: int) -> list[Any]:
        """Cut the batch into `micro_batches` parts."""
        if micro_batches == 1:
            return self._rows.split(1)
        return self.select([part[0].tolist() for part in BatchRows((torch.arange(self.count),)).split(micro_batches)])

    def most_parts(self, micro_batches: int) -> int:
        """Return `micro_batches`, or the number of rows if there are fewer."""
        return self._of_view.most_parts(micro_batches)

    def sizes(self, micro_batches: int) -> list[int]:
        """Return the rows of every micro-batch, in each block."""
        return self._of_view.sizes(micro_batches)

    def select(self, choices: Sequence[RowChoice], change: PartChange | None = None) -> list[Any]:
        """Return one batch for each choice of rows; `change` gets (rows, blocks, ...)."""

        def change_blocks(where: str, part: Any, k: int) -> Any:
            assert change is not None
            return self._stacked(change(where, self._side_by_side(part), k))

        of_view = [list(range(self.count)[each]) if isinstance(each, slice) else each for each in choices]
        starts = [self.count * block for block in range(self._views.count)]
        rows = [[start + row for start in starts for row in each] for each in of_view]
        return self._rows.select(rows, None if change is None else change_blocks)

    def columns(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and value, (rows, blocks, ...), of all tensors and arrays with rows."""
        for name, column in self._rows.columns():
            if has_rows(column):
                yield name, self._side_by_side(column)

    def item_counts(self) -> dict[str, list[int]]:
        """Return the counts of every row, over all blocks."""
        return fold_counts(self._rows.item_counts(), self._views.count) | {ROWS: [1] * self.count}

    def of(self, batch: Batch) -> RowsOfBatch:
        """Return the rows of another batch of as many blocks."""
        return ViewRows(batch, self._views, self._output_join)

    def leading(self, size: int) -> int | None:
        """Return the rows of all blocks."""
        return size * self._views.count

    def join(self, outputs: Sequence[Any], divisors: GetDivisors | None = None) -> Any:
        """Put the rows of all outputs back into their blocks; outputs with one entry for all blocks are concatenated."""
        sizes, count = self.sizes(len(outputs)), self._views.count

        def place(where: str, parts: Sequence[torch.Tensor], dim: int | None) -> Placing | None:
            blocks = Placing(dim or 0, [size * count for size in sizes], count)
            return first_fitting([blocks, Placing(dim or 0, sizes)], parts)

        return self._output_join(outputs, place, divisors)

    def _side_by_side(self, value: Any) -> Any:
        """Turn (blocks * rows, ...) into (rows, blocks, ...)."""
        return value.reshape(self._views.count, -1, *value.shape[1:]).swapaxes(0, 1)

    def _stacked(self, value: Any) -> Any:
        """Turn (rows, blocks, ...) into (blocks * rows, ...)."""
        return value.swapaxes(0, 1).reshape(-1, *value.shape[2:])
