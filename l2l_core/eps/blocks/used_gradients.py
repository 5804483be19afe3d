"""The value of `param.grad` after a step: a tensor without memory that raises when it is read.

A step frees each gradient when its layer is updated. With None there, `clip_grad_norm_` and loops that log norms would find no
gradient, return 0.0 and change nothing, without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch

from l2l_core._torch import disabled_torch_function, make_wrapper_subclass
from l2l_core.eps.blocks.units import Block

_MESSAGE = (
    "this gradient is gone: relay.step(batch) has updated every layer as its gradient arrived, and freed it. To clip, use "
    "RelayConfig(update='deferred', max_grad_norm=...); the norm of all gradients is `grad_norm` of what step returns. To read "
    "or change gradients before the update, use RelayConfig(update='deferred') and relay.optimizer.register_step_pre_hook(...)"
)
_aten = torch.ops.aten


class UsedGradient(torch.Tensor):
    """Gradient of a parameter that the EPS has used and freed; every operation that needs its values raises RuntimeError.

    `zero_grad` removes it, also with ``set_to_none=False``; a backward outside of the relay replaces it; ``model.to(...)``
    converts it.
    """

    __torch_function__ = disabled_torch_function
    _param: weakref.ref[
        torch.Tensor
    ]  # weak: the parameter refers to this object from C++, where no collector sees a cycle

    @staticmethod
    def __new__(cls: type[UsedGradient], param: torch.Tensor, **options: Any) -> UsedGradient:
        """Return the used gradient of a parameter; `options` may have another dtype or device."""
        options = {"dtype": param.dtype, "device": param.device, **options}
        self = make_wrapper_subclass(cls, param.shape, **options)
        self._param = weakref.ref(param)
        return self

    @property
    def param(self) -> torch.Tensor | None:
        """The parameter, while it exists."""
        return self._param()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run operations that clear, replace or convert a gradient; refuse the others."""
        if func is _aten._foreach_zero_.default:
            for grad in args[0]:
                grad.zero_()
            return None
        param = args[0].param if args and isinstance(args[0], cls) else None
        if param is not None:
            if func is _aten.zero_.default:
                param.grad = None
                return args[0]
            if func is _aten.add_.Tensor and not isinstance(args[1], cls):  # by autograd
                param.grad = args[1].clone()
                return args[0]
            if func in (_aten._to_copy.default, _aten.detach.default):
                options = {key: value for key, value in (kwargs or {}).items() if key in ("dtype", "device")}
                return cls(param, **{"dtype": args[0].dtype, "device": args[0].device, **options})
        raise RuntimeError(_MESSAGE)

    def share_memory_(self) -> UsedGradient:
        """Do nothing: ``model.share_memory()`` shares gradients, too, and there is no memory to share."""
        return self

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(_MESSAGE)

    numpy = tolist = _refuse  # PyTorch has messages of its own for these

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Return a line with the reason why there are no values."""
        return f"UsedGradient(shape={tuple(self.shape)}: relay.step has used and freed it)"


def set_used_gradients(blocks: Iterable[Block]) -> None:
    """Set `grad` of the trained parameters of updated blocks."""
    for block in blocks:
        for i in block.trained.indices:
            param = block.params[i]
            grad = block.used_gradients.get(i)
            if not isinstance(grad, UsedGradient) or grad.param is not param:
                grad = block.used_gradients[i] = UsedGradient(param)
            param.grad = grad


def clear_used_gradients(params: Iterable[torch.Tensor]) -> None:
    """Set `grad` to None where it is that of an earlier step."""
    for param in params:
        if type(param.grad) is UsedGradient:
            param.grad = None
