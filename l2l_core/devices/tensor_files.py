"""Writing tensors to files, and errors for a full disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # safetensors gives the number only in its text


def write_tensors(tensors: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the system could not write it (instead of safetensors' own error).
    """
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        if (found := _SYSTEM_ERROR.search(str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


@contextmanager
def explain_full_disk(folder: Path, needed_bytes: int, remedy: str) -> Iterator[None]:
    """Add sizes and a remedy to an error of a full disk while `folder` is written to."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        free = shutil.disk_usage(folder).free
        text = f"{error.strerror}: {needed_bytes:,} bytes are to be written to {folder}, and {free:,} are free there. {remedy}"
        raise OSError(error.errno, text, str(error.filename or folder)) from error
