"""Writer of PNG images with a palette (https://www.w3.org/TR/png-3/)."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Colour = tuple[int, int, int, int]  # red, green, blue, opacity, each from 0 to 255


def write_png(pixels: NDArray[np.uint8], palette: Sequence[Colour]) -> bytes:
    """Return a PNG of (height, width) palette indices; at least one pixel, at most 256 colours."""
    height, width = pixels.shape
    assert height and width and len(palette) <= 256 and int(pixels.max()) < len(palette), (pixels.shape, len(palette))
    lines = np.zeros((height, width + 1), np.uint8)  # each line begins with filter type 0: none
    lines[:, 1:] = pixels
    return b"".join(
        [
            b"\x89PNG\r\n\x1a\n",
            # 8 bits per pixel, colour type 3 (palette), default compression and filter methods, no interlace
            _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            _chunk(b"PLTE", bytes(value for colour in palette for value in colour[:3])),
            _chunk(b"tRNS", bytes(colour[3] for colour in palette)),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 6)),
            _chunk(b"IEND", b""),
        ]
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
