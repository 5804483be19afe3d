"""Versions of libraries, and what has to happen before they are imported."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch


def version_of(library: str) -> str:
    """Return the version of an installed distribution, or an empty text."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def declare_vision_operators() -> None:
    """Declare the operators without which torchvision's build for GPUs fails to import beside torch's for CPUs.

    No case uses them.
    """
    if not version_of("torchvision") or torch.cuda.is_available():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)  # its operators end with it


_kept: list[Any] = []
