"""The profile of a step: its visits with their costs, recorded from a trace or made from shapes, saved and loaded."""

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
    """The visits of one step, with their costs.

    Attributes:
        layers: costs by key, the shell among them; keys in stack order.
        start: what every micro-batch does before the first layer.
        stays: in order of time, forward and backward.
        closing: what the EPS does at the end, when all gradients have come.
        copies: speed of the link by lane, where no other is given.
        handover_s: from the end of a copy to the start of the work that waits for it.
        settings: how the step ran: "micro_batches", "stash", "precision", "update", ...
        names: dotted names of layers by key.
        memory: samples before the first event.
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
            ValueError: the trace holds no whole training step, or one whose stash was on the disk: of that it has the sums alone.
        """
        trace.check_finished()
        if trace.settings.get("stash") == "disk":
            raise ValueError(
                "the step ran with stash='disk', and a replay does not know what a stash reads and writes there: record a step "
                "with RelayConfig(stash='host'), or ask relay.forecast"
            )
        return Profile(**ProfileBuilder(trace).profile_fields())

    @staticmethod
    def of_shapes(shapes: Shapes, machine: Machine) -> Profile:
        """Make a profile by formula, from a model's shapes and a machine's figures alone; see `costs_of_shapes`."""
        return Profile(**profile_fields_of_shapes(shapes, machine))

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the step."""
        return max(len(self.start), 1)

    @property
    def turns(self) -> list[TurnCost]:
        """All turns in order of time, those before the first layer among them."""
        return [turn for _, turns in self.turns_by_stay() for turn in turns]

    def turns_by_stay(self) -> Iterator[tuple[int, tuple[TurnCost, ...]]]:
        """Go through the turns of every stay with its index, in order of time; those before the first layer have `START`."""
        yield BEFORE_FIRST_STAY, self.start
        yield from enumerate(stay.turns for stay in self.stays)

    def map_turns(self, change: Callable[[int, tuple[TurnCost, ...]], Iterable[TurnCost]], **others: Any) -> Profile:
        """Return the profile with what `change` makes of every item of `by_stay`, in that order, and with other fields."""
        # in order and once each, since a change may carry what fills the memories from turn to turn
        start, *rest = [tuple(change(index, turns)) for index, turns in self.turns_by_stay()]
        stays = tuple(stay._replace(turns=turns) for stay, turns in zip(self.stays, rest, strict=True))
        return replace(self, start=start, stays=stays, **others)

    @property
    def trained(self) -> set[str]:
        """Keys of the layers that gradients come from."""
        apart = {part.layer for turn in self.turns for op in turn.ops for part in op.gradient_parts}
        return apart | {key for key, layer in self.layers.items() if layer.push_bytes}

    def jobs(self, update: str) -> tuple[dict[int, list[EPSJob]], list[EPSJob]]:
        """Return the jobs of the EPS that can begin after each stay, by its index, and those that wait for the end of the step.

        With eager updates a layer's own gradients are whole after its last stay; those of the shell and of shared blocks, at the
        end.
        """
        last = {stay.layer: index for index, stay in enumerate(self.stays) if stay.is_backward}
        due, closing = defaultdict[int, list[EPSJob]](list), list[EPSJob]()
        for job in self.closing:
            early = update == "eager" and job.layer in last and job.kind in ("reduce", "update")
            (due[last[job.layer]] if early else closing).append(job)
        return due, closing

    def with_micro_batches(self, count: int) -> Profile:
        """Return the same step with `count` micro-batches of the same size: the recorded ones are repeated."""
        if count == self.micro_batches:
            return self
        return self.map_turns(
            lambda _, turns: [turns[k % len(turns)]._replace(k=k) for k in range(count)] if turns else (),
            settings={**self.settings, "micro_batches": count},
        )

    def aggregated(self) -> Profile:
        """Take the micro-batches of every stay together, as if they were one: far fewer events, the same sums."""
        closing = tuple(job for job in self.closing if job.k < 0)
        return self.map_turns(lambda _, turns: (_sum_turns(turns),), closing=closing)

    def save(self, path: str | Path) -> Path:
        """Write the profile as JSON; returns the path."""
        path = Path(path)
        path.write_text(json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}) + "\n", encoding="utf-8")
        return path

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is damaged, or its format has another version than the one that this release reads.
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
            raise ValueError(f"{path}: Profile.save did not write this: {type(error).__name__}: {error}") from error


def _read_profile(row: dict[str, Any]) -> Profile:
    def op(values: Sequence[Any]) -> ComputeOp:
        *plain, parts, memory = values
        return ComputeOp(
            *plain, tuple(GradientPartCost(*part) for part in parts), tuple((place, held) for place, held in memory)
        )

    def moves(row: Sequence[Any] | None) -> StashMoves | None:
        if row is None:
            return None
        fetched, demanded, left, gone = row
        asked = tuple((number, tuple(wanted)) for number, wanted in demanded)
        return StashMoves(tuple(fetched), asked, tuple(map(tuple, left)), tuple(gone))

    def turns(rows: Iterable[Sequence[Any]]) -> tuple[TurnCost, ...]:
        return tuple(TurnCost(k, tuple(map(op, ops)), *sums, moves(kept)) for k, ops, *sums, kept in rows)

    return Profile(
        layers={key: LayerCost(*values) for key, values in row.pop("layers").items()},
        start=turns(row.pop("start")),
        stays=tuple(StayCost(layer, visit, turns(rows)) for layer, visit, rows in row.pop("stays")),
        closing=tuple(EPSJob(*values) for values in row.pop("closing")),
        copies={lane: CopySpeed(*values) for lane, values in row.pop("copies").items()},
        memory=tuple((place, held) for place, held in row.pop("memory")),
        **row,
    )


def _sum_turns(turns: Sequence[TurnCost]) -> TurnCost:
    """One turn that does the work of all; operations of a kind become one."""
    sums: dict[tuple[str, str, int], ComputeOp] = {}
    for op in (op for turn in turns for op in turn.ops):
        known = sums.get((op.kind, op.layer, op.visit))
        if known is None:
            sums[op.kind, op.layer, op.visit] = op._replace(gradient_parts=_sum_gradient_parts(op.gradient_parts))
            continue
        sums[op.kind, op.layer, op.visit] = known._replace(
            seconds=known.seconds + op.seconds,
            overhead_s=known.overhead_s + op.overhead_s,
            demand_bytes=known.demand_bytes + op.demand_bytes,
            parts=_sum_gradient_parts(known.gradient_parts + op.gradient_parts),
            memory=op.memory,
        )
    totals = (sum(turn[field] for turn in turns) for field in range(2, 5))  # batch, fetch and stash bytes
    return TurnCost(-1, tuple(sums.values()), *totals)


def _sum_gradient_parts(parts: Iterable[GradientPartCost]) -> tuple[GradientPartCost, ...]:
    """The gradients of several micro-batches of a block as one."""
    sums: dict[tuple[str, str, int], GradientPartCost] = {}
    for part in parts:
        known = sums.setdefault((part.layer, part.block, part.visit), part._replace(nbytes=0, reduce_s=0.0))
        added = known._replace(nbytes=known.nbytes + part.nbytes, reduce_s=known.reduce_s + part.reduce_s)
        sums[part.layer, part.block, part.visit] = added
    return tuple(sums.values())
