"""The question "will it fit?": a model, a batch and a machine, answered by a table and programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from l2l_core import Disk, EmulatedDevice
from l2l_core.batches import rows_rule
from l2l_core.trace import format_bytes, parse_bytes
from workbench.fit.cards import COMPUTE_SHARES, UPDATE_PARAMS_PER_S, GpuCard, find_card
from workbench.fit.fit_table import ORIGINS, FitTable, FitWay, MachineLimits
from workbench.fit.formula_ways import FormulaWays, PlannedDisk
from workbench.fit.measured_ways import MeasuredWays
from workbench.fit.model_source import ModelSource, read_model
from workbench.fit.start_code import StartCode

# Bytes per second of a drive on four lanes of PCI Express 3: Samsung 970 EVO Plus 1 TB, by its datasheet.
DISK_READ, DISK_WRITE = 3.5e9, 3.3e9
PRECISIONS = ("bf16", "fp32")
_EMULATED = "emulated"
_MEASURING = 40  # bytes per parameter: the model, and copies of it with gradients and optimizer state


@dataclass(frozen=True, eq=False)
class FitRequest:
    """A model, a batch and a machine.

    Attributes:
        source: the model.
        card: a card, or an emulated device of this machine.
        host_bytes: memory of the host.
        disk: for a relay on disk; None without one.
        rows, length: rows of the batch, and tokens of a row; `length` is without effect for images and for modules.
        precision: of a card, "bf16" or "fp32"; models that are measured run in float32.
        batch: of a module.
        options: arguments of a `Relay` for a module.
        update_params_per_s: parameters that the host updates.
        known: measurements of this model, by sizes of the batch; copies with other settings share them.
    """

    source: ModelSource
    card: GpuCard | EmulatedDevice
    host_bytes: int
    disk: PlannedDisk | None
    rows: int
    length: int
    precision: str
    batch: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    update_params_per_s: float = UPDATE_PARAMS_PER_S
    known: dict[tuple[int, int], dict[tuple[Any, ...], Any]] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        """True if steps run on this machine: on an emulated device, and for models without formulas."""
        return isinstance(self.card, EmulatedDevice) or not self.source.has_formula

    @property
    def limits(self) -> MachineLimits:
        """Bytes of the machine."""
        memory = self.card.memory_bytes or self.host_bytes
        free = None if self.disk is None else self.disk.disk.free_bytes
        return MachineLimits(memory, self.host_bytes, 0 if self.disk is None else sys.maxsize if free is None else free)

    def table(self) -> FitTable:
        """Return all ways side by side; a model that is measured takes seconds to minutes.

        Raises:
            ValueError: the model is too large to be measured here, or the length does not suit it.
        """
        ways = self._measured() if self.is_measured else self._by_formula()
        return FitTable(self.title, ways, self.limits, self._notes())

    @property
    def title(self) -> str:
        """Model, batch and machine."""
        tokens = "" if self.source.module is not None else f" of {self.source.length_of(self.length):,} tokens"
        precision = "fp32" if self.is_measured else self.precision
        card = self.card.name
        return (
            f"{self.source.name}, {self.rows} rows{tokens} a step, {precision}; {card}, {format_bytes(self.host_bytes)} of host "
            "memory"
        )

    def code(self, way: FitWay) -> str:
        """Return the program that starts a way."""
        device = self.card if isinstance(self.card, EmulatedDevice) else None
        precision = "fp32" if self.is_measured else self.precision
        return StartCode(self.source, self.rows, self.source.length_of(self.length), precision, device).text(way)

    # -- the two sources of figures ------------------------------------------------------------------------------------

    def _by_formula(self) -> list[FitWay]:
        assert isinstance(self.card, GpuCard)
        self.source.check_length(self.length)
        numbers = self.rows, self.source.length_of(self.length), self.precision, self.update_params_per_s
        return FormulaWays(self.source.config, self.card, self.limits, *numbers, self.disk).all_ways()

    def _measured(self) -> list[FitWay]:
        self.source.check_length(self.length)
        self._check_memory()
        model = self.source.build()
        batch = self.batch if self.source.module is not None else self.source.make_batch(self.rows, self.length)
        device, speeds = EmulatedDevice(), None
        if isinstance(self.card, EmulatedDevice):
            device = self.card
        else:
            speeds = self.card.machines("fp32", self.update_params_per_s)
        rows = rows_rule(self.options.get("split"))(batch).count
        known = self.known.setdefault((self.rows, self.length), {})
        return MeasuredWays(model, batch, rows, self.limits, device, speeds, self.disk, self.options, known).all_ways()

    def _check_memory(self) -> None:
        free, count = psutil.virtual_memory().available, self.source.num_params
        if _MEASURING * count > free:
            raise ValueError(
                f"{self.source.name} has {count:,} parameters, and it would be measured here: "
                f"that takes {format_bytes(_MEASURING * count)}, and {format_bytes(free)} are free. Give the same configuration "
                "with fewer layers: bytes grow in proportion to them"
            )

    def _notes(self) -> list[str]:
        notes = [f"{name}: {words}." for name, words in ORIGINS.items() if self.is_measured or name != "measured"]
        if isinstance(self.card, EmulatedDevice):
            notes.append(
                "±: spread of the steps in core that were timed while the table was made, at least 20 %. It is too small for "
                "relays while other programs use the processor."
            )
        else:
            low, high = COMPUTE_SHARES
            notes.append(
                f"±: the card computes at {low:.0%} to {high:.0%} of its peak. That share is the same for all ways, so their "
                f"order is more certain than the seconds. Peaks: {self.card.source}."
            )
        return notes


def make_request(
    model: Any,
    batch: Any = None,
    *,
    card: str | GpuCard | EmulatedDevice = "RTX 4090 24GB",
    host: int | str | None = None,
    disk: str | Path | Disk | None = None,
    rows: int = 8,
    length: int = 1024,
    precision: str = "bf16",
    update_params_per_s: float = UPDATE_PARAMS_PER_S,
    **options: Any,
) -> FitRequest:
    """Read the arguments of `workbench.Fit`.

    Raises:
        TypeError, ValueError: an argument that cannot be read; the message has the accepted values.
    """
    for name, value in {"rows": rows, "length": length}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}={value!r}: must be a whole number of at least 1")
    if precision not in PRECISIONS:
        raise ValueError(f"precision={precision!r}: must be one of {', '.join(map(repr, PRECISIONS))}")
    source = read_model(model, batch, options)
    if source.module is not None:
        rows = rows_rule(options.get("split"))(batch).count
    return FitRequest(
        source,
        read_card(card),
        _read_host(host),
        _read_disk(disk),
        rows,
        length,
        precision,
        batch,
        options,
        update_params_per_s,
    )


def read_card(card: str | GpuCard | EmulatedDevice) -> GpuCard | EmulatedDevice:
    """Return a card by its name, or an emulated device for "emulated 2GB".

    Raises:
        ValueError: an unknown name.
    """
    if not isinstance(card, str):
        return card
    if card.lower().startswith(_EMULATED):
        size = card[len(_EMULATED) :].strip()
        return EmulatedDevice(memory_bytes=parse_bytes(size, "card", "") if size else None)
    return find_card(card)


def _read_host(host: int | str | None) -> int:
    if host is None:
        return psutil.virtual_memory().total
    nbytes = parse_bytes(host, "host") if isinstance(host, str) else host
    if nbytes <= 0:
        raise ValueError(f'host={host!r}: must be a positive number of bytes, or text as "128 GB"')
    return nbytes


def _read_disk(disk: str | Path | Disk | None) -> PlannedDisk | None:
    if disk is None:
        return None
    if isinstance(disk, Disk):
        return PlannedDisk(disk)
    if Path(disk).is_dir():
        return PlannedDisk(Disk.of(disk), slow_share=0.8)  # measured: only other work on it can slow it down
    free = parse_bytes(str(disk), "disk", ", or an existing folder")
    return PlannedDisk(Disk(read_bytes_per_s=DISK_READ, write_bytes_per_s=DISK_WRITE, free_bytes=free, name="assumed"))
