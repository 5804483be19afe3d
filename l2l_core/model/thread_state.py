"""The state that PyTorch and Python keep per thread, carried from one coroutine to another.

A forward that pauses may stand inside ``with autocast():``, ``no_grad``, a dispatch mode or an ``sdpa_kernel`` block, and
it draws from a random stream of its own. All of that lives in the thread, not in the coroutine, so it is taken along by
hand at every switch. What is not here: context variables (each greenlet has its own) and NumPy's global generator.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from l2l_core._torch import (
    TorchDispatchMode,
    attention_flags,
    dispatch_modes,
    function_modes,
    pop_dispatch_mode,
    pop_function_mode,
    pop_saved_tensors_hooks,
    push_dispatch_mode,
    push_function_mode,
    push_saved_tensors_hooks,
    set_attention_flags,
    set_grad_enabled,
    top_saved_tensors_hooks,
)
from l2l_core.model.python_random import PYTHON_RANDOM

_AUTOCAST_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators that a micro-batch draws from: the CPU's, Python's, and the current CUDA device's."""

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    python: tuple[Any, ...]

    @staticmethod
    def capture() -> RandomState:
        """Read the generators as they stand now. CUDA's lives on the host too, so that nothing is waited for."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return RandomState(torch.get_rng_state(), cuda, PYTHON_RANDOM.capture())

    @staticmethod
    def from_seed(seed: int) -> RandomState:
        """Make the state after ``torch.manual_seed(seed)`` and ``random.seed(seed)``; every generator is left alone.

        A device that is a GPU has initialised CUDA by now, so the state of CUDA's generator is there when it matters.
        """
        cuda = torch.Generator("cuda").manual_seed(seed).get_state() if torch.cuda.is_initialized() else None
        return RandomState(torch.Generator().manual_seed(seed).get_state(), cuda, random.Random(seed).getstate())

    def restore(self) -> None:
        """Make this the thread's state."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        PYTHON_RANDOM.restore(self.python)


class ThreadState(NamedTuple):  # which takes half as long to make as a frozen dataclass, and is made at every turn
    """Everything a coroutine expects to find unchanged when it is resumed."""

    random: RandomState
    grad_enabled: bool
    autocast: tuple[tuple[bool, torch.dtype], ...]
    autocast_cache: bool
    function_modes: tuple[Any, ...]
    dispatch_modes: tuple[TorchDispatchMode, ...]
    saved_tensor_hooks: tuple[tuple[Any, Any], ...]
    attention: tuple[Any, ...]

    @staticmethod
    def take() -> ThreadState:
        """Read the thread's state; its mode and hook stacks are left empty."""
        on, type_of = torch.is_autocast_enabled, torch.get_autocast_dtype
        state = ThreadState(
            random=RandomState.capture(),
            grad_enabled=torch.is_grad_enabled(),
            autocast=tuple([(on(kind), type_of(kind)) for kind in _AUTOCAST_TYPES]),
            autocast_cache=torch.is_autocast_cache_enabled(),
            function_modes=tuple(function_modes()),
            dispatch_modes=tuple(dispatch_modes()),
            saved_tensor_hooks=_pop_saved_tensor_hooks(),
            attention=attention_flags(),
        )
        for _ in state.function_modes:
            pop_function_mode()
        for _ in state.dispatch_modes:
            pop_dispatch_mode()
        return state

    @staticmethod
    def capture() -> ThreadState:
        """Read the thread's state, and leave it as it is."""
        state = ThreadState.take()
        state.restore()
        return state

    @staticmethod
    def clear() -> None:
        """Empty the thread's mode and hook stacks."""
        for _ in function_modes():
            pop_function_mode()
        for _ in dispatch_modes():
            pop_dispatch_mode()
        _pop_saved_tensor_hooks()

    def restore(self) -> None:
        """Make this the thread's state; its mode and hook stacks must be empty (`take` leaves them so)."""
        self.random.restore()
        self.restore_except_random()

    def restore_except_random(self) -> None:
        """Do the same, and let the random generators be as they are."""
        set_grad_enabled(self.grad_enabled)  # past what wraps it for tracing: this runs at every turn
        for device_type, (enabled, dtype) in zip(_AUTOCAST_TYPES, self.autocast, strict=True):
            torch.set_autocast_enabled(device_type, enabled)
            torch.set_autocast_dtype(device_type, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        for mode in self.function_modes:
            push_function_mode(mode)
        for mode in self.dispatch_modes:
            push_dispatch_mode(mode)
        for pack, unpack in self.saved_tensor_hooks:
            push_saved_tensors_hooks(pack, unpack)
        if self.attention != attention_flags():
            set_attention_flags(self.attention)

    def without_modes(self, *modes: Any) -> ThreadState:
        """Copy the state with some dispatch or function modes left out."""
        return self._replace(
            dispatch_modes=tuple(m for m in self.dispatch_modes if m not in modes),
            function_modes=tuple(m for m in self.function_modes if m not in modes),
        )

    def with_function_mode(self, mode: Any) -> ThreadState:
        """Copy the state inside a function mode, which is the first to be entered: the user's own come before it."""
        return self._replace(function_modes=(mode, *self.function_modes))

    def with_random_state(self, random_state: RandomState) -> ThreadState:
        """Copy the state with other random generators."""
        return self._replace(random=random_state)

    @property
    def has_autocast(self) -> bool:
        """Whether autocast is on for any device type."""
        return any(enabled for enabled, _ in self.autocast)

    @property
    def in_checkpoint(self) -> bool:
        """Whether a checkpoint is open, which will run again in backward what is called now."""
        hooks = self.saved_tensor_hooks if self.grad_enabled else ()
        return any(getattr(pack, "__module__", None) == "torch.utils.checkpoint" for pack, _ in hooks)

    @staticmethod
    def cleared() -> AbstractContextManager[None]:
        """Run a block with empty mode and hook stacks, then restore the whole state that was there before."""
        return _Cleared()

    @staticmethod
    def new_thread() -> AbstractContextManager[None]:
        """Run a block in the state of a new thread, then in the one that was there before; random generators go on."""
        return _NewThread()

    def activate(self, outer_state: ThreadState) -> AbstractContextManager[None]:
        """Run a block under this state, then under `outside` again, for whoever knows that it is in that one.

        Only the random generators are not: what is drawn outside goes on from where it was.
        """
        return _Activated(self, outer_state)


class _Cleared(AbstractContextManager[None]):
    def __enter__(self) -> None:
        self._outer_state = ThreadState.take()

    def __exit__(self, *exc: object) -> None:
        ThreadState.clear()  # a block that failed may leave modes behind, and `put` wants empty stacks
        self._outer_state.restore()


class _NewThread(_Cleared):
    def __enter__(self) -> None:
        super().__enter__()
        set_grad_enabled(True)
        for device_type in _AUTOCAST_TYPES:
            torch.set_autocast_enabled(device_type, False)

    def __exit__(self, *exc: object) -> None:
        ThreadState.clear()
        self._outer_state.restore_except_random()


class _Activated(AbstractContextManager[None]):
    """There is one at every recompute, and a generator would take twice as long."""

    def __init__(self, state: ThreadState, outer_state: ThreadState) -> None:
        self._state, self._outer_state = state, outer_state

    def __enter__(self) -> None:
        self._random = RandomState.capture()
        ThreadState.clear()
        try:
            self._state.restore()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *exc: object) -> None:
        ThreadState.clear()
        self._random.restore()
        self._outer_state.restore_except_random()


@contextmanager
def function_modes_without(kind: type) -> Iterator[None]:
    """Run a block under the function modes in force, but for those of a kind."""
    modes = function_modes()
    for _ in modes:
        pop_function_mode()
    kept = [mode for mode in modes if not isinstance(mode, kind)]
    for mode in kept:
        push_function_mode(mode)
    try:
        yield
    finally:
        for _ in kept:
            pop_function_mode()
        for mode in modes:
            push_function_mode(mode)


def _pop_saved_tensor_hooks() -> tuple[tuple[Any, Any], ...]:
    hooks = []
    # True: also while Dynamo traces, where they would not show.
    while (top := top_saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        pop_saved_tensors_hooks()
    return tuple(reversed(hooks))
