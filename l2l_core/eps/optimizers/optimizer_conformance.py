"""Trial of an optimizer: whether block-by-block updates give the same bits as one step over all parameters.

Copies of the optimizer train small weights in two blocks for ten steps: in plain steps, in parts as `LayerStore` updates them,
and resumed from a save. Weights, state and settings must agree in every bit.

A trial is no proof for every input; `Relay.verify` is. An optimizer that couples layers from its eleventh step on passes the
trial; `merge_changes` refuses it in training if the coupling shows in its settings.
"""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from l2l_core.eps.optimizers.optimizer_settings import (
    SettingChanges,
    apply_changes,
    clone_state,
    differing_settings,
    differing_state,
    is_same,
    load_settings,
    merge_changes,
    settings_of,
    settings_to_save,
    user_objects_of,
)
from l2l_core.eps.optimizers.partial_optimizer import clone_deep, restrict_optimizer, scale_lr, step_part, update_part
from l2l_core.model import Tensors, decode, encode, preserve_random_state, preserved_user_state, tensor_copier

_STEPS, _RESUMES = 10, 4
_PAUSES, _JOINS = (6, 7), (0, 1)  # steps without a gradient of the second block: frozen, or added later
_RATE = 1e-2  # minimum: at lower rates, rounding may hide for ten steps that layers are coupled
_WEAK = 0.001  # scale of the second block's gradients, so that sums over both blocks differ from sums over one
_LARGE = 4096  # elements, from which optimizers quantise state

Change = Callable[[Tensor], Tensor]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Findings:
    """Properties of an optimizer that can be updated block by block.

    Attributes:
        elementwise: it treats each element separately. Otherwise it sums over elements, and the bits depend on the number of
            cores that share an operation.
        newcomers: why it cannot take a parameter whose first gradient is in a later step; empty if it can.
        follows_rate: it computes settings from the learning rate, so a layer that warms up would need other settings.
        couples: why it cannot update block by block, so that only ``update="whole"`` is possible; empty if it can.
    """

    elementwise: bool = True
    newcomers: str = ""
    follows_rate: bool = False
    couples: str = ""


def try_blockwise(optimizer: Optimizer) -> Findings:
    """Try copies of an optimizer on small weights; the original is unchanged.

    Raises:
        ValueError: it has state outside of its parameters, draws random numbers or fails to step; or its state cannot be copied
            or saved.
    """
    trial = Trial(optimizer)
    with preserve_random_state(), preserved_user_state(*user_objects_of(optimizer)):
        try:
            return _findings_of(trial)
        except _StepError as error:
            raise ValueError(str(error)) from error.__cause__
        except _CouplesError as error:
            return Findings(elementwise=False, follows_rate=True, couples=str(error))


def _findings_of(trial: Trial) -> Findings:
    pauses, newcomers = _PAUSES, ""
    try:
        try:
            whole = trial.compare(pauses)
        except _StepError:  # it cannot freeze a layer in plain training either
            whole = trial.compare(pauses := ())
        try:
            trial.compare(_JOINS)
        except ValueError as error:
            newcomers = str(error.__cause__ or error)
        return Findings(trial.is_elementwise(pauses), newcomers, trial.follows_rate(whole, pauses))
    except _NothingChangedError:
        trial.compare_with_small_gradients()


def changed_attributes(optimizer: Optimizer) -> list[str]:
    """Return the names of attributes of the optimizer itself that a step on small weights changes."""
    with preserve_random_state(), preserved_user_state(*user_objects_of(optimizer)):
        copy = Trial(optimizer).copy()
        before = settings_of(copy)[:1]
        for param in (param for group in copy.param_groups for param in group["params"]):
            param.grad = torch.ones_like(param)
        step_part(copy)
        return differing_settings(before, settings_of(copy)[:1])


class Trial:
    """Copies of an optimizer that train small weights, which belong to two blocks in turn."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._name = optimizer, type(optimizer).__name__
        self._check_keys(
            key for key in optimizer.state if not isinstance(key, Tensor)
        )  # state of old parameters may remain
        noise = torch.Generator().manual_seed(0)
        groups = _two_of_each_kind(optimizer.param_groups)
        self._groups = [(group, _likes(group["params"], optimizer.state, noise)) for group in groups]
        self._likes = [like for _, likes in self._groups for like in likes]
        slopes = [torch.randn(like.shape, generator=noise) for like in self._likes]
        self._slopes = [_WEAK * slope if i % 2 else slope for i, slope in enumerate(slopes)]
        self._noises = [0.5 * s.abs().mean() * torch.randn(s.shape, generator=noise) for s in self._slopes]

    def compare(self, pauses: Sequence[int]) -> Optimizer:
        """Compare plain steps with steps in parts and with a resume; in `pauses` the second block has no gradient.

        Raises:
            ValueError: weights, state or settings differ, or a step fails.
        """
        with_state = 1 if 0 in pauses else 2
        whole = self._train(self.copy(with_state), range(_RESUMES), pauses)
        resumed = self._train(self._resumed(whole), range(_RESUMES, _STEPS), pauses)
        self._train(whole, range(_RESUMES, _STEPS), pauses)
        if not _differences(whole, self.copy(with_state)):
            raise _NothingChangedError(
                f"{self._name} cannot be tried: ten steps of a copy with other weights changed nothing. It keeps references to "
                "its parameters outside of its groups, or it skips steps, whether gradients are large or small. Read parameters "
                "from param_groups at every step, and skip batches in the training loop"
            )
        if names := _differences(whole, resumed):
            raise ValueError(
                f"{self._name} keeps something outside of its settings and its parameters' state that a save would not hold: "
                f"a resume gives another {', '.join(names[:4])}. Keep it in the state of each parameter, or as a number in "
                "param_groups"
            )
        if names := _differences(whole, self._train_in_parts(self.copy(with_state), pauses)):
            raise _CouplesError(
                f"{self._name} couples parameters of different layers: updating one layer at a time gives another "
                f"{', '.join(names[:4])} than one step over all. RelayConfig(update='whole') takes one step over all, once all "
                "gradients are there; or use an optimizer that treats each parameter by itself, such as torch.optim.AdamW"
            )
        return whole

    def compare_with_small_gradients(self) -> NoReturn:
        """Compare once more for an optimizer that has skipped every step.

        Raises:
            _CouplesError: it steps with small gradients, so it skips steps by their size.
            ValueError: it changes nothing with them either, or weights, state or settings differ.
        """
        self._slopes = [_WEAK * slope / slope.norm() for slope in self._slopes]
        self._noises = [_WEAK * noise / noise.norm() for noise in self._noises]
        self.compare(())
        raise _CouplesError(
            f"{self._name} skips steps when gradients are large, and with updates of one layer at a time it would decide for "
            "each layer by itself. RelayConfig(update='whole') takes one step over all, once all gradients are there"
        )

    def is_elementwise(self, pauses: Sequence[int]) -> bool:
        """Return whether permuted elements get the same updates, from the state's first value on."""
        copies = [self.copy(with_state=0), self.copy(with_state=0, change=_mixed)]
        try:
            self._train(copies[0], range(_STEPS), pauses)
            self._train(copies[1], range(_STEPS), pauses, _mixed)
        except ValueError:
            return False
        return not _differences(copies[0], copies[1], _mixed)

    def follows_rate(self, whole: Optimizer, pauses: Sequence[int]) -> bool:
        """Return whether another learning rate leads to settings other than those of `whole`."""
        if not all("lr" in group for group in whole.param_groups):
            return False
        if any(group["lr"] is None for group in whole.param_groups):
            return True
        other = self.copy()
        scale_lr(other, 0.5)
        self._train(other, range(_STEPS), pauses)
        return differing_settings(settings_of(whole), settings_of(other)) not in ([], ["lr"])

    def copy(self, with_state: int = 2, change: Change = _same) -> Optimizer:
        """Return a copy over new weights, with the optimizer's state for the first `with_state` blocks."""
        groups, counterparts = [], {}
        for group, likes in self._groups:
            params = [nn.Parameter(change(like.detach()).clone()) for like in likes]
            for param, like in zip(params, likes, strict=True):
                vars(param).update(vars(like))
            # All of the user's parameters have a counterpart, so the copy refers to none of them
            counterparts |= dict.fromkeys(group["params"], params[0] if params else None) | dict(
                zip(likes, params, strict=True)
            )
            groups.append({**group, "params": params})
        with self._copying():
            state = {
                counterparts[like]: _changed(clone_state(self._optimizer.state[like]), like, change)
                for i, like in enumerate(self._likes)
                if like in self._optimizer.state and i % 2 < with_state
            }
        clone = clone_deep(self._optimizer, groups, defaultdict(dict, state), counterparts)
        for group in clone.param_groups:
            group.pop("param_names", None)  # the user's
            if isinstance(rate := group.get("lr"), float | int | Tensor):
                group["lr"] = rate.clamp(min=_RATE) if isinstance(rate, Tensor) else max(rate, _RATE)
        if callable(train := getattr(clone, "train", None)):  # optimizers that average weights step in this mode
            train()
        return clone

    def _train(self, optimizer: Optimizer, steps: range, pauses: Sequence[int], change: Change = _same) -> Optimizer:
        """Take plain steps over all weights."""
        for step in steps:
            self._fill(optimizer, step, pauses, change)
            before = torch.get_rng_state()
            try:
                step_part(optimizer)
            except Exception as error:
                raise _StepError(f"{self._name} cannot be used: {_why_it_fails(optimizer, error)}") from error
            if not torch.equal(before, torch.get_rng_state()):
                raise ValueError(
                    f"{self._name} draws random numbers in its step: a relay draws others than plain training, with any update=, "
                    "since micro-batches have separate random streams and layers are updated in another order. Switch that "
                    "off (stochastic rounding, for instance), or use another optimizer"
                )
        return optimizer

    def _train_in_parts(self, whole: Optimizer, pauses: Sequence[int]) -> Optimizer:
        """Take the same steps as a relay: one block after another, the last one first."""
        parts = [restrict_optimizer(whole, _params(whole)[i::2]) for i in (1, 0)]
        for step in range(_STEPS):
            self._fill(whole, step, pauses)
            changes: SettingChanges = {}
            for part in parts:
                if all(param.grad is None for param in _params(part)):
                    continue  # a relay does not update it either
                try:
                    merge_changes(changes, update_part(part, whole))
                except Exception as error:
                    raise _CouplesError(
                        f"{self._name} cannot run block by block: {error}. RelayConfig(update='whole') takes one step over all "
                        "parameters, once all gradients are there"
                    ) from error
            apply_changes(whole, changes)
        return whole

    def _fill(self, optimizer: Optimizer, step: int, pauses: Sequence[int], change: Change = _same) -> None:
        """Set gradients with a constant direction plus noise, similar to real ones."""
        for i, (param, slope, noise) in enumerate(zip(_params(optimizer), self._slopes, self._noises, strict=True)):
            param.grad = None if i % 2 and step in pauses else change(slope + noise.roll(step))

    def _resumed(self, optimizer: Optimizer) -> Optimizer:
        """Return a new copy with everything that a save of a trained one would hold."""
        self._check_keys(optimizer.state.keys() - set(_params(optimizer)))
        tensors: Tensors = {}
        params, (attributes, groups) = _params(optimizer), settings_to_save(optimizer)
        with self._copying():
            states = encode([optimizer.state.get(param, {}) for param in params], "state", tensors)
            settings = encode([*attributes, *groups], "settings", tensors)
            for state in optimizer.state.values():  # for undo and branches
                clone_state(state)
        new, take = self.copy(), tensor_copier(tensors)
        new.state.clear()
        with torch.no_grad():
            for param, value, state in zip(_params(new), params, decode(states, take), strict=True):
                param.copy_(value)
                new.state.update({param: state} if state else {})
        load_settings(new, decode(settings, take))
        return new

    def _check_keys(self, strange: Iterable[object]) -> None:
        for key in strange:
            what = f"a tensor of shape {tuple(key.shape)}" if isinstance(key, Tensor) else repr(key)
            raise ValueError(
                f"{self._name} keeps a state of {what}, which is no parameter of its groups: it would count once per layer and "
                "be missing in saves. Use an optimizer that keeps its state by parameter and its counts in param_groups"
            )

    @contextmanager
    def _copying(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise ValueError(
                f"{self._name} keeps state or settings that a relay cannot copy or save ({error}): verify, undo, branches and "
                "saves would fail. Use an optimizer that keeps ordinary tensors and plain data, as those of torch do, and "
                "bitsandbytes' in 8 bits"
            ) from error


class _StepError(ValueError):
    """A plain step raised."""


class _NothingChangedError(ValueError):
    """Steps changed neither weights nor state."""


class _CouplesError(ValueError):
    """Steps over all parameters work, those over one block after another do not."""


def _params(optimizer: Optimizer) -> list[nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _differences(one: Optimizer, other: Optimizer, change: Change = _same) -> list[str]:
    """Return the names of settings, state and weights that differ after applying `change` to `one`."""
    names = [f"setting {name!r}" for name in differing_settings(settings_of(one), settings_of(other))]
    for p, q in zip(_params(one), _params(other), strict=True):
        state = _changed(one.state.get(p, {}), p, change)
        names += [f"state {name!r}" for name in differing_state(state, other.state.get(q, {}))]
        names += [] if is_same(change(p.detach()), q.detach()) else ["weights"]
    return list(dict.fromkeys(names))


def _changed(state: dict[str, Any], param: Tensor, change: Change) -> dict[str, Any]:
    """Apply `change` to the tensors with an element for each of the parameter's."""
    alike = {name for name, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape}
    return {name: change(value) if name in alike else value for name, value in state.items()}


def _mixed(tensor: Tensor) -> Tensor:
    """Permute elements, in an order that depends only on their number."""
    order = torch.randperm(tensor.numel(), generator=torch.Generator().manual_seed(tensor.numel()))
    return tensor.flatten()[order].view(tensor.shape)


def _two_of_each_kind(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return up to two groups of each kind: groups that differ only in nonzero numbers."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for group in groups:
        settings = {name: bool(value) if isinstance(value, float) else value for name, value in group.items()}
        settings |= {"params": sorted({param.dim() for param in group["params"]}), "param_names": None}
        kinds.setdefault(repr(settings), []).append(group)
    return [group for alike in kinds.values() for group in alike[:2]]


def _likes(params: Sequence[nn.Parameter], state: Any, noise: torch.Generator) -> list[nn.Parameter]:
    """Return two weights for each number of dimensions in a group, with first values.

    If the optimizer has state, they are the user's smallest weights with state, which matches the counts in the group.
    """
    likes: list[nn.Parameter] = []
    for dims in sorted({param.dim() for param in params}):
        alike = [param for param in params if param.dim() == dims]
        stateful = sorted((p for p in alike if p in state), key=lambda param: (param.numel() < _LARGE, param.numel()))
        # 16 elements beyond a multiple of 32, since workers cut weights at multiples of 16 (`Layout`)
        if dims < 2:  # no longer than the user's, since some optimizers keep a square matrix
            side = min(max(64, *(param.numel() for param in alike)), _LARGE) // 32 * 32
            shapes = [(side,) * dims, (side - 16,) * dims]
        else:
            side = math.ceil(_LARGE ** (1 / dims) - 1e-9)
            shapes = [(side,) * dims, (16 * (side // 16 | 1), *(side + 1,) * (dims - 1))]
        new = [nn.Parameter(0.1 * torch.randn(shape, generator=noise)) for shape in shapes]
        for like, param in zip(new, (alike[0], alike[-1]), strict=True):
            vars(like).update(vars(param))  # attributes that the optimizer may read
        likes += stateful[:2] or new
    return likes


def _why_it_fails(optimizer: Optimizer, error: Exception) -> str:
    """Return cause and remedy of an error in a step of a copy over small weights."""
    words, what = str(error).lower(), f"a step of a copy over other weights raised {error!r}. "
    if "closure" in words or "'nonetype' object is not callable" in words:
        return (
            f"{what}It needs a closure that runs the model again, and a relay step has one forward and backward. Use an "
            "optimizer whose step() works without one, such as torch.optim.AdamW"
        )
    if "grad" in words and ("graph" in words or "require" in words):
        return (
            f"{what}It needs gradients of gradients, and a relay keeps no graph. Use an optimizer that needs none, such as "
            "torch.optim.AdamW"
        )
    others = [*{*_arguments_of(optimizer.step)} - {"closure", "args", "kwargs"}]
    if others and not isinstance(error, RuntimeError):  # torch's own, of shapes and devices
        return (
            f"{what}Its step takes {', '.join(sorted(others))}, which a relay does not pass. Use an optimizer whose step() works "
            "without, such as torch.optim.AdamW"
        )
    return (
        f"{what}It probably keeps tensors outside of its groups and its state (lists beside param_groups?), which no copy and no "
        "save would hold, with any update=. Keep them in self.state[param], as torch's own optimizers do"
    )


def _arguments_of(function: Callable[..., Any]) -> Iterable[str]:
    try:
        return inspect.signature(function).parameters
    except ValueError:  # in C, without a statement of its arguments
        return ()
