"""The profile of a step: its stays with their costs, recorded or by formula; saving and loading."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from l2l_core.simulator.cost_formula import Machine, Shapes, profile_fields_of_shapes
from l2l_core.simulator.profile_builder import ProfileBuilder
from l2l_core.simulator.step_costs import (
    BEFORE_FIRST_STAY,
    ComputeOp,
    CopySpeed,
    EPSJob,
    GradientPartCost,
    LayerCost,
    MemorySamples,
    StashMoves,
    StayCost,
    TurnCost,
)
from l2l_core.trace import OtherVersionError, Trace, check_version

SCHEMA = "l2l-profile"
VERSION = 1


@dataclass(frozen=True)
class Profile:
    """The stays of one step, with their costs.

    Attributes:
        layers: costs by key, shell included, in stack order.
        start: turns before the first layer.
        stays: in order of time, forward and backward.
        closing: work of the EPS after all gradients have arrived.
        copies: speed of the link by lane, unless figures are given.
        handover_s: from the end of a copy to the start of the work that waits for it.
        settings: of the step: "micro_batches", "stash", "precision", "update", ...
        names: dotted names of layers by key.
        memory: samples before the first event.

    Example:
        >>> from l2l_core import Profile
        >>> profile = Profile.of(relay.step(batch).trace)
        >>> [*profile.layers]
        ['shell', 'L000', 'L001', 'L002', 'L003', 'L004', 'L005']
    """

    layers: Mapping[str, LayerCost]
    start: tuple[TurnCost, ...]
    stays: tuple[StayCost, ...]
    closing: tuple[EPSJob, ...]
    copies: Mapping[str, CopySpeed]
    handover_s: float
    settings: Mapping[str, Any]
    names: Mapping[str, str]
    memory: MemorySamples = ()

    @staticmethod
    def of(trace: Trace) -> Profile:
        """Make the profile of a recorded training step.

        Raises:
            ValueError: the trace has no whole training step, or its stash was on disk: a trace has only the sums of its bytes.
        """
        trace.check_finished()
        if trace.settings.get("stash") == "disk":
            raise ValueError(
                "the step ran with stash='disk', and its trace lacks the reads and writes of the single storages: record a "
                "step with RelayConfig(stash='host'), or use relay.forecast"
            )
        return Profile(**ProfileBuilder(trace).profile_fields())

    @staticmethod
    def of_shapes(shapes: Shapes, machine: Machine) -> Profile:
        """Make a profile by formula from a model's shapes and a machine's figures; see `profile_fields`."""
        return Profile(**profile_fields_of_shapes(shapes, machine))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the step."""
        return max(len(self.start), 1)

    @property
    def turns(self) -> list[TurnCost]:
        """All turns in order of time, those before the first layer included."""
        return [turn for _, turns in self.turns_by_stay() for turn in turns]

    def turns_by_stay(self) -> Iterator[tuple[int, tuple[TurnCost, ...]]]:
        """Yield index and turns of every stay, in order of time; those before the first layer have `BEFORE_FIRST_STAY`."""
        yield BEFORE_FIRST_STAY, self.start
        yield from enumerate(stay.turns for stay in self.stays)

    def map_turns(self, change: Callable[[int, tuple[TurnCost, ...]], Iterable[TurnCost]], **others: Any) -> Profile:
        """Return a profile with `change` applied to every item of `turns_by_stay`, and other fields replaced."""
        # In order and once each: a change may carry state from turn to turn
        start, *rest = [tuple(change(index, turns)) for index, turns in self.turns_by_stay()]
        stays = tuple(stay._replace(turns=turns) for stay, turns in zip(self.stays, rest, strict=True))
        return replace(self, start=start, stays=stays, **others)

    def map_memory(self, change: Callable[[MemorySamples], MemorySamples]) -> Profile:
        """Return the profile with its memory samples changed."""

        def changed(_: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
            for turn in turns:
                yield turn._replace(ops=tuple(op._replace(memory=change(op.memory)) for op in turn.ops))

        return replace(self.map_turns(changed), memory=change(self.memory))

    @property
    def forward_visits(self) -> int:
        """Number of layer visits in forward; the last one is the first of backward, which ends where nothing is trained."""
        return sum(stay.has("forward") for stay in self.stays)

    @property
    def trained(self) -> set[str]:
        """Keys of the layers with gradients."""
        by_micro_batch = {part.layer for turn in self.turns for op in turn.ops for part in op.gradient_parts}
        return by_micro_batch | {key for key, layer in self.layers.items() if layer.push_bytes}

    def jobs(self, update: str) -> tuple[dict[str, list[EPSJob]], list[EPSJob]]:
        """Return the EPS's work that can start when a layer's gradients are complete, by layer, and at the end.

        With eager updates, a layer's own gradients are complete after its last stay; those of the shell and shared blocks
        at the end.
        """
        undone = {stay.layer for stay in self.stays if stay.is_backward} if self.closing else set()
        by_layer, closing = defaultdict[str, list[EPSJob]](list), list[EPSJob]()
        for job in self.closing:
            early = update == "eager" and job.layer in undone and job.kind in ("reduce", "update")
            (by_layer[job.layer] if early else closing).append(job)
        return by_layer, closing

    def with_micro_batches(self, count: int) -> Profile:
        """Return the same step with `count` micro-batches: the recorded ones are repeated."""
        if count == self.micro_batches:
            return self

        def repeated(_: int, turns: Sequence[TurnCost]) -> Iterator[TurnCost]:
            recorded = [turn for turn in turns if turn.k >= 0] or turns
            for k in range(count if turns else 0):
                yield recorded[k % len(recorded)]._replace(k=k)
            yield from (turn for turn in turns if turn.k < 0 and recorded is not turns)  # the loss of the whole batch

        return self.map_turns(repeated, settings={**self.settings, "micro_batches": count})

    def aggregated(self) -> Profile:
        """Merge the micro-batches of every stay into one: far fewer events, the same sums."""
        closing = tuple(job for job in self.closing if job.k < 0)
        return self.map_turns(lambda _, turns: (_sum_turns(turns),), closing=closing)

    def save(self, path: str | Path) -> Path:
        """Write the profile as JSON; return the path."""
        path = Path(path)
        path.write_text(json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}) + "\n", encoding="utf-8")
        return path

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read a file of `save`.

        Raises:
            ValueError: the file is damaged, or of a version that this release cannot read.
        """
        path = Path(path)
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            check_version(path, row, SCHEMA, VERSION, "save the profile of a new step")
            del row["schema"], row["version"]
            return _read_profile(row)
        except OtherVersionError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}: not a file of Profile.save: {type(error).__name__}: {error}") from error


def _read_profile(row: dict[str, Any]) -> Profile:
    def op(values: Sequence[Any]) -> ComputeOp:
        read = ComputeOp(*values)
        return read._replace(gradient_parts=tuple(GradientPartCost(*part) for part in read.gradient_parts))

    def turn(values: Sequence[Any]) -> TurnCost:
        read = TurnCost(*_as_tuples(values))
        moves = None if read.moves is None else StashMoves(*read.moves)
        return read._replace(ops=tuple(map(op, read.ops)), moves=moves)

    def turns(rows: Iterable[Sequence[Any]]) -> tuple[TurnCost, ...]:
        return tuple(map(turn, rows))

    return Profile(
        layers={key: LayerCost(*values) for key, values in row.pop("layers").items()},
        start=turns(row.pop("start")),
        stays=tuple(StayCost(layer, visit, turns(rows)) for layer, visit, rows in row.pop("stays")),
        closing=tuple(EPSJob(*values) for values in row.pop("closing")),
        copies={lane: CopySpeed(*values) for lane, values in row.pop("copies").items()},
        memory=_as_tuples(row.pop("memory")),
        **row,
    )


def _as_tuples(value: Any) -> Any:
    """Return a list of JSON, and the lists in it, as tuples."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


def _sum_turns(turns: Sequence[TurnCost]) -> TurnCost:
    """Return one turn with the work of all; operations of one kind are merged."""
    sums: dict[tuple[str, str, int], ComputeOp] = {}
    for op in (op for turn in turns for op in turn.ops):
        key = op.kind, op.layer, op.visit
        total = sums.get(key, op._replace(seconds=0.0, overhead_s=0.0, demand_bytes=0, gradient_parts=()))
        sums[key] = total._replace(
            seconds=total.seconds + op.seconds,
            overhead_s=total.overhead_s + op.overhead_s,
            demand_bytes=total.demand_bytes + op.demand_bytes,
            gradient_parts=_sum_gradient_parts(total.gradient_parts + op.gradient_parts),
            memory=op.memory,
        )
    return TurnCost(
        -1,
        tuple(sums.values()),
        batch_bytes=sum(turn.batch_bytes for turn in turns),
        fetch_bytes=sum(turn.fetch_bytes for turn in turns),
        stash_bytes=sum(turn.stash_bytes for turn in turns),
    )


def _sum_gradient_parts(parts: Iterable[GradientPartCost]) -> tuple[GradientPartCost, ...]:
    """Merge a block's gradients of several micro-batches."""
    sums: dict[tuple[str, str, int], GradientPartCost] = {}
    for part in parts:
        key = part.layer, part.block, part.visit
        total = sums.get(key, part._replace(nbytes=0, reduce_s=0.0))
        sums[key] = total._replace(nbytes=total.nbytes + part.nbytes, reduce_s=total.reduce_s + part.reduce_s)
    return tuple(sums.values())
