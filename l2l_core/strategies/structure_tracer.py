"""Find the stage structure of a model in one ordinary forward; refuse models whose stages cannot run again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from l2l_core.model import equal_values, storage_key
from l2l_core.strategies.stage_structure import StageStructure
from l2l_core.strategies.staged_forward import StagedForward, Tensor


class StructureTracer(StagedForward):
    """A forward whose graph is not cut; it records which stages read which tensors.

    Invariant: every recorded tensor is kept until the end, so storage identifiers are unique.

    Example:
        >>> from l2l_core.strategies import StructureTracer
        >>> relay.close()
        >>> inputs, targets = batch
        >>> layers = {layer: f"layer {i}" for i, layer in enumerate(model[:6])}
        >>> structure = StructureTracer(model, layers, lambda: nn.functional.cross_entropy(model(inputs), targets)).trace()
        >>> structure.names[-2:], structure.stages
        (('layer 5', 'loss'), 7)
    """

    def __init__(self, model: nn.Module, layers: Mapping[nn.Module, str], task: Callable[[], Tensor]) -> None:
        super().__init__(model, layers, task)
        self._tensors: dict[int, tuple[Tensor, int]] = {}  # by number, with the version at the end of its stage
        self._made_without_gradient: set[int] = set()
        self._last_reader: dict[int, int] = {}  # the last stage that reads a tensor
        self._reads: dict[int, set[int]] = {}
        self._names: list[str] = []
        self._grad_enabled: list[list[bool]] = [[]]
        self._changed_buffers: list[set[str]] = []  # by stage

    def trace(self) -> StageStructure:
        """Run the forward and return the structure.

        Raises:
            RuntimeError, TypeError: the model does something that a rerun cannot repeat; the message has the remedy.
        """
        loss = None
        buffers = self._buffer_values()
        with self.patch_layers(), torch.enable_grad():
            while loss is None:
                loss = self.run_stage()
                self._refuse_changes()
                before, buffers = buffers, self._buffer_values()
                self._changed_buffers.append(
                    {name for name in buffers if name not in before or not equal_values(before[name], buffers[name])}
                )
                self._grad_enabled.append([])
        if not loss.requires_grad:
            raise RuntimeError("the loss depends on nothing that is trained: unfreeze a parameter")
        if self.numbers.get(loss) is None:
            raise RuntimeError("the loss was made out of sight: compute it with torch functions")
        return self._make_structure(self.numbers[loss])

    def substitute(self, tensor: Tensor, number: int) -> Tensor:
        self._tensors.setdefault(number, (tensor, tensor._version))
        self._last_reader[number] = self.stage_index
        self._reads.setdefault(self.stage_index, set()).add(number)
        return tensor

    def on_output(self, tensor: Tensor, number: int) -> None:
        self._tensors[number] = tensor, tensor._version
        if not tensor.requires_grad:
            self._made_without_gradient.add(number)

    def on_operation(self, func: Any) -> None:
        super().on_operation(func)
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("the model runs under autocast, which is not restored in a rerun: train in float32")
        self._grad_enabled[-1].append(torch.is_grad_enabled())

    def run_layer(self, layer_forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._names.append(self.layer_name)
        if not torch.is_grad_enabled():
            raise RuntimeError(
                f"layer {self.layer_name} was called with gradients off: leave it out of layers=, or freeze it "
                "(requires_grad_(False)) and call it with gradients on"
            )
        return layer_forward(*args, **kwargs)

    def _refuse_changes(self) -> None:
        for number, (tensor, version) in self._tensors.items():
            if tensor.requires_grad and number in self._made_without_gradient:
                raise RuntimeError(
                    f"stage {self.stage_index} has a tensor of shape {tuple(tensor.shape)} that got its gradient after it was "
                    "made, by a custom autograd.Function of shell code or by requires_grad_(). A rerun would skip the "
                    "function's own backward: move the function into a module and name that among layers="
                )
            if self.made_in[number] == self.stage_index:
                self._tensors[number] = tensor, tensor._version  # its own stage may change it
            elif tensor._version != version:
                where = [*self._names, "the loss"][self.stage_index]
                raise RuntimeError(
                    f"stage {self.stage_index} (up to {where}) changes a tensor of an earlier stage in place (shape "
                    f"{tuple(tensor.shape)}), from which that stage could not run again. Change a copy instead (x = x + y rather "
                    "than x += y, ReLU(inplace=False))"
                )

    def _buffer_values(self) -> dict[str, Tensor]:
        # Values, because batch norm changes its statistics without increasing their versions.
        return {name: buffer.clone() for name, buffer in self.model.named_buffers(remove_duplicate=False)}

    def _make_structure(self, loss: int) -> StageStructure:
        n = len(self.stages)
        differentiable = frozenset(number for number, (t, _) in self._tensors.items() if t.requires_grad)
        live = [
            frozenset(t for t, last in self._last_reader.items() if t in differentiable and self.made_in[t] < i <= last)
            for i in range(n + 1)
        ]
        weights = {storage_key(t) for t in (*self.model.parameters(), *self.model.buffers())}
        keys = {number: storage_key(tensor) for number, (tensor, _) in sorted(self._tensors.items())}
        crossing = {keys[number] for number in frozenset((loss,)).union(*live)}
        keys = {number: key for number, key in keys.items() if key in crossing}
        index = {key: position for position, key in enumerate(dict.fromkeys(keys.values()))}
        sizes = {name: buffer.nbytes for name, buffer in self.model.named_buffers(remove_duplicate=False)}
        buffers = self._buffers_by_stage(n)
        return StageStructure(
            names=(*self._names, "loss"),
            live=tuple(live),
            reads=tuple(live[i] & self._reads.get(i, set()) for i in range(n)),
            differentiable=differentiable,
            constants=frozenset(t for t in self._last_reader if t not in differentiable),
            loss=loss,
            signature=tuple(self.signature),
            grad_enabled=tuple(map(tuple, self._grad_enabled[:n])),
            storage={number: None if key in weights else index[key] for number, key in keys.items()},
            nbytes={index[key]: self._tensors[number][0].untyped_storage().nbytes() for number, key in keys.items()},
            buffers=tuple(buffers),
            buffer_bytes=tuple(sum(sizes[name] for name in names) for names in buffers),
        )

    def _buffers_by_stage(self, n: int) -> list[tuple[str, ...]]:
        """Name for each stage the buffers that it reads or writes and that some stage changes."""
        layers, by_layer = {*self.layers.values()}, defaultdict(set)
        for name in set().union(*self._changed_buffers):
            parents = [name[:i] for i, letter in enumerate(name) if letter == "." and name[:i] in layers]
            by_layer[parents[-1] if parents else ""].add(
                name
            )  # "" for buffers outside of layers, which every stage may read
        names = [*self._names, ""]  # of the loss
        return [tuple(sorted(by_layer[""] | by_layer[names[i]] | self._changed_buffers[i])) for i in range(n)]
