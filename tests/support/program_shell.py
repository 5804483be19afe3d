"""Shells of random programs: the model's own code between layer calls, ordinary and exotic, over a pool of tensors.

Every tensor of the pool has the shape of the batch. A feature writes lines that read some of the pool and add to it.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field

from program_blocks import Draft

ORDINARY = [
    "{v} = {p} + {q}",
    "{v} = {p} * torch.sigmoid({q})",
    "{v} = torch.tanh({p})",
    "{v} = {p} + 0.0",
    "{v} = torch.cat([{p}, {q}], -1)[..., 4:12]",
    "{v} = {p}.transpose(0, 1).contiguous().transpose(0, 1)",
    "{v} = {p}.flip(1)",
    "{v} = torch.stack([{p}, {q}]).mean(0)",
    "{v} = {p}[:, [2, 0, 1]]",
    "{v} = {p}.reshape(-1, 8).view({p}.shape)",
    "{v} = {p}.chunk(2, -1)[0].repeat(1, 1, 2)",
    "{v} = {p}.masked_fill(x[..., :1] > 1, 0.0)",
    "{v} = F.dropout({p}, 0.1, self.training)",
    "{v} = self.lin({p})",
    "{v} = self.norm({p})",
    "{v} = {p} + self.pos[:, : {p}.shape[1]]",
    "{v} = F.linear({p}, self.w)",
]
_PARTS = {
    "self.stem": "self.stem = nn.Linear(8, 8)",
    "self.head": "self.head = nn.Linear(8, 8)",
    "self.lin": "self.lin = nn.Linear(8, 8)",
    "self.norm": "self.norm = nn.LayerNorm(8)",
    "self.pos": "self.pos = nn.Parameter(torch.randn(1, 3, 8) * 0.1)",
    "self.w": "self.w = nn.Parameter(torch.randn(8, 8) * 0.3)",
}


@dataclass
class Shell:
    """The shell in the making."""

    rng: random.Random
    drafts: list[Draft]
    parts: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    loss: list[str] = field(default_factory=list)  # terms of the objective
    pool: list[str] = field(default_factory=lambda: ["x"])
    made: int = 0

    def new(self) -> str:
        self.made += 1
        return f"h{self.made}"

    def pick(self) -> str:
        """Mostly the newest tensor."""
        return self.pool[-1] if self.rng.random() < 0.75 else self.rng.choice(self.pool)

    def layer(self) -> int:
        return self.rng.randrange(len(self.drafts))

    def call(self, index: int, source: str | None = None) -> list[str]:
        """Lines that call a layer; what it gives joins the pool."""
        draft = self.drafts[index]
        p, q, v, w = source or self.pick(), self.pick(), self.new(), f"{self.new()}"
        call = f"self.layers[{index}]({draft.given.format(p=p, q=q)})"
        lines = [line.format(v=v, w=w, call=call, p=p) for line in draft.got]
        self.pool += [w, v] if draft.got == ["{v}, {w} = {call}"] and self.rng.random() < 0.7 else [v]
        return lines

    def write(self, *lines: str) -> None:
        """Lines with `{p}`, `{q}` read from the pool, and `{v}` added to it; what they need of the shell is made."""
        p, q = self.pick(), self.pick()
        makes = any("{v}" in line for line in lines)
        v = self.new() if makes else ""
        self.emit([line.replace("{p}", p).replace("{q}", q).replace("{v}", v) for line in lines])
        if makes:
            self.pool.append(v)

    def emit(self, lines: list[str]) -> None:
        self.lines += lines

    def part(self, *lines: str) -> None:
        """Lines of the model's ``__init__``."""
        self.parts += [line for line in lines if line not in self.parts]

    def ordinary(self) -> None:
        self.write(self.rng.choice(ORDINARY))

    def needed(self) -> list[str]:
        """Parts that the text names, and lines that use them."""
        text = "\n".join(self.lines + self.parts)
        return [line for name, line in _PARTS.items() if re.search(rf"{name}\b", text)] + self.parts
