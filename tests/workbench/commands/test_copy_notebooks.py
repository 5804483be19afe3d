"""Notebooks are copied from a clone and from an installed wheel, whole, and over nothing that is there."""

import re
from pathlib import Path

import nbformat
import pytest

from workbench.__main__ import main
from workbench.commands.copy_notebooks import QUIET_LAB, copy_notebooks, find_sources, refresh_copies
from workbench.commands.lab_launcher import lab_command

ROOT = Path(__file__).resolve().parents[3]
LINK = re.compile(r"\]\(([^()#\s]+)")  # target of a link in Markdown


def test_a_clone_gives_its_notebooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a" / "lesson"
    assert main(["notebooks", "--to", str(folder)]) == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (ROOT / "notebooks").glob("*.ipynb")} | {"README.md"}
    assert (folder / "02_memory.ipynb").read_bytes() == (ROOT / "notebooks" / "02_memory.ipynb").read_bytes()
    said = capsys.readouterr().out
    assert said.endswith(f"open them with: jupyter lab {QUIET_LAB} {folder}\n") and QUIET_LAB in lab_command(
        ROOT, "", 1
    )


def test_no_link_leads_out_of_the_copies(tmp_path: Path) -> None:
    sources = find_sources()
    copies = copy_notebooks(sources, tmp_path / "copied")
    texts = [path.read_text(encoding="utf-8") for path in copies]
    linked = [(path, link) for path, text in zip(copies, texts, strict=True) for link in LINK.findall(text)]
    assert linked and all((path.parent / link).is_file() for path, link in linked if "://" not in link)
    assert "has all letters and rules" in "".join(texts) and "docs/PLANS.md has all letters" in "".join(texts)
    for path in copies:
        if path.suffix == ".ipynb":
            nbformat.validate(nbformat.read(path, as_version=4))


def test_links_of_copies_within_a_clone_lead_to_its_files(tmp_path: Path) -> None:
    for path in refresh_copies(find_sources(), tmp_path / "out" / "notebooks"):
        for link in LINK.findall(path.read_text(encoding="utf-8")):
            at = (path.parent / link).resolve()
            assert "://" in link or at.is_file() or (ROOT / at.relative_to(tmp_path)).is_file(), (path.name, link)


def test_what_is_there_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "02_memory.ipynb").write_text("mine")
    assert main(["notebooks", "--to", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["02_memory.ipynb"]
    assert (tmp_path / "02_memory.ipynb").read_text() == "mine"
    said = capsys.readouterr().err
    assert "holds 02_memory.ipynb already" in said and "give another folder, or move these away" in said
    with pytest.raises(ValueError, match="is a file: give a folder"):
        copy_notebooks([], tmp_path / "02_memory.ipynb")


def test_an_installed_distribution_gives_the_files_of_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "site" / "l2l_workbench-9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: l2l-workbench\nVersion: 9\n")
    shared = tmp_path / "share" / "l2l-workbench" / "notebooks"
    shared.mkdir(parents=True)
    for name in ("a.ipynb", "README.md"):
        (shared / name).touch()
    where = "../share/l2l-workbench/notebooks"
    (info / "RECORD").write_text(f"{where}/a.ipynb,,\n{where}/README.md,,\nworkbench/__init__.py,,\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert find_sources(tmp_path) == [shared / "README.md", shared / "a.ipynb"]
    (info / "RECORD").write_text("workbench/__init__.py,,\n")
    with pytest.raises(ValueError, match="install its wheel again"):
        find_sources(tmp_path)


def test_copying_excludes_judging() -> None:
    with pytest.raises(SystemExit):
        main(["notebooks", "--check", "--to", "somewhere"])
