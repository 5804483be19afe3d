"""Modules that take the place of layers in steps without them, so that no other layer changes its position.

A model may read things by position: ``self.scales[i]``, a window per layer, an embedding for every other layer. Where a layer is
taken out of its list, each later layer reads its neighbour's. A stand-in keeps the place: it returns the hidden state that it is
given, in the form in which its layer returns it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from l2l_core._torch import pytree

Place = int | str  # of an argument: its position, or its keyword

_CONSTANT = (bool, str, type(None))  # numbers may be counted or measured in the layer


@dataclass(frozen=True)
class ReturnForm:
    """The outputs of a layer as arguments of its call.

    Attributes:
        spec: structure of the outputs.
        places: for each output, the argument that it is; None for a constant.
        constants: the outputs that are no tensors.
        absent: arguments that were None where an output was, which may be one of them.
    """

    spec: Any
    places: tuple[Place | None, ...]
    constants: tuple[Any, ...]
    absent: tuple[Place, ...] = ()

    def fill(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the outputs for a call with these arguments.

        Raises:
            LookupError: an argument is missing that the observed call had.
            ValueError: one is given that was None, so that it is not known which output it is.
        """
        if given := [place for place in self.absent if _argument(args, kwargs, place) is not None]:
            raise ValueError(f"argument {given[0]!r}")
        pairs = zip(self.places, self.constants, strict=True)
        leaves = [value if place is None else _argument(args, kwargs, place) for place, value in pairs]
        return pytree.tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class LayerReturn:
    """The outputs of one call of a layer, without their tensors.

    Attributes:
        spec: structure of the outputs.
        passed: for each output, the argument that it is, or None.
        constants: for each output, its value if it is a constant; else None.
        absent: the arguments that are None, if an output is None.
        other: numbers of the outputs that are neither.
        hidden: number of the first floating-point output; None if there is none.
        alike: arguments of the shape and type of the hidden output, in order.
    """

    spec: Any
    passed: tuple[Place | None, ...]
    constants: tuple[Any, ...]
    absent: tuple[Place, ...]
    other: tuple[int, ...]
    hidden: int | None
    alike: tuple[Place, ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> LayerReturn:
        leaves, spec = pytree.tree_flatten(outputs)
        arguments = dict(tensor_arguments(args, kwargs))
        place_of = {id(tensor): place for place, tensor in reversed(arguments.items())}
        passed = tuple(place_of.get(id(leaf)) for leaf in leaves)
        other = [i for i, leaf in enumerate(leaves) if passed[i] is None and not isinstance(leaf, _CONSTANT)]
        constants = tuple(leaf if isinstance(leaf, _CONSTANT) else None for leaf in leaves)
        given: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
        absent = tuple(place for place, value in given if value is None) if any(leaf is None for leaf in leaves) else ()
        hidden = next((i for i, leaf in enumerate(leaves) if _is_floating(leaf)), None)
        out = None if hidden is None else leaves[hidden]
        alike = [p for p, t in arguments.items() if out is not None and t.shape == out.shape and t.dtype == out.dtype]
        return cls(spec, passed, constants, absent, tuple(other), hidden, tuple(alike))

    def hidden_of(self, outputs: Any) -> torch.Tensor | None:
        """Return the hidden output among the outputs of this call."""
        return None if self.hidden is None else pytree.tree_leaves(outputs)[self.hidden]

    def form(self, hidden_at: Place) -> ReturnForm | None:
        """Return the form in which argument `hidden_at` is the hidden output; None if other outputs need the layer."""
        if self.hidden is None or hidden_at not in self.alike or not {*self.other} <= {self.hidden}:
            return None
        places = tuple(hidden_at if i == self.hidden else place for i, place in enumerate(self.passed))
        return ReturnForm(self.spec, places, self.constants, self.absent)


class StandIn(nn.Module):
    """Takes the place of a layer that does not run; it has no parameters.

    It shows the plain attributes of the layer, and is an instance of its class, since the model may choose a mask or a window by
    them.
    """

    def __new__(cls, layer: nn.Module, name: str, form: ReturnForm) -> StandIn:
        return object.__new__(type(cls.__name__, (cls, type(layer)), {}))

    def __init__(self, layer: nn.Module, name: str, form: ReturnForm) -> None:
        nn.Module.__init__(self)  # not that of the layer, which would make its parameters
        self.training = layer.training
        # Not by `__setattr__`, which would make the layer a part of the model again.
        vars(self).update(_layer=layer, _layer_name=name, _form=form)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the hidden state as the layer returns it."""
        if lacking := _collected_maps():
            raise RuntimeError(
                f"layer {self._layer_name} sits out and has no {', '.join(lacking)}, which transformers collects from layers in "
                "order, so that later layers would be taken for their neighbours: run all layers in this step, or ask for other "
                "outputs; relay.look(batch, attention=True, leave_out=...) shows attention maps by layer"
            )
        try:
            return self._form.fill(args, kwargs)
        except LookupError:
            raise RuntimeError(
                f"layer {self._layer_name} sits out, and the model calls it with other arguments than in its first forward, so "
                "that its hidden state is not known: pass the hidden state in the same argument in every call"
            ) from None
        except ValueError as error:
            raise RuntimeError(
                f"layer {self._layer_name} sits out, and the model gives it {error} now, which was None when layers were first "
                "skipped, and the layer returns a None: pass the argument in every batch (a mask of ones, for one), or in none"
            ) from None

    def __getattr__(self, name: str) -> Any:
        layer: nn.Module = vars(self)["_layer"]
        if any(name in held for held in (layer._parameters, layer._buffers, layer._modules)):
            raise RuntimeError(
                f"the model's own code reads {name} of layer {vars(self)['_layer_name']}, which sits this step out and is not "
                "loaded: run the layer in this step, or keep what others read outside of the layer"
            )
        return getattr(layer, name)


def _collected_maps() -> list[str]:
    """List the attention maps that transformers collects in the running forward; others read them by the position of layers.

    Hidden states have an entry for a stand-in. A router's loss is that of the layers that run.
    """
    collector = getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
    collected = None if collector is None else collector.get()
    return sorted(key for key in collected or () if "attentions" in key)


def tensor_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Place, torch.Tensor]]:
    """List the arguments of a call that are tensors, with their places."""
    pairs: list[tuple[Place, Any]] = [*enumerate(args), *kwargs.items()]
    return [(place, value) for place, value in pairs if isinstance(value, torch.Tensor)]


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], place: Place) -> Any:
    return args[place] if isinstance(place, int) else kwargs[place]


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
