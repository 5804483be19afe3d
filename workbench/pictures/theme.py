"""Colours, letters and the style sheet shared by all pictures.

Colours have the same meaning in every picture: weights and loads are blue, gradients and pushes vermilion, and so on. The
palette is that of Okabe and Ito (https://jfly.uni-koeln.de/color/), distinguishable with colour-blindness; no meaning
depends on colour alone. Text and surfaces follow JupyterLab's theme, and the system's elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping

BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
SKY, PURPLE, YELLOW, GREY = "#56B4E9", "#CC79A7", "#F0E442", "#999999"

# Ten evenly spaced colours of viridis, dark to light: perceptually uniform, also with colour-blindness (S. van der Walt
# and N. Smith for matplotlib, https://bids.github.io/colormap/, CC0).
LITTLE_TO_MUCH = (
    "#440154", "#482878", "#3e4989", "#31688e", "#26828e", "#1f9e89", "#35b779", "#6ece58", "#b5de2b", "#fde725"
)  # fmt: skip

KIND_COLOURS: Mapping[str, str] = {
    "forward": GREEN,
    "backward": ORANGE,
    "loss": YELLOW,
    "shell": GREY,
    "load": BLUE,
    "push": VERMILION,
    "stash": PURPLE,
    "fetch": PURPLE,
    "batch": GREY,
    "reduce": SKY,
    "update": SKY,
    "clip": SKY,
    "gather": BLUE,
    "exchange": VERMILION,
    "receive": BLUE,
    "send": VERMILION,
    "end": GREY,
    "read": BLUE,
    "write": VERMILION,
}

CATEGORY_COLOURS: Mapping[str, str] = {
    "weights": BLUE,
    "gradients": VERMILION,
    "activations": GREEN,
    "stash": PURPLE,
    "optimizer": SKY,
    "other": GREY,
}

KIND_LETTERS: Mapping[str, str] = {
    "forward": "F",
    "backward": "B",
    "loss": "loss",
    "shell": "S",
    "load": "L",
    "push": "P",
    "stash": "out",
    "fetch": "in",
    "batch": "b",
    "reduce": "R",
    "update": "U",
    "clip": "clip",
    "gather": "G",
    "exchange": "X",
    "receive": "recv",
    "send": "send",
    "end": "end",
    "read": "r",
    "write": "w",
}

LANE_NAMES: Mapping[str, str] = {
    "compute": "compute",
    "h2d": "host → device",
    "d2h": "device → host",
    "eps": "EPS",
    "gather": "gather",
    "reduce": "reduce",
    "disk read": "disk read",
    "disk write": "disk write",
}

# White on these colours has a contrast of about 3 or less.
_DARK_TEXT = (ORANGE, SKY, YELLOW, PURPLE, GREY)

# In a notebook the variables are JupyterLab's; elsewhere the system's colours apply. `svg:root` matches a picture opened as
# a file.
STYLE = """
svg:root{color-scheme:light dark}
.l2l{color:var(--jp-ui-font-color1,CanvasText);fill:currentColor;
font:12px var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums}
.l2l .dim{fill-opacity:.62}
.l2l .small{font-size:10.5px}
.l2l .strong{font-weight:600}
.l2l .rule{stroke:currentColor;stroke-opacity:.18;fill:none}
.l2l .axis{stroke:currentColor;stroke-opacity:.55;fill:none}
.l2l .page{fill:var(--jp-layout-color1,Canvas)}
.l2l .well{fill:currentColor;fill-opacity:.05}
.l2l .card{fill:var(--jp-layout-color1,Canvas);stroke:currentColor;stroke-opacity:.3}
.l2l .hatch{stroke:var(--jp-layout-color1,Canvas);stroke-width:1.6;fill:none}
.l2l .ghost{opacity:.28}
.l2l .code{font-family:var(--jp-code-font-family,ui-monospace,monospace)}
""".replace("\n", "")


def kind_colour(kind: str) -> str:
    """Return the colour of an event kind; grey for other kinds."""
    return KIND_COLOURS.get(kind, GREY)


def category_colour(category: str) -> str:
    """Return the colour of a memory category; grey for other categories."""
    return CATEGORY_COLOURS.get(category, GREY)


def text_colour_on(colour: str) -> str:
    """Return black or white, for text with sufficient contrast on a colour of the palette."""
    return "#000" if colour in _DARK_TEXT else "#fff"
