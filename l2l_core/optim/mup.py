"""Initial weights and learning rates by muP, for a model of another width or depth than a smaller base.

    scaling = mup_scaling(model, base)  # base: the same class, narrower, perhaps with fewer layers
    print(scaling)
    scaling.rescale_weights()
    optimizer = torch.optim.AdamW(scaling.groups(lr=1e-2, weight_decay=0.1), betas=(0.9, 0.95))

With muP, the size of activations and of their changes per step does not depend on the width, and a learning rate that is tuned
on the base is nearly the best one for the model. The rules are those of Tensor Programs V (arXiv 2203.03466), table 3: initial
weights and rates, no factors in the forward. A dimension that differs from the base is a width. For depth they are those of
depth-muP (arXiv 2310.02244), with the factor of a residual branch put into its last layer; the paper derives them for branches
of one layer, and finds limits for those of transformers.

| parameter | initial size | rate of Adam |
|---|---|---|
| input, bias, gain of a norm (one width, not summed over) | 1 | 1 |
| hidden (two widths) | 1 / sqrt(m) | 1 / m |
| output (summed over a width, gives none) | 1 / m | 1 / m |
| in a repeated layer | 1 | times 1 / sqrt(d) |
| last layer of a residual branch | times 1 / sqrt(d) | times 1 / d |

m: ratio of the width that is summed over; d: ratio of the number of layers; both to the base.

The rates are for optimizers that divide each element of a gradient by its size, as Adam does, not for SGD or Muon. The rules keep
the scale of attention, 1 / sqrt(size of a head), and so hold where heads keep their size and a wider model has more of them.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_ORDINARY = "one width, not summed over: as in the base"
_HEADS = "Attention: for heads that keep their size, so that a wider model has more of them."


@dataclass(frozen=True)
class MupRow:
    """Rule for one parameter.

    Attributes:
        name: dotted name.
        kind: "input", "hidden", "output", "vector" or "fixed".
        init: initial size (root of the mean square) relative to that in the base.
        rate: learning rate relative to the base's.
        why: reason for the factors.
        base_size: root of the mean square of the base's parameter; in layers that the base does not have, of all of its layers.
    """

    name: str
    kind: str
    init: float
    rate: float
    why: str
    base_size: float


@dataclass(frozen=True, repr=False)
class MupScaling:
    """Rules for all parameters of a model; `print` shows them as a table.

    Attributes:
        model: the model.
        rows: a rule for each parameter, in the order of `named_parameters`.

    Example:
        See `mup_scaling`.
    """

    model: nn.Module
    rows: tuple[MupRow, ...]

    def rescale_weights(self) -> None:
        """Give all initial weights the size of the base's times the factor; a second call changes nothing more.

        Raises:
            ValueError: a parameter is zero, but not in the base; nothing has changed.
        """
        params = dict(self.model.named_parameters())
        factors = {row.name: _factor(row, params[row.name]) for row in self.rows}
        with torch.no_grad():
            for name, factor in factors.items():
                if factor != 1:
                    params[name].mul_(factor)

    def groups(self, lr: float, weight_decay: float = 0.0) -> list[dict[str, Any]]:
        """Return groups of parameters with their rates, for Adam, AdamW and their like.

        Args:
            lr: learning rate of the base.
            weight_decay: of the base's matrices; vectors have none. It grows as the rate falls, since AdamW multiplies both.
        """
        params, found = dict(self.model.named_parameters()), defaultdict[tuple[float, bool], list[Tensor]](list)
        for row in self.rows:
            found[row.rate, params[row.name].ndim > 1].append(params[row.name])
        return [
            {"params": group, "lr": lr * rate, "weight_decay": weight_decay / rate if decays else 0.0}
            for (rate, decays), group in found.items()
        ]

    def __str__(self) -> str:
        merged: dict[tuple[str, ...], int] = {}
        for row in self.rows:
            cells = _pattern(row.name), row.kind, f"{row.init:.4g}", f"{row.rate:.4g}", row.why
            merged[cells] = merged.get(cells, 0) + 1
        lines = [("parameter", "kind", "init", "rate", "why")]
        lines += [(name if n == 1 else f"{name} (x {n})", *rest) for (name, *rest), n in merged.items()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([*text, _HEADS])

    __repr__ = __str__


def mup_scaling(
    model: nn.Module, base: nn.Module, branch_ends: Sequence[str] = (), input_dims: Mapping[str, int] | None = None
) -> MupScaling:
    """Return the rules of muP for a model, relative to a smaller one of the same class. Nothing changes.

    Args:
        model: model with its initial weights.
        base: the same model narrower, or with fewer layers, with its initial weights; its learning rate is known.
        branch_ends: names of the last layer in every residual branch, as ``("attn.c_proj", "mlp.c_proj")`` in a GPT-2. Needed
            if the number of layers differs.
        input_dims: by name of a matrix, the dimension that is summed over, for parameters that belong to no linear layer,
            convolution or embedding.

    Raises:
        ValueError: parameters of model and base do not correspond, weights are tied, or one of the last arguments is needed.

    Example:
        >>> from l2l_core import mup_scaling
        >>> def make(width):
        ...     return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
        >>> rules = mup_scaling(make(64), base=make(16))
        >>> {row.name: row.rate for row in rules.rows if "weight" in row.name}  # rates relative to those of the base
        {'0.weight': 1.0, '2.weight': 0.25, '4.weight': 0.25}
        >>> rules.rescale_weights()
        >>> optimizer = torch.optim.AdamW(rules.groups(lr=1e-2))
    """
    _refuse_tied(model)
    of_base, ratio = _BaseParameters(base), _depth_ratio(model, base)
    names = [name for name, _ in model.named_parameters()]
    if ratio != 1:
        _check_branch_ends(names, of_base, branch_ends)
    dims = {**_summed_dims(model), **(input_dims or {})}
    rows = []
    for name, param in model.named_parameters():
        kind, width = _kind(name, param, of_base.shape_of(name), dims)
        init, rate, why = _by_width(kind, width)
        if ratio != 1 and of_base.is_repeated(name, names):
            is_end = _is_in(name, branch_ends)
            init, rate = (init / math.sqrt(ratio), rate / ratio) if is_end else (init, rate / math.sqrt(ratio))
            why += f"; {'end of a branch' if is_end else 'layer'}, {ratio:.4g} times as many"
        rows.append(MupRow(name, kind, init, rate, why, of_base.size_of(name)))
    return MupScaling(model, tuple(rows))


class _BaseParameters:
    """Parameters of the base, by the names of a model that may have more layers."""

    def __init__(self, base: nn.Module) -> None:
        self.by_pattern: dict[str, list[Tensor]] = {}
        self._by_name = dict(base.named_parameters())
        for name, param in self._by_name.items():
            self.by_pattern.setdefault(_pattern(name), []).append(param)

    def of(self, name: str) -> list[Tensor]:
        """Return the base's parameter of that name, or those of all layers for a layer that it does not have."""
        if name in self._by_name:
            return [self._by_name[name]]
        like = self.by_pattern.get(_pattern(name), [])
        if len({param.shape for param in like}) == 1:
            return like
        raise ValueError(
            f"{name} has no counterpart in the base model: make both by the same class, so that they differ in width and in "
            "the number of equal layers alone"
        )

    def shape_of(self, name: str) -> torch.Size:
        return self.of(name)[0].shape

    def size_of(self, name: str) -> float:
        params = self.of(name)
        return math.sqrt(sum(float(param.detach().double().square().mean()) for param in params) / len(params))

    def is_repeated(self, name: str, names: Sequence[str]) -> bool:
        """Return whether the model has more of these than the base."""
        pattern = _pattern(name)
        return sum(_pattern(other) == pattern for other in names) != len(self.by_pattern[pattern])


# -- rules -------------------------------------------------------------------------------------------------------------


def _kind(name: str, param: Tensor, base: torch.Size, dims: Mapping[str, int]) -> tuple[str, float]:
    """Return the kind of a parameter and the ratio of the width that is summed over."""
    if param.ndim != len(base):
        raise ValueError(f"{name} has {param.ndim} dimensions and {len(base)} in the base: make both by the same class")
    ratios = [mine / theirs for mine, theirs in zip(param.shape, base, strict=True)]
    wide = [i for i, ratio in enumerate(ratios) if ratio != 1]
    if not wide:
        return "fixed", 1.0
    if param.ndim == 1:
        return "vector", 1.0
    if name not in dims:
        raise ValueError(
            f"{name}, of shape {tuple(param.shape)}, belongs to no linear layer, convolution or embedding: pass the dimension "
            f"that is summed over, as input_dims={{{name!r}: {wide[-1]}}}"
        )
    if len(wide) > 2:
        raise ValueError(f"{name} differs from the base in {len(wide)} dimensions: muP has rules for two widths")
    if dims[name] not in wide:
        return "input", 1.0
    return ("hidden" if len(wide) == 2 else "output"), ratios[dims[name]]


def _by_width(kind: str, width: float) -> tuple[float, float, str]:
    if kind == "hidden":
        return width**-0.5, 1 / width, f"sums over {width:.4g} times the width"
    if kind == "output":
        return 1 / width, 1 / width, f"sums over {width:.4g} times the width, and gives none"
    return 1.0, 1.0, "no width" if kind == "fixed" else _ORDINARY


def _factor(row: MupRow, param: Tensor) -> float:
    target, size = row.init * row.base_size, float(param.detach().double().square().mean().sqrt())
    if size == target:
        return 1.0
    if size == 0:
        raise ValueError(f"{row.name} is zero, but not in the base model: initialise both in the same way")
    return target / size


# -- models ------------------------------------------------------------------------------------------------------------


def _pattern(name: str) -> str:
    """Return a name with its numbers replaced by `*`, the same for all layers."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def _depth_ratio(model: nn.Module, base: nn.Module) -> float:
    """Return how many times as many layers the model has.

    Raises:
        ValueError: several stacks have grown by different ratios.
    """
    counts = [defaultdict[str, int](int) for _ in range(2)]
    for each, count in zip((model, base), counts, strict=True):
        for name, _ in each.named_parameters():
            count[_pattern(name)] += 1
    mine, theirs = counts
    ratios = {mine[pattern] / theirs[pattern] for pattern in mine if theirs[pattern]} - {1.0}
    if len(ratios) > 1:
        raise ValueError(
            f"stacks of the model have {', '.join(f'{ratio:.4g}' for ratio in sorted(ratios))} times the layers of the base: "
            "make a base whose stacks are all shorter by the same ratio"
        )
    return ratios.pop() if ratios else 1.0


def _summed_dims(model: nn.Module) -> dict[str, int]:
    """Return by name of a matrix the dimension that is summed over, where the kind of its module shows it."""
    return {
        f"{path}.{own}" if path else own: dim
        for path, module in model.named_modules()
        for own, dim in _own_summed_dims(module)
    }


def _own_summed_dims(module: nn.Module) -> Iterator[tuple[str, int]]:
    if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
        yield "weight", 0
    elif isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        yield "weight", 1
    elif isinstance(module, nn.Embedding) or type(module).__module__ == "transformers.pytorch_utils":  # its Conv1D
        yield "weight", 0
    elif isinstance(module, nn.MultiheadAttention):
        yield "in_proj_weight", 1


def _refuse_tied(model: nn.Module) -> None:
    names: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for param, found in names.items():
        if len({_pattern(name) for name in found}) > 1 and param.ndim > 1:
            raise ValueError(
                f"{' and '.join(found)} are one tensor, but input and output weights have different rules: untie them, in a "
                "config of transformers by tie_word_embeddings=False"
            )


def _check_branch_ends(names: Sequence[str], of_base: _BaseParameters, ends: Sequence[str]) -> None:
    inner = [name for name in names if of_base.is_repeated(name, names)]
    unknown = [end for end in ends if not any(_is_in(name, [end]) for name in inner)]
    if ends and not unknown:
        return
    matrices = dict.fromkeys(_pattern(name).rpartition("*.")[2].rpartition(".")[0] for name in inner)
    cause = f"branch_ends={[*ends]!r}: no layer has {unknown[0]!r}" if unknown else "the number of layers differs"
    raise ValueError(
        f"{cause}. Pass the names of the last linear layer in every residual branch, as branch_ends=[...]; a layer has "
        f"{', '.join(map(repr, matrices))}"
    )


def _is_in(name: str, modules: Sequence[str]) -> bool:
    """Return whether a parameter belongs to one of these modules of a layer."""
    owner = "." + name.rpartition(".")[0]
    return any(owner.endswith(f".{module}") for module in modules)
