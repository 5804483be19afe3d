"""HTML table of the layers: sizes, versions, gradient norms, update / weight ratios with bars, and influence.

A page needs `STYLE` once.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from html import escape
from typing import TypeGuard

from l2l_core.trace import format_bytes
from workbench.pictures.picture import Table
from workbench.pictures.theme import BLUE, GREEN, VERMILION
from workbench.readings import number_layers, short_name
from workbench.session import LayerRow

ALL_UP_TO = 40  # of more layers, both ends and the notable ones are shown
NUM_ENDS = 12  # layers shown at each end
NUM_NOTABLE = 3  # layers shown with the largest and with the smallest values of each figure
TEXT_UP_TO = 60
USUAL_RATIOS = (3e-4, 3e-3)  # update / weight: about 1e-3 is healthy, a rule of thumb (A. Karpathy)
UNUSUAL_RATIOS = (1e-5, 1e-2)  # ratios outside get an exclamation mark
RATIO_AXIS = (1e-6, 1e-1)  # ends of the ratios' bars

STYLE = f"""
.l2l-layers{{max-height:26em;overflow:auto;border:1px solid var(--jp-border-color2,#8886);
color:var(--jp-ui-font-color1,CanvasText);background:var(--jp-layout-color1,Canvas);
font:12px var(--jp-ui-font-family,system-ui,sans-serif);font-variant-numeric:tabular-nums}}
.l2l-layers table{{border-collapse:separate;border-spacing:0;width:100%;margin:0;table-layout:fixed;
font-size:inherit}}
.l2l-layers th,.l2l-layers td{{box-sizing:border-box;padding:2px 10px;text-align:right;white-space:nowrap;font-weight:inherit;
border-bottom:1px solid var(--jp-border-color3,#8883);background:none}}
.l2l-layers thead th{{position:sticky;top:0;z-index:1;background:var(--jp-layout-color2,Canvas);font-weight:600;
border-bottom:1px solid var(--jp-border-color1,#888a)}}
.l2l-layers .l2l-name{{text-align:left;overflow:hidden;text-overflow:ellipsis}}
.l2l-layers .l2l-ends{{direction:rtl}}
.l2l-layers .l2l-computing{{background:color-mix(in srgb,{GREEN} 24%,transparent)}}
.l2l-layers .l2l-computing td:first-child::before{{content:"▶ "}}
.l2l-layers .l2l-changed td.l2l-name::after{{content:" changed";font-weight:600}}
.l2l-layers .l2l-frozen{{opacity:.62}}
.l2l-layers tr[data-key]{{cursor:pointer}}
.l2l-layers .l2l-more td{{text-align:left;opacity:.62;font-style:italic}}
.l2l-odd{{display:inline-block;width:.8em;font-weight:600;text-align:center}}
.l2l-bar{{display:inline-block;position:relative;width:72px;height:9px;margin-left:6px;vertical-align:-1px;
background:color-mix(in srgb,currentColor 9%,transparent)}}
.l2l-bar i{{position:absolute;left:0;top:0;bottom:0;min-width:1px}}
.l2l-bar b{{position:absolute;top:-2px;bottom:-2px;border:solid currentColor;border-width:0 1px;opacity:.45}}
""".replace("\n", "")

_HEADER = ("layer", "key", "name", "weights", "bytes", "version", "gradient norm", "update / weight", "influence", "")
_WIDTHS = (4.5, 5.5, 0, 7, 6.5, 6, 13, 14, 7, 6)  # em, fixed so that columns do not move; 0: the remaining width
_TITLES = {
    "layer": "position among the layers, from 0; edits of earlier layers change it",
    "key": "permanent name of the layer, which edits do not change",
    "update / weight": "norm of the update over norm of the weights; about 1e-3 is usual, marks at 3e-4 and 3e-3",
    "influence": "1 minus the mean cosine between the layer's input and output: near 0, the layer changes little",
}


def draw_layers(
    layers: Sequence[LayerRow], *, computing: str = "", changed: Collection[str] = (), selected: str = ""
) -> str:
    """Return an HTML table of the layers, in a scrolling box.

    Args:
        layers: the layers, in order.
        computing: key of the computing layer.
        changed: keys of layers to mark, as after an edit.
        selected: key of the selected layer, which is always shown.
    """
    head = ""
    for name, width in zip(_HEADER, _WIDTHS, strict=True):
        style, title = f"width:{width}em" if width else "", _TITLES.get(name)
        attributes = ' class="l2l-name"' if name in ("key", "name") else ""
        attributes += f' title="{title}"' if title else ""
        head += f'<th scope="col" style="{style}"{attributes}>{name}</th>'
    ends = _axis_ends([layer.grad_norm for layer in layers])
    rows, last, numbers = [], -1, number_layers(layer.key for layer in layers)
    for number in _visible_layers(layers, {computing, selected, *changed}):
        if number > last + 1:
            more = f'<td colspan="{len(_HEADER) - 1}">… {number - last - 1:,} more</td>'
            rows.append(f'<tr class="l2l-more"><td></td>{more}</tr>')
        layer = layers[number]
        classes = ["l2l-computing"] if layer.key == computing else []
        classes += ["l2l-changed"] if layer.key in changed else []
        classes += ["l2l-frozen"] if layer.frozen else []
        rows.append(_row(short_name(layer.key, numbers), layer, ends, classes))
        last = number
    if not layers:
        rows.append(f'<tr class="l2l-more"><td colspan="{len(_HEADER)}">no layers</td></tr>')
    return f'<div class="l2l-layers"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def layers_table(layers: Sequence[LayerRow]) -> Table:
    """Return a table of the layers as text; of more than 60, both ends and the notable ones."""
    shown = range(len(layers)) if len(layers) <= TEXT_UP_TO else _visible_layers(layers, ())
    rows, names = [], number_layers(layer.key for layer in layers)
    for layer in (layers[i] for i in shown):
        sizes = f"{layer.num_params:,}", format_bytes(layer.nbytes), str(layer.version)
        figures = map(_figure, (layer.grad_norm, layer.update_ratio, layer.influence))
        rows.append((short_name(layer.key, names), layer.key, layer.name, *sizes, *figures, _describe_trained(layer)))
    header = (*_HEADER[:-1], "frozen")
    note = f"… {len(layers) - len(rows)} more" if len(rows) < len(layers) else ""
    return Table("Layers", header, rows, note)


def _visible_layers(layers: Sequence[LayerRow], besides: Collection[str]) -> Sequence[int]:
    """Return the positions of the layers to show, ascending."""
    count = len(layers)
    if count <= ALL_UP_TO:
        return range(count)
    chosen = {*range(NUM_ENDS), *range(count - NUM_ENDS, count)}
    for figures in zip(*((layer.grad_norm, layer.update_ratio, layer.influence) for layer in layers), strict=True):
        ranked = [i for _, i in sorted((figure, i) for i, figure in enumerate(figures) if _is_finite(figure))]
        broken = [i for i, figure in enumerate(figures) if figure is not None and not _is_finite(figure)]
        chosen |= {*ranked[:NUM_NOTABLE], *ranked[-NUM_NOTABLE:], *broken[:NUM_NOTABLE]}
    chosen |= set([i for i, layer in enumerate(layers) if layer.key in besides][:NUM_ENDS])
    return sorted(chosen)


def _row(number: str, layer: LayerRow, ends: tuple[float, float], classes: Sequence[str]) -> str:
    ratio = layer.update_ratio
    odd = _is_finite(ratio) and not UNUSUAL_RATIOS[0] <= ratio <= UNUSUAL_RATIOS[1]
    mark = f'<span class="l2l-odd">{"!" if odd else ""}</span>'
    low, high = (100 * _share(bound, RATIO_AXIS) for bound in USUAL_RATIOS)
    band = f'<b style="left:{low:.0f}%;right:{100 - high:.0f}%"></b>'
    cells = [
        f"<td>{number}</td>",
        f'<th scope="row" class="l2l-name" title="{escape(layer.key)}">{escape(layer.key)}</th>',
        f'<td class="l2l-name l2l-ends" title="{escape(layer.name)}"><bdi>{escape(layer.name)}</bdi></td>',
        f"<td>{layer.num_params:,}</td>",
        f"<td>{format_bytes(layer.nbytes)}</td>",
        f"<td>{layer.version}</td>",
        f"<td>{_figure(layer.grad_norm)}{_bar(layer.grad_norm, ends, VERMILION)}</td>",
        f"<td>{_figure(ratio)}{mark}{_bar(ratio, RATIO_AXIS, BLUE, band)}</td>",
        f"<td>{_figure(layer.influence)}</td>",
        f"<td>{_describe_trained(layer)}</td>",
    ]
    styled = f' class="{" ".join(classes)}"' if classes else ""
    return f'<tr data-key="{escape(layer.key)}"{styled}>{"".join(cells)}</tr>'


def _describe_trained(layer: LayerRow) -> str:
    """Return the trained share of a layer in words; empty if all of it is trained."""
    if layer.frozen:
        return "frozen"
    if layer.num_trained >= layer.num_params:
        return ""
    return f"trains {min(99, 100 * layer.num_trained / layer.num_params):.2g} %"  # 100 % would mean all of it


def _bar(figure: float | None, ends: tuple[float, float], colour: str, inside: str = "") -> str:
    filled = ""
    if _is_finite(figure):
        filled = f'<i style="width:{100 * _share(figure, ends):.0f}%;background:{colour}"></i>'
    return f'<span class="l2l-bar" aria-hidden="true">{filled}{inside}</span>'


def _axis_ends(figures: Sequence[float | None]) -> tuple[float, float]:
    """Return the ends of a logarithmic scale: powers of ten around all figures, at least two decades apart."""
    positive = [figure for figure in figures if _is_finite(figure) and figure > 0]
    if not positive:
        return 1e-3, 1.0
    # 0.3 lower, so that the smallest figure has a visible bar
    low, high = math.floor(math.log10(min(positive)) - 0.3), math.ceil(math.log10(max(positive)))
    return 10.0**low, 10.0 ** max(high, low + 2)


def _share(figure: float, ends: tuple[float, float]) -> float:
    """Return the position of a figure between the ends on a logarithmic scale, in [0, 1]."""
    if figure <= 0:
        return 0.0
    low, high = math.log10(ends[0]), math.log10(ends[1])
    return min(1.0, max(0.0, (math.log10(figure) - low) / (high - low)))


def _is_finite(figure: float | None) -> TypeGuard[float]:
    return figure is not None and math.isfinite(figure)


def _figure(figure: float | None) -> str:
    if figure is None:
        return "–"
    return f"{figure:.2e}" if figure and math.isfinite(figure) and not 1e-2 <= abs(figure) < 1e4 else f"{figure:.3g}"
