"""Messages between the parent process and a rank, pickled through a pipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.session import Failure, Snapshot


@dataclass(frozen=True, slots=True)
class RankRequest:
    """To a rank: call a method of its session.

    Attributes:
        number: returned in the response.
        method: name of a method of `Session`.
        args, options: positional and keyword arguments.
    """

    number: int
    method: str
    args: Sequence[Any] = ()
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankResponse:
    """From a rank: the method has returned.

    Attributes:
        number: number of the request.
        failure: failure of the step or the edit; None on success.
        refused: reason for a refusal; "" if the command was executed.
    """

    number: int
    failure: Failure | None = None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class SnapshotMessage:
    """From a rank: the state of its session.

    Attributes:
        snapshot: without the shown step if `step_unchanged`.
        step_unchanged: True if the shown step is that of the previous message.
    """

    snapshot: Snapshot
    step_unchanged: bool


@dataclass(frozen=True, slots=True)
class RankFailure:
    """From a rank: it could not start, or its snapshot cannot be pickled.

    Attributes:
        message: class and message of the error.
        traceback: the formatted traceback.
    """

    message: str
    traceback: str
