"""A question about a step: the settings of one that may never have run."""

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

CONFIG_FIELDS = ("micro_batches", "ahead", "resident", "keep", "stash", "precision")  # what is a relay's to set

_MAX_DEPTH, _MAX_COUNT = 100_000, 4096


@dataclass(frozen=True, kw_only=True)
class Question:
    """Settings of a step that may never have run.

    Attributes:
        depth: layers.
        width: of the model, as a multiple of the measured one.
        micro_batches: per step.
        same_batch: whether more micro-batches share the rows of the measured batch, as in a relay whose setting is changed;
            otherwise micro-batches keep their size and the batch grows.
        ahead: layers loaded ahead of the one that computes.
        resident, keep: further weights that stay on the device, and graphs that are kept, as in `RelayConfig`.
        stash, precision: as in `RelayConfig`.
        h2d_bytes_per_s, d2h_bytes_per_s: of the link; None: no limit but that of the machine that was measured.
        memory_bytes: of the device, None without a limit.

    Raises:
        ValueError: a value out of range; says which would be valid.
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
        if not 0 < self.width < math.inf:  # nan fails every comparison, so it is refused too
            raise ValueError(f"width={self.width!r}: must be a positive factor, as 2 for twice the measured width")
        for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", "memory_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value!r}: must be positive, or None for no limit")
        # Made for its checks: what no relay takes is no question.
        RelayConfig(**{name: getattr(self, name) for name in CONFIG_FIELDS})

    @staticmethod
    def of(step: Trace | Profile | MeasuredStep) -> Question:
        """Ask for the settings with which a step was measured."""
        base = MeasuredStep.of(step)
        return Question(depth=base.depth, **_known_settings(base.profile.settings))

    @staticmethod
    def next_of(snapshot: Snapshot) -> Question:
        """Ask for the settings of a session's next step."""
        config = {name: getattr(snapshot.config, name) for name in CONFIG_FIELDS}
        if isinstance(snapshot.config.keep, str):  # a number of bytes: the last step says how many layers that are
            config["keep"] = 0 if snapshot.last is None else snapshot.last.settings["keep"]
        return Question(depth=max(1, len(snapshot.layers)), **_known_settings({**snapshot.figures, **config}))

    @property
    def kept(self) -> int:
        """Layers that are not recomputed: no more than stay on the device, and the last one in any case."""
        return kept_layer_count({"keep": self.keep, "ahead": self.ahead, "resident": self.resident}, self.depth)

    def rows_factor(self, base: MeasuredStep) -> float:
        """Say how many rows a micro-batch has, as a multiple of those of a measured step."""
        return base.micro_batches / self.micro_batches if self.same_batch else 1.0


def _known_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    # A profile by formula knows few settings; of the others a question has its defaults.
    names = {f.name for f in fields(Question)} - {"depth", "width", "same_batch"}
    return {name: settings[name] for name in names & {*settings}}
