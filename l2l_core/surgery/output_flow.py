"""Which layers' outputs the model's own code uses, beyond the next layer.

In one forward, every tensor that is computed outside of layers is marked with the layers whose outputs it is made of. A layer's
outputs are marked with that layer alone, since its own use of its input is no affair of the model's code.

Not found: values that leave PyTorch in between (``x.tolist()``, NumPy), and views that were made before their base was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from l2l_core._torch import pytree

Layers = frozenset[nn.Module]


class OutputFlow(TorchFunctionMode):
    """Marks tensors with the layers whose outputs they are made of, in its `with` block.

    Args:
        running: the layers that run now; nothing is marked meanwhile.

    Attributes:
        result: the layers whose outputs the result of the forward is made of, without the way through other layers.
    """

    result: Layers = frozenset()

    def __init__(self, running: Sequence[nn.Module]) -> None:
        super().__init__()
        self._running = running
        self._made_of = WeakIdKeyDictionary()  # tensor -> Layers

    def mark(self, outputs: Any, layer: nn.Module) -> None:
        """Record that these are the outputs of a layer."""
        self._add(outputs, frozenset([layer]), replace=True)

    def layers_in(self, tree: Any) -> Layers:
        """Return the layers whose outputs the tensors of a tree are made of."""
        found = [self._made_of.get(leaf) for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
        return frozenset[nn.Module]().union(*(layers for layers in found if layers))

    def _add(self, tree: Any, layers: Layers, replace: bool = False) -> None:
        for leaf in pytree.tree_leaves(tree):
            if isinstance(leaf, torch.Tensor):
                before = None if replace else self._made_of.get(leaf)
                self._made_of[leaf] = layers if before is None else layers | before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._running and (layers := self.layers_in((args, kwargs))):
            self._add(out, layers)
            if getattr(func, "__name__", "") == "__setitem__":  # returns nothing
                self._add(args[0], layers)
        return out
