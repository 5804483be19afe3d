"""Messages for missing packages of the extra `workbench`, which `pip install l2l-workbench` does not install."""

import sys

INSTALL = 'pip install "l2l-workbench[workbench]"'
OUR_PACKAGES = ("workbench", "l2l_core")


def is_ours(error: ModuleNotFoundError) -> bool:
    """Return True if the missing module belongs to this repository, which is a bug rather than a missing package."""
    return error.name is None or error.name.partition(".")[0] in OUR_PACKAGES


def missing(name: str | None) -> str:
    """Return one line about a package that is not installed: its name, the interpreter and the install command."""
    return (
        f"{name} is not installed for {sys.executable}: run {INSTALL}, or in a clone `make setup` and .venv/bin/python"
    )
