"""Conversion between the values of a session and the JSON rows of a recorded run. Reads and writes no files.

Every line is one JSON object with a `type`:

    run       schema, version, time, machine
    moment    the snapshot after a step or a change, as the difference to the moment before
    trace     every event and memory sample of a step; `of` is the number of its moment
    race      a finished race: its branches with their steps and measurements
    look      a look inside
    held_out  a measurement on held-out data; level: a named reference loss; fact: a named sentence about the run
    end       the recorder was closed; it is missing if the process ended before

`lists` of a moment has, for each list, the number of elements that stay, and those that follow: [4, [...]]. So a step needs
one element, and a switch to another branch needs no special case. NaN and infinities are written as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache, partial
from typing import Any, TypeVar

from l2l_core import Event, RelayConfig, Trace
from l2l_core.edits import Branch, JournalEntry
from l2l_core.plan import Action, ScheduleFunction, ScheduleSettings
from l2l_core.trace import ALL_LANES, PLACES, MemorySample, WorkerInfo
from workbench.session import FIGURES, BranchHistories, Change, LayerRow, LossChange, Race, ShownStep, Snapshot, StepRow

SCHEMA, VERSION = "l2l-run", 7
PLAIN_FIELDS = (
    "model",
    "num_params",
    "device",
    "figures",
    "step",
    "shell_params",
    "shell_trained",
    "in_core_bytes",
    "can_undo",
    "can_redo",
    "branch",
)
LIST_FIELDS: Mapping[str, type] = {"steps": StepRow, "changes": Change, "journal": JournalEntry, "branches": Branch}
STEP_FIELDS = frozenset({"in_core_bytes"})  # plain fields that belong to the shown step
LAYER_COLUMNS = ("version", *FIGURES)  # change in every step; the other fields of a layer are in the list "stack"

JsonRow = dict[str, Any]
T = TypeVar("T")


# Settings ------------------------------------------------------------------------------------------------------------


def _read_config(plain: Mapping[str, Any]) -> RelayConfig:
    return RelayConfig.from_plain(plain, RelayConfig(schedule=_recorded_function(plain["schedule"])))


@cache
def _recorded_function(name: str) -> ScheduleFunction:
    """Return a function in place of a schedule whose name alone was recorded."""

    def schedule(settings: ScheduleSettings, visits: Sequence[str]) -> Iterable[Action]:
        raise RuntimeError(f"a recorded run has only the name of the schedule {name}, not its code")

    schedule.__name__ = name
    return schedule


# Snapshots -----------------------------------------------------------------------------------------------------------


class SnapshotDelta:
    """Encoder and decoder of the moments of a run; the recorder and the reader of a run each have one.

    Invariant: the reader applies the rows that the writer returned, so both have the same state after each row.
    """

    def __init__(self) -> None:
        self._plain: JsonRow = {}
        self._lists: dict[str, list[Any]] = {name: [] for name in (*LIST_FIELDS, "stack")}
        self._layer_columns: dict[str, list[Any]] = {name: [] for name in LAYER_COLUMNS}

    def encode(self, snapshot: Snapshot) -> JsonRow:
        """Return the row of a snapshot: its difference to the snapshot before."""
        plain = {name: getattr(snapshot, name) for name in PLAIN_FIELDS} | {"config": snapshot.config.to_plain()}
        plain |= {"figures": dict(snapshot.figures), "touched": sorted(snapshot.touched)}
        stack = [_constant_fields(layer) for layer in snapshot.layers]
        lists = {name: getattr(snapshot, name) for name in LIST_FIELDS} | {"stack": stack}
        tails = {name: _list_delta(self._lists[name], value) for name, value in lists.items()}
        columns = {name: [getattr(layer, name) for layer in snapshot.layers] for name in LAYER_COLUMNS}
        row: JsonRow = {
            "plain": {
                name: value for name, value in plain.items() if name not in self._plain or self._plain[name] != value
            },
            "lists": {
                name: [tail[0], [asdict(one) if name in LIST_FIELDS else one for one in tail[1]]]
                for name, tail in tails.items()
                if tail is not None
            },
            "layers": {
                name: _round_digits(column) for name, column in columns.items() if column != self._layer_columns[name]
            },
        }
        self._plain, self._layer_columns = plain, columns
        self._lists = {name: list(value) for name, value in lists.items()}
        return row

    def apply(self, row: Mapping[str, Any]) -> None:
        """Apply a row of `encode`.

        Raises:
            KeyError, TypeError, ValueError: the row is malformed.
        """
        self._plain |= row["plain"]
        for name, (kept, new) in row["lists"].items():
            elements = self._lists[name]
            if not 0 <= kept <= len(elements):
                raise ValueError(f"keeps {kept} of {len(elements)} {name}")
            elements[kept:] = [_BUILDERS[name](one) for one in new] if name in LIST_FIELDS else new
        for name, column in row["layers"].items():
            self._layer_columns[name] = [None if value is None else float(value) for value in column]

    @property
    def last_step(self) -> StepRow:
        """The last step of the current branch."""
        return self._lists["steps"][-1]

    @property
    def branch(self) -> str:
        """The current branch."""
        return self._plain["branch"]

    @property
    def branches(self) -> list[str]:
        """Names of all branches, the current one first."""
        return [self.branch, *(one.name for one in self._lists["branches"] if one.name != self.branch)]

    def layers(self) -> tuple[LayerRow, ...]:
        """Return the rows of the layers, in order."""
        rows = []
        columns = zip(*(self._layer_columns[name] for name in LAYER_COLUMNS), strict=True)
        for fixed, (version, *figures) in zip(self._lists["stack"], columns, strict=True):
            # `apply` converts all columns to float, and a version is an integer.
            values: JsonRow = {**fixed, "version": int(version or 0), **dict(zip(FIGURES, figures, strict=True))}
            rows.append(LayerRow(**values))
        return tuple(rows)

    def shown_step_factory(self) -> Callable[[Trace], ShownStep]:
        """Return a function that converts the trace of the last step to a `ShownStep`."""
        row = self.last_step
        journal, nbytes = tuple(self._lists["journal"]), self._plain["in_core_bytes"]
        return partial(ShownStep, row.branch, row.step, layers=self.layers(), journal=journal, in_core_bytes=nbytes)

    def decode(
        self, number: int, histories: BranchHistories, shown_step: ShownStep | None, race: Race | None = None
    ) -> Snapshot:
        """Return the snapshot after the applied rows; its state is "closed", because it accepts no commands.

        Args:
            number: number of the moment.
            histories: steps, statistics and held-out measurements by branch.
            shown_step: the last traced step up to the moment.
            race: the last race finished by then.
        """
        values: JsonRow = {name: self._plain[name] for name in PLAIN_FIELDS if name not in STEP_FIELDS}
        values |= {name: tuple(self._lists[name]) for name in LIST_FIELDS}
        steps = values["steps"]
        return Snapshot(
            **values,
            config=_read_config(self._plain["config"]),
            number=number,
            state="closed",
            pausing=False,
            queued=(),
            done=len(steps),
            target=len(steps),
            layers=self.layers(),
            statistics=histories.current.statistics.view(),
            shown=shown_step,
            progress=None,
            failure=None,
            elsewhere=histories.other_steps(),
            held_out=tuple(histories.current.held_out),
            touched=frozenset(self._plain["touched"]),
            race=race,
        )


def _constant_fields(layer: LayerRow) -> JsonRow:
    return {field.name: getattr(layer, field.name) for field in fields(layer) if field.name not in LAYER_COLUMNS}


def _list_delta(old: Sequence[Any], new: Sequence[Any]) -> tuple[int, list[Any]] | None:
    """Return the number of elements that stay and the elements that follow; None if nothing has changed."""
    if old and len(new) >= len(old) and new[len(old) - 1] is old[-1]:  # fast path: the list has grown
        kept = len(old)
    else:
        kept = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return None if kept == len(old) == len(new) else (kept, list(new[kept:]))


def _round_digits(column: Sequence[Any]) -> list[Any]:
    """Round to six digits, which pictures do not need more of, for a third of the bytes."""
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in column]


# Traces --------------------------------------------------------------------------------------------------------------


def trace_row(trace: Trace) -> JsonRow:
    """Convert a trace to a row; events are lists in the order of `Event`'s fields."""
    events = trace.events_since(0)[0]
    words = list(dict.fromkeys(word for event in events for word in (event.kind, event.layer)))
    number = {word: i for i, word in enumerate(words)}
    return {
        "step": trace.step,
        "device": trace.device,
        "names": trace.names,
        "settings": trace.settings,
        "words": words,
        "events": [
            [ALL_LANES.index(e.lane), number[e.kind], e.start_s, e.stop_s, number[e.layer], *e[5:]] for e in events
        ],
        **({"worker": asdict(trace.worker)} if trace.worker.count > 1 else {}),
        "memory": [[s.t_s, PLACES.index(s.place), dict(s.bytes_by_category)] for s in trace.memory],
    }


def trace_from_row(row: Mapping[str, Any]) -> Trace:
    """Convert a row of `trace_row` back, exactly.

    Raises:
        KeyError, IndexError, TypeError, ValueError: the row is malformed.
    """
    words = row["words"]
    events = [Event._make((ALL_LANES[lane], words[kind], start, stop, words[layer], *rest))
              for lane, kind, start, stop, layer, *rest in row["events"]]  # fmt: skip
    memory = [MemorySample(t_s, PLACES[place], used) for t_s, place, used in row["memory"]]
    header = {name: row[name] for name in ("step", "device", "names", "settings")}
    return Trace.of(events, memory, **header, worker=WorkerInfo(**row.get("worker", {})))


# Values --------------------------------------------------------------------------------------------------------------


def to_json(row: JsonRow) -> str:
    """Convert a row to JSON without line breaks; NaN and infinities are written as text."""
    try:
        return json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # rare, and a search in advance would take longer than writing
        return json.dumps(_json_value(row), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {name: _json_value(one) for name, one in value.items()}
    return [_json_value(one) for one in value] if isinstance(value, list | tuple) else value


def build_record(record: Callable[..., T], row: Mapping[str, Any]) -> T:
    """Return `record(**row)`, with floats converted from text and `LossChange` from its plain values.

    Raises:
        TypeError, ValueError: the fields are not those of the record, or a value is not a number.
    """
    kinds = {field.name: str(field.type).partition(" ")[0] for field in fields(record)}  # type: ignore[arg-type]  # a dataclass
    read = {name: _READERS[kind] for name, kind in kinds.items() if kind in _READERS}
    return record(**{name: read[name](v) if name in read and v is not None else v for name, v in row.items()})


_BUILDERS: Mapping[str, Callable[[JsonRow], Any]] = {
    name: partial(build_record, kind) for name, kind in LIST_FIELDS.items()
}
# By the type of a field.
_READERS: Mapping[str, Callable[[Any], Any]] = {"float": float, "LossChange": LossChange.of_plain}
