"""What a step costs: a `Profile` of its visits, recorded from a trace or made from shapes and a machine's figures.

A profile holds what does not depend on the link or on how far loads run ahead: seconds of compute and of the EPS, bytes
of weights, gradients and stash, in the order in which the relay does them. `simulate` puts the rest on top.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from l2l_core.roofline import visits_of
from l2l_core.trace import Event, Trace

SCHEMA = "l2l-profile"
VERSION = 1
SHELL = "shell"
COPY_LANES = ("h2d", "d2h")

Memory = tuple[tuple[str, Mapping[str, int]], ...]  # samples that follow a piece of work: place, bytes by category


class Part(NamedTuple):
    """A gradient of one micro-batch that leaves by itself and is reduced by itself."""

    layer: str
    nbytes: int
    block: str  # as the EPS calls it
    block_bytes: int
    reduce_s: float
    visit: int


class Op(NamedTuple):
    """One compute event."""

    kind: str
    layer: str
    visit: int
    seconds: float
    overhead_s: float = 0.0  # before it: neither work nor waiting, the host's own time
    demand_bytes: int = 0  # stash that is fetched only when the event asks for it
    parts: tuple[Part, ...] = ()
    memory: Memory = ()


class Turn(NamedTuple):
    """One micro-batch's part of a stay: what it does before it gives way."""

    k: int
    ops: tuple[Op, ...]
    batch_bytes: int = 0  # rows that are copied before it
    fetch_bytes: int = 0  # stash that arrives for it while the turn before computes
    stash_bytes: int = 0  # stash that leaves when it gives way


class Stay(NamedTuple):
    """A layer on the device, until another one takes over; at the turn a stay is forward and backward."""

    layer: str
    visit: int
    turns: tuple[Turn, ...]

    @property
    def is_backward(self) -> bool:
        """Whether gradients of the layer come out of it."""
        return any(op.kind == "backward" for turn in self.turns for op in turn.ops)


class Layer(NamedTuple):
    """What it takes to move and to update a layer, or the shell."""

    load_bytes: int
    push_bytes: int = 0  # of the summed gradient; 0 if there is none or its micro-batches are kept apart
    block_bytes: int = 0  # of the masters that this gradient updates
    reduce_s: float = 0.0
    update_s: float = 0.0


class Job(NamedTuple):
    """Work of the EPS that waits for all gradients."""

    kind: str
    layer: str
    k: int
    seconds: float
    nbytes: int


class CopySpeed(NamedTuple):
    """What a copy takes when nothing limits it: `fixed_s + nbytes / bytes_per_s`."""

    fixed_s: float = 0.0
    bytes_per_s: float = float("inf")


@dataclass(frozen=True)
class Machine:
    """Figures of a machine, for profiles that nobody has recorded.

    Attributes:
        flops_per_s: achieved in matrix products, in the precision in question.
        update_params_per_s: parameters that the optimizer updates on the host.
        h2d_bytes_per_s, d2h_bytes_per_s: of the link.
        name: for people.
    """

    flops_per_s: float
    update_params_per_s: float
    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    name: str = "a machine"

    def __post_init__(self) -> None:
        for field, value in asdict(self).items():
            if field != "name" and not value > 0:
                raise ValueError(f"{field}={value!r}: must be positive")


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

    layers: Mapping[str, Layer]
    start: tuple[Turn, ...]
    stays: tuple[Stay, ...]
    closing: tuple[Job, ...]
    copies: Mapping[str, CopySpeed]
    handover_s: float
    settings: Mapping[str, Any]
    names: Mapping[str, str]
    memory: Memory = ()

    @staticmethod
    def of(trace: Trace) -> Profile:
        """The profile of a recorded training step.

        Raises:
            ValueError: the trace holds no whole training step.
        """
        return _Recording(trace).profile()

    @staticmethod
    def of_shapes(
        layer_params: Sequence[int],
        shell_params: int,
        machine: Machine,
        *,
        tokens: int,
        boundary_bytes: int,
        micro_batches: int = 1,
        activation_bytes: int = 0,
        stash: str = "device",
        precision: str = "fp32",
    ) -> Profile:
        """A profile by formula, from numbers of parameters and a machine's figures alone.

        A token costs 2 operations per parameter forward, 6 in backward with recompute, 4 without (the last layer does not
        run twice); attention's own products are left out. Source: the roofline in Kaplan et al.,
        https://arxiv.org/abs/2001.08361, section 2.1.

        Args:
            layer_params: parameters of every layer.
            shell_params: of the rest of the model.
            machine: figures.
            tokens: per micro-batch.
            boundary_bytes: of what one layer hands to the next, per micro-batch.
            micro_batches: per step.
            activation_bytes: of one layer's graph for one micro-batch, if known.
            stash, precision: as in `RelayConfig`.

        Raises:
            ValueError: no layers.
        """
        if not layer_params:
            raise ValueError("layer_params is empty: a relay needs at least one layer")
        return _formula(
            layer_params,
            shell_params,
            machine,
            tokens,
            boundary_bytes,
            micro_batches,
            activation_bytes,
            stash,
            precision,
        )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of the step."""
        return max(len(self.start), 1)

    def with_micro_batches(self, count: int) -> Profile:
        """The same step with `count` micro-batches of the same size: the recorded ones, over and over."""
        if count == self.micro_batches:
            return self
        return replace(
            self,
            start=_cycled(self.start, count),
            stays=tuple(stay._replace(turns=_cycled(stay.turns, count)) for stay in self.stays),
            settings={**self.settings, "micro_batches": count},
        )

    def aggregated(self) -> Profile:
        """The micro-batches of every stay taken together, as if they were one: far fewer events, the same sums."""
        return replace(
            self,
            start=(_together(self.start),),
            stays=tuple(stay._replace(turns=(_together(stay.turns),)) for stay in self.stays),
            closing=tuple(job for job in self.closing if job.k < 0),
        )

    def save(self, path: str | Path) -> Path:
        """Write the profile as JSON; returns the path."""
        path = Path(path)
        path.write_text(json.dumps({"schema": SCHEMA, "version": VERSION, **asdict(self)}) + "\n", encoding="utf-8")
        return path

    @staticmethod
    def load(path: str | Path) -> Profile:
        """Read what `save` wrote.

        Raises:
            ValueError: the file is damaged or of another version; names it.
        """
        path = Path(path)
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            if row.pop("schema") != SCHEMA or row.pop("version") != VERSION:
                raise ValueError(f"expected schema {SCHEMA!r} version {VERSION}")
            return _restored(row)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{path}: this is no profile that Profile.save wrote: {type(error).__name__}: {error}"
            ) from error


def _restored(row: dict[str, Any]) -> Profile:
    def op(values: Sequence[Any]) -> Op:
        *plain, parts, memory = values
        return Op(*plain, tuple(Part(*part) for part in parts), tuple((place, held) for place, held in memory))

    def turns(rows: Iterable[Sequence[Any]]) -> tuple[Turn, ...]:
        return tuple(Turn(k, tuple(map(op, ops)), *rest) for k, ops, *rest in rows)

    return Profile(
        layers={key: Layer(*values) for key, values in row.pop("layers").items()},
        start=turns(row.pop("start")),
        stays=tuple(Stay(layer, visit, turns(rows)) for layer, visit, rows in row.pop("stays")),
        closing=tuple(Job(*values) for values in row.pop("closing")),
        copies={lane: CopySpeed(*values) for lane, values in row.pop("copies").items()},
        memory=tuple((place, held) for place, held in row.pop("memory")),
        **row,
    )


def _cycled(turns: Sequence[Turn], count: int) -> tuple[Turn, ...]:
    return tuple(turns[k % len(turns)]._replace(k=k) for k in range(count)) if turns else ()


def _together(turns: Sequence[Turn]) -> Turn:
    """One turn that does the work of all; operations of a kind become one."""
    sums: dict[tuple[str, str, int], Op] = {}
    for op in (op for turn in turns for op in turn.ops):
        known = sums.get((op.kind, op.layer, op.visit))
        if known is None:
            sums[op.kind, op.layer, op.visit] = op._replace(parts=())
            continue
        sums[op.kind, op.layer, op.visit] = known._replace(
            seconds=known.seconds + op.seconds,
            overhead_s=known.overhead_s + op.overhead_s,
            demand_bytes=known.demand_bytes + op.demand_bytes,
            memory=op.memory,
        )
    totals = (sum(turn[field] for turn in turns) for field in range(2, 5))
    return Turn(-1, tuple(sums.values()), *totals)


# ---- from a trace --------------------------------------------------------------------------------------------------


class _Recording:
    """Sorts the events of a trace into stays and turns."""

    def __init__(self, trace: Trace) -> None:
        self._trace, self._lanes, self._settings = trace, trace.lanes, dict(trace.settings)
        self._compute = self._lanes["compute"]
        self._visits = visits_of(self._compute)
        self._first_s = min((event.start_s for event in trace.events), default=0.0)
        if not self._visits[1:] or not any(event.kind == "backward" for event in self._compute):
            raise ValueError(f"{trace!r} is no whole training step, so there is nothing to replay")
        self._starts: dict[int, list[float]] = defaultdict(list)  # by micro-batch
        self._indices: dict[int, list[int]] = defaultdict(list)
        for index, event in enumerate(self._compute):
            self._starts[event.k].append(event.start_s)
            self._indices[event.k].append(index)
        self._pushed = _moved(self._lanes["d2h"], "push")
        self._demand: dict[int, int] = defaultdict(int)  # by index of compute event
        self._parts: dict[tuple[int, int], list[Part]] = defaultdict(list)  # by visit and micro-batch
        self._moved: dict[str, dict[tuple[int, int], int]] = {
            kind: defaultdict(int) for kind in ("batch", "fetch", "stash")
        }

    def profile(self) -> Profile:
        self._sort_stash()
        jobs = self._sort_gradients()
        memory = self._memory()
        ops = [self._op(index, event, memory[index + 1]) for index, event in enumerate(self._compute)]
        remaining = iter(zip(self._compute, ops, strict=True))
        groups = [list(islice(remaining, len(visit))) for visit in self._visits]
        stays = [stay for group in groups[1:] for stay in self._stays(group)]
        return Profile(
            layers=self._layers(),
            start=self._turns(-1, groups[0]),
            stays=tuple(Stay(s[0][0].layer, s[0][0].visit, self._turns(s[0][0].visit, s)) for s in stays),
            closing=tuple(jobs),
            copies={lane: _copy_speed(self._lanes[lane], self._settings) for lane in COPY_LANES},
            handover_s=self._handover_s(),
            settings=self._settings,
            names=self._trace.names,
            memory=memory[0],
        )

    def _after(self, event: Event) -> int:
        """The compute event of the same micro-batch for which a copy was made."""
        at = bisect_left(self._starts[event.k], event.stop_s - 1e-9)
        return self._indices[event.k][min(at, len(self._starts[event.k]) - 1)]

    def _sort_stash(self) -> None:
        for event in (event for lane in COPY_LANES for event in self._lanes[lane]):
            if event.kind == "fetch" and event.visit < 0:
                self._demand[self._after(event)] += event.nbytes
            elif event.kind in self._moved:
                self._moved[event.kind][event.visit, event.k] += event.nbytes

    def _sort_gradients(self) -> list[Job]:
        """Give gradients that leave apart to the events that they come from; return what is left for the end."""
        apart = [event for event in self._lanes["d2h"] if event.kind == "push" and event.k >= 0]
        eps = self._lanes["eps"]
        reduced = [event for event in eps if event.kind == "reduce" and event.k >= 0]
        for push, reduce in zip(apart, reduced, strict=False):
            seconds = reduce.stop_s - reduce.start_s
            part = Part(push.layer, push.nbytes, reduce.layer, reduce.nbytes, seconds, push.visit)
            self._parts[push.visit, push.k].append(part)
        rest = [e for e in eps if not (e.kind == "reduce" and e.k >= 0) and not self._follows_push(e)]
        return [Job(e.kind, e.layer, e.k, e.stop_s - e.start_s, e.nbytes) for e in rest]

    def _follows_push(self, event: Event) -> bool:
        """Whether work of the EPS is for a gradient that was pushed as a whole, and does not wait for others."""
        kinds = ("reduce",) if self._settings.get("update") == "deferred" else ("reduce", "update")
        return event.kind in kinds and event.k < 0 and event.layer in self._pushed

    def _layers(self) -> dict[str, Layer]:
        loads = _moved(self._lanes["h2d"], "load")
        layers = {key: Layer(nbytes, self._pushed.get(key, 0)) for key, nbytes in loads.items()}
        for event in filter(self._follows_push, self._lanes["eps"]):
            seconds = {f"{event.kind}_s": event.stop_s - event.start_s}
            layers[event.layer] = layers[event.layer]._replace(block_bytes=event.nbytes, **seconds)
        return dict(sorted(layers.items()))

    def _op(self, index: int, event: Event, memory: Memory) -> Op:
        ended_s = self._compute[index - 1].stop_s if index else self._first_s
        overhead_s = max(0.0, event.start_s - ended_s - event.stalled_s)
        seconds = event.stop_s - event.start_s
        return Op(event.kind, event.layer, event.visit, seconds, overhead_s, self._demand[index], (), memory)

    def _stays(self, group: Sequence[tuple[Event, Op]]) -> Iterator[Sequence[tuple[Event, Op]]]:
        """The stays in a visit: one, but two at the turn if the last layer's graphs were dropped and all came back."""
        turned = [i for i, (e, _) in enumerate(group) if e.kind == "backward" and self._comes_back(e, group[:i])]
        yield from filter(None, (group[: turned[0]], group[turned[0] :]) if turned else (group,))

    def _comes_back(self, event: Event, before: Sequence[tuple[Event, Op]]) -> bool:
        forward = [e for e, _ in before if e.kind == "forward"]
        moved = any((event.visit, event.k) in self._moved[kind] for kind in ("fetch", "stash"))
        return bool(forward) and (forward[-1].k != event.k or moved)

    def _turns(self, visit: int, group: Sequence[tuple[Event, Op]]) -> tuple[Turn, ...]:
        by_k: dict[int, list[Op]] = defaultdict(list)
        for event, op in group:
            by_k[event.k].append(op)
        moved = [self._moved[kind] for kind in ("batch", "fetch", "stash")]
        return tuple(
            Turn(k, tuple(self._with_parts(visit, k, ops)), *(bytes_of.get((visit, k), 0) for bytes_of in moved))
            for k, ops in by_k.items()
        )

    def _with_parts(self, visit: int, k: int, ops: list[Op]) -> list[Op]:
        """Let gradients that leave apart follow the loss, or the end of a backward and of the shell's before it."""
        for number in {visit, *(op.visit for op in ops)}:
            parts = tuple(self._parts.get((number, k), ()))
            losses = [
                i for i, op in enumerate(ops) if op.kind == "loss" and number == visit and ops[0].kind != "backward"
            ]
            for at in losses[-1:] or [-1]:
                ops[at] = ops[at]._replace(parts=ops[at].parts + parts)
        return ops

    def _memory(self) -> list[Memory]:
        """Samples by the compute event that they follow; those before the first one come first."""
        stops = [event.stop_s for event in self._compute]
        groups: list[list[tuple[str, Mapping[str, int]]]] = [[] for _ in range(len(stops) + 1)]
        for sample in self._trace.memory:
            groups[bisect_right(stops, sample.t_s)].append((sample.place, dict(sample.bytes_by_category)))
        return [tuple(group) for group in groups]

    def _handover_s(self) -> float:
        """From the end of a copy to the start of the work that waits for it, as seen at the rows of the batch."""
        stops_s = {event.k: event.stop_s for event in self._lanes["h2d"] if event.kind == "batch"}
        return min(
            (e.start_s - stops_s[e.k] for e in self._visits[0] if e.start_s >= stops_s.get(e.k, 1e9)), default=0.0
        )


def _moved(events: Sequence[Event], kind: str) -> dict[str, int]:
    """Bytes of every layer's first whole copy of a kind; its pieces follow one another."""
    moved: dict[str, int] = {}
    current = ""
    for event in (e for e in events if e.kind == kind and e.k < 0):
        if event.layer == current:
            moved[current] += event.nbytes
        else:
            current = "" if event.layer in moved else event.layer
            moved.setdefault(event.layer, event.nbytes)
    return moved


def _copy_speed(events: Sequence[Event], settings: Mapping[str, Any]) -> CopySpeed:
    """Speed of the host's memory as the copies show it, where no link limited them; otherwise the link's."""
    if not events:
        return CopySpeed()
    limit = settings.get(f"{events[0].lane}_bytes_per_s")
    if limit:
        return CopySpeed(median(max(0.0, e.stop_s - e.start_s - e.nbytes / limit) for e in events), limit)
    fixed_s = min(event.stop_s - event.start_s for event in events)
    rest_s = sum(event.stop_s - event.start_s - fixed_s for event in events)
    return CopySpeed(fixed_s, sum(event.nbytes for event in events) / rest_s if rest_s > 0 else float("inf"))


# ---- from shapes ---------------------------------------------------------------------------------------------------


def _formula(
    layer_params: Sequence[int],
    shell_params: int,
    machine: Machine,
    tokens: int,
    boundary_bytes: int,
    micro_batches: int,
    activation_bytes: int,
    stash: str,
    precision: str,
) -> Profile:
    width = 2 if precision == "bf16" else 4
    on_host = stash == "host"
    depth = len(layer_params)
    keys = [f"L{index:03d}" for index in range(depth)]
    per_param_s = 2 * tokens / machine.flops_per_s

    def layer(params: int) -> Layer:
        return Layer(width * params, 4 * params, 4 * params, update_s=params / machine.update_params_per_s)

    def turns(ops: Sequence[Op], fetched: int, parked: int) -> tuple[Turn, ...]:
        moved = (0, fetched * boundary_bytes, parked * boundary_bytes) if on_host else (0, 0, 0)
        return tuple(Turn(k, tuple(ops), *moved) for k in range(micro_batches))

    forward = [
        Stay(key, visit, turns([Op("forward", key, visit, params * per_param_s)], 1, 1))
        for visit, (key, params) in enumerate(zip(keys[:-1], layer_params[:-1], strict=True))
    ]
    last, params = depth - 1, layer_params[-1]
    turn = [
        Op("forward", keys[last], last, params * per_param_s),
        Op("loss", SHELL, -1, 3 * shell_params * per_param_s),
    ]
    turn.append(Op("backward", keys[last], depth, 2 * params * per_param_s))
    backward = [
        Stay(key, depth + 1 + i, turns([Op("backward", key, depth + 1 + i, 3 * params * per_param_s)], 2, 1))
        for i, (key, params) in enumerate(zip(keys[-2::-1], layer_params[-2::-1], strict=True))
    ]
    slots = {
        "weights": width * (shell_params + 2 * max(layer_params)),
        "gradients": 4 * (shell_params + 2 * max(layer_params)),
    }
    held = (4 if on_host else depth * micro_batches) * boundary_bytes
    peak = {**slots, "stash": held, "activations": activation_bytes}
    return Profile(
        layers={**{k: layer(p) for k, p in zip(keys, layer_params, strict=True)}, SHELL: layer(shell_params)},
        start=turns([Op("shell", SHELL, -1, 0.0)], 0, 1),
        stays=(*forward, Stay(keys[last], last, turns(turn, 1, 1)), *backward),
        closing=(),
        copies={"h2d": CopySpeed(0.0, machine.h2d_bytes_per_s), "d2h": CopySpeed(0.0, machine.d2h_bytes_per_s)},
        handover_s=0.0,
        settings={
            "micro_batches": micro_batches,
            "stash": stash,
            "precision": precision,
            "update": "eager",
            "ahead": 1,
        },
        names={key: key for key in (*keys, SHELL)},
        memory=(("device", peak),),
    )
