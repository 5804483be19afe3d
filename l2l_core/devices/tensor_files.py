"""Tensors into files, and what is said when there is no room for them."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SYSTEM_ERROR = re.compile(r"\(os error (\d+)\)")  # in Rust's words: safetensors passes no number on


def write_tensors(tensors: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Write one file in the safetensors format.

    Raises:
        OSError: the system could not write it; safetensors has an error of its own for that, which nobody expects.
    """
    try:
        save_file(dict(tensors), path)
    except SafetensorError as error:
        if (found := _SYSTEM_ERROR.search(str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def is_disk_full(error: BaseException) -> bool:
    """Whether it says that there is no room: on the disk, in a quota, in a file."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def disk_full_error(error: OSError, folder: Path, needed_bytes: int, remedy: str) -> OSError:
    """Make the error for whoever wanted to write so many bytes to `folder`."""
    free_bytes = shutil.disk_usage(folder).free
    story = f"{error.strerror}: {needed_bytes:,} bytes are to be written to {folder}, and {free_bytes:,} are free there. {remedy}"
    return OSError(error.errno, story, str(error.filename or folder))
