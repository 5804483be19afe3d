"""The EPS in the relay picture: a cell for every layer, with its state.

States differ in shape as well as in colour: a computing layer is solid and framed, a loading one fills from below, a
gradient is hatched, and an updated layer has a bar at its foot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from l2l_core.trace import format_bytes
from workbench.pictures import svg
from workbench.pictures.cell_grid import CellGrid
from workbench.pictures.relay_drawing import draw_stash, shortened
from workbench.pictures.theme import BLUE, GREEN, SKY, VERMILION, kind_colour, text_colour_on
from workbench.readings import LayerNumbers, StepState, full_name, number_layers, short_name


def draw_eps(
    x: float,
    y: float,
    width: float,
    height: float,
    state: StepState,
    keys: Sequence[str],
    names: Mapping[str, str],
    versions: Mapping[str, int],
    frozen: frozenset[str],
) -> list[str]:
    """Draw the EPS in a box at least 250 px high, with a title above; sizes are in px."""
    still = f", {len(frozen)} frozen" if frozen else ""
    nbytes = format_bytes(sum(state.host.values())) if state.host else ""
    parts = [
        svg.text(x, y - 10, "EPS", size=15, strong=True),
        svg.text(x + 36, y - 10, f"keeps {len(keys)} layers on the host{still}", style="dim"),
        svg.text(x + width, y - 10, nbytes, anchor="end", style="dim"),
        svg.rect(x, y, width, height, style="card", r=6),
    ]
    grid = CellGrid(len(keys), x + 10, y + 10, width - 20, 168)
    parts += _draw_cells(grid, state, keys, names, versions, frozen)
    y += 202
    if state.eps_kind:
        work = f"{state.eps_kind}s {short_name(state.eps_layer or '', number_layers(keys))}"
        ink = text_colour_on(SKY)
        parts.append(svg.rect(x + 10, y - 15, 118, 22, fill=SKY, r=4))
        parts.append(svg.text(x + 69, y + 1, shortened(work, 13), size=14, strong=True, anchor="middle", fill=ink))
    else:
        parts.append(svg.rect(x + 10, y - 15, 118, 22, style="well", r=4))
        parts.append(svg.text(x + 69, y, "at rest", style="dim", anchor="middle"))
    parts.append(svg.text(x + width - 10, y, f"{len(state.updated)} of {len(keys)} updated", size=13, anchor="end"))
    parts += draw_stash(x + 10, y + 12, width - 20, state, "host")
    parts += _draw_legend(x + 10, y + 46)
    return parts


def _draw_cells(
    grid: CellGrid,
    state: StepState,
    keys: Sequence[str],
    names: Mapping[str, str],
    versions: Mapping[str, int],
    frozen: frozenset[str],
) -> list[str]:
    """Draw the layers state by state, so that the markup of a thousand layers stays small."""
    if not keys:
        return []
    place = number_layers(keys)
    computing = kind_colour("backward" if state.kind == "backward" else "forward")
    active = ((state.eps_layer, SKY), (state.layer, computing))
    solid = {key: colour for key, colour in active if key is not None and key in place}
    parts = [f'<path d="{grid.all_boxes()}" class="well" stroke="currentColor" stroke-opacity="0.25"/>']
    if frozen:
        parts.append(svg.path(grid.hatch([place[key] for key in frozen if key in place]), style="axis", width=0.7))
    filled = {}
    for slot in state.slots:
        if slot.layer is not None and slot.layer in place and slot.layer not in solid:
            i, filled[slot.layer] = [place[slot.layer]], slot.share
            parts.append(svg.path(grid.boxes(i, high=slot.share), fill=BLUE))
            parts.append(svg.path(grid.boxes(i), stroke=BLUE, fill="none", width=grid.frame))
    for travel in state.pushing:
        if travel.layer in place and travel.layer not in solid:
            i = [place[travel.layer]]
            parts += _draw_gradient(grid, i, max(0.12, 0.55 * travel.share))
            parts.append(svg.path(grid.boxes(i), stroke=VERMILION, fill="none", width=grid.frame))
    parts += _draw_gradient(grid, [place[key] for key in state.arrived if key in place and key not in solid], 0.55)
    # drawn after slots and gradients, so that the mark lies over them
    updated = [place[key] for key in state.updated if key in place and key not in solid]
    parts.append(svg.path(grid.boxes(updated, high=grid.mark), fill=SKY))
    for key, colour in solid.items():
        box = grid.boxes([place[key]], grow=0.0 if grid.legible else 2.0)
        parts.append(svg.path(box, fill=colour, stroke="currentColor", width=grid.frame))
    # drop the paths of states without layers
    parts = [part for part in parts if ' d=""' not in part]
    inks = {key: text_colour_on(colour) for key, colour in solid.items()}
    # cells fill from below: the colour reaches the number at two thirds, and the version earlier
    inks |= {key: "#fff" for key, share in filled.items() if share > 0.66}
    low_inks = inks | {key: "#fff" for key, share in filled.items() if share > 0.45}
    parts += grid.numbers(keys, inks, state.layer)
    parts += grid.versions(keys, low_inks, versions)
    # with many cells the tooltips would be most of the markup
    if len(keys) <= 64:
        parts += [grid.tip(i, key, _tip(key, place, names, versions, key in frozen)) for i, key in enumerate(keys)]
    return parts


def _draw_gradient(grid: CellGrid, cells: Sequence[int], high: float) -> list[str]:
    """Draw gradients on the host, up to the share `high` of the cells' height."""
    lines = [svg.path(grid.hatch(cells, high=high), style="hatch")] if grid.legible else []
    return [svg.path(grid.boxes(cells, high=high), fill=VERMILION), *lines]


def _tip(key: str, numbers: LayerNumbers, names: Mapping[str, str], versions: Mapping[str, int], frozen: bool) -> str:
    words = [full_name(key, numbers), names.get(key, "")] + ([f"version {versions[key]}"] if key in versions else [])
    return ", ".join(word for word in [*words, "frozen" if frozen else ""] if word)


def _draw_legend(x: float, y: float) -> list[str]:
    parts, at = [], x
    for words, wide in (("computes", 65), ("loads", 45), ("gradient", 60), ("updates", 58), ("updated", 58)):
        box = f"M{at:.1f} {y - 8:.1f}h8v9h-8z"
        low = f"M{at:.1f} {y - 4:.1f}h8v5h-8z"
        if words == "computes":
            half = f"M{at:.1f} {y - 8:.1f}h4v9h-4z"
            parts += [svg.path(box, fill=kind_colour("backward")), svg.path(half, fill=GREEN)]
            parts.append(svg.path(box, fill="none", stroke="currentColor", width=1.2))
        elif words == "loads":
            parts += [svg.path(low, fill=BLUE), svg.path(box, stroke=BLUE, fill="none", width=1.2)]
        elif words == "gradient":
            parts += [svg.path(low, fill=VERMILION), svg.path(svg.hatch(at, y - 4, 8, 5, 4), style="hatch")]
            parts.append(svg.path(box, stroke=VERMILION, fill="none", width=1.2))
        elif words == "updates":
            parts.append(svg.path(box, fill=SKY, stroke="currentColor", width=1.2))
        else:
            parts += [svg.path(box, style="rule"), svg.path(f"M{at:.1f} {y - 2:.1f}h8v3h-8z", fill=SKY)]
        parts.append(svg.text(at + 12, y, words, size=10, style="dim"))
        at += wide + 4
    return parts
