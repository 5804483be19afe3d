"""Layers of random programs: ordinary kinds, and exotic features that are added to them.

A draft of a layer has the local `h` for its result; features add lines after the core, or change what is returned.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from program import Layer

ORDINARY: dict[str, tuple[list[str], list[str]]] = {
    "mlp": (
        ["self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)"],
        ["h = x + self.b(torch.tanh(self.a(x)))"],
    ),
    "norm": (["self.a, self.n = nn.Linear(8, 8), nn.LayerNorm(8)"], ["h = x + self.a(self.n(x))"]),
    "tanh": (["self.a = nn.Linear(8, 8)"], ["h = torch.tanh(self.a(x))"]),
    "gated": (
        ["self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)"],
        ["h = x * torch.sigmoid(self.a(x)) + self.b(x)"],
    ),
    "dropout": (
        ["self.a, self.b, self.d = nn.Linear(8, 16), nn.Linear(16, 8), nn.Dropout(0.2)"],
        ["h = x + self.d(self.b(F.gelu(self.a(x))))"],
    ),
    "attention": (
        ["self.n, self.qkv, self.o = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)"],
        [
            "q, k, v = self.qkv(self.n(x)).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)",
            "h = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))",
        ],
    ),
    "lstm": (["self.r = nn.LSTM(8, 8, batch_first=True)"], ["h = x + self.r(x)[0]"]),
    "gru": (["self.r = nn.GRU(8, 8, batch_first=True)"], ["h = x + self.r(x)[0]"]),
    "conv": (
        ["self.c, self.a = nn.Conv1d(8, 8, 3, padding=1, groups=8), nn.Linear(8, 8)"],
        ["h = x + self.a(F.gelu(self.c(x.transpose(1, 2)).transpose(1, 2)))"],
    ),
}


@dataclass
class Draft:
    """A layer in the making.

    `given` is how the shell passes `{p}` (and `{q}`, another tensor), `got` what it does with `{call}` to gain `{v}` (and
    `{w}`).
    """

    init: list[str]
    body: list[str]
    takes: str = "x"
    given: str = "{p}"
    returns: list[str] = field(default_factory=lambda: ["return h"])
    got: list[str] = field(default_factory=lambda: ["{v} = {call}"])
    head: list[str] = field(default_factory=list)  # before the core
    tied: bool = False

    def layer(self) -> Layer:
        return Layer(self.takes, self.init, [*self.head, *self.body, *self.returns])

    def add(self, init: str | list[str], body: str | list[str]) -> None:
        """More lines, each name of `init` once."""
        for line in [init] if isinstance(init, str) else init:
            if line not in self.init:
                self.init.append(line)
        self.body += [body] if isinstance(body, str) else body


def draw_block(rng: random.Random) -> Draft:
    init, body = ORDINARY[rng.choice(list(ORDINARY))]
    return Draft([*init], [*body])


def _adds(init: str | list[str], *bodies: str | list[str]) -> Callable[[Draft, random.Random], bool]:
    def feature(draft: Draft, rng: random.Random) -> bool:
        draft.add(init, rng.choice(bodies))
        return True

    return feature


def _returns(
    init: str | list[str], body: list[str], returns: str, got: list[str]
) -> Callable[[Draft, random.Random], bool]:
    def feature(draft: Draft, rng: random.Random) -> bool:
        if draft.returns != ["return h"]:
            return False
        draft.add(init, body)
        draft.returns, draft.got = [returns], [*got]
        return True

    return feature


def _takes(takes: str, given: str, head: list[str], body: list[str]) -> Callable[[Draft, random.Random], bool]:
    def feature(draft: Draft, rng: random.Random) -> bool:
        if draft.takes != "x":
            return False
        draft.takes, draft.given, draft.head = takes, given, [*head]
        draft.add([], body)
        return True

    return feature


_U = "self.u = nn.Linear(8, 8)"
_PAIR = ["{v}, {w} = {call}"]

# name -> adds the feature to a draft, or says that it does not fit.
BLOCK_FEATURES: dict[str, Callable[[Draft, random.Random], bool]] = {
    # weights
    "weight twice": _adds(_U, "h = h + self.u(torch.tanh(self.u(h)))", "h = self.u(h) + torch.tanh(self.u(x * 2))"),
    "weight thrice": _adds(_U, ["for _ in range(3):", "    h = torch.tanh(self.u(h))"]),
    "unused parameter": _adds(["self.unused = nn.Parameter(torch.zeros(3))"], []),
    "frozen weight": _adds([_U, "self.u.weight.requires_grad_(False)"], "h = h + self.u(h)"),
    "frozen layer": _adds([_U, "for p in self.parameters():", "    p.requires_grad_(False)"], "h = h + self.u(h)"),
    "bare parameter": _adds(["self.s = nn.Parameter(torch.ones(8))"], ["h = h * self.s", "h = h + self.s"]),
    "scalar parameter": _adds(["self.g = nn.Parameter(torch.tensor(0.5))"], "h = x + self.g * h"),
    "weight norm": _adds(["self.wn = parametrizations.weight_norm(nn.Linear(8, 8))"], "h = h + self.wn(h)"),
    "spectral norm": _adds(["self.sn = parametrizations.spectral_norm(nn.Linear(8, 8))"], "h = h + self.sn(h)"),
    "sometimes unused": _adds(_U, ["if way(x.mean() > 0):", "    h = h + self.u(h)"]),
    # buffers
    "batch norm": _adds("self.bn = nn.BatchNorm1d(8)", "h = self.bn(h.transpose(1, 2)).transpose(1, 2)"),
    "batch norm in eval": _adds(
        ["self.be = nn.BatchNorm1d(8).eval()"], "h = self.be(h.transpose(1, 2)).transpose(1, 2)"
    ),
    "ema buffer": _adds(
        'self.register_buffer("ema", torch.ones(8))',
        ["with torch.no_grad():", "    self.ema.mul_(0.9).add_(h.mean((0, 1)), alpha=0.1)", "h = h + self.ema"],
        ["h = h * self.ema", "with torch.no_grad():", "    self.ema.mul_(0.9).add_(h.detach().mean((0, 1)) * 0.1)"],
        ["self.ema = 0.9 * self.ema + 0.1 * h.detach().mean((0, 1))", "h = h - self.ema"],
    ),
    "own statistics": _adds("self.bent = Bent()", "h = self.bent(h)"),
    "buffer view": _adds(
        ['self.register_buffer("big", torch.ones(2, 8))', 'self.register_buffer("row", self.big[0])'],
        ["with torch.no_grad():", "    self.big.mul_(0.9).add_(0.1 * h.mean())", "h = h * self.row"],
        "h = h + self.row",
    ),
    "lazy buffer": _adds(
        ["self.table = None"],
        ["if self.table is None:", "    self.table = torch.linspace(0, 1, 8)", "h = h + self.table"],
    ),
    # graph
    "checkpoint": _adds(
        "self.ck = nn.Sequential(nn.Linear(8, 8), nn.Tanh())", "h = h + checkpoint(self.ck, h, use_reentrant=False)"
    ),
    "reentrant checkpoint": _adds(
        "self.ck = nn.Sequential(nn.Linear(8, 8), nn.Tanh())", "h = h + checkpoint(self.ck, h, use_reentrant=True)"
    ),
    "custom function": _adds([], "h = h + Sine.apply(h)"),
    "custom function with a weight": _adds(
        "self.s = nn.Parameter(torch.ones(8))", "h = h + Square.apply(h, self.s)", "h = h + Square.apply(x, self.s)"
    ),
    "custom function with attributes": _adds(
        [], "h = h + Kept.apply(h)", "h = h + Kept.apply(x)", "h = h + Noted.apply(x)"
    ),
    "no_grad part": _adds(_U, ["with torch.no_grad():", "    s = torch.sigmoid(self.u(h))", "h = h * s"]),
    "detach": _adds([], "h = x + h.detach()", "h = h + h.detach() * 0.5", "h = h.detach()"),
    "gate without gradient": _adds(
        [],
        "h = torch.where(x > 0, h, torch.zeros_like(h))",
        "h = h * 0.0",
        "h = x * (h > 0)",
        "h = torch.zeros_like(h)",
    ),
    "inner gradient hook": _adds([], ["if h.requires_grad:", "    h.register_hook(lambda g: g * 0.5)"]),
    "inplace": _adds(_U, "h = torch.relu_(self.u(h))", "h = self.u(h).add_(x)", ["h = self.u(h)", "h[:, 0] = 0.0"]),
    "inplace on the input": _adds([], ["x = x.add_(1.0)", "h = h * x"], ["x.mul_(0.5)", "h = h + x"]),
    "saved input": _adds([], "h = h + x.exp().clamp(max=3.0) * x.sigmoid()"),
    "autocast inside": _adds(
        _U, ['with torch.autocast("cpu", dtype=torch.bfloat16):', "    s = self.u(h)", "h = h + s.float()"]
    ),
    "gradient inside": _adds(
        _U,
        [
            "t = h.detach().requires_grad_()",
            "(g,) = torch.autograd.grad(self.u(t).pow(2).sum(), t, create_graph=True)",
            "h = h + g",
        ],
        ["t = x.detach().requires_grad_()", "(g,) = torch.autograd.grad(torch.tanh(self.u(t)).sum(), t)", "h = h + g"],
    ),
    "vmap inside": _adds(_U, "h = h + torch.vmap(self.u)(h)"),
    "data inside": _adds([], "h = h + x.data", ["h = h * 1.0", "h.data.mul_(0.5)"]),
    "weight clamped in forward": _adds(
        _U,
        ["with torch.no_grad():", "    self.u.weight.clamp_(-0.2, 0.2)", "h = h + self.u(h)"],
        ["self.u.weight.data.mul_(0.99)", "h = h + self.u(h)"],
    ),
    # state of Python
    "noise": _adds([], "h = h + 0.1 * torch.randn_like(h)", "h = h * (1 + 0.1 * random.random())"),
    "counter": _adds(["self.calls = 0"], ["self.calls += 1", "h = h * (1 + 0.01 * self.calls)"], "self.calls += 1"),
    "last input": _adds(["self.last = None"], "self.last = x", "self.last = h.detach()"),
    "memory of the last call": _adds(
        ["self.before = None"],
        ["if self.before is not None:", "    h = h + self.before", "self.before = h.detach().mean((0, 1))"],
    ),
    "queue buffer": _adds(
        [
            'self.register_buffer("queue", torch.zeros(4, 8))',
            'self.register_buffer("at", torch.zeros((), dtype=torch.long))',
        ],
        [
            "with torch.no_grad():",
            "    self.queue[int(self.at) % 4] = h[0, 0]",
            "    self.at += 1",
            "h = h + self.queue.mean(0)",
        ],
    ),
    "branch inside": _adds([], ["if way(x[0, 0, 0] > 0):", "    h = torch.tanh(h)"]),
    # what comes in
    "two inputs": _takes("x, y", "{p}, {q}", [], ["h = h + 0.5 * y"]),
    "keyword input": _takes("x, *, y", "{p}, y={q}", [], ["h = h + torch.tanh(y)"]),
    "list input": _takes("xs", "[{p}, {q}]", ["x, y = xs"], ["h = h * torch.sigmoid(y)"]),
    "same input twice": _takes("x, y", "{p}, {p}", [], ["h = h + 0.5 * y"]),
    "detached input": _takes("x, y", "{p}, {q}.detach()", [], ["h = h + 0.5 * y"]),
    "view of the input beside it": _takes("x, y", "{p}, {p}[:, :1]", [], ["h = h + 0.5 * y"]),
    "mask input": _takes("x, m", "{p}, {p} > 0", [], ["h = h.masked_fill(m, 0.1)"]),
    # what comes out
    "two outputs": _returns(_U, ["h2 = torch.tanh(self.u(h))"], "return h, h2", _PAIR),
    "dict output": _returns(
        _U,
        ["h2 = torch.tanh(self.u(h))"],
        'return {"a": h, "b": [h2, x]}',
        ["{w} = {call}", '{v} = {w}["a"] + {w}["b"][0]'],
    ),
    "chunks out": _returns(_U, ["h = self.u(torch.cat([h, x], 1))"], "return h.chunk(2, 1)", _PAIR),
    "unbind out": _returns(_U, ["h = self.u(torch.stack([h, x]))"], "return h.unbind(0)", _PAIR),
    "output and its view": _returns([], [], "return h, h[:, :, :]", _PAIR),
    "view of the input out": _returns([], [], "return h, x.view_as(x)", _PAIR),
    "view of a part of the input out": _returns([], [], "return h, x[:, :1]", ["{v}, {w} = {call}", "{v} = {v} + {w}"]),
    "only a view of the input out": _returns([], [], "return x.transpose(0, 1)", ["{v} = {call}.transpose(0, 1)"]),
    "the input itself out": _returns([], [], "return h, x", _PAIR),
    "only the input out": _returns([], [], "return x", ["{v} = {call}"]),
    "view of a weight out": _returns(
        "self.w = nn.Parameter(torch.randn(1, 1, 8) * 0.3)", [], "return h, self.w.expand_as(x)", _PAIR
    ),
    "weight out": _returns(
        "self.w = nn.Parameter(torch.randn(1, 1, 8) * 0.3)",
        [],
        "return h, self.w",
        ["{v}, {w} = {call}", "{v} = {v} * {w}"],
    ),
    "buffer out": _returns(
        'self.register_buffer("w", torch.ones(8))', [], "return h, self.w", ["{v}, {w} = {call}", "{v} = {v} * {w}"]
    ),
    "named tuple out": _returns(
        [], [], "return torch.max(h, 1, keepdim=True)", ["{w} = {call}", "{v} = {p} + {w}.values"]
    ),
    "detached output": _returns([], [], "return h, h.detach()", _PAIR),
    "argmax out": _returns(
        [], [], "return h, h.argmax(-1)", ["{v}, {w} = {call}", "{v} = {v} + 0.1 * {w}.unsqueeze(-1)"]
    ),
    "mask out": _returns([], [], "return h, h > 0", ["{v}, {w} = {call}", "{v} = torch.where({w}, {v}, 0.5 * {v})"]),
    "output twice": _returns([], [], "return h, h", _PAIR),
    "none and numbers out": _returns(
        [], [], "return h, None, 0.5, x.shape[0]", ["{v}, _, {w}, _ = {call}", "{v} = {v} * {w}"]
    ),
    "scalar out": _returns([], [], "return h, h.pow(2).mean()", ["{v}, {w} = {call}", "{v} = {v} / (1 + {w})"]),
}


def _frozen(make: str, use: str) -> Callable[[Draft, random.Random], bool]:
    return _adds(f"self.code = nn.Parameter({make}, requires_grad=False)", use)


_CAST = "h = h + F.linear(h, self.code.to(h.dtype))"
_SMALL = "torch.randn(8, 8) * 0.2"
# Of parameters that are not trained and keep their dtypes: name of the dtype -> as above. Drawn on request alone, so that a
# seed that was drawn before stays the same program.
FROZEN_DTYPES: dict[str, Callable[[Draft, random.Random], bool]] = {
    "int8": _frozen(
        "torch.randint(-127, 128, (8, 8), dtype=torch.int8)", "h = h + F.linear(h, self.code.to(h.dtype) / 400)"
    ),
    "uint8": _frozen(  # two codes of 4 bits in each
        "torch.randint(0, 256, (8, 4), dtype=torch.uint8)",
        "h = h + F.linear(h, torch.stack((self.code & 15, self.code >> 4), -1).flatten(1).to(h.dtype) / 40 - 0.2)",
    ),
    "float16": _frozen(f"({_SMALL}).half()", _CAST),
    "bfloat16": _frozen(f"({_SMALL}).bfloat16().t()", _CAST),
    "float8_e4m3fn": _frozen(f"({_SMALL}).to(torch.float8_e4m3fn)", _CAST),
    "float8_e5m2": _frozen(f"({_SMALL}).to(torch.float8_e5m2)", _CAST),
    "bool": _frozen("torch.rand(8) < 0.3", "h = h.masked_fill(self.code, 0.0)"),
    "complex64": _frozen(
        "torch.randn(5, dtype=torch.complex64)",
        "h = torch.fft.irfft(torch.fft.rfft(h.float()) * self.code, 8).to(h.dtype)",
    ),
}
