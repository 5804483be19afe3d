"""The user's step hooks: fired once per step of the relay, seeing what they would see in core, or refused.

In core all gradients are there when pre-hooks run, and still there when post-hooks do. So it is with ``update="deferred"``:
parameters of the model and of the optimizer hold masters and gradients while hooks run, and what pre-hooks make of the
gradients counts. With ``"eager"`` updates there is no such moment. Pre-hooks run before the step then; one that touches
a gradient or changes a weight there is refused, before anything is trained. That is seen, not guessed: a function mode
sees every access to `grad`, and a dispatch mode every operation that writes.

One idea, which is why the file is a little longer than others: what a hook may see, and how it is seen whether it did.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from l2l_core._torch import TorchDispatchMode, hooks_of_all_optimizers, pytree
from l2l_core.eps.blocks import Block, GradientPiece

Hook = Callable[..., Any]

_REMEDY = (
    "With update='eager' layers are updated as their gradients come, so there is no moment at which all are there. Use "
    "RelayConfig(update='deferred'); to clip, max_grad_norm with it"
)


def pre_hooks(optimizer: Optimizer, of_all: bool = True) -> list[Hook]:
    """Return the hooks that are fired before a step of the optimizer; `of_all`: those of all optimizers too."""
    everywhere = hooks_of_all_optimizers()[0] if of_all else {}
    return [*everywhere.values(), *optimizer._optimizer_step_pre_hooks.values()]


@dataclass(frozen=True)
class StepHooks:
    """Fires the hooks of a store's optimizer.

    Args:
        optimizer: the whole one.
        masters: gives the optimizer's parameters of every block, in the order of the block's own.
        before_write: called before a hook changes a block's weights.
        of_all: whether hooks of all optimizers are fired with its own.
    """

    optimizer: Optimizer
    masters: Callable[[], Mapping[Block, Sequence[nn.Parameter]]]
    before_write: Callable[[Block], None]
    of_all: bool = True

    @property
    def has_pre(self) -> bool:
        """Whether there are hooks to fire before a step."""
        return bool(self._pre)

    def fire_before_gradients(self) -> None:
        """Fire the pre-hooks of a step that updates layers as their gradients come.

        Raises:
            ValueError: a hook touches a gradient or changes a weight.
        """
        rows = self._rows({})
        with self._masters_in_place(rows), _watched(rows, self._pre, _refuse_write) as fire:
            fire(self.optimizer)

    def fire_with_gradients(self, whole: dict[Block, GradientPiece]) -> None:
        """Fire the pre-hooks of a step whose gradients are all there; what they make of those is in `whole` afterwards.

        Raises:
            ValueError: a hook gives a gradient to a parameter that has none, or two to one.
        """
        rows = self._rows(whole)
        with self._masters_in_place(rows), _watch_writes(rows, self._note_write):
            for hook in self._pre:
                _call(hook, self.optimizer)
            for block, piece in list(whole.items()):
                has = [row.take_back() for row in rows if row.block is block]
                whole[block] = replace(piece, covers=tuple(has[i] for i in piece.trained.indices))
            for row in rows:
                if row.block not in whole:
                    row.check_none()

    def fire_after(self, whole: Mapping[Block, GradientPiece], has_gradients: bool) -> None:
        """Fire the post-hooks, with the gradients that the step had, if there is a moment at which all are there.

        Raises:
            ValueError: a hook reads a gradient where there is none any more.
        """
        hooks = self._post
        if not hooks:
            return
        rows = self._rows(whole)
        with self._masters_in_place(rows), ExitStack() as stack:
            if has_gradients:
                stack.enter_context(_watch_writes(rows, self._note_write))
                for hook in hooks:
                    _call(hook, self.optimizer)
            else:
                stack.enter_context(_watched(rows, hooks, self._note_write, after=True))(self.optimizer)

    @property
    def has_any(self) -> bool:
        """Whether there are hooks to fire before a step or after it."""
        return bool(self._pre or self._post)

    @property
    def _pre(self) -> list[Hook]:
        return pre_hooks(self.optimizer, self.of_all)

    @property
    def _post(self) -> list[Hook]:
        of_all = hooks_of_all_optimizers()[1] if self.of_all else {}
        return [*self.optimizer._optimizer_step_post_hooks.values(), *of_all.values()]

    def _note_write(self, row: _Row, hook: str) -> None:
        self.before_write(row.block)

    def _rows(self, whole: Mapping[Block, GradientPiece]) -> list[_Row]:
        rows = []
        for block, masters in self.masters().items():
            places, given = (whole[block].places, whole[block].views()) if block in whole else ({}, {})
            for i, row in enumerate(zip(block.names, block.params, masters, block.views, strict=True)):
                rows.append(_Row(block, *row, places.get(i), i in given))
        return rows

    @contextmanager
    def _masters_in_place(self, rows: Sequence[_Row]) -> Iterator[None]:
        """Let parameters hold masters and gradients, as they do in core when an optimizer takes its step."""
        data = [row.param.data for row in rows]
        try:
            for row in rows:
                row.param.data = row.view  # before `grad`: PyTorch refuses one of another type than the data
                row.param.grad = row.master.grad = row.given
            yield
        finally:
            for row, held in zip(rows, data, strict=True):
                row.param.grad = row.master.grad = None  # buffers are used again, and nobody may find them here
                row.param.data = held


@dataclass(frozen=True, eq=False)
class _Row:
    """Stands for one parameter while hooks run."""

    block: Block
    name: str
    param: nn.Parameter
    master: nn.Parameter
    view: torch.Tensor  # of the block's master
    grad: torch.Tensor | None  # where its gradient is, or would be
    has: bool

    @property
    def given(self) -> torch.Tensor | None:
        return self.grad if self.has else None

    def take_back(self) -> bool:
        """Take over the gradient that hooks have left; returns whether there is one.

        Raises:
            ValueError: the model's parameter and the optimizer's have different new ones.
        """
        if self.grad is None:
            self.check_none()
            return False
        new = [held.grad for held in (self.master, self.param) if held.grad is not self.given]
        if not new:
            return self.has
        if len(new) == 2 and new[0] is not new[1]:
            raise ValueError(
                f"a step hook gives {self.name} one gradient through the optimizer and another one through the model: set "
                "it in one place"
            )
        if new[0] is not None:
            self.grad.copy_(new[0])
        return new[0] is not None

    def check_none(self) -> None:
        """Refuse a gradient that a hook has given to a parameter that can have none in this step.

        Raises:
            ValueError: names the parameter.
        """
        if self.master.grad is not None or self.param.grad is not None:
            raise ValueError(
                f"a step hook gives {self.name} a gradient, and its layer has none in this step (it is frozen or sits out): "
                "let it change gradients that are there"
            )


def _call(hook: Hook, optimizer: Optimizer) -> None:
    result = hook(optimizer, (optimizer,), {})
    if result is not None and result != ((optimizer,), {}):
        raise ValueError(
            f"the step hook {_name(hook)} returns {result!r} as arguments of step(): a relay updates layers without any. Let it "
            "return None"
        )


# -- watching ----------------------------------------------------------------------------------------------------------

Fire = Callable[[Optimizer], None]
OnWrite = Callable[[_Row, str], None]


@contextmanager
def _watched(rows: Sequence[_Row], hooks: Sequence[Hook], on_write: OnWrite, after: bool = False) -> Iterator[Fire]:
    """Give out what fires the hooks, and refuses them if they touch a gradient; it counts even if they hide the error."""
    watch = _GradWatch({id(held): row for row in rows for held in (row.param, row.master)}, after)
    writes = _WriteWatch(rows, on_write)

    def fire(optimizer: Optimizer) -> None:
        for hook in hooks:
            watch.hook = writes.hook = _name(hook)
            with watch, writes:
                _call(hook, optimizer)
            for error in (*watch.errors, *writes.errors):
                raise error

    yield fire


@contextmanager
def _watch_writes(rows: Sequence[_Row], on_write: OnWrite) -> Iterator[None]:
    with _WriteWatch(rows, on_write):
        yield


class _GradWatch(TorchFunctionMode):
    """Refuses what gets, sets or deletes the gradient of one of the parameters."""

    def __init__(self, rows: Mapping[int, _Row], after: bool) -> None:
        super().__init__()
        self.rows, self.after, self.hook, self.errors = rows, after, "", list[ValueError]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # To get, set and delete an attribute arrive as the bound methods of its descriptor
        if getattr(func, "__self__", None) is torch.Tensor.grad and id(args[0]) in self.rows and not self._clears(args):
            self._refuse(self.rows[id(args[0])])
        return func(*args, **(kwargs or {}))

    def _clears(self, args: Sequence[Any]) -> bool:
        """Tell whether it only clears a gradient that is gone after the step, as `zero_grad` does."""
        return self.after and (args[1:] == (None,) or _is_called_by("zero_grad"))

    def _refuse(self, row: _Row) -> NoReturn:
        when = "after" if self.after else "before"
        error = ValueError(
            f"the step {'post' if self.after else 'pre'}-hook {self.hook} touches the gradient of {row.name}, and runs {when} "
            f"the relay's step, when there is none. {_REMEDY}"
        )
        self.errors.append(error)
        raise error


class _WriteWatch(TorchDispatchMode):
    """Tells of every operation that is about to write into a master."""

    def __init__(self, rows: Sequence[_Row], on_write: OnWrite) -> None:
        super().__init__()
        self.hook, self.errors, self._on_write = "", list[ValueError](), on_write
        # One storage per block, so one row stands for it: the first, as it was put there last
        self._rows = {row.view.untyped_storage().data_ptr(): row for row in reversed(rows)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            given = [*zip(func._schema.arguments, args, strict=False)]
            given += [(argument, kwargs.get(argument.name)) for argument in func._schema.arguments[len(args) :]]
            written = [
                value for argument, value in given if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in pytree.tree_leaves(written):
                if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                    self._tell(self._rows.get(tensor.untyped_storage().data_ptr()))
        return func(*args, **kwargs)

    def _tell(self, row: _Row | None) -> None:
        if row is None:
            return
        try:
            self._on_write(row, self.hook)
        except ValueError as error:
            self.errors.append(error)
            raise


def _refuse_write(row: _Row, hook: str) -> NoReturn:
    raise ValueError(
        f"the step pre-hook {hook} changes weights of {row.name} or of its layer, before the relay's step: its gradient would be "
        f"that of other weights. {_REMEDY}"
    )


def _is_called_by(name: str) -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _name(hook: Hook) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__name__
