"""Held-out loss and metrics over a whole loader, once or every few steps, without a trace on training.

Random generators, buffers, modes, metric objects and what hooks and losses count are as if nothing had been measured
(`Relay.probe_batch`), and so is the generator of the loader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, cast

import torch

from l2l_core import Relay
from l2l_core.batches import Batch
from l2l_core.model import preserve_random_state
from workbench.session.early_stopping import EarlyStopping, StoppingMonitor
from workbench.session.metrics import LOSS, MetricSet
from workbench.session.snapshot_values import HeldOutRow


class Evaluation:
    """One loader with its metrics.

    Args:
        loader: an iterable of batches that can be iterated repeatedly, such as a DataLoader or a list.
        metrics: measured with the loss.
        every: number of steps between measurements; None: only on request.
        stop: pauses the run.

    Raises:
        TypeError: `loader` cannot be iterated repeatedly.
        ValueError: `every` is no positive integer, or `stop` cannot be used with these metrics.
    """

    def __init__(
        self, loader: Iterable[Batch], metrics: MetricSet, every: int | None, stop: EarlyStopping | None
    ) -> None:
        _check_loader(loader)
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"every={every!r}: give a positive number of steps, or None to measure once")
        if stop is not None and every is None:
            raise ValueError("stop= needs several evaluations: give every=, the number of steps between them")
        self._loader, self._metrics, self.every = loader, metrics, every
        self._monitor = StoppingMonitor(stop, metrics) if stop is not None else None

    @property
    def total(self) -> int | None:
        """Number of batches; None if the loader has no length."""
        try:
            return len(cast(Sized, self._loader))
        except TypeError:  # of an iterable data set, too
            return None

    def measure(self, relay: Relay, advance: Callable[[], None]) -> HeldOutRow:
        """Measure the relay, and call `advance` after each batch.

        Raises:
            ValueError: the loader is empty.
        """
        began_s, total, weight, rows, batches = time.perf_counter(), 0.0, 0.0, 0, 0
        self._metrics.reset()
        with preserve_random_state(), _preserved_generators(self._loader), torch.no_grad():
            for batch in self._loader:
                found = relay.probe_batch(batch, outputs=bool(self._metrics.names))
                total, weight = total + found.count * found.loss, weight + found.count
                self._metrics.update(found.outputs, batch, found.count)
                rows, batches = rows + found.rows, batches + 1
                advance()
        if not batches:
            raise ValueError(
                "the loader holds no batch, so nothing was measured: give a held-out set that is not empty"
            )
        values = {LOSS: total / weight, **self._metrics.values()}
        return HeldOutRow(relay.steps, values, relay.branch, batches, rows, time.perf_counter() - began_s)

    def reason_to_stop(self, row: HeldOutRow) -> str:
        """Return the reason to pause the run after a measurement, in words; "" if there is none."""
        return "" if self._monitor is None else self._monitor.check(row)


def _check_loader(loader: Any) -> None:
    # A tensor, a string or a mapping is one batch, or part of one.
    if isinstance(loader, torch.Tensor | str | dict) or not isinstance(loader, Iterable):
        raise TypeError(
            f"loader is a {type(loader).__name__}: give a DataLoader, or a list of batches, such as [batch]"
        )
    if isinstance(loader, Iterator):
        raise TypeError(
            f"loader is a {type(loader).__name__}, which can be used once only: give the DataLoader itself, or list(...) "
            "of it"
        )
    if isinstance(loader, tuple) and all(isinstance(item, torch.Tensor) for item in loader):
        raise TypeError("loader is a tuple of tensors, which is one batch: give a list of batches, such as [batch]")


@contextmanager
def _preserved_generators(loader: Any) -> Iterator[None]:
    """Restore the generators of a DataLoader and its sampler, which may be shared with that of the training batches."""
    owners = loader, getattr(loader, "sampler", None), getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    found = {getattr(owner, "generator", None) for owner in owners}
    states = [(each, each.get_state()) for each in found if isinstance(each, torch.Generator)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
