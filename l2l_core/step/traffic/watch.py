"""Who may read what: every operation of shell code, and of backward through it, is seen before it runs.

An emptied storage that is read would end the process, and another micro-batch's value would train the model wrongly. So
what is away is brought back first, and what was made for another micro-batch is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from l2l_core.eps.blocks import weights_changed
from l2l_core.model import key_of, pieces_of
from l2l_core.step.graph import BufferOrder, written_by
from l2l_core.step.traffic.at_work import NOBODY
from l2l_core.step.traffic.images import Held
from l2l_core.step.traffic.stash import Stash


class Watch(TorchDispatchMode):
    """Sees every operation that runs while it is on: what it reads is brought back first, what it makes is noted.

    Args:
        stash: brings what is away.
        order: told of what shell code does to buffers.
    """

    def __init__(self, stash: Stash, order: BufferOrder) -> None:
        super().__init__()
        self.stash, self.at_work, self._order = stash, stash.at_work, order
        self._images = stash.images

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code shall be what it is in plain training; of what runs in it, the watch sees what PyTorch runs."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = {t.untyped_storage()._cdata: t for t in _tensors_in(*args, kwargs)}
        self._before(func, reads, args)
        out = func(*args, **(kwargs or {}))
        self.made(out, reads)
        return out

    @property
    def is_needed(self) -> bool:
        """Whether shell code is at work that may read what is not on the device."""
        return self.stash.moves and self.at_work.in_shell and not self.at_work.in_compiled_part

    @property
    def guards_shell(self) -> bool:
        """Whether shell code must run under the watch."""
        return self.stash.guards or bool(self._order)

    # -- operations ----------------------------------------------------------------------------------------------------

    def _before(self, func: Any, reads: dict[int, torch.Tensor], args: Sequence[Any]) -> None:
        """An operation is about to read these storages."""
        here, stash, images = self.at_work, self.stash, self._images
        if here.in_forward and here.in_shell and self._order:
            self._order.shell_does(here.k, func, reads, args)
        if stash.metering and here.in_forward and (changed := written_by(func, args) & images.weights):
            raise RuntimeError(weights_changed(here.reader, reads[changed.pop()]))
        known = [key for key in reads if key in images.held]
        if not known:
            return
        if stash.metering and here.k != NOBODY and here.in_forward:
            self._check_reads(known, reads)
        moved = [h for key in known if not (h := images.held[key]).resident or h.covered]
        if moved:
            stash.restore([(s, h) for h in moved if (s := h.ref()) is not None])
        if func._schema.is_mutable:
            for held in (images.held[key] for key in known):
                if held.ticket is not None:
                    held.ticket.wait()  # it may still be leaving, though it stays
                held.dirty = True

    def made(self, out: Any, reads: dict[int, torch.Tensor]) -> None:
        """An operation has made `out` of what it has read."""
        if not self.stash.guards:
            return
        here, images = self.at_work, self._images
        # What a layer or backward makes is counted, but part of no image before it crosses to the shell (`hold`).
        k = here.k if here.in_shell and here.in_forward else NOBODY
        for tensor in _tensors_in(out):
            storage = tensor.untyped_storage()
            key = storage._cdata
            is_new = key not in reads and key not in images.held
            if is_new and self.stash.is_on_device(tensor) and not tensor._is_zerotensor():
                images.add(storage, k, "activations", exact=self.stash.metering)

    # -- whose it is ---------------------------------------------------------------------------------------------------

    def asked(self, tensor: torch.Tensor, maker: int) -> None:
        """Somebody is about to do something with a tensor that micro-batch `maker` has made and left.

        Raises:
            RuntimeError: another micro-batch, or a layer that was not given it.
        """
        key, here = key_of(tensor), self.at_work
        is_given = maker == here.k and (here.layer_inputs is None or key in here.layer_inputs)
        if here.k != NOBODY and not is_given:
            mark = tensor._relay_aside  # type: ignore[attr-defined]
            if maker > 0 or mark.is_replaced:  # what the first one leaves, and no other replaces, may be a table
                raise RuntimeError(self._not_for(tensor, maker))
            mark.is_lent = here.k != maker
            if key in self._images.held:
                self._images.stay(self._images.held[key])
        self.stash.touch(tensor)

    def _check_reads(self, known: list[int], reads: dict[int, torch.Tensor]) -> None:
        """Refuse what another micro-batch has made and left; what the first one left stays: it may be a table."""
        given = self.at_work.layer_inputs or set()
        for held, tensor in ((self._images.held[key], reads[key]) for key in known if key not in given):
            if held.maker == NOBODY or self._is_own(held):
                continue
            if held.maker > 0:
                raise RuntimeError(self._not_for(tensor, held.maker))
            self._images.stay(held)

    def _is_own(self, held: Held) -> bool:
        here = self.at_work
        return held.maker == here.k and (here.in_shell or (held.k == NOBODY and held.owner == here.owner))

    def _not_for(self, tensor: torch.Tensor, maker: int) -> str:
        return (
            f"{self.at_work.reader} reads a tensor of shape {tuple(tensor.shape)} that was made for micro-batch {maker} and not "
            "passed as an argument (left on an attribute or in a shared container?). Micro-batches take turns, so it "
            "may be another micro-batch's value. Pass it as an argument of the layer, or return it"
        )


def _tensors_in(*trees: Any) -> list[torch.Tensor]:
    """List the tensors among an operation's arguments or results, in order; of sparse ones indices and values."""
    found: list[torch.Tensor] = []
    for tree in trees:  # a loop and no generator: every operation that is watched comes by here
        if isinstance(tree, torch.Tensor):
            if tree.layout is torch.strided:
                found.append(tree)
            else:
                found += pieces_of(tree)
        elif isinstance(tree, (tuple, list)):
            found += _tensors_in(*tree)
        elif isinstance(tree, dict):
            found += _tensors_in(*tree.values())
    return found
