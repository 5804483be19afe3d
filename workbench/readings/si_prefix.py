"""Numbers with an SI prefix."""

from __future__ import annotations

_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def format_prefixed(value: float) -> str:
    """Return a number with three digits and an SI prefix."""
    factor, prefix = next((unit for unit in _PREFIXES if value >= unit[0] * 0.9995), _PREFIXES[-1])
    return f"{value / factor:.3g} {prefix}"
