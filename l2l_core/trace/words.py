"""Numbers for people, as tables, pictures and messages have them."""


def format_bytes(nbytes: int | float) -> str:
    """Write `nbytes` for people: decimal units, three digits."""
    value = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
