"""A training program as plain data: lines of source by place. Rendered to text it is what runs, and what a report prints.

The same data gives the same model, always: weights come from the program's seed, and the text is all there is. It knows
nothing of the relay.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import program_parts
import torch
from torch import nn
from torch.utils import _pytree as pytree

ROWS, POSITIONS, WIDTH = 6, 3, 8  # of a batch: (rows, positions, width)


@dataclass
class Layer:
    """One layer's class. `init` and `body` are lines of its ``__init__`` and ``forward``; `takes` are its parameters."""

    takes: str = "x"
    init: list[str] = field(default_factory=list)
    body: list[str] = field(default_factory=list)


@dataclass
class Settings:
    """How a program is trained; the defaults are the plainest."""

    micro_batches: int = 1
    ahead: int = 1
    stash: str = "device"
    schedule: str = "breadth_first"
    update: str = "eager"
    meter: str = "on_change"
    optimizer: str = "sgd"
    rows: list[int] = field(default_factory=lambda: [ROWS])  # of every step's batch
    seed: int = 0
    piece_bytes: int = 1 << 14  # the least that goes over the link by itself; layers here are smaller


@dataclass
class Program:
    """A model, its objective and its settings.

    `parts` are lines of the model's ``__init__``, after `layers` were made; `body` of its ``forward(x, y)``, and `loss` of
    ``objective(model, batch)`` with `x` (rows, positions, width) and `y` (rows,) in reach. `features` are only labels.
    """

    seed: int
    layers: list[Layer]
    parts: list[str]
    body: list[str]
    loss: list[str]
    settings: Settings
    features: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Program:
        plain: dict[str, Any] = json.loads(text)
        layers = [Layer(**layer) for layer in plain.pop("layers")]
        return Program(**{**plain, "layers": layers, "settings": Settings(**plain["settings"])})

    def source(self) -> str:
        """The classes and the objective, as Python."""
        lines: list[str] = []
        for index, layer in enumerate(self.layers):
            lines.append(f"class L{index}(nn.Module):")
            lines += _method("__init__(self)", ["super().__init__()", *layer.init]) if layer.init else []
            lines += [*_method(f"forward(self, {layer.takes})", layer.body), ""]
        made = ", ".join(f"L{index}()" for index in range(len(self.layers)))
        init = ["super().__init__()", f"self.layers = nn.ModuleList([{made}])", *self.parts]
        lines += [
            "class Model(nn.Module):",
            *_method("__init__(self)", init),
            *_method("forward(self, x, y)", self.body),
        ]
        lines += ["", "def objective(model, batch):", *_indented(["x, y = batch", *self.loss])]
        return "\n".join(lines) + "\n"

    def show(self) -> str:
        """The program as a text to read."""
        settings = ", ".join(f"{name}={value!r}" for name, value in asdict(self.settings).items())
        return f"# seed {self.seed}: {', '.join(self.features) or 'nothing exotic'}\n# {settings}\n{self.source()}"

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch of a step, `x` and `y`."""
        rows, generator = self.settings.rows[step], torch.Generator().manual_seed(1000 * self.seed + step)
        x = torch.randn(rows, POSITIONS, WIDTH, generator=generator)
        return x, torch.randint(WIDTH, (rows,), generator=generator)


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _method(head: str, lines: list[str]) -> list[str]:
    return _indented([f"def {head}:", *_indented(lines or ["pass"])])


class Built:
    """A program made into a model, with what the hooks in it have seen."""

    def __init__(self, program: Program) -> None:
        self.seen: list[tuple[str, float]] = []
        self.way: list[Any] = []
        names = {name: getattr(program_parts, name) for name in program_parts.__all__}
        names |= {"torch": torch, "nn": nn, "F": nn.functional, "random": random, "seen": self._see, "way": self._note}
        exec(compile(program.source(), f"<program {program.seed}>", "exec"), names)
        torch.manual_seed(program.seed)
        random.seed(program.seed)
        self.model: nn.Module = names["Model"]()
        self.objective = names["objective"]
        self.optimizer = _optimizer(program.settings.optimizer, self.model)

    @property
    def calls(self) -> Counter[str]:
        """How often each hook was called."""
        return Counter(tag for tag, _ in self.seen)

    def _see(self, tag: str, value: Any) -> None:
        tensors = [t.detach() for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]
        self.seen.append((tag, sum(float(t.double().sum()) for t in tensors)))

    def _note(self, choice: Any) -> Any:
        """Remember which way a micro-batch takes; an identity."""
        self.way.append(int(choice))
        return choice


def _optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    params = list(model.parameters())
    groups = [{"params": [p for p in params if (p.dim() > 1) == flag]} for flag in (True, False)]
    groups = [group for group in groups if group["params"]]
    if kind == "sgd":
        return torch.optim.SGD(params, lr=0.05)
    if kind == "momentum":
        return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    if kind == "adagrad":
        return torch.optim.Adagrad(params, lr=0.01)
    groups[0]["weight_decay"] = 0.1  # type: ignore[assignment]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.0, fused=kind == "fused_adamw")
