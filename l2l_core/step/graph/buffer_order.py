"""Whether micro-batches meet the model's buffers in the order of plain training.

Plain training finishes one micro-batch before it begins the next; in a relay they take turns at the layers. A buffer that
a forward changes (running statistics, a moving average) and that is met in one place comes out the same. One that is met
in several places, or by micro-batches that go different ways, does not: that is refused before anything is trained.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from l2l_core.eps.blocks import Buffers, Place
from l2l_core.model import key_of, same_numbers

_WRITES_STATISTICS = ("batch_norm", "instance_norm")  # operations that change arguments without saying so


class BufferOrder:
    """Notes which micro-batches read and changed each buffer.

    Invariant: after a change by micro-batch k nothing of an earlier one touches the buffer, and k changes nothing that a
    later one has read.

    Args:
        shell, layers: the buffers, as they stand on the device for this pass.
        attributes: tensors that modules keep as plain attributes; they may be views of buffers, and then follow them.
    """

    def __init__(self, shell: Buffers, layers: Iterable[Buffers], attributes: Iterable[torch.Tensor]) -> None:
        self._shell, self._of_shell = shell, set(shell.places)
        self._viewed = {key_of(tensor) for tensor in attributes}
        self._places: defaultdict[int, set[Place]] = defaultdict(set)  # by storage
        self._stand: dict[Place, torch.Tensor | None] = {}  # held, so that nothing else gets their addresses
        for buffers in (shell, *layers):
            self._note_replaced(buffers)
        self._homes: dict[Place, torch.Tensor] = {}  # of buffers of the shell that each micro-batch has for itself
        self._fresh: set[Place] = set()  # changed in place in this turn
        self._read: dict[Place, int] = {}
        self._written: dict[Place, int] = {}

    def __bool__(self) -> bool:
        return bool(self._places)

    def _note_replaced(self, buffers: Buffers) -> list[Place]:
        """Find where another tensor stands now than before, and note it."""
        now = zip(buffers.places, buffers.now(), strict=True)
        changed = [(at, tensor) for at, tensor in now if at not in self._stand or tensor is not self._stand[at]]
        for place, tensor in changed:
            self._put(place, tensor)
        return [place for place, _ in changed]

    def _put(self, place: Place, tensor: torch.Tensor | None) -> None:
        if (before := self._stand.get(place)) is not None:
            self._places[key_of(before)].discard(place)
        self._stand[place] = tensor
        if tensor is not None:
            self._places[key_of(tensor)].add(place)

    # -- what layers do ------------------------------------------------------------------------------------------------

    def layer_ran(
        self, k: int, buffers: Buffers, before: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor | None]
    ) -> None:
        """A layer has run, with these values of its buffers before and after (the same list if nothing changed)."""
        self.reads(k, buffers.places)
        if before is not after:
            trios = zip(buffers.places, before, after, strict=True)
            self.writes(k, [place for place, old, new in trios if not _same(old, new)])
            self._note_replaced(buffers)

    def part_ran(
        self, k: int, buffers: Buffers, before: Sequence[torch.Tensor | None], after: Sequence[torch.Tensor | None]
    ) -> None:
        """A compiled part of the shell has run, which nobody could watch: as `layer_ran`, for buffers of the shell."""
        self.layer_ran(k, buffers, before, after)
        trios = zip(buffers.places, before, after, strict=True)
        self._fresh.update(place for place, old, new in trios if not _same(old, new))

    # -- what shell code does ------------------------------------------------------------------------------------------

    def begin_turn(self) -> None:
        """A micro-batch goes on. What the one before has changed in place, and autograd may have saved, is its own."""
        for place in self._fresh:
            module, name = place
            buffer = module._buffers[name]
            if buffer is None or key_of(buffer) in self._viewed:
                continue
            self._homes.setdefault(place, buffer)
            module._buffers[name] = own = buffer.detach().clone()
            self._put(place, own)
        self._fresh.clear()

    def shell_does(self, k: int, func: Any, reads: dict[int, torch.Tensor], args: Sequence[Any]) -> None:
        """An operation of the shell reads these storages, by key."""
        met = [key for key in reads if self._places.get(key)]
        if not met:
            return
        self.reads(k, [place for key in met for place in self._places[key]])
        if changed := written_by(func, args) & set(met):
            places = [place for key in changed for place in self._places[key]]
            self.writes(k, places)
            self._fresh.update(place for place in places if place in self._of_shell)

    def end_turn(self, k: int) -> None:
        """A micro-batch gives way: buffers that it has replaced by other tensors are changed too."""
        self.writes(k, self._note_replaced(self._shell))

    def close(self) -> None:
        """The pass is over: the model's own tensors have the last values."""
        for (module, name), home in self._homes.items():
            last = module._buffers[name]
            if last is self._stand[module, name] and last is not None and last.shape == home.shape:
                with torch.no_grad():
                    home.copy_(last)
                module._buffers[name] = home
        self._homes.clear()

    # -- the order -----------------------------------------------------------------------------------------------------

    def reads(self, k: int, places: Iterable[Place]) -> None:
        """Micro-batch `k` reads buffers.

        Raises:
            RuntimeError: a later one has changed them already.
        """
        for place in places:
            if self._written.get(place, k) > k:
                self._refuse(place, k, f"micro-batch {self._written[place]} has already changed")
            self._read[place] = max(k, self._read.get(place, k))

    def writes(self, k: int, places: Iterable[Place]) -> None:
        """Micro-batch `k` changes buffers.

        Raises:
            RuntimeError: a later one has met them already.
        """
        for place in places:
            if self._read.get(place, k) > k:
                self._refuse(place, k, f"micro-batch {self._read[place]} has already read")
            self._written[place] = max(k, self._written.get(place, k))

    def _refuse(self, place: Place, k: int, story: str) -> None:
        module, name = place
        raise RuntimeError(
            f"micro-batch {k} meets the buffer {name!r} of a {type(module).__name__}, which {story}. Micro-batches take turns at "
            "the layers, so a buffer that the forward changes can be met in one place only: not in a layer that is called "
            "twice, nor in the model's own code both before and after a layer. Use RelayConfig(micro_batches=1), or a module of "
            "its own for each place"
        )


def written_by(func: Any, args: Sequence[Any]) -> set[int]:
    """Find the storages that an operation changes, by key."""
    changed = (args[at] for at in _positions_written(func) if at < len(args))
    return {key_of(value) for value in changed if isinstance(value, torch.Tensor)}


@cache
def _positions_written(func: Any) -> tuple[int, ...]:
    """Say which arguments of an operation it changes: it is asked for each time that one runs."""
    schema = func._schema
    hidden = not schema.is_mutable and any(part in schema.name for part in _WRITES_STATISTICS)
    return tuple(
        at
        for at, argument in enumerate(schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (hidden and argument.name.startswith("running_"))
    )


def _same(a: torch.Tensor | None, b: torch.Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and same_numbers(a, b))
