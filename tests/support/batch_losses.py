"""Models and losses over the whole batch, and plain training on them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, WORDS, LAYERS = 16, 40, 3


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Tower(nn.Module):
    """Tokens to one vector per row."""

    def __init__(self, dropout: float = 0.1, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS if tied else 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))

    def forward(self, a: Tensor) -> Tensor:
        return self.encode(a)


class TwoTowers(Tower):
    """CLIP-like: both towers share the layers."""

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"a": self.encode(a), "b": self.encode(b)}


class Temperature(TwoTowers):
    """The loss reads a parameter of the model."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.scale = nn.Parameter(torch.tensor(1.5))


class EarlyOutputs(Tower):
    """Outputs of earlier shell code and of a layer itself; one is not differentiable."""

    def forward(self, a: Tensor) -> dict[str, Tensor]:
        x = embedded = self.embed(a)
        hidden = []
        for layer in self.layers:
            x = layer(x)
            hidden.append(x)
        return {"a": self.head(self.norm(x).mean(1)), "b": embedded[:, 0], "c": hidden[0], "tokens": a}


class Scaled(Tower):
    """The last code of a forward has no weights."""

    def forward(self, a: Tensor) -> tuple[Tensor, str]:
        x = self.embed(a)
        for layer in self.layers:
            x = layer(x)
        return x.mean(1), "no tensor"


def info_nce(one: Tensor, other: Tensor, scale: float | Tensor = 5.0) -> Tensor:
    similar = F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T * scale
    return F.cross_entropy(similar, torch.arange(len(similar)))


def shifted(model: nn.Module, outputs: Tensor, batch: Any) -> Tensor:
    """Rows that follow one another are a pair."""
    return info_nce(outputs, outputs.roll(1, 0))


def supervised(model: nn.Module, outputs: Tensor, batch: Any) -> Tensor:
    """SupCon: all rows of a class are positives."""
    z, labels = F.normalize(outputs, dim=-1), batch["y"]
    others = ~torch.eye(len(z), dtype=torch.bool)
    positive = (labels[:, None] == labels) & others
    logits = (z @ z.T * 5).masked_fill(~others, -torch.inf).log_softmax(1).masked_fill(~positive, 0)
    return -(logits.sum(1) / positive.sum(1).clamp(min=1)).mean()


def matched(model: nn.Module, outputs: dict[str, Tensor], batch: Any) -> Tensor:
    return info_nce(outputs["a"], outputs["b"]) + info_nce(outputs["b"], outputs["a"])


def scaled(model: Any, outputs: dict[str, Tensor], batch: Any) -> Tensor:
    """Weights that the loss reads: one that only the loss uses, and one that the towers use too."""
    return info_nce(outputs["a"], outputs["b"], model.scale.exp()) + model.norm.weight.pow(2).mean()


def early(model: nn.Module, outputs: dict[str, Tensor], batch: Any) -> Tensor:
    assert torch.equal(outputs["tokens"], batch["a"])
    return info_nce(outputs["a"], outputs["a"].flip(0)) + outputs["b"].std() + outputs["c"].pow(2).mean()


def noisy(model: nn.Module, outputs: Tensor, batch: Any) -> Tensor:
    """The loss draws random numbers."""
    return shifted(model, F.dropout(outputs, 0.2), batch)


def first_of(model: nn.Module, outputs: tuple[Tensor, str], batch: Any) -> Tensor:
    assert outputs[1] == "no tensor"
    return shifted(model, outputs[0], batch)


Loss = Callable[[nn.Module, Any, Any], Tensor]
CASES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "info_nce": (Tower, shifted),
    "sup_con": (Tower, supervised),
    "tied": (partial(Tower, tied=True), shifted),
    "two_towers": (TwoTowers, matched),
    "temperature": (Temperature, scaled),
    "early_outputs": (EarlyOutputs, early),
    "noisy": (Tower, noisy),
    "tuple": (Scaled, first_of),
}


def batch_of(model: nn.Module, rows: int, step: int, words: int = 5) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(step)
    names = ("a", "b") if isinstance(model, TwoTowers) else ("a",)
    batch = {name: torch.randint(WORDS, (rows, words), generator=draw) for name in names}
    return batch | {"y": torch.randint(3, (rows,), generator=draw)}


def inputs_of(part: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in part.items() if name != "y"}


def cut(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    parts = zip(*(value.split(-(-len(value) // count)) for value in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def joined(outputs: list[Any]) -> Any:
    one = outputs[0]
    if isinstance(one, dict):
        return {name: torch.cat([each[name] for each in outputs]) for name in one}
    if isinstance(one, tuple):
        return torch.cat([each[0] for each in outputs]), one[1]
    return torch.cat(outputs)


def tensors_of(outputs: Any) -> list[Tensor]:
    values = outputs.values() if isinstance(outputs, dict) else outputs if isinstance(outputs, tuple) else [outputs]
    return [value for value in values if isinstance(value, Tensor)]


def detached(outputs: Any) -> Any:
    def copy_of(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    if isinstance(outputs, dict):
        return {name: copy_of(value) for name, value in outputs.items()}
    return tuple(map(copy_of, outputs)) if isinstance(outputs, tuple) else copy_of(outputs)


def add_gradients(model: nn.Module, loss: Loss, batch: dict[str, Tensor], seeds: list[int]) -> float:
    """Plain training: all graphs, one loss, then each micro-batch's backward."""
    outputs = []
    for part, seed in zip(cut(batch, len(seeds)), seeds, strict=True):
        torch.manual_seed(seed)
        outputs.append(model(**inputs_of(part)))
    leaves = [detached(each) for each in outputs]
    total = loss(model, joined(leaves), batch)
    total.backward()
    for output, leaf in zip(outputs, leaves, strict=True):
        pairs = [(t, o.grad) for t, o in zip(tensors_of(output), tensors_of(leaf), strict=True) if o.grad is not None]
        torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs])
    return total.item()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)
