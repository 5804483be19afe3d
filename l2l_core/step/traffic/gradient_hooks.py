"""Post-accumulate-grad hooks that move gradients from parameters to gradient slots.

A hook takes the first gradient of a visit. Then the parameter's place in the slot is installed as its `grad`, and autograd adds
to it without a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from l2l_core._torch import engine_will_run
from l2l_core.eps.blocks import Block, Unit, check_no_stray_grads, stray_grad_message


class GradientHooks:
    """Hooks on every trained parameter for the length of a pass.

    Parameters with an installed `grad` have no hook, except while `is_pending` needs them.

    Invariant: every gradient is taken by the unit whose backward has made it, or the step fails.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._names: dict[torch.Tensor, str] = {
            param: name for unit in units for b in unit.blocks for param, name in zip(b.params, b.names, strict=True)
        }
        # As they are when the pass begins
        self.trained = {block: block.trained for unit in units for block in unit.blocks}
        self._routes: dict[torch.Tensor, Callable[[torch.Tensor], None]] = {}
        self._installed: dict[torch.Tensor, torch.Tensor] = {}  # `grad` that autograd adds to
        self._accumulated: set[torch.Tensor] = set()  # in this run of backward, which accumulates into each once
        self._handles: dict[torch.Tensor, RemovableHandle] = {}
        for param in self._trained_params():
            self._register_hook(param)

    def _trained_params(self) -> list[torch.Tensor]:
        return [block.params[i] for block, trained in self.trained.items() for i in trained.indices]

    def numel(self, unit: Unit) -> int:
        """Return the number of elements of the unit's gradient."""
        return sum(self.trained[block].numel for block in unit.blocks)

    def check_requires_grad(self, blocks: Iterable[Block] | None = None) -> None:
        """Raise RuntimeError if `requires_grad` of a parameter of these blocks, or any, changed since the pass began."""
        for block in self.trained if blocks is None else blocks:
            flags = self.trained[block].flags
            for name, param, was in zip(block.names, block.params, flags, strict=True):
                if param.requires_grad != was:
                    raise RuntimeError(
                        f"requires_grad of parameter {name} became {param.requires_grad} during the step: what a step trains "
                        "is settled when it begins. Change it between steps, or use Freeze and Unfreeze"
                    )

    def _register_hook(self, param: torch.Tensor) -> None:
        if param.requires_grad and param not in self._handles:  # `check_requires_grad` refuses one frozen meanwhile
            self._handles[param] = param.register_post_accumulate_grad_hook(self._on_accumulated)

    def begin_backward(self) -> None:
        """Prepare a run of backward in which `is_pending` will be called."""
        self._accumulated.clear()
        for param in self._installed:
            self._register_hook(param)

    def is_pending(self, block: Block) -> bool:
        """Whether the present run of backward will still add to a parameter of the block."""
        params = (block.params[i] for i in self.trained[block].indices)
        return any(engine_will_run(get_gradient_edge(param).node) for param in params if param not in self._accumulated)

    def _on_accumulated(self, param: torch.Tensor) -> None:
        self._accumulated.add(param)
        grad = param.grad
        if grad is None or param in self._installed:
            return
        param.grad = None
        if param not in self._routes:
            raise RuntimeError(stray_grad_message(self._names[param]))
        if grad.layout is not torch.strided:
            raise ValueError(
                f"parameter {self._names[param]} has a {grad.layout} gradient; use Embedding(sparse=False)"
            )
        self._routes[param](grad)

    def route(self, param: torch.Tensor, consume: Callable[[torch.Tensor], None]) -> Callable[[], object]:
        """Pass gradients of a parameter to `consume`, unless they have a route already; return a function that ends it."""
        # The shell's route is made first and stays for the whole pass, so it takes gradients of shared parameters.
        if self._routes.setdefault(param, consume) is not consume:
            return lambda: None
        return lambda: self._routes.pop(param)

    def install_grad(self, param: torch.Tensor, grad_view: torch.Tensor) -> None:
        """Make `grad_view` the parameter's `grad`, so that autograd adds to it."""
        if grad_view.dtype == param.dtype:  # gradients of bfloat16 weights are bfloat16, their sum is float32
            self._installed[param] = param.grad = grad_view
            self._handles[param].remove()
            del self._handles[param]  # last: an interrupt may occur at any moment

    def remove_grad(self, param: torch.Tensor) -> None:
        """Remove an installed `grad`, if any, and restore the hook."""
        place, grad = self._installed.pop(param, None), param.grad
        if place is None:
            return
        if grad is not None and grad is not place:  # a user's hook has replaced the sum
            place.copy_(grad)
        param.grad = None
        self._register_hook(param)

    def check_no_stray_grads(self) -> None:
        """Raise RuntimeError if user code has set `grad` of a parameter after the backward of its layer."""
        for block, trained in self.trained.items():
            if not block.points_to_master:  # else its update sets `grad`, and checks it
                check_no_stray_grads(block, [i for i in trained.indices if block.params[i] not in self._routes])

    def close(self) -> None:
        """Remove all routes and hooks."""
        for param in list(self._installed):
            self.remove_grad(param)
        self._routes.clear()
        self._handles.clear()
        # Not through handles: an interrupt may have occurred before a handle was stored.
        for param in self._trained_params():
            hooks = param._post_accumulate_grad_hooks or {}
            for key in [key for key, hook in hooks.items() if hook == self._on_accumulated]:
                del hooks[key]
