"""The lines of a recorded run, as plain values for JSON, and back to the values of the views. Reads and writes no files.

Every line is one JSON object with a `type`:

    run       schema, version, when, on what machine
    moment    after a step or a change: what a snapshot shows now, as far as the line before did not say it already
    trace     every event and memory sample of a step; `of` is the number of its moment
    race      branches that trained on the same batches, with all that was measured; it was over after the moment before
    look      what was seen inside of layers, after the moment before
    held_out  a loss on held-out data; level: a named loss to compare with; fact: something else that was found out
    end       the run was closed; without it, its process has ended before

A moment's `lists` say of each list how much of the line before stays, and what follows: [4, [...]]. So a step costs one
row, whatever came before, and a session that goes to another branch is told in the same way. Numbers that JSON does not
have, NaN and infinities, are written as text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any, TypeVar

from l2l_core import Event, RelayConfig, Trace
from l2l_core.edits import Branch, JournalEntry
from l2l_core.trace import ALL_LANES, PLACES, MemorySample, WorkerInfo
from workbench.session import FIGURES, BranchHistories, Change, LayerRow, LossChange, Race, ShownStep, Snapshot, StepRow

SCHEMA, VERSION = "l2l-run", 6
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
STEP_FIELDS = frozenset({"in_core_bytes"})  # of PLAIN: what a snapshot has of the step that it shows
LAYER_COLUMNS = ("version", *FIGURES)  # what every step changes; the rest of a layer is in the list "stack"

JsonRow = dict[str, Any]
T = TypeVar("T")


# Snapshots -----------------------------------------------------------------------------------------------------------


class SnapshotDelta:
    """What the lines so far say of a session; the writer and the reader of a run each keep one.

    Invariant: both go through the same states, because the reader takes in exactly what the writer gave out.
    """

    def __init__(self) -> None:
        self._plain: JsonRow = {}
        self._lists: dict[str, list[Any]] = {name: [] for name in (*LIST_FIELDS, "stack")}
        self._layer_columns: dict[str, list[Any]] = {name: [] for name in LAYER_COLUMNS}

    def encode(self, snapshot: Snapshot) -> JsonRow:
        """Make the line for a snapshot: what differs from what was told before."""
        plain = {name: getattr(snapshot, name) for name in PLAIN_FIELDS} | {"config": asdict(snapshot.config)}
        plain |= {"figures": dict(snapshot.figures), "touched": sorted(snapshot.touched)}
        stack = [_constant_fields(layer) for layer in snapshot.layers]
        lists = {name: getattr(snapshot, name) for name in LIST_FIELDS} | {"stack": stack}
        tails = {name: _list_delta(self._lists[name], value) for name, value in lists.items()}
        columns = {name: [getattr(layer, name) for layer in snapshot.layers] for name in LAYER_COLUMNS}
        told = {
            "plain": {
                name: value for name, value in plain.items() if name not in self._plain or self._plain[name] != value
            },
            "lists": {name: tail for name, tail in tails.items() if tail is not None},
            "layers": {name: column for name, column in columns.items() if column != self._layer_columns[name]},
        }
        self._plain, self._layer_columns = plain, columns
        for name, tail in told["lists"].items():
            self._lists[name][tail[0] :] = tail[1]
        rows = {
            name: [kept, [asdict(one) if name in LIST_FIELDS else one for one in new]]
            for name, (kept, new) in told["lists"].items()
        }
        return {
            "plain": told["plain"],
            "lists": rows,
            "layers": {name: _round_digits(column) for name, column in told["layers"].items()},
        }

    def apply(self, row: Mapping[str, Any]) -> None:
        """Take in such a line.

        Raises:
            KeyError, TypeError, ValueError: it is no such line.
        """
        self._plain |= row["plain"]
        for name, (kept, new) in row["lists"].items():
            known = self._lists[name]
            if not 0 <= kept <= len(known):
                raise ValueError(f"keeps {kept} of {len(known)} {name}")
            known[kept:] = [_BUILDERS[name](one) for one in new] if name in LIST_FIELDS else new
        for name, column in row["layers"].items():
            self._layer_columns[name] = [None if value is None else float(value) for value in column]

    @property
    def last_step(self) -> StepRow:
        """The newest step of the present branch."""
        return self._lists["steps"][-1]

    @property
    def branch(self) -> str:
        """The present branch."""
        return self._plain["branch"]

    @property
    def branches(self) -> list[str]:
        """Names of all branches, the present one among them."""
        return [self.branch, *(one.name for one in self._lists["branches"] if one.name != self.branch)]

    def layers(self) -> tuple[LayerRow, ...]:
        """Make the rows of the layers, in order."""
        # `take` makes floats of all columns, and a version is a whole number.
        columns = zip(*(self._layer_columns[name] for name in LAYER_COLUMNS), strict=True)
        return tuple(
            LayerRow(**fixed, **(dict(zip(LAYER_COLUMNS, figures, strict=True)) | {"version": int(figures[0] or 0)}))
            for fixed, figures in zip(self._lists["stack"], columns, strict=True)
        )

    def shown_step_factory(self) -> Callable[[Trace], ShownStep]:
        """Return a function that takes the trace of the step that the lines end with, and says whose it is."""
        row = self.last_step
        journal, nbytes = tuple(self._lists["journal"]), self._plain["in_core_bytes"]
        return partial(ShownStep, row.branch, row.step, layers=self.layers(), journal=journal, in_core_bytes=nbytes)

    def decode(
        self, number: int, pasts: BranchHistories, shown_step: ShownStep | None, race: Race | None = None
    ) -> Snapshot:
        """Show the session as it was then: closed, because nothing can be asked of it.

        Args:
            number: of the moment.
            pasts: steps and statistics by branch.
            shown: the last step that led there and is known whole.
            race: the last one that was over by then.
        """
        plain = {name: self._plain[name] for name in PLAIN_FIELDS if name not in STEP_FIELDS}
        steps = tuple(self._lists["steps"])
        return Snapshot(
            **plain,
            **{name: tuple(self._lists[name]) for name in LIST_FIELDS},
            config=RelayConfig(**self._plain["config"]),
            number=number,
            state="closed",
            pausing=False,
            queued=(),
            done=len(steps),
            target=len(steps),
            layers=self.layers(),
            statistics=pasts.current.statistics.view(),
            shown=shown_step,
            progress=None,
            failure=None,
            elsewhere=pasts.other_steps(),
            touched=frozenset(self._plain["touched"]),
            race=race,
        )


def _constant_fields(layer: LayerRow) -> JsonRow:
    return {field.name: getattr(layer, field.name) for field in fields(layer) if field.name not in LAYER_COLUMNS}


def _list_delta(old: Sequence[Any], new: Sequence[Any]) -> tuple[int, list[Any]] | None:
    """How many of the old ones stay, and what follows them; None if nothing has changed."""
    if old and len(new) >= len(old) and new[len(old) - 1] is old[-1]:  # the usual case, at no cost: it has grown
        kept = len(old)
    else:
        kept = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    return None if kept == len(old) == len(new) else (kept, list(new[kept:]))


def _round_digits(column: Sequence[Any]) -> list[Any]:
    """Six digits of a figure are enough for every picture, and a third of the bytes."""
    return [float(f"{value:.6g}") if isinstance(value, float) else value for value in column]


# Traces --------------------------------------------------------------------------------------------------------------


def trace_row(trace: Trace) -> JsonRow:
    """Make the row of a trace: events are lists in the order of `Event`, with lanes and names of layers by number."""
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
    """Make the trace that `trace_row` was given, exactly.

    Raises:
        KeyError, IndexError, TypeError, ValueError: it is no such row.
    """
    words = row["words"]
    events = [Event._make((ALL_LANES[lane], words[kind], start, stop, words[layer], *rest))
              for lane, kind, start, stop, layer, *rest in row["events"]]  # fmt: skip
    memory = [MemorySample(t_s, PLACES[place], used) for t_s, place, used in row["memory"]]
    header = {name: row[name] for name in ("step", "device", "names", "settings")}
    return Trace.of(events, memory, **header, worker=WorkerInfo(**row.get("worker", {})))


# Values --------------------------------------------------------------------------------------------------------------


def to_json(row: JsonRow) -> str:
    """Write a row as a line without its end; numbers that JSON does not have are written as text."""
    try:
        return json.dumps(row, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    except ValueError:  # there is one: rare, and looking for it takes longer than writing
        return json.dumps(_json_value(row), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _json_value(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else repr(value)
    if isinstance(value, Mapping):
        return {name: _json_value(one) for name, one in value.items()}
    return [_json_value(one) for one in value] if isinstance(value, list | tuple) else value


def build_record(record: type[T], row: Mapping[str, Any]) -> T:
    """Make `record(**row)`; numbers that were written as text become numbers again, and judgements become `Judged`.

    Raises:
        TypeError, ValueError: other fields than the record's, or no number.
    """
    kinds = {field.name: str(field.type).partition(" ")[0] for field in fields(record)}  # type: ignore[arg-type]
    read = {name: _READERS[kind] for name, kind in kinds.items() if kind in _READERS}
    return record(**{name: read[name](v) if name in read and v is not None else v for name, v in row.items()})


_BUILDERS: Mapping[str, Callable[[JsonRow], Any]] = {
    name: partial(build_record, kind) for name, kind in LIST_FIELDS.items()
}
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "float": float,
    "LossChange": LossChange.of_plain,
}  # by the type of a field
