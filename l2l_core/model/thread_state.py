"""Per-thread state of PyTorch and Python, saved and restored when coroutines are switched.

A forward may be suspended inside ``with autocast():``, ``no_grad``, a dispatch mode or an ``sdpa_kernel`` block, and each
micro-batch has its own random stream. That state belongs to the thread, so every switch saves and restores it. Context
variables (each greenlet has its own) and NumPy's global generator are not included.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
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

_AUTOCAST_TYPES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of the random generators of the CPU, of Python, and of the current CUDA device."""

    torch_cpu: torch.Tensor
    torch_cuda: torch.Tensor | None
    python: tuple[Any, ...]

    @staticmethod
    def capture() -> RandomState:
        """Read the current states. CUDA's generator state is on the host too, so this does not synchronize."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        return RandomState(torch.get_rng_state(), cuda, random.getstate())

    @staticmethod
    def from_seed(seed: int) -> RandomState:
        """Return the state after ``torch.manual_seed(seed)`` and ``random.seed(seed)`` without seeding the generators.

        Where the device is a GPU, CUDA is already initialised, so that its generator is included.
        """
        cuda = torch.Generator("cuda").manual_seed(seed).get_state() if torch.cuda.is_initialized() else None
        return RandomState(torch.Generator().manual_seed(seed).get_state(), cuda, random.Random(seed).getstate())

    def restore(self) -> None:
        """Make this the thread's state."""
        torch.set_rng_state(self.torch_cpu)
        if self.torch_cuda is not None:
            torch.cuda.set_rng_state(self.torch_cuda)
        random.setstate(self.python)


class ThreadState(NamedTuple):  # created at every turn, in half the time of a frozen dataclass
    """The thread state that a coroutine needs unchanged when it is resumed."""

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
        """Return the thread's state and empty its mode and hook stacks."""
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
        """Return the thread's state without changing it."""
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
        """Make this the thread's state, except the random generators."""
        set_grad_enabled(self.grad_enabled)  # the C function: this runs at every turn
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

    @property
    def has_autocast(self) -> bool:
        """Whether autocast is on for any device type."""
        return any(enabled for enabled, _ in self.autocast)

    @property
    def in_checkpoint(self) -> bool:
        """Whether the state is inside a `torch.utils.checkpoint`, which reruns its calls in backward."""
        hooks = self.saved_tensor_hooks if self.grad_enabled else ()
        return any(getattr(pack, "__module__", None) == "torch.utils.checkpoint" for pack, _ in hooks)

    @staticmethod
    @contextmanager
    def cleared() -> Iterator[None]:
        """Run a block with empty mode and hook stacks, then restore the whole previous state."""
        outer_state = ThreadState.take()
        try:
            yield
        finally:
            ThreadState.clear()  # a block that failed may leave modes behind, and `restore` needs empty stacks
            outer_state.restore()

    @staticmethod
    @contextmanager
    def new_thread() -> Iterator[None]:
        """Run a block in the state of a new thread, then restore the previous one except the random generators."""
        outer_state = ThreadState.take()
        set_grad_enabled(True)
        for device_type in _AUTOCAST_TYPES:
            torch.set_autocast_enabled(device_type, False)
        try:
            yield
        finally:
            ThreadState.clear()
            outer_state.restore_except_random()

    @contextmanager
    def activate(self, outer_state: ThreadState) -> Iterator[None]:
        """Run a block under this state, then restore `outer_state`, which must be the current one.

        The random generators are restored to their current states, not to those of `outer_state`.
        """
        current = RandomState.capture()
        ThreadState.clear()
        try:
            self.restore()
            yield
        finally:
            ThreadState.clear()
            current.restore()
            outer_state.restore_except_random()


@contextmanager
def function_modes_without(kind: type) -> Iterator[None]:
    """Run a block under the current function modes except those of class `kind`."""
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
    # True: also while Dynamo traces, where they would be hidden.
    while (top := top_saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        pop_saved_tensors_hooks()
    return tuple(reversed(hooks))
