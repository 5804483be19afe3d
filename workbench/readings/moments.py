"""The state of the relay at one event or at one time, deduced from a trace's columns alone. It draws nothing.

A finished step is known exactly. Of a step under way only what is over is known: the layer that computed last still
counts as computing, and a lane shows what it did last.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from l2l_core.trace import CATEGORIES, LANES, PLACES, Trace
from workbench.readings.algorithm import line_of
from workbench.readings.columns import Columns
from workbench.readings.copies import Copies
from workbench.readings.moment import Moment, Phase, Slot, Travel, Work
from workbench.readings.residency import Residency


class Moments:
    """Every moment of a step; arrays are made once, so that a moment costs far less than a millisecond.

    Args:
        columns: events and samples of the step.
        keys: the stack, in order.
        micro_batches, ahead, stash: settings of the step; micro-batches are counted if not given.
        before: the step before, of the same stack: it says how many bytes a layer loads and in which order layers come.
            As `Moments` it need not be prepared again for each frame.
        live: whether the step is still under way, so that `columns` holds only what is over.
    """

    def __init__(
        self,
        columns: Columns,
        keys: Sequence[str],
        *,
        micro_batches: int | None = None,
        ahead: int = 1,
        stash: str = "device",
        before: Moments | Columns | None = None,
        live: bool = False,
    ) -> None:
        self.keys, self.live, self.stash = tuple(keys), live, stash
        self._columns = c = columns
        by_stop = np.argsort(c.stop_s, kind="stable")
        self._order = by_stop[np.argsort(c.start_s[by_stop], kind="stable")]
        self.count = len(self._order)
        self._start, self._stop = c.start_s[self._order], c.stop_s[self._order]
        self.end_s = float(self._stop.max()) if self.count else 0.0
        self._kind, self._k, self._layer = c.kind[self._order], c.k[self._order], c.layer[self._order]
        self._lane = c.lane[self._order]
        self._lanes = {name: np.flatnonzero(self._lane == number) for number, name in enumerate(LANES)}
        self.micro_batches = micro_batches or int(c.k.max(initial=0)) + 1
        if isinstance(before, Columns):
            before = Moments(before, keys, ahead=ahead)
        self._earlier = before if live else None

        rank = {key: number for number, key in enumerate(self.keys)}
        self._rank = np.array([rank.get(name, -1) for name in c.layers], np.int64)  # place of a layer in the stack
        ranks = self._rank[self._layer] if self.count else np.empty(0, np.int64)
        self._loads = self._put_together("load", ranks, self._earlier._loads if self._earlier else None)
        self._pushes = self._put_together("push", ranks, self._earlier._pushes if self._earlier else None)
        self._follow_compute(ranks)
        visits = list(zip(self._visit_start.tolist(), self._visit_stop.tolist(), self._visited, strict=True))
        self._expected = self._expect()
        loads = list(zip(self._loads.start_s.tolist(), self._loads.layers, strict=True))
        self._residency = Residency(loads, visits, self._expected, ahead + 1)
        self._follow_gradients(ranks)
        self._follow_stash(ranks)
        self._samples = {place: c.at(place) for place in PLACES}
        self._sample_s = {place: c.sample_s[rows] for place, rows in self._samples.items()}
        self._peaks = self._find_peaks()

    @classmethod
    def of(cls, trace: Trace, keys: Sequence[str] | None = None) -> Moments:
        """A finished step; without `keys` the layers that it loads or runs, in the order of the trace's names."""
        columns, settings = Columns.of(trace), trace.settings
        if keys is None:
            used = {e.layer for e in trace.events if e.kind in ("load", "forward") and e.layer != "shell"}
            keys = [key for key in trace.names if key in used]
            keys += sorted(used.difference(keys))
        return cls(
            columns,
            keys,
            micro_batches=settings.get("micro_batches"),
            ahead=settings.get("ahead", 1),
            stash=settings.get("stash", "device"),
        )

    def visits(self) -> list[int]:
        """Events with which a visit begins."""
        return self._visit_rows.tolist()

    def at(self, i: int) -> Moment:
        """The moment just after event `i` has started, 0 <= i < count, by time of start."""
        if not 0 <= i < self.count:
            raise ValueError(f"event {i}: the step has {self.count} events, numbered from 0")
        return self._moment(i, float(self._start[i]))

    def when(self, t_s: float) -> Moment:
        """The moment at a time, in seconds since the step began."""
        return self._moment(int(np.searchsorted(self._start, t_s, side="right")) - 1, t_s)

    def telling(self) -> int:
        """An event in mid-backward at which as many lanes as possible are at work; 0 if there is none."""
        runs = np.flatnonzero(self._is("backward"))
        if not len(runs):
            return max(0, self.count // 2)
        runs = runs[len(runs) // 4 : max(len(runs) * 3 // 4, len(runs) // 4 + 1)]
        candidates = np.arange(runs[0], runs[-1] + 1)
        times = self._start[candidates]
        busy = np.zeros(len(times), np.int64)
        for spans in (self._loads, self._pushes):
            busy += 2 * _covers(spans.start_s, spans.stop_s, times)
            margin_s = (spans.stop_s - spans.start_s) / 4  # well under way shows best
            busy += _covers(spans.start_s + margin_s, spans.stop_s - margin_s, times)
        for lane in ("compute", "eps"):
            rows = self._lanes[lane]
            busy += 3 * _covers(self._start[rows], self._stop[rows], times)
        best = candidates[busy == busy.max()]
        return int(best[len(best) // 2])

    # -- prepared once -------------------------------------------------------------------------------------------------

    def _is(self, *kinds: str) -> NDArray[np.bool_]:
        wanted = [number for number, name in enumerate(self._columns.kinds) if name in kinds]
        return np.isin(self._kind, wanted)

    def _put_together(self, kind: str, ranks: NDArray[np.int64], earlier: Copies | None) -> Copies:
        rows = np.flatnonzero(self._is(kind) & (ranks >= 0))
        nbytes = self._columns.nbytes[self._order[rows]]
        return Copies(self._start[rows], self._stop[rows], ranks[rows], nbytes, earlier, self.live)

    def _follow_compute(self, ranks: NDArray[np.int64]) -> None:
        """Visits: runs of compute events of one layer. The last layer's forward and backward are one visit."""
        self._passes = np.flatnonzero(self._is("forward", "backward", "loss"))
        rows = np.flatnonzero(self._is("forward", "backward") & (ranks >= 0))
        visit, kind = self._columns.visit[self._order][rows], self._kind[rows]
        new = np.ones(len(rows), bool)
        new[1:] = (np.diff(ranks[rows]) != 0) | ((np.diff(visit) != 0) & (np.diff(kind) == 0))
        firsts = np.flatnonzero(new)
        self._visit_rows = rows[firsts]
        self._visit_start = self._start[rows[firsts]]
        self._visit_stop = np.maximum.reduceat(self._stop[rows], firsts) if len(firsts) else self._stop[rows]
        self._visited: list[int] = ranks[rows[firsts]].tolist()
        backward = np.flatnonzero(self._is("backward"))
        self._turn_row = int(backward[0]) if len(backward) else self.count
        compute = self._lanes["compute"]
        self._compute_end_s = float(self._stop[compute].max()) if len(compute) else 0.0

    def _expect(self) -> list[int]:
        """Visits still to come in a step under way, as in the step before or down the stack and back."""
        if not self.live:
            return []
        depth = len(self.keys)
        plan = self._earlier._visited if self._earlier else [*range(depth), *range(depth - 2, -1, -1)]
        return plan[len(self._visited) :]

    def _follow_gradients(self, ranks: NDArray[np.int64]) -> None:
        """When each gradient comes to be and when it has left, and when the EPS is done with it."""
        rows = np.flatnonzero(self._is("backward") & (ranks >= 0))
        visits = np.searchsorted(self._visit_rows, rows, side="right") - 1
        numbers, first = np.unique(visits, return_index=True)
        self._gradients: list[tuple[float, float, float, int, int]] = []  # begun, complete, gone, layer, push
        before = self._earlier
        still = set(before._visited).difference(before._pushes.layers) if before else set()  # what is frozen
        pushes: dict[int, list[int]] = {}
        for push, layer in enumerate(self._pushes.layers):
            pushes.setdefault(layer, []).append(push)
        for number, begun_s in zip(numbers.tolist(), self._start[rows[first]].tolist(), strict=True):
            layer = self._visited[number]
            push = next((p for p in pushes.get(layer, ()) if self._pushes.stop_s[p] >= begun_s), -1)
            over_s = float(self._visit_stop[number]) if not self.live or number + 1 < len(self._visited) else np.inf
            if push >= 0:
                gone_s = float(self._pushes.stop_s[push])
                if self._pushes.share(push, np.inf) < 1.0:  # pieces are still to come
                    gone_s = np.inf
                self._gradients.append((begun_s, over_s, max(gone_s, over_s), layer, push))
            elif self.live and number + 2 >= len(self._visited) and layer not in still:  # a push not seen yet
                self._gradients.append((begun_s, over_s, np.inf, layer, -1))
        self._gradient_start = [begun_s for begun_s, *_ in self._gradients]
        updates = np.flatnonzero(self._is("update") & (ranks >= 0))
        updates = updates[np.argsort(self._stop[updates], kind="stable")]
        self._update_stop = self._stop[updates]
        self._updates = [self.keys[rank] for rank in ranks[updates].tolist()]
        by_stop = np.argsort(self._pushes.stop_s, kind="stable")
        self._arrival_s = self._pushes.stop_s[by_stop]
        self._arrivals = [self.keys[self._pushes.layers[push]] for push in by_stop.tolist()]

    def _follow_stash(self, ranks: NDArray[np.int64]) -> None:
        """When inputs are put aside, and when their recompute is over."""
        visit, width = self._columns.visit[self._order], int(self._k.max(initial=0)) + 2
        forward = np.flatnonzero(self._is("forward") & (ranks >= 0))
        backward = np.flatnonzero(self._is("backward") & (ranks >= 0))
        calls = visit[forward] * width + self._k[forward] + 1
        _, first = np.unique(calls, return_index=True)
        forward = forward[first]
        # a call is split where compute waits: the last part ends it
        back = visit[backward] * width + self._k[backward] + 1
        _, last = np.unique(back[::-1], return_index=True)
        backward = backward[len(backward) - 1 - last]
        if not self.live and len(backward):  # what no backward comes back for is not kept
            total = 2 * (int(visit[forward].max(initial=-1)) + 1) - 1
            partners = (total - visit[backward]) * width + self._k[backward] + 1
            forward = forward[np.isin(visit[forward] * width + self._k[forward] + 1, partners)]
        self._put_s, self._put_sum = _running(self._start[forward], self._weights(forward))
        self._taken_s, self._taken_sum = _running(self._stop[backward], self._weights(backward))

    def _weights(self, rows: NDArray[np.intp]) -> NDArray[np.int64]:
        return np.where(self._k[rows] < 0, self.micro_batches, 1)  # taken together, an event stands for all

    def _find_peaks(self) -> tuple[int, int]:
        totals, stashes = [0], [0]
        for place, rows in self._samples.items():
            sampled = self._columns.sample_bytes[rows]
            stashes.append(int(sampled[:, CATEGORIES.index("stash")].max(initial=0)))
            if place == "device":
                totals.append(int(sampled.sum(axis=1).max(initial=0)))
        earlier = self._earlier._peaks if self._earlier else (0, 0)
        return max(max(totals), earlier[0]), max(max(stashes), earlier[1])

    # -- one moment ----------------------------------------------------------------------------------------------------

    def _moment(self, i: int, t_s: float) -> Moment:
        lanes = {lane: self._work(lane, i, t_s) for lane in LANES}
        bytes_at = {place: self._bytes(place, t_s) for place in PLACES}
        held = self._residency.at(t_s)
        slots = tuple(
            Slot(None, 0.0) if one is None else Slot(self.keys[one.layer], self._share(one.load, one.layer, t_s))
            for one in held
        )
        phase, kind, k = self._phase(i, t_s)
        layer, waits_for, first = self._computing(t_s, {slot.layer: slot.share for slot in slots}, phase)
        adding, leaving = self._gradients_at(t_s)
        eps, updated = lanes["eps"], tuple(self._updates[: int(np.searchsorted(self._update_stop, t_s, "right"))])
        arrived = frozenset(self._arrivals[: int(np.searchsorted(self._arrival_s, t_s, "right"))]).difference(updated)
        line = self._line(i) if phase != "idle" else None
        if self.live and kind:  # what happens in a moment's time is not known, so the line follows the layer
            line = self._line(self._last_pass(i))
        beside = {self._line(self._last(lane, i)): lane for lane in reversed(LANES) if lanes[lane] is not None}
        return Moment(
            i=i,
            count=self.count if not self.live else max(self.count, self._earlier.count) if self._earlier else 0,
            t_s=t_s,
            phase=phase,
            lanes=lanes,
            slots=slots,
            layer=layer,
            waits_for=waits_for,
            k=-1 if layer is None else 0 if first and k >= 0 else k,
            micro_batches=self.micro_batches,
            kind=kind,
            adding=adding,
            leaving=leaving,
            arrived=arrived,
            eps_layer=eps.layer if eps is not None else None,
            eps_kind=eps.kind if eps is not None else "",
            updated=updated,
            stashed=_so_far(self._put_s, self._put_sum, t_s) - _so_far(self._taken_s, self._taken_sum, t_s),
            stash=self.stash,
            device=bytes_at["device"],
            host=bytes_at["host"],
            device_peak_bytes=self._peaks[0],
            stash_peak_bytes=self._peaks[1],
            line=line,
            beside=tuple(sorted((number, lane) for number, lane in beside.items() if number != line)),
        )

    def _horizon(self, lane: str, i: int) -> int:
        """The last event that has begun when event `i` begins: of those that begin together `i` stands for its lane."""
        if i < 0 or self._lane[i] == LANES.index(lane):
            return i
        return int(np.searchsorted(self._start, self._start[i], side="right")) - 1

    def _last(self, lane: str, i: int) -> int:
        """The event of a lane that started last, -1 if there is none."""
        rows = self._lanes[lane]
        j = int(np.searchsorted(rows, self._horizon(lane, i), side="right")) - 1
        return int(rows[j]) if j >= 0 else -1

    def _last_pass(self, i: int) -> int:
        """The forward, backward or loss event that started last, -1 if there is none."""
        j = int(np.searchsorted(self._passes, self._horizon("compute", i), side="right")) - 1
        return int(self._passes[j]) if j >= 0 else -1

    def _work(self, lane: str, i: int, t_s: float) -> Work | None:
        row = self._last(lane, i)
        if row < 0:
            return None
        start_s, stop_s = float(self._start[row]), float(self._stop[row])
        if self.live:
            if t_s > stop_s + self._visit_s:
                return None
            progress = None
        elif t_s >= stop_s and row != i:
            return None
        elif row == i and t_s > stop_s:  # it was the last thing that happened, and it is over
            return None
        else:
            progress = min(1.0, (t_s - start_s) / (stop_s - start_s)) if stop_s > start_s else 0.0
        c, source = self._columns, self._order[row]
        return Work(
            c.kinds[self._kind[row]], c.layers[self._layer[row]], int(self._k[row]), int(c.nbytes[source]), progress
        )

    @cached_property
    def _visit_s(self) -> float:
        """About how long a visit takes."""
        starts = self._visit_start
        if len(starts) > 1:
            return float(np.diff(starts[-9:]).mean())
        return self._earlier._visit_s if self._earlier else 0.1

    def _line(self, row: int) -> int | None:
        if row < 0:
            return None
        c = self._columns
        return line_of(c.kinds[self._kind[row]], c.layers[self._layer[row]], row >= self._turn_row)

    def _bytes(self, place: str, t_s: float) -> dict[str, int]:
        j = int(np.searchsorted(self._sample_s[place], t_s, side="right")) - 1
        if j < 0:
            return {}
        row = self._columns.sample_bytes[self._samples[place][j]].tolist()
        return {category: nbytes for category, nbytes in zip(CATEGORIES, row, strict=True) if nbytes}

    def _share(self, load: int, layer: int, t_s: float) -> float:
        if load < 0:
            return 1.0
        total = self._loads.total(load)
        if self.live and load == len(self._loads.layers) - 1 and layer not in self._visited[-1:]:
            total = max(total, self._loads.known.get(layer, 0))
        return min(1.0, self._loads.done(load, t_s) / total) if total else 1.0

    def _phase(self, i: int, t_s: float) -> tuple[Phase, str, int]:
        """The phase, and the kind and micro-batch of what the pass did last."""
        if i < 0 or (not self.live and t_s > self.end_s):
            return ("idle" if not (self.live and self.count) else "fill"), "", -1
        row = self._last_pass(i)
        if row < 0:
            return "fill", "", -1
        kind = self._columns.kinds[self._kind[row]]
        phase: Phase = "backward" if kind == "backward" else "forward"
        if not self.live and t_s >= self._compute_end_s and self._last("compute", i) != i:
            phase = "tail"
        return phase, kind, int(self._k[row])

    def _computing(
        self, t_s: float, shares: Mapping[str | None, float], phase: Phase
    ) -> tuple[str | None, str | None, bool]:
        """The layer that computes, the one that compute waits for, and whether its first event is still to come."""
        if phase in ("tail", "idle"):
            return None, None, False
        j = int(np.searchsorted(self._visit_start, t_s, side="right")) - 1
        over = j < 0 or t_s >= self._visit_stop[j]
        key = self.keys[self._visited[j]] if j >= 0 else None
        if not over or (self.live and key in shares):
            return key, None, False
        following = [*self._visited[j + 1 : j + 2], *self._expected[:1]]
        if not following:
            return (key if key in shares else None), None, False
        coming = self.keys[following[0]]
        if shares.get(coming, 0.0) >= 1.0 and j >= 0:
            return coming, None, True
        return None, coming, False

    def _gradients_at(self, t_s: float) -> tuple[str | None, tuple[Travel, ...]]:
        adding, leaving = None, []
        stop = int(np.searchsorted(self._gradient_start, t_s, side="right"))
        for _, complete_s, gone_s, layer, push in self._gradients[max(0, stop - 8) : stop]:
            if t_s < complete_s:
                adding = self.keys[layer]
            elif t_s < gone_s:
                leaving.append(Travel(self.keys[layer], self._pushes.share(push, t_s) if push >= 0 else 0.0))
        return adding, tuple(leaving)


def _running(times: NDArray[np.float64], amounts: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Times in order, and the sum of the amounts up to each."""
    order = np.argsort(times, kind="stable")
    return times[order], np.concatenate([np.zeros(1, np.int64), np.cumsum(amounts[order])])


def _so_far(times: NDArray[np.float64], sums: NDArray[np.int64], t_s: float) -> int:
    return int(sums[np.searchsorted(times, t_s, side="right")])


def _covers(start_s: NDArray[np.float64], stop_s: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether some span covers each time; spans in order of start."""
    if not len(start_s):
        return np.zeros(len(times), bool)
    j = np.searchsorted(start_s, times, side="right") - 1
    return (j >= 0) & (times < stop_s[np.maximum(j, 0)])
