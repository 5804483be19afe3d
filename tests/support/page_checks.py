"""Reads faults of a workbench from its page: parts that are cut off, and serious violations that axe-core finds."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator

HAS_AXE = importlib.util.find_spec("axe_playwright_python") is not None
OURS = ".l2l-workbench"
SERIOUS = ("serious", "critical")

# An ellipsis with a tip cuts on purpose. A box that scrolls sideways cuts as well, unless it is a region with a name.
_CUT = """root => [root, ...root.querySelectorAll("*")].filter(e => {
    if (!(e instanceof HTMLElement) || !e.checkVisibility() || e.clientWidth < 2) return false;
    const style = getComputedStyle(e), isRead = e.role === "region" || e.tagName === "PRE";
    if (style.overflowX === "visible" || style.overflowX !== "hidden" && isRead) return false;
    return e.scrollWidth > e.clientWidth + 1 && !(style.textOverflow === "ellipsis" && e.title);
}).map(e => `${e.className || e.tagName}: ${e.scrollWidth} px in ${e.clientWidth}, ${e.innerText.slice(0, 60)}`)"""


def find_cut_parts(root: Locator) -> list[str]:
    """Every visible part below `root` that is wider than its place and hides the rest."""
    return list(root.evaluate(_CUT))


def find_violations(root: Locator) -> list[str]:
    """The serious and critical violations of accessibility in all workbenches of the page, one line each."""
    from axe_playwright_python.sync_playwright import Axe

    found: list[dict[str, Any]] = Axe().run(root.page, context=OURS).response["violations"]
    return [
        f"{one['id']} ({one['impact']}): {one['help']}; {node['html'][:300]}"
        for one in found
        if one["impact"] in SERIOUS
        for node in one["nodes"]
    ]
