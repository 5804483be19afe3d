"""Batches that several workers cut by `split=`, each its own rows, beside plain training on the parts of all."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from l2l_core import Relay, RelayConfig, Sequences, Views, Workers

RATE = 0.1


class Token(nn.Module):
    """(tokens,) or (tokens, rows) of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def pairs(scores: Tensor, part: Any) -> Tensor:
    chosen, rejected = scores[..., 0].mean(-1).chunk(2)
    return -F.logsigmoid(chosen - rejected).mean()


def targets(scores: Tensor, part: Any) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), part["y"].flatten())


def numbers(rank: int, *shape: int) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(rank))


def every_second(batch: Any, count: int) -> list[Any]:
    return [{name: value[k::count] for name, value in batch.items()} for k in range(count)]


def case_of(name: str, rank: int) -> tuple[Any, Any, Any, list[Any], list[int]]:
    """Return loss, split, a worker's batch, its two parts by hand, and their shares of the mean."""
    ids = numbers(rank, 8, 5)
    if name == "views":
        parts = [{"ids": torch.cat([ids[a : a + 2], ids[4 + a : 6 + a]])} for a in (0, 2)]
        return pairs, Views(2), {"ids": ids}, parts, [2, 2]
    if name == "dims":
        batch = {"ids": ids, "y": numbers(rank + 9, 8, 5)}
        return targets, 1, batch, [{n: v[:, a:b] for n, v in batch.items()} for a, b in ((0, 3), (3, 5))], [24, 16]
    if name == "function":
        batch = {"ids": ids, "y": numbers(rank + 9, 8, 5)}
        return targets, every_second, batch, every_second(batch, 2), [20, 20]
    lengths = ((3, 2, 4), (6, 1))[rank]
    borders = torch.tensor([0, *lengths]).cumsum(0)
    batch = {"ids": numbers(rank, sum(lengths)), "y": numbers(rank + 9, sum(lengths)), "cu": borders}
    cut = (5, 6)[rank]
    parts = [{n: batch[n][a:b] for n in ("ids", "y")} for a, b in ((0, cut), (cut, sum(lengths)))]
    return targets, Sequences("cu"), batch, parts, [cut, sum(lengths) - cut]


def made() -> nn.Module:
    torch.manual_seed(1)
    return Token().train()


def train_cut(rank: int, count: int, name: str) -> dict[str, Any]:
    """Train two steps; return the losses, those of plain training, and the names of unlike weights."""
    loss, split, batch, _, _ = case_of(name, rank)
    sgd, model, plain = partial(torch.optim.SGD, lr=RATE), made(), made()
    options = {"workers": Workers(reduce="ordered"), "loss": loss, "split": split}
    with Relay(model, sgd, "cpu", config=RelayConfig(seed=0, micro_batches=2), **options) as relay:
        losses = [relay.step(batch).loss for _ in range(2)]
        report = relay.verify(batch).equal
    optimizer, expected = sgd(plain.parameters()), []
    cases = [case_of(name, other) for other in range(count)]
    total = sum(sum(shares) for *_, shares in cases)
    for _ in range(2):
        own = []
        for _, _, _, parts, shares in cases:
            for part, share in zip(parts, shares, strict=True):
                own.append(loss(plain(part["ids"]), part) / (total / share))
                own[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(sum(each.detach() for each in own)))
    weights = zip(model.state_dict().items(), plain.state_dict().values(), strict=True)
    return {
        "losses": losses,
        "expected": expected,
        "verified": report,
        "differences": [key for (key, ours), theirs in weights if not torch.equal(ours, theirs)],
    }
