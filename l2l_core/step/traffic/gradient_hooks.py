"""Who gets what autograd accumulates: hooks on parameters, and the places that stand as their `grad`.

The first gradient of a visit is handed to whoever is at work with the parameter. From then on its place in the slot stands there,
and autograd adds to it by itself, as it would add to any `grad`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from l2l_core._torch import engine_will_run
from l2l_core.eps.blocks import Block, Unit


class GradientHooks:
    """Who takes the gradients that autograd accumulates into parameters.

    A hook on each tells of them, for the length of a pass, but not of those to whose place autograd adds: there is nothing to do
    with these, unless somebody asks what a run of backward has yet to bring.

    Invariant: every gradient is taken by the unit whose backward has made it, or the step ends.

    Args:
        units: the shell and the layers.

    Attributes:
        trained: by block, which parameters are trained in this pass.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._names = {
            param: name for unit in units for b in unit.blocks for param, name in zip(b.params, b.names, strict=True)
        }
        self.trained = {block: block.trained for unit in units for block in unit.blocks}
        self._routes: dict[torch.Tensor, Callable[[torch.Tensor], None]] = {}
        self._installed: dict[torch.Tensor, torch.Tensor] = {}  # places that autograd adds to
        self._accumulated: set[torch.Tensor] = (
            set()
        )  # in this run of backward, which accumulates into each at most once
        self._handles: dict[torch.Tensor, RemovableHandle] = {}
        for block, trained in self.trained.items():
            for i in trained.indices:
                self._register_hook(block.params[i])

    def numel(self, unit: Unit) -> int:
        """Count the elements of a slot for the unit's gradient."""
        return sum(self.trained[block].numel for block in unit.blocks)

    def check_requires_grad(self, blocks: Iterable[Block]) -> None:
        """Refuse parameters that were frozen, or let go, since the pass began: their gradients would be lost.

        Raises:
            RuntimeError: names one of them.
        """
        for block in blocks:
            flags = self.trained[block].flags
            for name, param, was in zip(block.names, block.params, flags, strict=True):
                if param.requires_grad != was:
                    raise RuntimeError(
                        f"requires_grad of parameter {name} became {param.requires_grad} during the step: what a step trains "
                        "is settled when it begins. Change it between steps, or use Freeze and Unfreeze"
                    )

    def _register_hook(self, param: torch.Tensor) -> None:
        if param.requires_grad and param not in self._handles:  # one that was frozen meanwhile is refused by `check`
            self._handles[param] = param.register_post_accumulate_grad_hook(self._on_accumulated)

    def begin_backward(self) -> None:
        """A run of backward begins, of which `awaits` will be asked."""
        self._accumulated.clear()
        for param in self._installed:
            self._register_hook(param)

    def is_pending(self, block: Block) -> bool:
        """Whether the run of backward that asks has yet to add to a parameter of a block: what uses it may be anywhere."""
        params = (block.params[i] for i in self.trained[block].indices)
        return any(_will_execute(param) for param in params if param not in self._accumulated)

    def _on_accumulated(self, param: torch.Tensor) -> None:
        self._accumulated.add(param)
        grad = param.grad
        if grad is None or param in self._installed:
            return
        param.grad = None
        if param not in self._routes:
            raise RuntimeError(self._foreign_message(param))
        if grad.layout is not torch.strided:
            raise ValueError(
                f"parameter {self._names[param]} has a {grad.layout} gradient; use Embedding(sparse=False)"
            )
        self._routes[param](grad)

    def route(self, param: torch.Tensor, consume: Callable[[torch.Tensor], None]) -> Callable[[], None]:
        """Let `take` have the gradients of a parameter, unless somebody has them; the result ends that."""
        # What a layer shares with the shell goes to the shell's gradient, which is there first and stays for the whole
        # pass.
        if self._routes.setdefault(param, consume) is not consume:
            return lambda: None
        return lambda: self._routes.pop(param)  # type: ignore[func-returns-value]

    def install_grad(self, param: torch.Tensor, grad_view: torch.Tensor) -> None:
        """Let autograd add what comes for a parameter to a place that holds a part of its gradient."""
        if grad_view.dtype == param.dtype:  # weights in bfloat16 have such gradients, and their sum is float32
            self._installed[param] = param.grad = grad_view
            self._handles[param].remove()
            del self._handles[param]  # only now: an interrupt may come at any moment

    def remove_grad(self, param: torch.Tensor) -> None:
        """Let nothing be added there any more, and say of what comes: be it for nobody, and cleared at once, it is refused."""
        if self._uninstall_grad(param):
            self._register_hook(param)

    def _uninstall_grad(self, param: torch.Tensor) -> bool:
        place, grad = self._installed.pop(param, None), param.grad
        if place is None:
            return False
        if grad is not None and grad is not place:  # a hook of the user has put another sum there
            place.copy_(grad)
        param.grad = None
        return True

    def check_no_stray_grads(self) -> None:
        """Refuse gradients that somebody has set by hand on parameters of layers that backward has left: no hook tells of those.

        Raises:
            RuntimeError: names one of the parameters.
        """
        for block, trained in self.trained.items():
            for param in (block.params[i] for i in trained.indices):
                if param.grad is not None and param not in self._routes:
                    raise RuntimeError(self._foreign_message(param))

    def _foreign_message(self, param: torch.Tensor) -> str:
        return (
            f"parameter {self._names[param]} gets a gradient from code that is not in its layer (a closure, an attribute, "
            "another layer): it would miss the relay. Pass it as an argument of the layer that uses it"
        )

    def close(self) -> None:
        """Take no more gradients."""
        for param in list(self._installed):
            self._uninstall_grad(param)
        self._routes.clear()
        self._handles.clear()
        # Not by handles: an interrupt may have come before one was kept.
        for hooks in [
            block.params[i]._post_accumulate_grad_hooks for block, t in self.trained.items() for i in t.indices
        ]:
            for key in [key for key, hook in (hooks or {}).items() if hook == self._on_accumulated]:
                del hooks[key]


def _will_execute(param: torch.Tensor) -> bool:
    """Whether the run of backward that asks leads to a parameter."""
    return engine_will_run(get_gradient_edge(param).node)
