"""Call the model with a micro-batch and compute its loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from l2l_core._torch import is_torch_loss
from l2l_core.batches.loss_modules import metrics_in, modules_used_by, refuse_gradient_scalers, settings_of
from l2l_core.model import no_cache_arguments

LossResult = torch.Tensor | tuple[torch.Tensor, Any]  # a scalar, or (scalar, extras)
Loss = Callable[[Any, Any], LossResult]
UserObjective = Callable[[nn.Module, Any], LossResult]
Objective = Callable[[nn.Module, Any], torch.Tensor]
_TARGETS = ("target", "targets", "label", "labels", "y", "y_true")
_MODEL_CALL = (
    "A relay calls the model with the whole batch: values of a dict by their keys, entries of a tuple in order. To keep targets "
    "from the model, pass loss=lambda outputs, batch: ..., which gets the whole batch; the model is then called without the last "
    "entry of a tuple, or without keys that its forward does not name. Or pass objective=lambda model, batch: ... and call the "
    "model yourself."
)
_LOSS_CALL = (
    "A relay calls loss(outputs, batch), with the whole batch: pass loss=lambda outputs, batch: ... and take from the batch what "
    "the loss needs, as batch[-1] or batch['labels']."
)
_TARGETS_CALL = (
    "A relay calls loss(outputs, batch), with the whole batch, and this function runs with the last entry of the batch: pass "
    "loss=lambda outputs, batch: criterion(outputs, batch[{}]). Losses of torch.nn, as nn.CrossEntropyLoss(), are passed as they "
    "are."
)
JoinFn = Callable[[Sequence[Any]], Any]  # joins the outputs of micro-batches


class ModelCall:
    """Calls the model and the loss on a micro-batch.

    A mapping gives keyword arguments; with `loss`, keys that the model's ``forward`` does not take are for the loss only. A
    sequence gives positional arguments; with `loss`, its last element is the target, unless ``forward`` needs all of them. A
    dataclass needs an `objective`.

    A loss or an objective returns a scalar, or ``(scalar, extras)`` with any tree of tensors and values for `StepResult.extras`.

    Attributes:
        refusal: why the loss that the model computes must not be used; empty if it may.
    """

    refusal = ""

    def __init__(
        self,
        model: nn.Module,
        loss: Loss | None = None,
        objective: UserObjective | None = None,
    ) -> None:
        if loss is not None and objective is not None:
            raise ValueError(
                "loss= and objective= are both given: pass one, objective(model, micro_batch) includes the loss"
            )
        refuse_gradient_scalers((loss, objective))
        self._criterion = loss if _takes_targets(loss) else None
        # Not a method of this object, which would refer to itself
        self._loss = partial(_apply_criterion, self._criterion) if self._criterion else loss
        self._objective, self._model = objective, model
        parameters = inspect.signature(model.forward).parameters
        self._takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._names = frozenset(parameters)
        self._fixed = no_cache_arguments(model)
        needed = [p for name, p in parameters.items() if p.default is p.empty and name not in self._fixed]
        self._needs = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in needed)

    def settings(self) -> Hashable:
        """Return the settings of the loss or objective; see `settings_of`."""
        return settings_of(self._criterion or self._loss or self._objective)

    def continue_run(self, folder: Path, own_loss: bool) -> None:
        """Refuse the model's loss from now on if the run in a folder had one of the user."""
        if own_loss and not self.functions:
            self.refusal = (
                f"{folder} was trained with a loss= or objective= of yours, and this relay has none: steps and evaluations "
                "would use the loss that the model computes. Pass the same one to Relay or Relay.load; for the model's loss "
                "pass objective=lambda model, batch: model(**batch).loss, or model(*batch)['loss'], as in a plain loop"
            )

    def check_loss(self) -> None:
        """Raise ValueError if the loss that the model computes must not be used."""
        if self.refusal:
            raise ValueError(self.refusal)

    def check(self, batch: Any) -> None:
        """Raise TypeError for a batch from which the model cannot be called."""
        if self._objective is None:
            _check_arguments(batch)

    def objective(self, model: nn.Module, micro_batch: Any) -> torch.Tensor:
        """Run the model on one micro-batch; return the scalar loss."""
        return self.objective_with_extras(model, micro_batch)[0]

    def objective_with_extras(self, model: nn.Module, micro_batch: Any) -> tuple[torch.Tensor, Any]:
        """Run the model on one micro-batch; return the scalar loss and the extras, None without any."""
        if self._objective is not None:
            return split_extras(self._objective(model, micro_batch), "objective(model, micro_batch)")
        return self._loss_with_extras(self.outputs(model, micro_batch), micro_batch)

    @property
    def has_objective(self) -> bool:
        """True if the user's objective runs the model, so that its outputs are not known."""
        return self._objective is not None

    def objective_with_outputs(self, model: nn.Module, micro_batch: Any) -> tuple[torch.Tensor, Any]:
        """Run the model on one micro-batch, without an objective; return the scalar loss and the outputs."""
        outputs = self.outputs(model, micro_batch)
        return self._loss_with_extras(outputs, micro_batch)[0], outputs

    def _loss_with_extras(self, outputs: Any, micro_batch: Any) -> tuple[torch.Tensor, Any]:
        if self._loss is not None:
            return _apply_loss(self._loss, outputs, micro_batch)
        return _check_scalar(_loss_of(outputs, micro_batch), "outputs.loss"), None

    def loss_modules(self) -> list[nn.Module]:
        """Return the modules that the loss or the objective uses beside the model, such as metrics or a teacher."""
        return self._outside_model(lambda module: list(module.modules()))

    @property
    def functions(self) -> list[object]:
        """The functions of the user: the loss and the objective, if given."""
        return [function for function in (self._loss, self._objective) if function is not None]

    def metrics(self) -> list[nn.Module]:
        """Return those of them that have no parameters."""
        return self._outside_model(metrics_in)

    def _outside_model(self, parts_of: Callable[[nn.Module], list[nn.Module]]) -> list[nn.Module]:
        found = modules_used_by((self._loss, self._objective))
        in_model = set(self._model.modules()) if found else set()  # edits may have changed it
        return [part for module in found if module not in in_model for part in parts_of(module) if part not in in_model]

    def batch_loss(self, join: JoinFn, outputs: Sequence[Any], batch: Any) -> torch.Tensor:
        """Return the loss of a batch, given the outputs of its micro-batches and the function that joins them."""
        return self.batch_loss_with_extras(join, outputs, batch)[0]

    def batch_loss_with_extras(self, join: JoinFn, outputs: Sequence[Any], batch: Any) -> tuple[torch.Tensor, Any]:
        """Return the same loss, and the extras, None without any.

        Raises:
            ValueError: the loss is not a scalar, or outputs cannot be joined.
        """
        assert self._loss is not None, "checked by `check_batch_loss`"
        return _apply_loss(self._loss, join(outputs), batch)

    def check_batch_loss(self) -> None:
        """Raise ValueError if the loss cannot be taken over the outputs of several micro-batches."""
        if self._loss is None:
            computed = (
                "the model computes it" if self._objective is None else "objective(model, micro_batch) includes it"
            )
            raise ValueError(
                f'loss_over="batch" needs the loss apart from the model, but {computed}: pass loss=lambda outputs, batch: ..., '
                "which gets the outputs of all micro-batches, and leave labels out of the model's arguments"
            )

    def outputs(self, model: nn.Module, micro_batch: Any) -> Any:
        """Run the model on one micro-batch; return its outputs.

        Raises:
            TypeError: the model cannot be called from the batch, even if there is an objective.
        """
        _check_arguments(micro_batch)
        if isinstance(micro_batch, Mapping):
            named = {**self._fixed, **self._model_arguments(micro_batch)}  # the batch takes precedence
            with _explained(model.forward, _MODEL_CALL, **named):
                return model(**named)
        # A forward that needs all of them leaves no target, as with two views of each row.
        has_target = self._loss is not None and len(micro_batch) > max(1, 0 if self._criterion else self._needs)
        given = micro_batch[:-1] if has_target else micro_batch
        with _explained(model.forward, _MODEL_CALL, *given, **self._fixed):
            return model(*given, **self._fixed)

    def _model_arguments(self, micro_batch: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._loss is None or self._takes_any:
            return micro_batch
        return {name: value for name, value in micro_batch.items() if name in self._names}


@contextmanager
def _explained(function: Callable[..., Any], how: str, *args: Any, **kwargs: Any) -> Iterator[None]:
    """Add to a TypeError how the relay calls a function of the user, if it takes other arguments."""
    try:
        yield
    except TypeError as error:
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError:
            error.add_note(how)
        except ValueError:  # a function in C that does not state its arguments
            pass
        raise


def _apply_loss(loss: Loss, outputs: Any, batch: Any) -> tuple[torch.Tensor, Any]:
    """Return the scalar loss and the extras; add a remedy to the error of a function of outputs and targets."""
    try:
        with _explained(loss, _LOSS_CALL, outputs, batch):
            result = loss(outputs, batch)
    except (TypeError, AttributeError) as error:
        if isinstance(batch, Sequence) and batch and _returns_scalar(loss, outputs, batch[-1]):
            error.add_note(_TARGETS_CALL.format(len(batch) - 1))
        raise
    return split_extras(result, "loss(outputs, batch)")


def _returns_scalar(loss: Loss, outputs: Any, targets: Any) -> bool:
    try:
        with torch.no_grad():
            split_extras(loss(outputs, targets), "loss(outputs, targets)")
    except Exception:
        return False
    return True


def _apply_criterion(criterion: Any, outputs: Any, batch: Any) -> torch.Tensor:
    """Apply a loss that takes outputs and targets, as those of `torch.nn` do."""
    name = f"{type(criterion).__name__}()" if isinstance(criterion, nn.Module) else criterion.__name__
    if isinstance(batch, list | tuple) and len(batch) > 1 and isinstance(outputs, torch.Tensor):
        return criterion(outputs, batch[-1])  # the model got the others
    raise ValueError(
        f"loss={name} takes outputs and targets; where they are is known for one tensor of outputs and a tuple (inputs, "
        "..., targets) as a batch. Otherwise pass loss=lambda outputs, batch: criterion(outputs.logits, batch['labels'])"
    )


def _takes_targets(loss: object) -> bool:
    """Return whether a loss takes outputs and targets, not the batch.

    Losses of `torch.nn` do, and modules and functions of `torch.nn.functional` that have an argument of such a name.
    """
    if is_torch_loss(loss):
        return True
    is_module = isinstance(loss, nn.Module)
    if not is_module and getattr(loss, "__module__", "") != "torch.nn.functional":
        return False
    function: Any = loss.forward if is_module else loss
    names = list(inspect.signature(function).parameters)
    return len(names) > 1 and names[1] in _TARGETS


def _check_arguments(batch: Any) -> None:
    if not isinstance(batch, Mapping | Sequence):
        raise TypeError(
            f"batch is a {type(batch).__name__}, from which the model cannot be called: pass a dict of keyword arguments or a "
            "tuple of positional ones, as (batch,); or pass objective=lambda model, micro_batch: ... to the relay, which is "
            "enough to train and evaluate"
        )


def _loss_of(outputs: Any, micro_batch: Any) -> Any:
    """Return the loss among a model's outputs: the field `loss`, or the outputs themselves if they are one floating scalar."""
    if _is_scalar(outputs):
        return outputs
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if loss is not None:
        return loss
    call = "model(**batch)" if isinstance(micro_batch, Mapping) else "model(*batch)"
    remedy = f"put labels into the batch, or pass loss=lambda outputs, batch: ..., or objective=lambda model, batch: {call}..."
    if isinstance(outputs, Mapping) and outputs and all(map(_is_scalar, outputs.values())):
        remedy = f"if the loss is their sum, pass objective=lambda model, batch: sum({call}.values())"
    elif isinstance(outputs, Sequence) and (at := [i for i, each in enumerate(outputs) if _is_scalar(each)]):
        remedy = f"if it is the scalar at {at[0]}, pass objective=lambda model, batch: {call}[{at[0]}]"
    raise ValueError(f"the model's output ({type(outputs).__name__}) has no .loss: {remedy}")


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and value.is_floating_point()


def split_extras(result: Any, source: str) -> tuple[torch.Tensor, Any]:
    """Return the scalar and the extras of what a loss returned; raise ValueError if there is no scalar."""
    loss, extras = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    return _check_scalar(loss, source), extras


def _check_scalar(loss: Any, source: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(
            f"{source} returned {got}: the relay needs one scalar tensor per micro-batch, or (scalar, extras); reduce it (mean) "
            "first"
        )
    return loss


def divide_loss(loss: torch.Tensor, divisor: float) -> torch.Tensor:
    """Return the loss of a micro-batch divided by its divisor; 0 for a micro-batch that has no targets (infinite divisor)."""
    return loss / divisor if math.isfinite(divisor) else torch.zeros_like(loss, requires_grad=False)
