"""Learn a model's structure from one ordinary forward, and refuse what cannot be cut or run again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import StagedForward, Tensor


class StructureTracer(StagedForward):
    """A forward that is not cut: it looks which tensors are read where.

    Invariant: everything it has seen is held until the end, so that a storage is never taken for another one.
    """

    def __init__(self, model: nn.Module, layers: Mapping[nn.Module, str], task: Callable[[], Tensor]) -> None:
        super().__init__(model, layers, task)
        self._tensors: dict[int, tuple[Tensor, int]] = {}  # by number, with its version at the end of its stage
        self._without_gradient: set[int] = set()  # made without a gradient
        self._last_reader: dict[int, int] = {}  # the last stage that reads it
        self._reads: dict[int, set[int]] = {}
        self._names: list[str] = []
        self._grad_enabled: list[list[bool]] = [[]]
        self._changed_buffers: list[set[str]] = []  # buffers that a stage changes

    def trace(self) -> StageStructure:
        """Run the forward.

        Raises:
            RuntimeError, TypeError: the model does something that a plan cannot do again; the message has the remedy.
        """
        loss = None
        buffers = self._buffer_values()
        with self.patch_layers(), torch.enable_grad():
            while loss is None:
                loss = self.run_stage()
                self._refuse_changes()
                now = self._buffer_values()
                self._changed_buffers.append(
                    {name for name, value in now.items() if not _equal_values(buffers.get(name), value)}
                )
                self._grad_enabled.append([])
                buffers = now
        if not loss.requires_grad:
            raise RuntimeError("the loss depends on nothing that is trained: unfreeze a parameter")
        if self.numbers.get(loss) is None:
            raise RuntimeError("the loss was made out of sight: compute it with torch functions")
        return self._make_structure(self.numbers[loss])

    # -- what it hears -------------------------------------------------------------------------------------------------

    def substitute(self, tensor: Tensor, number: int) -> Tensor:
        self._tensors.setdefault(number, (tensor, tensor._version))
        self._last_reader[number] = self.stage_index
        self._reads.setdefault(self.stage_index, set()).add(number)
        return tensor

    def on_output(self, tensor: Tensor, number: int) -> None:
        self._tensors[number] = tensor, tensor._version
        if not tensor.requires_grad:
            self._without_gradient.add(number)

    def on_operation(self, func: Any) -> None:
        super().on_operation(func)
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError(
                "the model runs under autocast, which plans do not carry into a re-run: train in float32"
            )
        self._grad_enabled[-1].append(torch.is_grad_enabled())

    def run_layer(self, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._names.append(self.layer_name)
        if not torch.is_grad_enabled():
            raise RuntimeError(
                f"layer {self.layer_name} was called with gradients off: leave it out of layers=, or freeze it (requires_grad_(False)) "
                "and call it with gradients on"
            )
        return layer_forward(*args, **kwargs)

    # -- what is refused -----------------------------------------------------------------------------------------------

    def _refuse_changes(self) -> None:
        for number, (tensor, version) in self._tensors.items():
            if tensor.requires_grad and number in self._without_gradient:
                raise RuntimeError(
                    f"stage {self.stage_index} has a tensor of shape {tuple(tensor.shape)} that got its gradient after it was made: by "
                    "a custom autograd.Function of shell code, or by requires_grad_(). A plan would replay the operation inside, "
                    "without the function's own backward: move the function into a module and name that among layers="
                )
            if self.made_in[number] == self.stage_index:
                self._tensors[number] = tensor, tensor._version  # within its own stage it may be changed
            elif tensor._version != version:
                where = (self._names + ["the loss"])[self.stage_index]
                raise RuntimeError(
                    f"stage {self.stage_index} (up to {where}) changes a tensor of an earlier stage in place (shape "
                    f"{tuple(tensor.shape)}), from which that stage could not run again. Change a copy instead (x = x + y rather "
                    "than x += y, ReLU(inplace=False))"
                )

    def _buffer_values(self) -> dict[str, Tensor]:
        # By value: batch norm moves its statistics without counting up their versions.
        return {name: buffer.clone() for name, buffer in self.model.named_buffers(remove_duplicate=False)}

    # -- what comes out ------------------------------------------------------------------------------------------------

    def _make_structure(self, loss: int) -> StageStructure:
        n = len(self.stages)
        differentiable = frozenset(number for number, (t, _) in self._tensors.items() if t.requires_grad)
        live = [
            frozenset(t for t, last in self._last_reader.items() if t in differentiable and self.made_in[t] < i <= last)
            for i in range(n + 1)
        ]
        weights = {t.untyped_storage()._cdata for t in (*self.model.parameters(), *self.model.buffers())}
        at_cuts = frozenset[int]().union(*live, (loss,))
        keys = {number: tensor.untyped_storage()._cdata for number, (tensor, _) in sorted(self._tensors.items())}
        crossing = {keys[number] for number in at_cuts}
        keys = {number: key for number, key in keys.items() if key in crossing}
        sizes = {name: buffer.nbytes for name, buffer in self.model.named_buffers(remove_duplicate=False)}
        order = {key: at for at, key in enumerate(dict.fromkeys(keys.values()))}
        return StageStructure(
            names=(*self._names, "loss"),
            live=tuple(live),
            reads=tuple(live[i] & self._reads.get(i, set()) for i in range(n)),
            differentiable=differentiable,
            constants=frozenset(t for t in self._last_reader if t not in differentiable),
            loss=loss,
            signature=tuple(self.signature),
            grad_enabled=tuple(map(tuple, self._grad_enabled[:n])),
            storage={number: None if key in weights else order[key] for number, key in keys.items()},
            nbytes={order[key]: self._tensors[number][0].untyped_storage().nbytes() for number, key in keys.items()},
            buffers=tuple(self._buffers_of(i) for i in range(n)),
            buffer_bytes=tuple(sum(sizes[name] for name in self._buffers_of(i)) for i in range(n)),
        )

    def _buffers_of(self, i: int) -> tuple[str, ...]:
        """Name the buffers that stage i reads or writes and that some stage changes."""
        changing = set().union(*self._changed_buffers)
        inside = {name: layer for layer in self.layers.values() for name in changing if name.startswith(f"{layer}.")}
        mine = self._names[i] if i < len(self._names) else ""
        return tuple(
            sorted(name for name in changing if inside.get(name, mine) == mine or name in self._changed_buffers[i])
        )


def _equal_values(before: Tensor | None, now: Tensor) -> bool:
    return before is not None and before.shape == now.shape and torch.equal(before, now)
