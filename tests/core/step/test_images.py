"""No storage that is away from the device is read by anybody: every way in is right to the bit, or refused in words.

Each program runs for three steps with the stash in both places, in a process of its own, so that a crash is a failure of
one test. In plain training all of them run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import adamw, assert_equal, both
from patience import HANG_S
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from zoo import BY_NAME, Chain, Kind, Mlp, ResidualMlp

from l2l_core import RelayConfig

STEPS, REFUSED = 3, 77
STASHES = ["device", "host"]


class SharedModule(Chain):
    """A position encoding that the layers hold and the shell calls too, as CoaT does."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.position = nn.Linear(32, 32)
        for layer in self.layers:
            layer.position = self.position

    def walk(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(self.position(h))
        return h


class UsesPosition(ResidualMlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.position(x))


class Pair(ResidualMlp):
    """Two outputs that are views of one storage, and an input that it hands on."""

    def forward(self, x: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        left, right = super().forward(x).unbind(1)[:2]
        return left, right, kept


class Pairs(Chain):
    def walk(self, h: Tensor) -> Tensor:
        kept = h
        for layer in self.layers:
            left, right, kept = layer(h, kept)
            h = torch.stack([left + right, left - right] * (h.shape[1] // 2), 1)
        return h + kept


class Table(Chain):
    """A table that the shell makes when it is first needed, and hands to layers in slices."""

    table = None

    def walk(self, h: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 64 * 32).reshape(64, 32)
        for layer in self.layers:
            h = layer(h + self.table[: h.shape[1]])
        return h


class KeepsView(ResidualMlp):
    """Keeps a view of what it gives out, and looks at it in the next forward, without effect."""

    view = None

    def forward(self, x: Tensor) -> Tensor:
        if self.view is not None:
            self.seen = self.view.sum()
        out = super().forward(x)
        self.view = out.detach()[:, :1]
        return out


class KeepsList(ResidualMlp):
    """The same in a list, and from the second step on."""

    def forward(self, x: Tensor) -> Tensor:
        if len(self.kept) > 4:
            self.seen = sum(each.sum() for each in self.kept)
        out = super().forward(x)
        self.kept.append(out)
        return out


class WithList(Chain):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        for layer in self.layers:
            layer.kept = []


class ReadsTheShell(ResidualMlp):
    """Reaches into the shell, but only after some steps."""

    def forward(self, x: Tensor) -> Tensor:
        self.steps[0] += 1
        if self.steps[0] > 40:
            x = x * self.notes["scale"]
        return super().forward(x)


class Notes(Chain):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__(layers)
        self.notes: dict[str, Any] = {}
        for layer in self.layers:
            layer.notes, layer.steps = self.notes, [0]

    def walk(self, h: Tensor) -> Tensor:
        self.notes["scale"] = h.detach().abs().mean(-1, keepdim=True)
        return super().walk(h)


class Recomputes(ResidualMlp):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.reentrant)


class KeepsOutside(torch.autograd.Function):
    """Keeps its input as an attribute, which autograd does not know."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.x = x
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.x * grad


class Squares(ResidualMlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(KeepsOutside.apply(x * 0.1))


class SquaresOutside(Chain):
    def walk(self, h: Tensor) -> Tensor:
        first = h
        for layer in self.layers:
            h = layer(KeepsOutside.apply(h * 0.1)) + KeepsOutside.apply(first) * 0.01
        return h


class WatchesGradients(Chain):
    """Keeps gradients and looks at them when the next one comes."""

    def walk(self, h: Tensor) -> Tensor:
        self.grads: list[Tensor] = []
        for layer in self.layers:
            h = layer(h)
            h.register_hook(self.look)
        return h

    def look(self, grad: Tensor) -> None:
        self.grads.append(grad)
        self.total = sum(each.abs().sum() for each in self.grads)


def recomputing(reentrant: bool) -> Callable[[], nn.Module]:
    def layer() -> nn.Module:
        made = Recomputes()
        made.reentrant = reentrant
        return made

    return layer


PROGRAMS: dict[str, tuple[type[Chain], Callable[[], nn.Module]]] = {
    "module shared with the shell": (SharedModule, UsesPosition),
    "views of one storage out": (Pairs, Pair),
    "table made in the shell": (Table, Mlp),
    "view kept on an attribute": (Chain, KeepsView),
    "outputs kept in a list": (WithList, KeepsList),
    "layer that reads the shell later": (Notes, ReadsTheShell),
    "checkpoint inside": (Chain, recomputing(False)),
    "reentrant checkpoint inside": (Chain, recomputing(True)),
    "function that keeps its input": (Chain, Squares),
    "function of the shell that keeps its input": (SquaresOutside, ResidualMlp),
    "gradients kept by a hook": (WatchesGradients, ResidualMlp),
}
RIGHT = {
    "module shared with the shell",
    "views of one storage out",
    "table made in the shell",
    "checkpoint inside",
    "reentrant checkpoint inside",
    "function that keeps its input",
    "function of the shell that keeps its input",
    "gradients kept by a hook",
}


def train(name: str, stash: str) -> None:
    """Three steps beside plain training; exits with `REFUSED` if a step is refused in words."""
    shell, layer = PROGRAMS[name]

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return shell([layer() for _ in range(3)])

    kind = Kind(name, make_model, BY_NAME["chain"].make_batch, BY_NAME["chain"].loss)
    with both(kind, RelayConfig(micro_batches=3, stash=stash), adamw) as pair:  # type: ignore[arg-type]
        for step in range(STEPS):
            try:
                assert_equal([pair.step(kind.make_batch(6, step))])
            except RuntimeError as error:
                assert "argument" in str(error) or "micro-batch" in str(error), error
                raise SystemExit(REFUSED) from error


def train_all(ways: Iterable[tuple[str, str]]) -> None:
    """Train these programs with these stashes, each in a fork of this process; print exit codes and errors as JSON."""
    torch.set_num_threads(1)  # a fork has none of the threads of its parent
    outcomes = {}
    for name, stash in ways:
        with tempfile.TemporaryFile("w+") as errors:
            if (child := os.fork()) == 0:
                os.dup2(errors.fileno(), 2)
                code = 1
                try:
                    train(name, stash)
                    code = 0
                except SystemExit as refused:
                    code = refused.code
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
            errors.seek(0)
            outcomes[f"{name}, {stash}"] = os.waitstatus_to_exitcode(status), errors.read()[-3000:]
    print(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, tuple[int, str]]:
    """What became of those that are asked for in this session."""
    asked = [
        item.callspec.params for item in request.session.items if getattr(item, "originalname", "") == "test_way_in"
    ]
    ways = [(params["name"], params["stash"]) for params in asked]
    here = Path(__file__).parent
    folders = [str(here.parents[2]), str(here.parents[1] / "support"), str(here)]
    code = f"import sys; sys.path[:0] = {folders!r}; import test_images; test_images.train_all({ways!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("stash", STASHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_way_in(name: str, stash: str, outcomes: dict[str, tuple[int, str]]) -> None:
    """Right, or refused; never a crash."""
    code, errors = outcomes[f"{name}, {stash}"]
    assert code in ({0} if name in RIGHT else {0, REFUSED}), f"exit {code}\n{errors}"
