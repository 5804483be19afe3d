"""Estimate the device memory of in-core training from the trace of one relay step.

In core, the graphs of all layers exist at once. The relay builds the same graphs one after another: at the end of a layer's
forward event its graph is complete and its temporaries are freed, so the growth of the activation bytes is the size of the
graph. Layer inputs (the stash of one micro-batch), weights, optimizer state and, from the second micro-batch on, gradients are
added. The peak is the maximum over the loss, the backward of each layer with the graphs of the layers below it, and the update.
The samples of a depth-first step are used directly, because its graphs exist at once too.

Error relative to `InCore.measure_peak_bytes` for GPT-2 (with and without dropout), BERT, Llama, an MLP and a convolutional
stack, 1 to 4 micro-batches, the stash at either place, AdamW (fused) and SGD: -1.3 % to +3.5 %, mostly below 0.5 %; from a step
in bfloat16, whose graphs are scaled by a factor, -10 % to +18 %. Temporaries of an optimizer that is not fused are not
included. On a GPU, samples have host times and events GPU times, so graphs are separated less exactly (not measured).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from l2l_core import Relay, Trace
from l2l_core.trace import CATEGORIES
from workbench.readings.trace_columns import Columns

# Size of a float32 graph relative to bfloat16 autocast: measured 2.1 for GPT-2 without dropout, 1.5 with dropout and for BERT,
# in which masks and softmax keep their type.
BF16_FACTOR = 1.7

IntArray = NDArray[np.int64]


def estimate_in_core_bytes(relay: Relay, trace: Trace) -> int:
    """Estimate the peak device bytes of an in-core step from a finished step of the relay."""
    units = [relay.shell, *relay.stack]
    owners = {param: unit.key for unit in reversed(units) for param in unit.params}  # one owner per shared parameter
    gradients = dict.fromkeys((unit.key for unit in units), 0)
    for param, key in owners.items():
        gradients[key] += 4 * param.numel() if param.requires_grad else 0
    buffer_bytes = sum(buffer.nbytes for buffer in relay.model.buffers())
    return estimate_peak_bytes(trace, 4 * sum(param.numel() for param in owners) + buffer_bytes, gradients)


def estimate_peak_bytes(trace: Trace, weight_bytes: int, gradient_bytes: Mapping[str, int]) -> int:
    """Estimate the peak device bytes of an in-core step without the relay.

    Args:
        trace: a finished relay step.
        weight_bytes: float32 bytes of the whole model, including buffers.
        gradient_bytes: float32 bytes of the trained parameters, by key of the layer or "shell".
    """
    columns = Columns.of(trace)
    gradients = sum(gradient_bytes.values())
    fixed = weight_bytes + _peak_bytes(columns, "host", "optimizer") + batch_bytes(trace)
    if trace.settings.get("schedule") == "depth_first":  # in core except for the optimizer
        return fixed + gradients + round(_precision_factor(trace) * _peak_bytes(columns, "device", "activations"))
    graphs = _GraphBytes.of(columns, on_host=trace.settings.get("stash") == "host")
    if graphs is None:
        return fixed + gradients
    factor = _precision_factor(trace)
    trained = np.array([gradient_bytes.get(columns.layers[int(layer)], 0) for layer in graphs.layer])
    above = np.append(np.cumsum(trained[::-1])[::-1][1:], 0)  # gradients that exist when a layer's backward begins
    several = graphs.micro_batches > 1  # after the first micro-batch, all gradients exist
    at_backward = factor * graphs.backward_bytes + (gradients if several else above)
    at_loss = factor * graphs.loss_bytes + (gradients if several else 0)
    return fixed + round(max(float(at_backward.max()), at_loss, gradients))


def _precision_factor(trace: Trace) -> float:
    return BF16_FACTOR if trace.settings.get("precision") == "bf16" else 1.0


@dataclass(frozen=True)
class _GraphBytes:
    """In-core activation bytes of one micro-batch.

    Attributes:
        layer: (visits,), index of the visited layer, in order of forward.
        backward_bytes: (visits,), during the backward of the layer.
        loss_bytes: at the loss, with the graphs of all layers and of the loss.
        micro_batches: number of micro-batches.
    """

    layer: IntArray
    backward_bytes: IntArray
    loss_bytes: int
    micro_batches: int

    @staticmethod
    def of(columns: Columns, on_host: bool) -> _GraphBytes | None:
        """Compute from a trace whose stash was `on_host`; None without a forward event."""
        compute = columns.events_on("compute")
        visit, k, kind = columns.visit[compute], columns.k[compute], columns.kind[compute]
        forward = np.flatnonzero((kind == _kind_index(columns, "forward")) & (visit >= 0))
        if not len(forward):
            return None
        before, during, after = _activation_bytes(columns, compute)
        visits, count = int(visit[forward].max()) + 1, len(np.unique(k[forward]))
        # A call has several events if compute waits: the graph is the growth from before the first to after the last.
        call = visit[forward] * (int(k.max()) + 2) + k[forward]
        firsts = forward[np.unique(call, return_index=True)[1]]
        lasts = forward[len(forward) - 1 - np.unique(call[::-1], return_index=True)[1]]
        saved, layer = np.zeros(visits, np.int64), np.zeros(visits, np.int64)
        np.maximum.at(saved, visit[firsts], after[lasts] - before[firsts])
        layer[visit[forward]] = columns.layer[compute][forward]

        backward = np.flatnonzero(kind == _kind_index(columns, "backward"))
        own = saved.copy()  # of the layer in backward, with temporaries
        np.maximum.at(own, np.clip(2 * visits - 1 - visit[backward], 0, visits - 1), during[backward])
        below = np.cumsum(saved) - saved
        stash = _peak_bytes(columns, "host" if on_host else "device", "stash") // count
        inputs = stash * np.arange(1, visits + 1) // visits
        turn = firsts[visit[firsts] == visits - 1][0]  # the last layer keeps its graph until the loss
        until = backward[0] if len(backward) else len(compute)
        last = max(int(during[turn:until].max(initial=0) - before[turn]), int(saved[-1]))
        shell = 0 if on_host else int(before[turn]) // count  # saved between layers; part of the stash on the host
        return _GraphBytes(layer, below + own + inputs + shell, int(below[-1]) + last + stash + shell, count)


def _activation_bytes(columns: Columns, compute: NDArray[np.intp]) -> tuple[IntArray, IntArray, IntArray]:
    """Return the activation bytes before, during (maximum) and after every compute event.

    At the end of an event the relay records two samples, the maximum and the current bytes; none if nothing has changed.
    """
    at = columns.samples_at("device")
    activations = np.append(columns.sample_bytes[at, CATEGORIES.index("activations")], 0)
    first = np.append(np.searchsorted(columns.sample_s[at], columns.stop_s[compute], "left"), len(at))
    after = np.where(first[1:] > 0, activations[first[1:] - 1], 0)
    during = np.where(first[1:] > first[:-1], np.maximum.reduceat(activations, first[:-1]), after)
    return np.append(0, after[:-1]), during, after


def batch_bytes(trace: Trace) -> int:
    """Return the bytes of the batch that a finished step copied to the device."""
    columns = Columns.of(trace)
    return int(columns.nbytes[columns.kind == _kind_index(columns, "batch")].sum())


def _peak_bytes(columns: Columns, place: str, category: str) -> int:
    return int(columns.sample_bytes[columns.samples_at(place), CATEGORIES.index(category)].max(initial=0))


def _kind_index(columns: Columns, kind: str) -> int:
    return columns.kinds.index(kind) if kind in columns.kinds else -1
