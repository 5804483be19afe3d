"""Bytes and seconds as text, for tables, pictures, messages and settings."""

import re

_DECIMAL_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_BINARY_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_UNITS = _DECIMAL_UNITS | _BINARY_UNITS
_BYTES = re.compile(rf"(\d+(?:\.\d+)?)\s*({'|'.join(_UNITS)})")


def format_bytes(nbytes: int | float) -> str:
    """Format a number of bytes: decimal units, three digits."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_seconds(seconds: float) -> str:
    """Format a duration: three digits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 999.5 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} µs"


def parse_bytes(text: str, name: str, alternative: str = "") -> int:
    """Convert a number of bytes with a unit, as "500 MB" or "1.5 GiB", to an integer.

    Args:
        text: the value of a setting.
        name: name of the setting, for the error.
        alternative: other numbers that the setting accepts, for the error.

    Raises:
        ValueError: not a number of bytes with a unit.
    """
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise ValueError(
            f"{name}={text!r}: must be a number of {alternative}bytes with a unit ({', '.join(_UNITS)}), as '500 MB'"
        )
    return int(float(found[1]) * _UNITS[found[2]])
