"""The extra `workbench`: packages of the notebook, which `pip install l2l-workbench` alone does not install."""

import sys

INSTALL = 'pip install "l2l-workbench[workbench]"'
OUR_PACKAGES = ("workbench", "l2l_core")


def is_ours(error: ModuleNotFoundError) -> bool:
    """True if a module of this repository is missing: a mistake in the code, which no installation repairs."""
    return error.name is None or error.name.partition(".")[0] in OUR_PACKAGES


def missing(name: str | None) -> str:
    """Write one line for a package that is not installed: its name, the interpreter, and the command that installs it."""
    return (
        f"{name} is not installed for {sys.executable}: run {INSTALL}, or in a clone `make setup` and .venv/bin/python"
    )
