"""What goes through the pipe between a rank and whoever steers it. All of it can be pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.session import Failure, Snapshot


@dataclass(frozen=True, slots=True)
class RankRequest:
    """To a rank: call a verb of its session.

    Attributes:
        number: comes back with the answer.
        verb: name of a method of `Session`.
    """

    number: int
    method: str
    args: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankResponse:
    """From a rank: what was asked is done.

    Attributes:
        number: of the question.
        failure: of the step or the edit; None if all went well.
        refused: why nothing was done, in words; "" if it was.
    """

    number: int
    failure: Failure | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotMessage:
    """From a rank: how its session stands.

    Attributes:
        snapshot: without the step that is shown, if that is the one of the message before.
        same: whether it is.
    """

    snapshot: Snapshot
    step_unchanged: bool


@dataclass(frozen=True, slots=True)
class RankFailure:
    """From a rank: it could not begin, or cannot be shown any more.

    Attributes:
        message: of the error, with its class.
        traceback: as Python prints it.
    """

    message: str
    traceback: str
