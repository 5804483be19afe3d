"""Copies of the notebooks, from a clone or from an installed wheel: `python -m workbench notebooks --to DIR`."""

import importlib.metadata
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTION = "l2l-workbench"
INSTALLED = f"share/{DISTRIBUTION}/notebooks"  # where the wheel puts them: `data-files` in pyproject.toml
# JupyterLab finds the type checker of our tests, and its notes about a notebook's cells stop the user with a dialog.
QUIET_LAB = "--LanguageServerManager.autodetect=False"
_LINK_OUT = re.compile(
    r"\[([^\[\]]*)\]\(\.\./([^()]*)\)"
)  # from a notebook to a file of the repository outside of its folder


def main(folder: Path) -> int:
    """Copy all notebooks and their README into `folder`; return 1 if nothing was copied."""
    try:
        copied = copy_notebooks(find_sources(), folder)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(copied)} files copied to {folder}; open them with: jupyter lab {QUIET_LAB} {folder}")
    return 0


def find_sources(root: Path = ROOT) -> list[Path]:
    """Return the notebooks and their README from the clone, or else from the installed distribution.

    Raises:
        ValueError: neither has notebooks.
    """
    clone = root / "notebooks"
    found = [*clone.glob("*.ipynb"), clone / "README.md"] if clone.is_dir() else _installed_files()
    if not any(path.suffix == ".ipynb" for path in found):
        raise ValueError(
            f"no notebooks in {clone}, and none installed with {DISTRIBUTION}: install its wheel again (pip install "
            "--force-reinstall --no-deps, with the wheel), or run this from a clone"
        )
    return sorted(found)


def _installed_files() -> list[Path]:
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []
    return [Path(file.locate()).resolve() for file in files if file.parent.as_posix().endswith(INSTALLED)]


def copy_notebooks(sources: list[Path], folder: Path) -> list[Path]:
    """Copy files into a folder, which is created if needed; either all are copied or none.

    Links to files outside of the notebooks become plain names: a JupyterLab opened on the folder cannot follow them.

    Raises:
        ValueError: a file of that name exists, or `folder` is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder to copy the notebooks to")
    if taken := [path.name for path in sources if (folder / path.name).exists()]:
        raise ValueError(
            f"{folder} holds {', '.join(taken)} already, so nothing was copied: give another folder, or move these away"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in sources:
        (folder / path.name).write_text(_text_of_copy(path, None), encoding="utf-8")
    return [folder / path.name for path in sources]


def refresh_copies(sources: list[Path], folder: Path) -> list[Path]:
    """Copy notebooks into a folder one level deeper, where the user works on them, and return the copies.

    A copy that the user has changed stays; another is replaced when its source is newer. Relative links lead to the same files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        copy, original = folder / source.name, folder / f".{source.name}.original"
        text = _text_of_copy(source, "../..")
        if not copy.exists() or (original.exists() and copy.read_bytes() == original.read_bytes()):
            copy.write_text(text, encoding="utf-8")
            original.write_text(text, encoding="utf-8")
    return [folder / source.name for source in sources]


def _text_of_copy(source: Path, root: str | None) -> str:
    """Return a notebook whose links lead to the repository by `root`, a path relative to the copy; None: no links."""
    text = source.read_text(encoding="utf-8")
    return _LINK_OUT.sub(r"\1" if root is None else rf"[\1]({root}/\2)", text)
