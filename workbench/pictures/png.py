"""Small PNG images with a palette (https://www.w3.org/TR/png-3/): many cells in few bytes."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int, int]  # red, green, blue, opacity, each from 0 to 255


def write_png(pixels: NDArray[np.uint8], palette: Sequence[Colour]) -> bytes:
    """Write a PNG of (height, width) numbers of colours; at least one pixel, at most 256 colours."""
    height, width = pixels.shape
    assert height and width and len(palette) <= 256 and int(pixels.max()) < len(palette), (pixels.shape, len(palette))
    lines = np.zeros((height, width + 1), np.uint8)  # before each line the number of its filter: none
    lines[:, 1:] = pixels
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            # 8 bits a pixel, colours by palette (3); the three zeros are the only compression and filter, and no interlace
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", bytes(value for colour in palette for value in colour[:3])),
            _chunk(b"tRNS", bytes(colour[3] for colour in palette)),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)),
            _chunk(b"IEND", b""),
        ]
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
