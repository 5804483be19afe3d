"""Execute a plan for one micro-batch: first runs, runs again, backward, and what waits on the host.

Every run of a layer has gradients on, also where its graph is dropped at once: under `no_grad` PyTorch may take other
kernels. A run again replays the stage's tape and calls its layer, under the random state and from the buffers that the
first run found. Gradients pass from cut to cut through sinks, so autograd adds them in the order of plain training.

It is long because first runs, runs again and backward share what is held between two operations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from l2l_core._torch import DisableTorchDispatch, pytree
from l2l_core.model import RandomState, keep_attributes
from l2l_core.step.graph import Sink, enter, run_backward
from l2l_core.strategies.forward import Forward, Stage, Tensor
from l2l_core.strategies.frames import Frames, Position, Seen, key_of, older
from l2l_core.strategies.meter import Meter
from l2l_core.strategies.moves import Moves
from l2l_core.strategies.plan import COMPUTES, FALL, FCK, OFF, OFFX, PRE, PREX, B, Operation
from l2l_core.strategies.replay import Replay, as_it_is
from l2l_core.strategies.structure import Structure

OnMade = Callable[[int, dict[int, Tensor], bool], None]  # stage, the cut behind it, whether it ran again
Timed = Callable[[str, str, int], Callable[[], None]]  # begins an event of a kind, layer and visit; the result ends it
_BACK = {PRE: OFF, PREX: OFFX}


@dataclass(eq=False)
class Record:
    """What backward through one stage reads.

    Attributes:
        entries: the tensors of older stages as this one has read them, each with where its gradient gathers.
        outs: what it has made for later stages.
        saved: storages that autograd has saved.
    """

    entries: dict[int, tuple[Tensor, Sink]]
    outs: dict[int, Tensor]
    saved: dict[int, None]


class Done(NamedTuple):
    """One executed operation, in bytes counted by the meter."""

    operation: Operation
    high: int  # most bytes during it
    after: int
    host: int  # bytes on the host after it
    seconds: float
    record: int = 0  # of B: bytes of the record that are in no tensor at a cut
    waiting: int = 0  # of B: bytes of gradients that wait at the cut
    frames: Frames | None = None  # of a first run, if it is measured


class Execution(Forward):
    """One micro-batch under one plan.

    Invariant: between operations it holds the cut, what the plan keeps, and gradients that wait at the next cut.

    Args:
        structure: learned from a micro-batch of this form.
        meter, moves: count and move bytes.
        timed: tells the trace of compute.
    """

    def __init__(
        self,
        model: nn.Module,
        layers: Mapping[nn.Module, str],
        task: Callable[[], Tensor],
        structure: Structure,
        meter: Meter,
        moves: Moves,
        timed: Timed,
        k: int = 0,
    ) -> None:
        super().__init__(model, layers, task)
        self.structure, self.meter, self.moves, self.k = structure, meter, moves, k
        self.log: list[Done] = []
        self.loss = torch.zeros(())
        self.layer_forwards = 0
        self.on_made: OnMade | None = None
        self.backs = 0  # how many backwards have begun
        self.measures = False
        self.on_done: Callable[[Done], None] = lambda done: None
        self._timed = timed
        self._cut: dict[int, Tensor] = {}
        self._entries: dict[int, tuple[Tensor, Sink]] = {}
        self._outs: dict[int, Tensor] = {}
        self._records: dict[int, Record] = {}
        self._held: dict[int, dict[int, Tensor]] = {}
        self._at: tuple[int, dict[int, Tensor]] | None = None  # the input that a run again has just made
        self._waiting: dict[int, Tensor] = {}  # gradients
        self._keeps = False

    def run(self, operations: Sequence[Operation]) -> None:
        """Execute a checked plan.

        Raises:
            RuntimeError: the model takes another way than the one that was learned.
        """
        with self.shadowing():
            for operation in operations:
                self._do(operation)
        assert not (self._records or self._held), f"left: {list(self._records)}, {list(self._held)}"

    def constant_bytes(self) -> dict[int, int]:
        """Return the bytes of what is read across cuts without a gradient, by the stage that made it."""
        made: dict[int, set[int]] = {}
        seen: set[int] = set()
        for number, tensor in self.consts.items():
            if self.born[number] >= 0 and key_of(tensor) not in seen:
                made.setdefault(self.born[number], set()).add(key_of(tensor))
                seen.add(key_of(tensor))
        return {stage: self.meter.bytes_of(keys) for stage, keys in made.items()}

    def _in_frames(self, seen: Seen) -> Frames:
        """Find what shell code made that only the model's own frames hold."""
        held = [*self._cut.values(), *self.consts.values()]
        held += [
            t for r in self._records.values() for t in (*r.outs.values(), *(leaf for leaf, _ in r.entries.values()))
        ]
        held += [t for tensors in self._held.values() for t in tensors.values()]
        keys = {key_of(tensor) for tensor in held}.union(*(record.saved for record in self._records.values()))
        found: dict[int, int] = {}
        late = set()
        for key, (storage, stage) in older(self.numbers, self.born, self.structure).items():
            if key in keys:
                continue
            if storage == -1:
                found[stage] = found.get(stage, 0) + self.meter.bytes_of([key])
            else:
                late.add(storage)
        return Frames(found, frozenset(late), seen.made, seen.ends)

    def _position(self) -> Position:
        return Position(len(self.stages), len(self.signature))

    def _do(self, operation: Operation) -> None:
        kind, i = operation
        self.meter.take_high()
        began_s, record, is_first = time.perf_counter(), 0, len(self.stages) < self.structure.stages
        layer = self.structure.names[i]
        if kind in COMPUTES:
            for out in (OFF, OFFX):
                self.moves.wait((out, i))
            visit = i if is_first else 2 * self.structure.stages - 1 - i
            stop = self._timed("backward" if kind == B else "forward", layer, visit)
            if kind == B:
                record = self._backward(i)
            elif is_first:
                if self.measures:
                    self.meter.seen = Seen(older(self.numbers, self.born, self.structure), self._position)
                self._first(kind, i)
            else:
                self._again(kind, i)
            stop()
            self.moves.settle()
        elif kind in _BACK:
            self.moves.bring((_BACK[kind], i), layer, self.k)
        else:
            self.moves.send((kind, i), self._leaving(kind, i), layer, self.k)
        seconds, waiting = time.perf_counter() - began_s, self.meter.bytes_of(map(key_of, self._waiting.values()))
        seen, self.meter.seen = self.meter.seen, None
        frames = self._in_frames(seen) if seen else None
        high, now = self.meter.take_high(), self.meter.now
        done = Done(operation, high, now, self.moves.host_bytes, seconds, record, waiting, frames)
        self.log.append(done)
        self.on_done(done)

    # -- first runs ----------------------------------------------------------------------------------------------------

    def _first(self, kind: str, i: int) -> None:
        self._keeps = kind == FALL
        if kind == FCK:
            self._held[i] = {number: tensor.detach() for number, tensor in self._cut.items()}
        buffers = {} if self._keeps else self._copy_buffers(i)
        with torch.set_grad_enabled(self._keeps), _saved() as saved:
            loss = self.advance()
        self.stages[-1].buffers = buffers
        self._check_way(is_over=loss is not None)
        if loss is not None:
            self._outs[self.structure.loss] = loss
            with DisableTorchDispatch():  # the result is the caller's
                self.loss = loss.detach().clone()
            self._cut.clear()
        wanted = self.structure.live[i + 1] if loss is None else (self.structure.loss,)
        cut = {number: self._outs[number] if number in self._outs else self._cut[number] for number in wanted}
        if self.on_made is not None:
            self.on_made(i, cut, False)
        if self._keeps:
            self._records[i] = Record(self._entries, self._outs, saved)
        self._entries, self._outs = {}, {}
        self._cut = cut if loss is None else {}

    def _copy_buffers(self, i: int) -> dict[str, Tensor]:
        names = self.structure.buffers[i]
        buffers = dict(self.model.named_buffers(remove_duplicate=False)) if names else {}
        return {name: buffers[name].clone() for name in names}

    def _check_way(self, is_over: bool) -> None:
        known = self.structure.signature
        done = self.signature
        at = self.index
        layer = "loss" if self.stages[-1].call is None else self.name
        same = known[: len(done)] == tuple(done) and self.structure.names[at] == layer
        if not same or is_over != (at == self.structure.stages - 1) or (is_over and len(done) != len(known)):
            raise RuntimeError(
                f"the model takes another way than when it was learned, in stage {at} (up to {layer}): a plan holds for one way. "
                "Layers that are skipped at random, or chosen by values, relay (Relay(model)), but follow no plan"
            )

    def stands_for(self, tensor: Tensor, number: int) -> Tensor:
        if number not in self.structure.differentiable:
            self.consts[number] = tensor
            return tensor
        if number not in self._entries:
            self._entries[number] = self._enter(tensor, number, self._keeps)
        return self._entries[number][0]

    def has_made(self, tensor: Tensor, number: int) -> None:
        if number in self.structure.constants:
            self.consts[number] = tensor
        following = self.structure.live[self.index + 1] if self.index + 1 < self.structure.stages else ()
        if number in following:
            self._outs[number] = tensor

    def _enter(self, tensor: Tensor, number: int, keeps: bool) -> tuple[Tensor, Sink]:
        sink = Sink()
        if keeps:
            with torch.enable_grad():
                leaf = enter(tensor, sink)
        else:
            leaf = tensor.detach()
        self.numbers[leaf] = number  # a layer may hand it on
        return leaf, sink

    def run_layer(self, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.layer_forwards += 1
        if self._keeps:
            return real(*args, **kwargs)
        args, kwargs = pytree.tree_map(self._with_graph, (args, kwargs))
        with torch.enable_grad():
            out = real(*args, **kwargs)
        del args, kwargs
        return pytree.tree_map(self._without_graph, out)

    def _with_graph(self, value: Any) -> Any:
        number = None if self.is_own(value) else self.numbers.get(value)
        return value if number not in self.structure.differentiable else self._enter(value, number, True)[0]

    def _without_graph(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad or self.is_own(value):
            return value
        plain, number = value.detach(), self.numbers.get(value)
        if number is not None:
            self.numbers[plain] = number
        return plain

    # -- again ---------------------------------------------------------------------------------------------------------

    def _again(self, kind: str, i: int) -> None:
        given = self._at[1] if self._at and self._at[0] == i else self._held[i]
        self._at = None
        if kind == FCK:
            self._held[i] = given
        elif kind == FALL:
            self._held.pop(i, None)
        self._keeps = kind == FALL
        stage, is_last = self.stages[i], i == self.structure.stages - 1
        wanted = frozenset((self.structure.loss,)) if is_last else self.structure.live[i + 1]
        self._entries = entries = {}
        shell_in = partial(self._read_again, stage=i) if self._keeps else as_it_is
        layer_in, layer_out = (shell_in, as_it_is) if self._keeps else (self._read_without, self._without_graph)
        with self._as_first(stage) as lent, _saved() as saved:
            replay = Replay(given, self.consts, lent)
            for call, on in zip(stage.shell, self.structure.grads_on[i], strict=True):
                with torch.set_grad_enabled(self._keeps and on):
                    replay.run(call, shell_in)
            if stage.call is not None:
                replay.forget_all_but(wanted, stage.call)
                with torch.enable_grad():
                    replay.run(stage.call, layer_in, layer_out)
                self.layer_forwards += 1
        self._entries = {}
        made = {number: replay.values[number] for number in wanted}
        del replay
        if self._keeps:
            self._records[i] = Record(entries, {t: made[t] for t in wanted if t not in given}, saved)
            made = {number: tensor.detach() for number, tensor in made.items()}
        if self.on_made is not None:
            self.on_made(i, made, True)
        self._at = None if is_last else (i + 1, made)

    def _read_again(self, tensor: Tensor, number: int, stage: int) -> Tensor:
        # At its first reading, as in the first run: the order in which nodes are made is the one in which autograd runs them.
        if number not in self.structure.reads[stage]:
            return tensor
        if number not in self._entries:
            self._entries[number] = self._enter(tensor, number, True)
        return self._entries[number][0]

    def _read_without(self, tensor: Tensor, number: int) -> Tensor:
        return self._enter(tensor, number, True)[0] if number in self.structure.differentiable else tensor

    @contextmanager
    def _as_first(self, stage: Stage) -> Iterator[dict[int, Tensor]]:
        """Let a stage find random state and buffers as in its first run, and leave no effect but tensors.

        Buffers are lent as copies: to put values back would break autograd's check of what the run has saved.
        """
        outside, lent = RandomState.take(), {}
        places = [(self.model.get_submodule(path.rpartition(".")[0]), path) for path in stage.buffers]
        own = [(module, path.rpartition(".")[2], module._buffers[path.rpartition(".")[2]]) for module, path in places]
        for (module, path), (_, name, buffer) in zip(places, own, strict=True):
            lent.setdefault(id(buffer), stage.buffers[path].clone())
            module._buffers[name] = lent[id(buffer)]
        modules = [m for m, name in self.layers.items() if name == self.structure.names[stage.index]]
        put_back = keep_attributes(part for module in modules for part in module.modules())
        stage.random.put()
        try:
            yield lent
        finally:
            outside.put()
            put_back()
            for module, name, buffer in own:
                module._buffers[name] = buffer

    # -- backward ------------------------------------------------------------------------------------------------------

    def _backward(self, i: int) -> int:
        """Back-propagate through stage i; returns the bytes of its record that lie in no tensor at a cut."""
        record = self._records.pop(i)
        self.backs += 1
        self._held.pop(i, None)
        self.stages[i].buffers.clear()
        if self._at and self._at[0] == i + 1:
            self._at = None
        own_bytes = self.meter.bytes_of(record.saved.keys() - self._at_cuts(record))
        record.saved.clear()
        if i == self.structure.stages - 1:
            self._waiting = {self.structure.loss: torch.ones_like(record.outs[self.structure.loss])}
        roots = [
            (get_gradient_edge(root), self._waiting.pop(number))
            for number in list(self._waiting)
            if (root := record.outs.get(number, record.entries.get(number, (None,))[0])) is not None
        ]
        entries = record.entries  # they stay until the end, whoever else has them: so the bytes depend on nobody else
        del record
        run_backward(roots)
        del roots
        for number, (_, sink) in entries.items():
            if (grad := sink.take()) is not None:
                self._waiting[number] = grad
        return own_bytes

    # -- what goes to the host -----------------------------------------------------------------------------------------

    def _leaving(self, kind: str, i: int) -> list[int]:
        """List the storages that go out: what stage i is the last to read, and what autograd has saved for it alone."""
        if kind == OFFX:
            tensors, saved = self._held[i], set()
        else:
            record = self._records[i]
            tensors = {number: leaf for number, (leaf, _) in record.entries.items()}
            saved = record.saved.keys() - self._at_cuts(record)
        movable = self.structure.movable(i)
        mine = {key_of(t) for number, t in tensors.items() if self.structure.storage[number] in movable}
        return sorted(saved | mine - {key_of(t) for t in self.consts.values()})

    def _at_cuts(self, record: Record) -> set[int]:
        tensors = [leaf for leaf, _ in record.entries.values()]
        return {key_of(t) for t in (*tensors, *record.outs.values(), *self.consts.values(), *self._cut.values())}


@contextmanager
def _saved() -> Iterator[dict[int, None]]:
    """Note the storages that autograd saves in the block."""
    keys: dict[int, None] = {}

    def pack(tensor: Tensor) -> Tensor:
        keys[key_of(tensor)] = None
        return tensor.detach()  # itself would be a cycle: node, saved output, node

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield keys
