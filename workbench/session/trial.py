"""What the probe says of a model with a layer left out, or twice in it. The model itself stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from l2l_core import Drop, Duplicate, Edit
from workbench.session.judgement import NOT_MEASURED, Judged, change_words
from workbench.session.snapshot import Snapshot

How = Literal["without", "twice"]

TRIED: Mapping[How, Callable[[str], Edit]] = {"without": Drop, "twice": Duplicate}  # by key of the layer


class Moment(NamedTuple):
    """When something was measured, as far as that can be told: another step or change makes another moment."""

    branch: str
    step: int
    changes: int  # recorded ones
    entries: int  # of the journal

    @classmethod
    def of(cls, now: Snapshot) -> Moment:
        """Return the moment of a snapshot."""
        return cls(now.branch, now.step, len(now.changes), len(now.journal))


@dataclass(frozen=True)
class Trial:
    """One layer, tried out.

    Attributes:
        key: of the layer.
        how: what was tried.
        judged: the losses of the probe as they are, and with it; None if they could not be measured.
        why_not: then.
        moment: at which the losses were measured.
    """

    key: str
    how: How
    judged: Judged | None
    why_not: str
    moment: Moment

    @property
    def words(self) -> str:
        """The change and its spread, with the verdict's mark; or why there is none."""
        if self.judged is None:
            return f"{NOT_MEASURED}: {self.why_not}"
        return f"{change_words(self.judged)}, {self.judged.verdict}"
