"""A few functions that write SVG: elements, text, and the document around them.

Coordinates are in pixels of a picture that scales with its place. Ids are avoided, because several pictures share a page.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from html import escape

from workbench.pictures.theme import STYLE

PAGE = "var(--jp-layout-color1,Canvas)"  # the colour behind the picture


def document(width: float, height: float, title: str, description: str, parts: Iterable[str], left: float = 0) -> str:
    """Write a whole picture from `left` on, with a title and a description for those who do not see it."""
    # with its own style: in a file there is no page around it that would have one
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="l2l" viewBox="{left:g} 0 {width:g} {height:g}" width="100%" role="img" '
        f'aria-label="{escape(title)}" style="display:block;height:auto">'
        f"<title>{escape(title)}</title><desc>{escape(description)}</desc><style>{STYLE}</style>"
        + "".join(parts)
        + "</svg>"
    )


def text(x: float, y: float, words: str, *, style: str = "", anchor: str = "start", fill: str = "") -> str:
    """Write words at a point on their baseline; `style` names classes of the theme, `anchor` is start, middle or end."""
    named = f' class="{style}"' if style else ""
    placed = f' text-anchor="{anchor}"' if anchor != "start" else ""
    filled = f' fill="{fill}"' if fill else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{placed}{filled}>{escape(words)}</text>'


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
    """Write a rectangle; `tip` is shown under the pointer, `key` says of which layer it is."""
    named = f' class="{style}"' if style else ""
    filled = f' fill="{fill}"' if fill else ""
    rounded = f' rx="{r:g}"' if r else ""
    start = f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}"{rounded}{named}{filled}{layer_attribute(key)}'
    return f"{start}><title>{escape(tip)}</title></rect>" if tip else f"{start}/>"


def layer_attribute(key: str | None) -> str:
    """Write the attribute by which a page knows of which layer an element is; nothing if it is of none."""
    return f' data-key="{escape(key)}"' if key is not None else ""


def image(x: float, y: float, width: float, height: float, png: bytes) -> str:
    """Write a PNG that lies in the picture itself, stretched to a box; its pixels stay sharp."""
    return (
        f'<image x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="data:image/png;base64,{b64encode(png).decode()}"/>'
    )


def path(d: str, *, style: str = "", stroke: str = "", fill: str = "", width: float = 0, dash: str = "") -> str:
    """Write a path from its commands."""
    named = f' class="{style}"' if style else ""
    stroked = f' stroke="{stroke}"' if stroke else ""
    filled = f' fill="{fill}"' if fill else ""
    wide = f' stroke-width="{width:g}"' if width else ""
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'<path d="{d}"{named}{stroked}{filled}{wide}{dashed}/>'


def group(parts: Iterable[str], *, style: str = "", transform: str = "") -> str:
    """Put parts together that share a class or a place."""
    named = f' class="{style}"' if style else ""
    moved = f' transform="{transform}"' if transform else ""
    return f"<g{named}{moved}>{''.join(parts)}</g>"


def outlined_text(words: str, width: float = 3) -> str:
    """Write words over lines or areas, with a seam in the colour of the page, `width` px wide."""
    return f'<g style="paint-order:stroke;stroke:{PAGE};stroke-width:{width:g}px;stroke-linejoin:round">{words}</g>'


def hatch(x: float, y: float, width: float, height: float, pitch: float = 5) -> str:
    """Return commands of a path that fills a box with slanted lines, inside its edges; join several into one path."""
    strokes = []
    at = x - height
    while at < x + width:
        low, high = max(at, x), min(at + height, x + width)
        if high > low:
            strokes.append(f"M{low:.1f} {y + height - (low - at):.1f}L{high:.1f} {y + height - (high - at):.1f}")
        at += pitch
    return "".join(strokes)
