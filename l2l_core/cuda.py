"""A CUDA GPU as the relay's device. Not supported in this version: asking for one says so."""

from __future__ import annotations

import torch

from l2l_core.device import Device


def cuda_device(name: str) -> Device:
    """A device for "cuda" or "cuda:n".

    Raises:
        ValueError: always, in this version.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            f"device={name!r} does not exist: PyTorch finds no CUDA device. Use 'cpu' or EmulatedDevice(...)"
        )
    raise ValueError(f"device={name!r} is not supported in this version: use 'cpu' or EmulatedDevice(...)")
