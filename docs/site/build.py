"""Build the documentation site, offline, with warnings as errors: python docs/site/build.py [folder, default out/site].

The pages are those of the repository: Markdown, notebooks with their stored outputs, and docstrings. They are copied into one
tree, beside the pages of this folder, so that links between them lead to the same places as in the repository. A step is trained
and recorded for the player of the first page.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from sphinx.cmd.build import build_main

from l2l_core import EmulatedDevice, Relay, RelayConfig
from l2l_core.trace import format_bytes
from workbench import Recorder, Session, load_run, write_player
from workbench.lessons.corpus import load_corpus
from workbench.lessons.demo import draw_batch, make_model
from workbench.lessons.demo_values import Settings

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = ("docs", "notebooks", "examples", "l2l_core")  # l2l_core: for links to its files
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "LICENSE", "pyproject.toml")
FILE_LINK = re.compile(r"\[(?:[\w/]+/)?(\w+)(?:\.md)?\]\(((?:[\w/.]+/)?\1\.(?:md|ipynb)(?:#[\w-]+)?)\)")


def main() -> int:
    """Build into the folder of the command line, if there are no warnings; return the exit status."""
    began = time.perf_counter()
    out = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "out" / "site").resolve()
    if out.is_dir() and any(out.iterdir()) and not (out / "searchindex.js").is_file():
        print(f"{out} holds files that are no site and would be removed: name another folder", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        pages, built = Path(folder, "pages"), Path(folder, "site")
        stage(pages)
        record(Path(folder, "run.jsonl.gz"), pages / "_static" / "step.js")
        options = ["-W", "--keep-going", "-q", "-d", str(Path(folder, "doctrees")), "-b", "html"]
        if status := build_main([*options, str(pages), str(built)]):
            return status
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(built, out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"built in {time.perf_counter() - began:.0f} s, {format_bytes(size)}: open {out / 'index.html'}")
    return 0


def stage(pages: Path) -> None:
    """Copy all pages into one tree."""
    shutil.copytree(HERE, pages, ignore=shutil.ignore_patterns("build.py", "__pycache__"))
    for name in FOLDERS:
        shutil.copytree(
            ROOT / name, pages / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "site")
        )
    for name in FILES:
        shutil.copy2(ROOT / name, pages / name)
    for path in (*pages.rglob("*.md"), *pages.glob("notebooks/*.ipynb")):
        name_links_by_titles(path)


def name_links_by_titles(page: Path) -> None:
    """Remove texts of links that repeat the name of a file; Sphinx puts the title of the page there."""
    text = page.read_text(encoding="utf-8")
    page.write_text(FILE_LINK.sub(r"[](\2)", text), encoding="utf-8")


def record(run: Path, player: Path) -> None:
    """Train a small GPT on real text for three steps, and write the last one with its player."""
    settings = Settings(layers=8, width=128, heads=4, rows=16, micro_batches=4)
    generator, text = torch.Generator().manual_seed(0), load_corpus().train
    device = EmulatedDevice(memory_bytes="20 MB", h2d_bytes_per_s=200e6, d2h_bytes_per_s=200e6)
    config = RelayConfig(micro_batches=settings.micro_batches, stash="host")
    with (
        Relay(make_model(settings), device=device, config=config) as relay,
        Recorder(run, title="A small GPT on real text", overwrite=True) as recorder,
        Session(relay, lambda: draw_batch(text, settings, generator), loggers=[recorder]) as session,
    ):
        session.run(3)
        session.wait()
    write_player(load_run(run), player)


if __name__ == "__main__":
    sys.exit(main())
