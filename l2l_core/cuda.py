"""A CUDA GPU as the relay's device. Not written yet: it comes with transfer overlap."""

from __future__ import annotations

import torch


class CudaDevice:
    def __init__(self, device: str = "cuda") -> None:
        if not torch.cuda.is_available():
            raise ValueError(f"device={device!r} does not exist: no CUDA device here; use 'cpu' or EmulatedDevice(...)")
        raise ValueError("CUDA is not supported in this version; use device='cpu'")
