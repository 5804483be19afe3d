"""Simulation of a pipeline's plan: seconds, waits, and exact bytes on every rank.

Each rank has one compute lane, two copy lanes to and from the host, and a link to every other rank; each is serial, and
messages overlap with compute. A recompute right before its backward starts so late that the two meet. A copy to the host
may take until the next action has run; then compute waits for it, so that bytes stay bounded. A fetch starts some actions
before its reader. A record that the next action reads stays. Updates take no time here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from l2l_core.pipelines.pipeline_plan import PipelineAction, PipelinePlan
from l2l_core.trace import Event, MemorySample, Trace, WorkerInfo

_EVENT_KINDS = {"F": "forward", "R": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass(frozen=True)
class StageCost:
    """Seconds and bytes of one stage and one micro-batch; by default in slots and records.

    Attributes:
        forward_s, backward_s, recompute_s: of F, B and R.
        input_share: share of backward that I takes; W takes the rest.
        input_bytes: what a forward keeps that is recomputed later.
        record_bytes: what backward reads, the input included.
        weight_record_bytes: what W reads, from the end of I; default the whole record.
        host_bytes: part of the record that waits on the host between forward and backward.
        fetch_ahead: number of actions before the backward with whose start the fetch may start.
        forward_extra_bytes, backward_extra_bytes: needed beside the record while the action runs.
        output_bytes: of the message to the next stage, and of its gradient.
        weight_bytes: of weights, gradients and optimizer state, which stay on the rank.

    Example:
        >>> from l2l_core.pipelines import StageCost, gpipe, simulate_pipeline
        >>> costs = [StageCost(forward_s=1), StageCost(forward_s=3)]
        >>> simulate_pipeline(gpipe(2, 4), costs).seconds
        23.0
    """

    forward_s: float = 1.0
    backward_s: float = 2.0
    recompute_s: float = 1.0
    input_share: float = 0.5
    input_bytes: int = 0
    record_bytes: int = 1
    weight_record_bytes: int | None = None
    host_bytes: int = 0
    fetch_ahead: int = 2
    forward_extra_bytes: int = 0
    backward_extra_bytes: int = 0
    output_bytes: int = 0
    weight_bytes: int = 0

    def seconds(self, kind: str) -> float:
        """Return the seconds of an action."""
        split = {"I": self.input_share, "W": 1 - self.input_share}
        if kind in split:
            return self.backward_s * split[kind]
        return {"F": self.forward_s, "R": self.recompute_s, "B": self.backward_s}[kind]


@dataclass(frozen=True)
class RankSpeeds:
    """Speeds of ranks and links.

    Attributes:
        slowdown: factor by which each rank computes slower than the costs; default 1 for all.
        latency_s, bytes_per_s: of the link between two ranks; None is a link that takes no time.
        host_bytes_per_s: of the copies between a rank and its host, in each direction.

    Example:
        >>> from l2l_core.pipelines import RankSpeeds, gpipe, simulate_pipeline
        >>> slow = RankSpeeds(slowdown=[1, 2])  # rank 1 takes twice as long
        >>> [simulate_pipeline(gpipe(2, 4), speeds=each).seconds for each in (RankSpeeds(), slow)]
        [15.0, 27.0]
    """

    slowdown: Sequence[float] = ()
    latency_s: float = 0.0
    bytes_per_s: float | None = None
    host_bytes_per_s: float | None = None

    def slowdown_of(self, rank: int) -> float:
        """Return the factor of a rank."""
        return self.slowdown[rank] if self.slowdown else 1.0


class TimedAction(NamedTuple):
    """An action with its times, in seconds since the step began.

    Example:
        >>> from l2l_core.pipelines import gpipe, simulate_pipeline
        >>> [str(timed.action) for timed in simulate_pipeline(gpipe(2, 1)).ranks[0]]
        ['0F0', '0B0']
    """

    action: PipelineAction
    start_s: float
    stop_s: float


@dataclass(frozen=True)
class PipelineSimulation:
    """A simulated step.

    Attributes:
        plan: that was simulated.
        ranks: timed actions by rank.
        copies: by rank, of records to the host and back.
        memory: by rank, bytes from a time on, exact for these costs.
        wire_bytes: sent by each rank to other ranks.

    Example:
        >>> from l2l_core.pipelines import gpipe, simulate_pipeline
        >>> simulation = simulate_pipeline(gpipe(2, 2))
        >>> simulation.seconds, simulation.peak_bytes
        (9.0, (2, 2))
        >>> print(simulation.diagram())
          0 | 0F0 0F1 .   .   .   0B0 0B0 0B1 0B1
          1 | .   1F0 1F1 1B0 1B0 1B1 1B1 .   .
    """

    plan: PipelinePlan
    ranks: tuple[tuple[TimedAction, ...], ...]
    copies: tuple[tuple[Event, ...], ...]
    memory: tuple[tuple[tuple[float, int], ...], ...] = field(repr=False)  # by rank, bytes from a time on
    wire_bytes: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return max(timed.stop_s for actions in self.ranks for timed in actions)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of each rank."""
        return tuple(max(nbytes for _, nbytes in samples) for samples in self.memory)

    def compute_s(self, rank: int) -> float:
        """Return the seconds in which a rank computes."""
        return sum(timed.stop_s - timed.start_s for timed in self.ranks[rank])

    @property
    def bubble(self) -> float:
        """Waiting time of all ranks as a share of their compute time; (p-1)/m for GPipe."""
        computes = sum(map(self.compute_s, range(len(self.ranks))))
        return (self.seconds * len(self.ranks) - computes) / computes

    def diagram(self, slot_s: float = 1.0) -> str:
        """Draw a row per rank and a column per slot; `.` is a slot without an action."""
        width = max(len(str(action)) for actions in self.plan.ranks for action in actions)
        rows: list[str] = []
        for rank, actions in enumerate(self.ranks):
            cells = ["."] * round(self.seconds / slot_s)
            for action, start_s, stop_s in actions:
                first, stop = round(start_s / slot_s), round(stop_s / slot_s)
                cells[first:stop] = [str(action)] * (stop - first)
            rows.append(f"{rank:>3} | {' '.join(cell.ljust(width) for cell in cells).rstrip()}")
        return "\n".join(rows)

    def trace(self, rank: int) -> Trace:
        """Return the step of one rank as a trace, for pictures and exports."""
        events = [
            Event("compute", _EVENT_KINDS[action.kind], start_s, stop_s, f"stage {action.stage}", action.k)
            for action, start_s, stop_s in self.ranks[rank]
        ]
        samples = [MemorySample(t_s, "device", {"activations": nbytes}) for t_s, nbytes in self.memory[rank]]
        worker = WorkerInfo(rank, len(self.ranks))
        return Trace.of([*events, *self.copies[rank]], samples, device="simulated", worker=worker)


def simulate_pipeline(
    plan: PipelinePlan,
    costs: StageCost | Sequence[StageCost] = StageCost(),
    speeds: RankSpeeds = RankSpeeds(),
) -> PipelineSimulation:
    """Simulate a checked plan.

    Args:
        plan: actions by rank.
        costs: of each stage, or of every stage if they are alike.
        speeds: of ranks and links.

    Raises:
        ValueError: there are costs, or slowdowns, for another number of stages or ranks.

    Example:
        >>> from l2l_core.pipelines import gpipe, one_forward_one_backward, simulate_pipeline
        >>> plans = gpipe(4, 8), one_forward_one_backward(4, 8)  # 4 ranks, 8 micro-batches
        >>> [round(simulate_pipeline(plan).bubble, 2) for plan in plans]
        [0.38, 0.38]
    """
    of_stage = [costs] * plan.stages if isinstance(costs, StageCost) else list(costs)
    if len(of_stage) != plan.stages:
        raise ValueError(f"costs of {len(of_stage)} stages for a plan of {plan.stages}: give one cost per stage")
    if speeds.slowdown and len(speeds.slowdown) != len(plan.ranks):
        raise ValueError(f"slowdown of {len(speeds.slowdown)} ranks for a plan of {len(plan.ranks)}: give one per rank")
    return _VirtualRanks(plan, of_stage, speeds).run()


class _VirtualRanks:
    """Lanes, links and memory of all ranks on a virtual clock."""

    def __init__(self, plan: PipelinePlan, costs: Sequence[StageCost], speeds: RankSpeeds) -> None:
        self._plan, self._costs, self._speeds = plan, costs, speeds
        count = len(plan.ranks)
        self._timed: list[list[TimedAction]] = [[] for _ in range(count)]
        self._copies: list[list[Event]] = [[] for _ in range(count)]
        self._changes: list[list[tuple[float, int]]] = [[] for _ in range(count)]  # of bytes
        self._arrival: dict[tuple[PipelineAction, int], float] = {}  # of an action's message at a rank
        self._free: dict[tuple[int | str, ...], float] = defaultdict(float)  # when a lane or a link is free
        self._on_host: dict[tuple[int, int], float] = {}  # when a record is on the host
        self._sends: list[list[tuple[int, float]]] = [[] for _ in range(count)]  # position of the action, end
        self._wire = [0] * count

    def run(self) -> PipelineSimulation:
        for action in self._plan.in_order():
            self._run_action(action)
        return PipelineSimulation(
            self._plan,
            tuple(map(tuple, self._timed)),
            tuple(map(tuple, self._copies)),
            tuple(tuple(self._add_up(rank)) for rank in range(len(self._timed))),
            tuple(self._wire),
        )

    def _run_action(self, action: PipelineAction) -> None:
        rank, _ = self._plan.place[action]
        stage, kind, k = action
        cost, timed = self._costs[stage], self._timed[rank]
        seconds = cost.seconds(kind) * self._speeds.slowdown_of(rank)
        free_s = max(timed[-1].stop_s if timed else 0.0, self._sent_before(rank, len(timed) - 1))
        needs = {need: self._arrival[need, rank] for need in self._plan.needs(action)}
        gradient = self._plan.gradient_of(stage + 1, k)
        late = needs.pop(gradient, 0.0) - seconds if kind == "R" else 0.0
        start_s = max(free_s, late, *needs.values(), 0.0)
        if kind in "BI" and cost.host_bytes:
            ahead_s = timed[max(0, len(timed) - cost.fetch_ahead)].start_s
            start_s = max(start_s, self._fetch(rank, action, cost, ahead_s))
        stop_s = start_s + seconds
        timed.append(TimedAction(action, start_s, stop_s))
        self._deliver(action, rank, stop_s)
        self._count_bytes(rank, action, cost, start_s, stop_s)

    def _deliver(self, action: PipelineAction, rank: int, stop_s: float) -> None:
        """Note when the ranks that need the action have its message."""
        stage, kind, k = action
        self._arrival[action, rank] = stop_s
        next_stage = stage + 1 if kind == "F" else stage - 1 if kind in "BI" else -1
        readers = [PipelineAction(next_stage, each, k) for each in ("FR" if kind == "F" else "RBI")]
        if kind == "F":
            readers.append(PipelineAction(stage, "R", k))  # on another rank, with weights on the host
        others = {self._plan.place[each][0] for each in readers if each in self._plan.place} - {rank}
        nbytes = self._costs[stage if kind == "F" else next_stage].output_bytes if next_stage >= 0 else 0
        for other in sorted(others):
            link = (rank, other)
            self._free[link] = max(self._free[link], stop_s) + self._link_s(nbytes)
            self._arrival[action, other] = self._free[link]
            self._wire[rank] += nbytes

    def _link_s(self, nbytes: int) -> float:
        return self._speeds.latency_s + (nbytes / self._speeds.bytes_per_s if self._speeds.bytes_per_s else 0.0)

    # -- bytes ---------------------------------------------------------------------------------------------------------

    def _count_bytes(self, rank: int, action: PipelineAction, cost: StageCost, start_s: float, stop_s: float) -> None:
        stage, kind, k = action
        recomputed = self._plan.recomputes(stage, k)
        kept = cost.input_bytes if recomputed else cost.record_bytes
        extra = cost.forward_extra_bytes if kind in "FR" else cost.backward_extra_bytes
        of_weights = cost.record_bytes if cost.weight_record_bytes is None else cost.weight_record_bytes
        change = self._changes[rank]
        change += [(start_s, extra), (stop_s, -extra)]
        if kind == "F":
            change.append((start_s, kept))
            if cost.host_bytes and not recomputed and not self._plan.is_read_at_once(action):
                self._offload(rank, action, cost, stop_s)
            if recomputed and self._plan.weights_on_host:
                change.append((stop_s, -kept))  # the input is moved to the host
        elif kind == "R":
            change.append((start_s, cost.record_bytes - (0 if self._plan.weights_on_host else kept)))
        elif kind == "I":
            change.append((stop_s, of_weights - cost.record_bytes))
        else:
            change.append((stop_s, -(cost.record_bytes if kind == "B" else of_weights)))

    def _offload(self, rank: int, action: PipelineAction, cost: StageCost, stop_s: float) -> None:
        end_s = self._copy(rank, "d2h", "stash", action, cost, stop_s)
        self._on_host[action.stage, action.k] = end_s
        self._sends[rank].append((len(self._timed[rank]) - 1, end_s))
        self._changes[rank].append((end_s, -cost.host_bytes))

    def _sent_before(self, rank: int, position: int) -> float:
        """Return when all records of actions before a position are on the host."""
        return max((end_s for sent, end_s in self._sends[rank][-2:] if sent < position), default=0.0)

    def _fetch(self, rank: int, action: PipelineAction, cost: StageCost, ahead_s: float) -> float:
        """Fetch a record from the host; return when it is there."""
        out_s = self._on_host.get((action.stage, action.k))
        if out_s is None:  # recomputed, or read at once
            return 0.0
        end_s = self._copy(rank, "h2d", "fetch", action, cost, max(ahead_s, out_s))
        self._changes[rank].append((self._copies[rank][-1].start_s, cost.host_bytes))
        return end_s

    def _copy(self, rank: int, lane: str, kind: str, action: PipelineAction, cost: StageCost, ready_s: float) -> float:
        speed = self._speeds.host_bytes_per_s
        start_s = max(ready_s, self._free[rank, lane])
        end_s = self._free[rank, lane] = start_s + (cost.host_bytes / speed if speed else 0.0)
        self._copies[rank].append(Event(lane, kind, start_s, end_s, f"stage {action.stage}", action.k, cost.host_bytes))
        return end_s

    def _add_up(self, rank: int) -> Iterator[tuple[float, int]]:
        """Yield the bytes of a rank at each change; at one time, releases come first."""
        nbytes = self._weight_bytes(rank)
        yield 0.0, nbytes
        for t_s, change in sorted(self._changes[rank]):
            nbytes += change
            yield t_s, nbytes

    def _weight_bytes(self, rank: int) -> int:
        """Return the bytes of weights on a rank; with weights on the host, of two visits in a row."""
        sizes = [cost.weight_bytes for cost in self._costs]
        if not self._plan.weights_on_host:
            return sum(sizes[stage] for stage in self._plan.stages_of(rank))
        visits = list(dict.fromkeys((a.stage, a.kind == "F") for a in self._plan.ranks[rank]))
        return max(
            (sizes[a] + sizes[b] for (a, _), (b, _) in zip(visits, [*visits[1:], visits[0]], strict=True)), default=0
        )
