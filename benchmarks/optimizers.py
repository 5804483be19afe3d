"""Which optimizers a relay takes, and whether each that it takes gives the weights of plain training, to the bit.

    python benchmarks/optimizers.py [--only torch.optim] [--names AdamW Lamb]

Every optimizer of torch.optim, and of pytorch_optimizer, schedulefree, bitsandbytes, prodigyopt and torchao where they
are installed, in its default settings but for a rate of 0.01. Each runs the same course: six steps of two micro-batches,
with a layer frozen in the third and fourth; before the third a verify; after the fourth a save, which a fresh model
resumes, and a branch, which is trained and left again. The relay, the resumed relay and plain training in core, which
shares no code with them, must end with the same weights and the same `state_dict`. Or else the optimizer must be refused
before anything is trained. One line each; the exit status is 1 if any is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import tempfile
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from _common import report, show
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from l2l_core import Freeze, Relay, RelayConfig, Unfreeze

Make = Callable[[nn.Module], Optimizer]
PACKAGES = ("torch.optim", "pytorch_optimizer", "schedulefree", "bitsandbytes.optim", "prodigyopt", "torchao.optim")
WIDTH, FROZEN, STEPS = 64, 1, 6  # 4,096 elements per matrix: where 8-bit states begin


class Block(nn.Module):
    """One residual layer, with a matrix, a vector and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """Three such layers between two matrices of the shell."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.layers, self.head = (
            nn.Linear(8, WIDTH),
            nn.ModuleList(Block() for _ in range(3)),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main() -> None:
    """Try all, show a line for each, and exit with 1 if any is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PACKAGES, default=PACKAGES, help="packages")
    parser.add_argument("--names", nargs="+", help="classes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of other people's packages

    rows = []
    for package, name, make in found(args.only):
        if not args.names or name in args.names:
            outcome, why = judge(make)
            rows.append({"package": package, "optimizer": name, "outcome": outcome, "why": why})
            print(f"{package}.{name}: {outcome}{f': {why}' if why else ''}", flush=True)
    outcomes = sorted({row["outcome"] for row in rows})
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in outcomes}
    print()
    show(["outcome", "optimizers"], list(counts.items()))
    report("optimizers", {"arguments": vars(args), "counts": counts, "optimizers": rows})
    sys.exit(1 if counts.get("WRONG") else 0)


# -- what there is -----------------------------------------------------------------------------------------------------


def found(packages: list[str]) -> Iterator[tuple[str, str, Make]]:
    """Package, name, and a function from a model to the optimizer, for every class that is installed."""
    for package in packages:
        try:
            module = importlib.import_module(package)
        except ImportError:
            print(f"{package} is not installed")
            continue
        for name, kind in sorted(vars(module).items()):
            if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer:
                yield package, name, partial(build, kind)


def build(kind: type[Optimizer], model: nn.Module) -> Optimizer:
    """One in its default settings, made with the arguments that its constructor needs."""
    asked = inspect.signature(kind).parameters
    needed = [name for name, parameter in asked.items() if parameter.default is parameter.empty]
    needed += ["lr"] if "lr" in asked and isinstance(asked["lr"].default, float) else []
    given = {
        "params": list(model.parameters()),
        "model": model,
        "optimizer": AdamW(model.parameters(), lr=1e-2),
        "base_optimizer": AdamW,
        "num_iterations": 100,
        "num_data": 16,
        "lr": 1e-2,
        "rho_scheduler": None,
    }
    ways: list[dict[str, Any]] = [{name: given[name] for name in needed if name in given}]
    if "params" in needed:  # those for matrices alone
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        ways.append(
            ways[0] | {"params": [{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}]}
        )
        ways += [ways[0] | {"params": matrices}, ways[0] | {"momentum": 0.9}]
    for way in ways:
        try:
            optimizer = kind(**way)
        except Exception as error:
            failure = error
        else:
            if callable(getattr(optimizer, "train", None)):
                optimizer.train()
            return optimizer
    raise failure


# -- one course --------------------------------------------------------------------------------------------------------


@dataclass
class InCore:
    """Plain training, with torch alone."""

    make: Make
    model: Model = field(default_factory=Model)

    def __post_init__(self) -> None:
        self.optimizer = self.make(self.model)

    def step(self, number: int) -> None:
        """Two micro-batches, then one step of the optimizer."""
        x, y = batch_of(number)
        self.model.layers[FROZEN].requires_grad_(number not in (2, 3))
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            (squared_error(self.model(part), (part, target)) / 2).backward()
        self.optimizer.step()
        for param in self.model.parameters():
            param.grad = None


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Inputs (4, 8) and targets (4, 4) of a step."""
    noise = torch.Generator().manual_seed(number)
    return torch.randn(4, 8, generator=noise), torch.randn(4, 4, generator=noise)


def squared_error(outputs: Tensor, batch: Any) -> Tensor:
    """The mean over a micro-batch."""
    return nn.functional.mse_loss(outputs, batch[1])


def judge(make: Make) -> tuple[str, str]:
    """ "equal", "refused", "not in core" (plain training raises) or "WRONG", and why."""
    try:
        make(Model())
    except Exception as error:
        return "not in core", brief(error)
    core, in_core_error = InCore(make), ""
    try:
        for number in range(STEPS):
            core.step(number)
    except Exception as error:
        in_core_error = brief(error)
    model = Model()
    try:
        relay = Relay(model, make(model), "cpu", loss=squared_error, config=RelayConfig(micro_batches=2))
    except (ValueError, TypeError) as error:
        unchanged = same(dict(model.named_parameters()), dict(Model().named_parameters()))
        return ("refused", str(error)) if unchanged else ("WRONG", f"refused, but weights have changed: {brief(error)}")
    except Exception as error:
        return "WRONG", f"the constructor raised {brief(error)}"
    with relay, tempfile.TemporaryDirectory() as folder:
        if in_core_error:
            return "not in core", in_core_error
        try:
            wrong = course(relay, make, core, Path(folder))
        except Exception as error:
            return "WRONG", f"raised {brief(error)}"
    return ("WRONG", "; ".join(wrong)) if wrong else ("equal", "")


def course(relay: Relay, make: Make, core: InCore, folder: Path) -> list[str]:
    """Let the relay, and one resumed from its save, go the course; return what differs from `core` at its end."""
    wrong = []
    for number in range(2):
        relay.step(batch_of(number))
    if not (verdict := relay.verify(batch_of(2))).equal:
        wrong.append(f"verify: {verdict}")
    relay.apply(Freeze(FROZEN))
    relay.step(batch_of(2))
    relay.step(batch_of(3))
    relay.apply(Unfreeze(FROZEN))
    relay.forecast(batch_of(4))
    relay.save(folder)
    relay.fork("aside")
    relay.step(batch_of(99))
    relay.switch("main")
    fresh = Model()
    with Relay.load(folder, fresh, make(fresh), device="cpu", loss=squared_error) as resumed:
        for number in range(4, STEPS):
            relay.step(batch_of(number))
            resumed.step(batch_of(number))
        for which, one in {"trained through": relay, "resumed": resumed}.items():
            wrong += [f"{which}: {what}" for what in differences(one, core)]
    return wrong


def differences(relay: Relay, core: InCore) -> list[str]:
    """Return the differences of the weights and of the optimizer's `state_dict`."""
    pairs = zip(core.model.named_parameters(), relay.model.parameters(), strict=True)
    names = [name for (name, expected), weight in pairs if not same(expected.detach(), weight.detach())]
    expected, found = core.optimizer.state_dict(), relay.optimizer.state_dict()
    for place, key in [("groups", "param_groups"), ("state", "state")]:
        if not same(expected[key], found[key]):
            names.append(f"{place} of the state_dict")
    return names[:4]


def same(one: Any, other: Any) -> bool:
    """Whether two trees of tensors and values have the same bits; NaN is like NaN, and the order of keys is no matter."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return (
            one.dtype == other.dtype and one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple | deque) and isinstance(other, list | tuple | deque):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


def brief(error: BaseException) -> str:
    """Return the type of an error and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


if __name__ == "__main__":
    main()
