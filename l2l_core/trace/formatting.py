"""Numbers for people, as tables, pictures and messages have them."""


def format_bytes(nbytes: int | float) -> str:
    """Write `nbytes` for people: decimal units, three digits."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"


def format_seconds(seconds: float) -> str:
    """Write `seconds` for people: three digits."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}" if seconds < 999.5 else f"{seconds:.0f} s"
    return f"{seconds * 1e6:.3g} µs"
