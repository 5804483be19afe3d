"""Contexts that restore global state: random generators, modes and buffers of a module, float32 precision."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import backends, nn

from l2l_core.model.compiled import force_eager
from l2l_core.model.thread_state import RandomState

_EXACT, _UNSET = "ieee", "none"


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the random generators of torch, Python and, if it is imported, NumPy after a block."""
    numpy = sys.modules.get("numpy")
    before, numpy_before = RandomState.capture(), numpy.random.get_state(legacy=False) if numpy is not None else None
    try:
        yield
    finally:
        before.restore()
        if numpy is not None:
            numpy.random.set_state(numpy_before)


@contextmanager
def preserve_module_state(model: nn.Module) -> Iterator[None]:
    """Run a block in eval mode and without compiled code, then restore modes and buffers."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [
        (module, name, buffer, None if buffer is None else buffer.detach().clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
    ]
    for module, _ in modes:  # not model.eval(), which a model may override
        module.training = False
    try:
        with force_eager():
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for module, name, buffer, value in buffers:
                module._buffers[name] = buffer  # the forward may have replaced the tensor
                if buffer is not None and value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute in full float32 precision on `device`: without autocast, TF32 or bfloat16 in matrix products and convolutions."""
    cudnn, mkldnn = backends.cudnn, backends.mkldnn
    kinds = (backends.cuda.matmul, cudnn.conv, cudnn.rnn, mkldnn.matmul, mkldnn.conv, mkldnn.rnn)
    before = [(kind, kind.fp32_precision) for kind in kinds if kind.fp32_precision not in (_EXACT, _UNSET)]
    try:
        for kind, _ in before:
            kind.fp32_precision = _EXACT
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for kind, precision in before:
            kind.fp32_precision = precision
