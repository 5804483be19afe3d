"""Settings of a step to simulate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from l2l_core import Profile, RelayConfig, Trace
from l2l_core.schedule_rules import kept_layer_count
from workbench.session import Snapshot
from workbench.what_if.measured_step import MeasuredStep

Stash = Literal["device", "host"]
Precision = Literal["fp32", "bf16"]

CONFIG_FIELDS = ("micro_batches", "ahead", "resident", "keep", "stash", "precision")  # fields of RelayConfig

_MAX_DEPTH, _MAX_COUNT = 100_000, 4096


@dataclass(frozen=True, kw_only=True)
class Question:
    """Settings of a step to simulate.

    Attributes:
        depth: number of layers.
        width: width of the model as a multiple of the measured width.
        micro_batches: number of micro-batches.
        same_batch: if True, the micro-batches divide the rows of the measured batch; if False, they keep their size and the
            batch grows.
        ahead, resident, keep, stash, precision: as in `RelayConfig`.
        h2d_bytes_per_s, d2h_bytes_per_s: bandwidth of the link; None for that of the measured machine.
        memory_bytes: device memory, None without a limit.

    Raises:
        ValueError: a value is out of range; the message has the valid range.
    """

    depth: int
    width: float = 1.0
    micro_batches: int = 1
    same_batch: bool = True
    ahead: int = 1
    resident: int = 0
    keep: int = 0
    stash: Stash = "device"
    precision: Precision = "fp32"
    h2d_bytes_per_s: float | None = None
    d2h_bytes_per_s: float | None = None
    memory_bytes: float | None = None

    def __post_init__(self) -> None:
        for name, most in (("depth", _MAX_DEPTH), ("micro_batches", _MAX_COUNT)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ValueError(f"{name}={value!r}: must be an integer from 1 to {most:,}")
        if not 0 < self.width < math.inf:  # False for NaN too
            raise ValueError(f"width={self.width!r}: must be a positive factor, e.g. 2 for twice the measured width")
        for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: must be positive, or None for no limit")
        RelayConfig(**{name: getattr(self, name) for name in CONFIG_FIELDS})  # raises on invalid settings

    @staticmethod
    def of(step: Trace | Profile | MeasuredStep) -> Question:
        """Return the settings of a measured step."""
        base = MeasuredStep.of(step)
        return Question(depth=base.depth, **_question_settings(base.profile.settings))

    @staticmethod
    def next_of(snapshot: Snapshot) -> Question:
        """Return the settings of the next step of a session."""
        config = {name: getattr(snapshot.config, name) for name in CONFIG_FIELDS}
        if isinstance(snapshot.config.keep, str):  # bytes, which the last step has converted into layers
            config["keep"] = 0 if snapshot.last is None else snapshot.last.settings["keep"]
        return Question(depth=max(1, len(snapshot.layers)), **_question_settings({**snapshot.figures, **config}))

    @property
    def kept(self) -> int:
        """Number of layers that are not recomputed: at least the last one, at most those that stay on the device."""
        return kept_layer_count({"keep": self.keep, "ahead": self.ahead, "resident": self.resident}, self.depth)

    def rows_factor(self, base: MeasuredStep) -> float:
        """Return the rows of a micro-batch as a multiple of those in the measured step."""
        return base.micro_batches / self.micro_batches if self.same_batch else 1.0


def _question_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `Question` among the settings; a profile by formula has few of them."""
    names = {f.name for f in fields(Question)} - {"depth", "width", "same_batch"}
    return {name: settings[name] for name in names & {*settings}}
