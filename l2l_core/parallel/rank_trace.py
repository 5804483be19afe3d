"""Trace of a rank's step by torch's own means: messages and memory by its profiler, layers by hooks.

A message lasts from its call, or from the end of the one before on its lane, to its end, so waits for other ranks are part of
it. But a sent message has no length, since gloo reports its end only where the rank waits for that. "gather" has what arrives
(all-gathers, broadcasts, received messages), "reduce" the rest. Compute waits where a message is on its way and no operation
runs. Bytes are those of torch's allocator; gloo's own buffers are not counted.

The profiler does not see gloo's thread: what is freed there stays counted. Torch's own hooks of DDP (PowerSGD, fp16) compute in
callbacks on it. Their messages last to the ends of these, and messages that a callback sends are missing. Torch then warns of a
"memory block of unknown size", which was allocated in a callback.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.autograd.profiler import profile

from l2l_core._torch import pytree
from l2l_core.trace import Event, Interval, MemorySample, merge, subtract

_KINDS = {
    "all_gather": ("gather", "gather"),
    "broadcast": ("gather", "gather"),
    "recv": ("gather", "receive"),
    "send": ("reduce", "send"),
}  # lane and kind, by gloo's name; others add up
_SEND = "gloo:send"
_ITEM_BYTES = {"double": 8, "long int": 8, "float": 4, "int": 4, "c10::Half": 2, "c10::BFloat16": 2}  # others: 1
_BETWEEN_S = 1e-4  # of Python between two operations; a shorter pause is no wait


@contextmanager
def profiled_rank() -> Iterator[Any]:
    """Profile the block: all operations, messages and allocations of this process."""
    gc.collect()  # so that nothing from before is freed within
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # otherwise each start prints a line
    with profile(record_shapes=True, profile_memory=True) as recorded:
        yield recorded


class RankProfile:
    """Messages, operations and allocations of a profiled block.

    Args:
        recorded: torch's profile, ended.
        began_s: time of `time.perf_counter` that is 0 in the results.
    """

    def __init__(self, recorded: Any, began_s: float) -> None:
        begin_ns = time.time_ns() - round(1e9 * (time.perf_counter() - began_s))  # the profiler has the wall clock
        self._events = [
            ((each.start_ns() - begin_ns) / 1e9, (each.end_ns() - begin_ns) / 1e9, each)
            for each in recorded.kineto_results.events()
        ]

    def messages(self) -> list[Event]:
        """Return the messages called from 0 on, in the order of their ends, as events of the network lanes."""
        free_s: dict[str, float] = {}
        events: list[Event] = []
        for start_s, stop_s, each in sorted(self._messages(), key=lambda one: one[1]):
            lane, kind = _KINDS.get(each.name().removeprefix("gloo:"), ("reduce", "exchange"))
            sizes = zip(each.shapes(), each.dtypes(), strict=True)
            nbytes = sum(math.prod(shape) * _ITEM_BYTES.get(dtype, 1) for shape, dtype in sizes)
            events.append(Event(lane, kind, max(start_s, free_s.get(lane, start_s)), stop_s, nbytes=nbytes))
            free_s[lane] = stop_s
        return events

    def _messages(self) -> Iterator[tuple[float, float, Any]]:
        for start_s, stop_s, each in self._events:
            # One of the step before is over, but its callback may still run.
            if each.name().startswith("gloo:") and start_s >= 0.0:
                yield start_s, start_s if each.name() == _SEND else stop_s, each

    def waits(self) -> list[Interval]:
        """Return when a message was on its way and no operation ran."""
        operations = [(a, b + _BETWEEN_S) for a, b, each in self._events if each.name().startswith("aten::")]
        running = [(a, b - _BETWEEN_S) for a, b in merge(operations)]
        return subtract(merge((a, b) for a, b, _ in self._messages()), running)

    def allocated(self) -> list[tuple[float, int]]:
        """Return the bytes that the block has allocated and not freed, after each change."""
        total, found = 0, list[tuple[float, int]]()
        for start_s, _, each in self._events:
            if each.name() == "[memory]":
                total += each.nbytes()
                found.append((start_s, total))
        return found


class _Mark(NamedTuple):
    """Begin of a rank's work on a layer, until the next mark."""

    start_s: float
    kind: str
    layer: str
    k: int
    gradient_bytes: int


class LayerMarks:
    """Times at which a rank begins forward and backward of its layers, from hooks on them.

    Args:
        layers: by key; hooks run after those that are there.
        gradient_bytes: returns the bytes of gradients, which is read at each mark.
    """

    def __init__(self, layers: Mapping[str, nn.Module], gradient_bytes: Callable[[], int]) -> None:
        self._gradient_bytes = gradient_bytes
        self._marks: list[_Mark] = []
        self._calls = dict.fromkeys(layers, 0)
        self.began_s = time.perf_counter()
        for key, layer in layers.items():
            layer.register_forward_pre_hook(lambda *_, key=key: self.mark("forward", key, self._calls[key]))
            # First, so that waits for weights in backward are those of this layer.
            layer.register_forward_hook(lambda _, __, output, key=key: self._on_output(key, output), prepend=True)

    def mark(self, kind: str, layer: str = "shell", k: int = -1) -> None:
        """Begin some work; it lasts until the next mark."""
        self._marks.append(_Mark(time.perf_counter() - self.began_s, kind, layer, k, self._gradient_bytes()))

    def _on_output(self, key: str, output: Any) -> None:
        k = self._calls[key]
        self._calls[key] += 1
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: self.mark("backward", key, k))
        self.mark("shell")

    def compute(self, waits: Sequence[Interval]) -> list[Event]:
        """Return events between marks, without waits; the last mark is the end of the step."""
        return [
            Event("compute", mark.kind, start_s, stop_s, mark.layer, mark.k)
            for mark, after in pairwise(self._marks)
            for start_s, stop_s in subtract([(mark.start_s, after.start_s)], list(waits))
        ]

    def memory(self, allocated: Sequence[tuple[float, int]], held: Mapping[str, int]) -> list[MemorySample]:
        """Return samples of the device during the step, by category.

        Args:
            allocated: times and bytes in order, from before the step.
            held: bytes by category that stay as they are; gradients are those of the last mark, and the rest is activations,
                but for bytes that were there before the step or are new in its update.
        """
        begin_s = self._marks[0].start_s
        early = next((nbytes for t_s, nbytes in reversed(allocated) if t_s < begin_s), 0)
        before = early - sum(held.values()) - self._marks[0].gradient_bytes
        samples: list[MemorySample] = []
        marks = iter(pairwise([*self._marks, self._marks[-1]._replace(start_s=math.inf)]))
        mark, after = next(marks)
        for t_s, nbytes in [(begin_s, early), *(each for each in allocated if each[0] >= begin_s)]:
            while t_s >= after.start_s:
                mark, after = next(marks)
            rest = nbytes - sum(held.values()) - mark.gradient_bytes
            new = 0 if mark.kind in ("update", "end") else max(0, rest - before)
            sizes = {**held, "gradients": mark.gradient_bytes, "activations": new, "other": rest - new}
            samples.append(MemorySample(t_s, "device", sizes))
        return samples
