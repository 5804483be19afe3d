"""Float32 that is float32, for a while: no autocast, and no matrix product or convolution in TF32 or bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import backends

_EXACT, _UNSET = "ieee", "none"


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute in full precision on this device inside a block, whatever is set; afterwards it is set as before."""
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
