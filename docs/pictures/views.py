"""Opens every view of notebook 00 in two sizes and themes, keeps a screenshot of each, and prints what is cut or violated.

    python docs/pictures/views.py                     all views
    python docs/pictures/views.py inside edits        some of them

The screenshots are written to `out/views`. Open each of them after a change of a view: the printed faults are only those that
a program finds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from playwright.sync_api import Page, sync_playwright
from take import ROOT, open_bench

sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from lab import Bench, find_chromium, serve_lab, until  # noqa: E402
from page_checks import HAS_AXE, find_cut_parts, find_violations  # noqa: E402

OUT = ROOT / "out" / "views"
SIZES = ((1440, 900), (1280, 720))
THEMES = ("JupyterLab Light", "JupyterLab Dark")
VIEWS = ("Relay", "Time", "Memory", "Layers", "Edits", "Loss", "Figures", "Inside", "Race", "What if")
TALL = 2400  # px: room for a whole view, since a screenshot ends at the edge of the page


def main() -> None:
    """Take the pictures of the views named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("views", nargs="*", default=[], help=f"of {', '.join(VIEWS)}; default all")
    names = {name.casefold() for name in parser.parse_args().views}
    chosen = [view for view in VIEWS if not names or view.casefold() in names]
    OUT.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, serve_lab(Path(folder)) as lab, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": SIZES[0][0], "height": TALL})
        bench = open_bench(lab, page)
        prepare(bench, page)
        for theme in THEMES:
            page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', {theme})", theme)
            page.wait_for_function("dark => document.body.dataset.jpThemeLight === String(!dark)", arg="Dark" in theme)
            take_views(bench, page, chosen, theme.split()[1].lower())
        browser.close()


def prepare(bench: Bench, page: Page) -> None:
    """Make the views as full as those of a user: an edit, a branch, a selected layer, and a look inside."""
    bench.press("Edits")
    bench.root.get_by_placeholder("name").fill("mine")
    bench.press("Fork")
    bench.press("Apply")
    until(
        lambda: bench.button("Redo").is_visible() and bench.root.locator(".l2l-journal tbody th").count(), page, "edit"
    )
    bench.press("Layers")
    bench.root.locator('tr[data-key="L006"]').click()
    bench.press("Predictions without it")
    bench.press("Inside")
    bench.root.get_by_label("your text").fill("def __init__(self, ")
    until(lambda: bench.root.locator('svg[aria-label="Next words by depth"]').count(), page, "next words")
    bench.root.get_by_role("button", name="Pull out layer 3 · L003").click()
    until(lambda: bench.root.locator("svg text", has_text="without 3").count(), page, "next words without a layer")
    bench.press("Look")
    until(lambda: bench.root.locator('svg[aria-label="The stream over depth"]').count(), page, "a look")


def take_views(bench: Bench, page: Page, views: Sequence[str], theme: str) -> None:
    """Keep a screenshot of each view in each size, embedded and presented."""
    for view in views:
        bench.press(view)
        for width, height in SIZES:
            name = f"{view.replace(' ', '_').lower()}_{width}_{theme}"
            page.set_viewport_size({"width": width, "height": TALL})
            page.wait_for_timeout(400)
            report(name, bench)
            bench.root.screenshot(path=OUT / f"{name}.png")
            page.set_viewport_size({"width": width, "height": height})
            present(bench, page, f"present_{name}")


def present(bench: Bench, page: Page, name: str) -> None:
    """Keep a screenshot of the view full screen."""
    bench.root.locator(".l2l-present").click()
    page.wait_for_function("document.fullscreenElement")
    page.wait_for_timeout(400)
    report(name, bench)
    page.screenshot(path=OUT / f"{name}.png")
    bench.root.locator(".l2l-present").click()
    page.wait_for_function("!document.fullscreenElement")


def report(name: str, bench: Bench) -> None:
    """Print the faults of a view that a program finds."""
    faults = find_cut_parts(bench.root) + (find_violations(bench.root) if HAS_AXE else [])
    print(f"{name}: {len(faults)} faults", *faults, sep="\n    ", flush=True)


if __name__ == "__main__":
    main()
