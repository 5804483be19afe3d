"""What plain in-core training of the same batch would need on the device: an estimate from one step by relay.

Nothing is trained in core for it (`in_core.py` does that, and measures). In core the graphs of all layers are alive at
once. The relay makes the same graphs one after another, and its memory samples tell their sizes: when a layer's forward
event ends, its graph is still whole and its temporaries are gone, so the activation bytes then, less those before the
event, are what autograd has saved inside the layer. Layer inputs come on top (the stash of one micro-batch), and
weights, optimizer state and, from the second micro-batch on, gradients. The peak is the highest of these moments: the
loss, the backward of each layer above the graphs of those below it, and the update.

Measured against `InCore.measure_peak_bytes` for GPT-2 (with and without dropout), BERT, Llama, an MLP and a
convolutional stack, 1 to 4 micro-batches, the stash on either side, AdamW (fused) and SGD: off by -1.3 % to +3.5 %, most
by less than 0.5 %. From a relay in bfloat16 the float32 graphs are guessed by a factor: off by -10 % to +18 %. Not counted:
temporaries of an optimizer that is not fused. A step depth first has the graphs of a micro-batch alive at once, as in core: its
samples are the measure. On a GPU samples carry the host's times and events the GPU's, so graphs
are told apart less well there; that was not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from l2l_core import Relay, Trace
from l2l_core.trace import CATEGORIES
from workbench.readings.trace_columns import Columns

# Bytes of a float32 graph over those of autocast: measured 2.1 for GPT-2 without dropout, 1.5 with it and for BERT, where
# masks and softmax keep their type.
BF16_FACTOR = 1.7

IntArray = NDArray[np.int64]


def estimate_in_core_bytes(relay: Relay, trace: Trace) -> int:
    """Estimate the peak device bytes of a step in core.

    Args:
        relay: whose model it is.
        trace: one of its finished steps; says how many micro-batches there are.
    """
    units = [relay.shell, *relay.stack]
    owners = {param: unit.key for unit in reversed(units) for param in unit.params}  # one owner, even if shared
    gradients = dict.fromkeys((unit.key for unit in units), 0)
    for param, key in owners.items():
        gradients[key] += 4 * param.numel() if param.requires_grad else 0
    buffer_bytes = sum(buffer.nbytes for buffer in relay.model.buffers())
    return estimate_peak_bytes(trace, 4 * sum(param.numel() for param in owners) + buffer_bytes, gradients)


def estimate_peak_bytes(trace: Trace, weight_bytes: int, gradient_bytes: Mapping[str, int]) -> int:
    """Estimate the peak device bytes of a step in core from plain values.

    Args:
        trace: a finished step by relay.
        weight_bytes: of the whole model in float32, buffers included.
        gradient_bytes: of what is trained, by key of its layer or "shell", float32.
    """
    columns = Columns.of(trace)
    gradients = sum(gradient_bytes.values())
    fixed = weight_bytes + _peak_bytes(columns, "host", "optimizer") + batch_bytes(trace)
    if trace.settings.get("schedule") == "depth_first":  # in core already, but for the optimizer
        return fixed + gradients + round(_precision_factor(trace) * _peak_bytes(columns, "device", "activations"))
    graphs = _GraphBytes.of(columns, on_host=trace.settings.get("stash") == "host")
    if graphs is None:
        return fixed + gradients
    factor = _precision_factor(trace)
    trained = np.array([gradient_bytes.get(columns.layers[layer], 0) for layer in graphs.layer])
    above = np.append(np.cumsum(trained[::-1])[::-1][1:], 0)  # gradients that exist when a layer's backward begins
    several = graphs.micro_batches > 1  # then those of the first one are all there
    at_backward = factor * graphs.backward_bytes + (gradients if several else above)
    at_loss = factor * graphs.loss_bytes + (gradients if several else 0)
    return fixed + round(max(float(at_backward.max()), at_loss, gradients))


def _precision_factor(trace: Trace) -> float:
    return BF16_FACTOR if trace.settings.get("precision") == "bf16" else 1.0


@dataclass(frozen=True)
class _GraphBytes:
    """Activation bytes in core of one micro-batch: at its loss, and while each layer is back-propagated.

    Attributes:
        layer: (visits,), index of the layer that was visited, in order of forward.
        at_backward: (visits,).
        at_loss: with the graphs of all layers and of the loss.
        micro_batches: how many there are.
    """

    layer: IntArray
    backward_bytes: IntArray
    loss_bytes: int
    micro_batches: int

    @staticmethod
    def of(columns: Columns, on_host: bool) -> _GraphBytes | None:
        """From a trace whose stash was `on_host`; None if it holds no forward."""
        compute = columns.events_on("compute")
        visit, k, kind = columns.visit[compute], columns.k[compute], columns.kind[compute]
        forward = np.flatnonzero((kind == _kind_index(columns, "forward")) & (visit >= 0))
        if not len(forward):
            return None
        before, during, after = _activation_bytes(columns, compute)
        visits, count = int(visit[forward].max()) + 1, len(np.unique(k[forward]))
        # an event that waited was cut in pieces: what was there before the first, what is left after the last
        call = visit[forward] * (int(k.max()) + 2) + k[forward]
        firsts = forward[np.unique(call, return_index=True)[1]]
        lasts = forward[len(forward) - 1 - np.unique(call[::-1], return_index=True)[1]]
        saved, layer = np.zeros(visits, np.int64), np.zeros(visits, np.int64)
        np.maximum.at(saved, visit[firsts], after[lasts] - before[firsts])
        layer[visit[forward]] = columns.layer[compute][forward]

        backward = np.flatnonzero(kind == _kind_index(columns, "backward"))
        own = saved.copy()  # the layer that is back-propagated, with its temporaries
        np.maximum.at(own, np.clip(2 * visits - 1 - visit[backward], 0, visits - 1), during[backward])
        below = np.cumsum(saved) - saved
        stash = _peak_bytes(columns, "host" if on_host else "device", "stash") // count
        inputs = stash * np.arange(1, visits + 1) // visits
        turn = firsts[visit[firsts] == visits - 1][0]  # the last layer keeps its graph until the loss is done
        until = backward[0] if len(backward) else len(compute)
        last = max(int(during[turn:until].max(initial=0) - before[turn]), int(saved[-1]))
        shell = 0 if on_host else int(before[turn]) // count  # saved between layers; on the host, it is in the stash
        return _GraphBytes(layer, below + own + inputs + shell, int(below[-1]) + last + stash + shell, count)


def _activation_bytes(columns: Columns, compute: NDArray[np.intp]) -> tuple[IntArray, IntArray, IntArray]:
    """Activation bytes on the device before, during (highest) and after every compute event.

    The relay samples when an event has ended: what was highest, then what is left. Where nothing changed there is no
    sample.
    """
    at = columns.samples_at("device")
    held = np.append(columns.sample_bytes[at, CATEGORIES.index("activations")], 0)
    first = np.append(np.searchsorted(columns.sample_s[at], columns.stop_s[compute], "left"), len(at))
    after = np.where(first[1:] > 0, held[first[1:] - 1], 0)
    during = np.where(first[1:] > first[:-1], np.maximum.reduceat(held, first[:-1]), after)
    return np.append(0, after[:-1]), during, after


def batch_bytes(trace: Trace) -> int:
    """Add up the bytes of a finished step's batch, as they were copied to the device."""
    columns = Columns.of(trace)
    return int(columns.nbytes[columns.kind == _kind_index(columns, "batch")].sum())


def _peak_bytes(columns: Columns, place: str, category: str) -> int:
    return int(columns.sample_bytes[columns.samples_at(place), CATEGORIES.index(category)].max(initial=0))


def _kind_index(columns: Columns, kind: str) -> int:
    return columns.kinds.index(kind) if kind in columns.kinds else -1
