"""Takes the README's pictures: notebook 00 in JupyterLab, in a real Chromium.

    python docs/pictures/take.py                  all of them
    python docs/pictures/take.py relay card       some of them

The script trains a relay for a few steps, so run it on a quiet machine. The pictures are screenshots of the page, unedited.
`race.png` is the screenshot that `tests/browser/test_race.py` keeps.
"""

from __future__ import annotations

import argparse
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from lab import Bench, Lab, Notebook, find_chromium, serve_lab, until  # noqa: E402

EVENTS = 10  # from one frame of the animation to the next
FRAME_MS, LAST_MS = 110, 1500
COLOURS = 96


def main() -> None:
    """Open the notebook and take the pictures named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", nargs="*", default=[], help=f"of {', '.join(TAKEN)}; default all")
    names = parser.parse_args().pictures or list(TAKEN)
    with tempfile.TemporaryDirectory() as folder, serve_lab(Path(folder)) as lab, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 1500}, device_scale_factor=1)
        bench = open_bench(lab, page)
        for name in names:
            TAKEN[name](bench, page)
        browser.close()


def open_bench(lab: Lab, page: Page) -> Bench:
    """The workbench of notebook 00, with a probe, after three steps."""
    cells = json.loads((ROOT / "notebooks" / "00_start_here.ipynb").read_text())["cells"]
    first = "".join(next(cell["source"] for cell in cells if cell["cell_type"] == "code"))
    if "probe=" not in first:
        first = first.replace(
            "Workbench(relay, draw_batch", "Workbench(relay, draw_batch, probe=[draw_batch() for _ in range(2)]"
        )
    notebook = Notebook(page, lab, lab.write("pictures.ipynb", [first]))
    notebook.run_cell(0)
    bench = notebook.bench(0)
    for step in range(1, 4):
        bench.press("Step")
        bench.wait_for_step(step)
    return bench


def take_relay(bench: Bench, page: Page) -> None:
    """The last step event by event, as an animation."""
    bench.press("Relay")
    picture = bench.root.locator(".l2l-picks:visible")  # stays, while what is in it is drawn anew
    bench.press("Next event")
    until(lambda: "event" in bench.moment, page, "the player")
    found = re.search(r"event \d+ of (\d+)", bench.moment)
    assert found is not None
    count = int(found[1])
    frames = []
    for event in range(2, count, EVENTS):
        for _ in range(EVENTS if event > 2 else 1):
            bench.press("Next event")
        until(lambda at=event: bench.event >= at, page, f"event {event}")
        frames.append(Image.open(io.BytesIO(picture.screenshot())).convert("RGB"))
    palette = beside([frames[len(frames) * share // 8] for share in (1, 4, 6)]).quantize(COLOURS)
    drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    lasts = [FRAME_MS] * (len(drawn) - 1) + [LAST_MS]
    drawn[0].save(HERE / "relay.gif", save_all=True, append_images=drawn[1:], duration=lasts, loop=0, optimize=True)
    bench.press("Live")


def beside(frames: Sequence[Image.Image]) -> Image.Image:
    """Several frames in one, so that it has the colours of all."""
    width, height = frames[0].size
    whole = Image.new("RGB", (width * len(frames), height))
    for i, frame in enumerate(frames):
        whole.paste(frame, (i * width, 0))
    return whole


def take_workbench(bench: Bench, page: Page) -> None:
    """The view of time, of the last step."""
    bench.press("Time")
    bench.root.locator("svg.l2l:visible").first.wait_for()
    bench.root.screenshot(path=HERE / "workbench.png")


def take_card(bench: Bench, page: Page) -> None:
    """The card of a layer, after all of them were measured."""
    bench.press("Layers")
    bench.root.locator('tr[data-key="L006"]').click()
    bench.press("Measure all layers")
    until(
        lambda: bench.button("Stop measuring").is_disabled() and bench.root.locator(".l2l-card-panel svg").count() > 2,
        page,
        "all",
        500,
    )
    bench.root.locator(".l2l-card-panel").screenshot(path=HERE / "card.png")


TAKEN: dict[str, Callable[[Bench, Page], None]] = {
    "relay": take_relay,
    "workbench": take_workbench,
    "card": take_card,
}

if __name__ == "__main__":
    main()
