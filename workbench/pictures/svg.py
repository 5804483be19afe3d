"""SVG elements and documents as strings.

Coordinates are in pixels of the view box. Elements have no ids, because several pictures share a page.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from workbench.pictures.theme import STYLE

PAGE = "var(--jp-layout-color1,Canvas)"  # the colour behind the picture


def document(width: float, height: float, title: str, description: str, parts: Iterable[str], left: float = 0) -> str:
    """Return an SVG document whose view box begins at `left`, with title and description for screen readers."""
    return (  # with its style, so that it can be saved to a file
        f'<svg xmlns="http://www.w3.org/2000/svg" class="l2l" viewBox="{left:g} 0 {width:g} {height:g}" width="100%" role="img" '
        f'aria-label="{escape(title)}" style="display:block;height:auto">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc><style>{STYLE}</style>"
        + "".join(parts)
        + "</svg>"
    )


def text(
    x: float,
    y: float,
    words: str,
    *,
    style: str = "",
    anchor: str = "start",
    fill: str = "",
    size: float = 0,
    strong: bool = False,
) -> str:
    """Return text; `y` is its baseline, `style` names classes of the theme, `anchor` is start, middle or end.

    `size` in px has no effect with the class `small`, which takes precedence.
    """
    sized = f' font-size="{size:g}"' if size else ""
    heavy = ' font-weight="600"' if strong else ""
    named = f' class="{style}"' if style else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    filled = f' fill="{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{sized}{heavy}{named}{placed}{filled}>{escape(words)}</text>'


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    *,
    fill: str = "",
    style: str = "",
    r: float = 0,
    tip: str = "",
    key: str | None = None,
) -> str:
    """Return a rectangle with tooltip `tip` and the key of its layer."""
    named = f' class="{style}"' if style else ""
    filled = f' fill="{fill}"' if fill else ""
    rounded = f' rx="{r:g}"' if r else ""
    box = f'x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"'
    start = f"<rect {box}{rounded}{named}{filled}{layer_attribute(key)}"
    return f"{start}><title>{escape(tip)}</title></rect>" if tip else f"{start}/>"


def layer_attribute(key: str | None) -> str:
    """Return the attribute that names an element's layer; empty for None."""
    return f' data-key="{escape(key)}"' if key is not None else ""


def image(x: float, y: float, width: float, height: float, png: bytes) -> str:
    """Return an embedded PNG, stretched to a box with sharp pixels."""
    return (
        f'<image x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{b64encode(png).decode()}"/>'
    )


def path(d: str, *, style: str = "", stroke: str = "", fill: str = "", width: float = 0, dash: str = "") -> str:
    """Return a path with commands `d`."""
    named = f' class="{style}"' if style else ""
    stroked = f' stroke="{stroke}"' if stroke else ""
    filled = f' fill="{fill}"' if fill else ""
    wide = f' stroke-width="{width:g}"' if width else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{d}"{named}{stroked}{filled}{wide}{dashed}/>'


def polyline(points: Iterable[tuple[float, float]]) -> str:
    """Return path commands of a line through points."""
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def group(parts: Iterable[str], *, style: str = "", transform: str = "") -> str:
    """Return a group of parts with a common class or transform."""
    named = f' class="{style}"' if style else ""
    moved = f' transform="{transform}"' if transform else ""
    return f"<g{named}{moved}>{''.join(parts)}</g>"


def outlined_text(words: str, width: float = 3) -> str:
    """Return text elements with an outline in the page's colour, `width` px wide, readable over lines and areas."""
    return f'<g style="paint-order:stroke;stroke:{PAGE};stroke-width:{width:g}px;stroke-linejoin:round">{words}</g>'


def hatch(x: float, y: float, width: float, height: float, pitch: float = 5) -> str:
    """Return path commands of slanted lines that fill a box; several results can be joined into one path."""
    strokes = []
    at = x - height
    while at < x + width:
        low, high = max(at, x), min(at + height, x + width)
        if high > low:
            strokes.append(f"M{low:.1f} {y + height - (low - at):.1f}L{high:.1f} {y + height - (high - at):.1f}")
        at += pitch
    return "".join(strokes)
