"""What a relay asks of its workers, be it one or several: the value that makes the difference, so that nobody else has to.

A `Solo` does nothing and asks nobody. A `Team` puts its own place of weights and its own reducer at the seams of the EPS,
numbers micro-batches through all workers, and sees to it that all do the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from l2l_core.batches import Alone as AloneWithBatches
from l2l_core.batches import Others
from l2l_core.devices import Device, Ledger, WaitingRoom
from l2l_core.eps import Alone, InHostMemory, LayerStore, Place, Reducer, Side
from l2l_core.eps.blocks import Block, Layout, Unit, into_memory
from l2l_core.trace import Trace
from l2l_core.workers.crew import Crew
from l2l_core.workers.errors import WorkerError
from l2l_core.workers.place import Gathered
from l2l_core.workers.reducer import Exchanged
from l2l_core.workers.refusals import Unchanged, refuse_batch_norm
from l2l_core.workers.rounds import init_round, launched
from l2l_core.workers.settings import Workers, settings_of
from l2l_core.workers.shares import Shares

T = TypeVar("T")
Facts = Callable[[], Mapping[str, str]]


def numbered(names: Sequence[str]) -> list[str]:
    """Give keys by number."""
    return [f"L{i:03d}" for i in range(len(names))]


class Company(Protocol):
    """Is whoever trains along: nobody, or other workers.

    Attributes:
        rank, count: of this worker, and how many there are.
        others: what the weighing of micro-batches asks.
        can_rehearse: whether one worker may run passes that the others do not run.
        settings: how they train together.
        lost: the error that tells of a lost worker, if there is one.
    """

    rank: int
    count: int
    others: Others
    can_rehearse: bool
    settings: Workers

    @property
    def lost(self) -> WorkerError | None: ...

    def keep_by(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        """Give what finds a place for the weights of a block of the model, once; `empty` makes host memory."""

    def place(self, device: Device, host: Ledger) -> Place:
        """Make what knows where weights are."""

    def place_apart(self, device: Device, host: Ledger) -> Place:
        """Make the same for passes that train nothing, on another device and with another ledger; blocks are seen whole."""

    def scratch(self, device: Device, host: Ledger) -> WaitingRoom | None:
        """Say where a stash waits on the disk; None if it has no place there."""

    def reducer(self) -> Reducer:
        """Make what happens to gradients before updates."""

    def take_over(self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: Facts) -> int:
        """Take what this worker keeps of the blocks of a new relay; returns the number of steps that they have made already."""

    def together(self, what: str, facts: Facts) -> AbstractContextManager[None]:
        """Do something with all workers; see `Crew.together`."""

    def whole(self) -> AbstractContextManager[None]:
        """Hold all of every block in a block of code that all workers run; inside of another one nothing happens."""

    def seen_whole(self) -> AbstractContextManager[None]:
        """Let the EPS's custody show all of every block, in a block of code that all workers run."""

    def editing(self) -> AbstractContextManager[None]:
        """Let layers be edited in a block of code that all workers run."""

    def keys(self, names: Sequence[str]) -> list[str]:
        """Give permanent keys to layers of these names, whose user gave them none."""

    def room(self, block: Block) -> tuple[Layout | None, int]:
        """Say what this worker holds of a block, None for all of it, and in how many elements."""

    def settle(self, waiting: Mapping[Block, Side]) -> None:
        """Hold parts of what is in stacks, and all of what waits beside them, after blocks have changed places."""

    def agree_on(self, units: Sequence[Unit]) -> None:
        """Let all workers have the weights that worker 0 has, and buffers that are to be the same; blocks are whole."""

    def unchanged(self, units: Sequence[Unit]) -> Callable[[], None]:
        """Make the check that forwards leave alone what no worker could know of the others."""

    def signed(self, trace: Trace) -> Trace:
        """Say in the trace of what begins now whose it is; returns it."""

    def failing(self, error: BaseException) -> None: ...
    def failed(self, error: BaseException, updated: Sequence[str]) -> list[str]: ...
    def every(self, mine: Sequence[T], what: str = "") -> list[T]: ...
    def first(self, count: int) -> int: ...

    def refuse(self, what: str, why: str) -> None:
        """Refuse what several workers cannot do."""

    def leave(self) -> None:
        """Make an ordinary model again of what workers hold, if all are there."""

    def close(self) -> None:
        """Join threads, and give up connections."""


class Solo:
    """Is the company of one worker, with its weights in memory."""

    rank, count = 0, 1
    others: Others = AloneWithBatches()
    can_rehearse = True
    settings = Workers()
    lost = None

    def keep_by(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        return into_memory(empty)

    def place(self, device: Device, host: Ledger) -> Place:
        return InHostMemory(device, host)

    def place_apart(self, device: Device, host: Ledger) -> Place:
        return InHostMemory(device, host)

    def scratch(self, device: Device, host: Ledger) -> WaitingRoom | None:
        return None

    def reducer(self) -> Reducer:
        return Alone()

    def take_over(self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: Facts) -> int:
        return 0

    def together(self, what: str, facts: Facts) -> AbstractContextManager[None]:
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def seen_whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def editing(self) -> AbstractContextManager[None]:
        return nullcontext()

    keys = staticmethod(numbered)

    def room(self, block: Block) -> tuple[Layout | None, int]:
        return None, block.layout.numel

    def settle(self, waiting: Mapping[Block, Side]) -> None:
        pass

    def agree_on(self, units: Sequence[Unit]) -> None:
        pass

    def unchanged(self, units: Sequence[Unit]) -> Callable[[], None]:
        return lambda: None

    def signed(self, trace: Trace) -> Trace:
        return trace

    def failing(self, error: BaseException) -> None:
        pass

    def failed(self, error: BaseException, updated: Sequence[str]) -> list[str]:
        return list(updated)

    def every(self, mine: Sequence[T], what: str = "") -> list[T]:
        return list(mine)

    def first(self, count: int) -> int:
        return 0

    def refuse(self, what: str, why: str) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass


class Team:
    """Is the company of several workers.

    Args:
        crew: the workers.
        settings: how they train together.
    """

    can_rehearse = False

    def __init__(self, crew: Crew, settings: Workers) -> None:
        self._crew, self.settings = crew, settings
        self.rank, self.count, self.others = crew.rank, crew.count, crew
        self.together, self.failing, self.failed = crew.together, crew.failing, crew.failed
        self.every, self.first = crew.every, crew.first
        self._shares: Shares | None = None
        self._is_whole = False

    @property
    def lost(self) -> WorkerError | None:
        return self._crew.lost

    def keep_by(self, empty: Callable[[int], torch.Tensor]) -> Callable[[Block], None]:
        return into_memory(empty)

    def place(self, device: Device, host: Ledger) -> Place:
        return Gathered(device, host, self._crew)

    def place_apart(self, device: Device, host: Ledger) -> Place:
        return InHostMemory(device, host)

    def scratch(self, device: Device, host: Ledger) -> WaitingRoom | None:
        return None

    def reducer(self) -> Reducer:
        wire = {"fp32": torch.float32, "bf16": torch.bfloat16}[self.settings.wire]
        return Exchanged(self._crew, keeps_apart=self.settings.reduce == "ordered", wire=wire)

    def take_over(self, units: Sequence[Unit], store: LayerStore, host: Ledger, device: Device, facts: Facts) -> int:
        self._crew.elementwise = store.masters.findings.elementwise
        shares = Shares(self._crew, store.masters, host, device.host_empty)
        modes = {name: getattr(self.settings, name) for name in ("reduce", "wire", "buffers")}
        with self.together("make a relay", lambda: {**modes, **facts()}):
            shares.take_weights()
            shares.take_buffers(units)
        shares.cut()
        self._shares = shares
        return 0

    @contextmanager
    def whole(self) -> Iterator[None]:
        assert self._shares is not None
        if self._is_whole:
            yield
            return
        self._is_whole = True
        try:
            self._shares.join()
            yield
        finally:
            self._is_whole = False
            self._shares.cut()  # of whatever is whole by now

    def seen_whole(self) -> AbstractContextManager[None]:
        return self.whole()

    editing = whole
    keys = staticmethod(numbered)

    def room(self, block: Block) -> tuple[Layout | None, int]:
        cut = self._crew.cut_of(block)
        return cut.part(self.rank), cut.size(self.rank)

    def settle(self, waiting: Mapping[Block, Side]) -> None:
        assert self._shares is not None
        self._shares.cut()
        self._shares.join_waiting(waiting)

    def agree_on(self, units: Sequence[Unit]) -> None:
        assert self._shares is not None
        self._shares.take_weights()
        if self.settings.buffers == "same":
            self._shares.take_buffers(units)

    def unchanged(self, units: Sequence[Unit]) -> Callable[[], None]:
        return Unchanged(units) if self.settings.buffers == "same" else lambda: None

    def signed(self, trace: Trace) -> Trace:
        trace.settings |= {"workers": self.count, "reduce": self.settings.reduce, "wire": self.settings.wire}
        return self._crew.signed(trace)

    def refuse(self, what: str, why: str) -> None:
        """Refuse what several workers cannot do.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{what} is not there for a relay of {self.count} workers: {why}. Nothing was done")

    def leave(self) -> None:
        assert self._shares is not None
        if self._crew.lost is None:
            self._crew.part(self._shares.join)

    def close(self) -> None:
        self._crew.close()


def company(workers: Workers | dist.ProcessGroup | str | Solo | Team | None, model: nn.Module) -> Company:
    """Make the company that a relay of this model is to have, or give the one that is there already.

    Raises:
        ValueError, TypeError: no such thing, or a model that several workers cannot train.
    """
    if workers is None:
        return Solo()
    if isinstance(workers, Solo | Team):
        return workers
    settings = settings_of(workers)
    if not dist.is_available():
        raise ValueError("workers: this PyTorch was built without torch.distributed")
    made = settings.group == "auto" and not dist.is_initialized()
    rank, count = launched()
    if made and count == 1:
        return Solo()
    if settings.buffers == "same":
        refuse_batch_norm(model)
    if made:
        init_round(rank, count, settings.timeout_s)
    group = dist.group.WORLD if settings.group == "auto" else settings.group
    if dist.get_world_size(group) == 1:
        return Solo()
    return Team(Crew(group, settings.timeout_s, made, settings.network), settings)
