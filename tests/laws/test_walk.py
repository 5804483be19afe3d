"""Random commands on a relay, beside plain training of the same model: equal bits after every one of them.

A walk is a list of commands of a few numbers each, which mean something in any state. So a list that fails is cut down by
leaving commands out, and the shortest one that still fails is shown.
"""

from __future__ import annotations

import copy
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shadow import Batch, Make, Shadow, assert_equal
from torch import Tensor, nn
from torch.optim import Optimizer

from l2l_core import (
    Delink,
    Drop,
    Duplicate,
    Edit,
    EmulatedDevice,
    Freeze,
    Insert,
    Interpolate,
    Loops,
    Move,
    Relay,
    RelayConfig,
    Replace,
    Swap,
    Unfreeze,
    Unroll,
)

WIDTH, MOST_LAYERS, MOST_BRANCHES = 4, 7, 3


class Block(nn.Module):
    def __init__(self, inner: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Normed(Block):
    def __init__(self, inner: int = WIDTH) -> None:
        super().__init__(inner)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stacks(nn.Module):
    """A stem, stacks one after another, and a head."""

    def __init__(self, *depths: int, kind: type[Block] = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(kind() for _ in range(depths[0]))
        if depths[1:]:
            self.more = nn.ModuleList(kind() for _ in range(depths[1]))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in (*self.layers, *getattr(self, "more", ())):
            x = layer(x)
        return self.head(x)


class Looped(Stacks):
    """One stack that runs several times."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.n_loops = 2

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(self.n_loops):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class Recurrent(Looped):
    """Its number of loops has a name that is often a depth, as in ALBERT."""

    def __init__(self, depth: int) -> None:
        self.config = SimpleNamespace(num_hidden_layers=2)
        super().__init__(depth)

    @property
    def n_loops(self) -> int:  # type: ignore[override]
        return self.config.num_hidden_layers

    @n_loops.setter
    def n_loops(self, count: int) -> None:
        self.config.num_hidden_layers = count


class Configured(Stacks):
    """The forward runs as many layers as a configuration has, as Llama's does."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.config = SimpleNamespace(n_layer=depth, heads=depth)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers[: self.config.n_layer]:
            x = layer(x)
        return self.head(x)


class Beside(Stacks):
    """A number for each layer beside the stack, read by its position; edits that move layers are refused."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.gains = nn.Parameter(1 + 0.1 * torch.arange(depth))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i, layer in enumerate(self.layers):
            x = layer(x * self.gains[i])
        return self.head(x)


def configured() -> nn.Module:
    return Configured(2)


def recurrent() -> nn.Module:
    return Recurrent(1)


def beside() -> nn.Module:
    return Beside(3)


def looped() -> nn.Module:
    return Looped(2)


def plain() -> nn.Module:
    return Stacks(3)


def normed() -> nn.Module:
    return Stacks(3, kind=Normed)


def several() -> nn.Module:
    return Stacks(2, 2)


def tied_in_pairs() -> nn.Module:
    model = Stacks(4)
    for i in (0, 1):
        model.layers[i + 2].up.weight = model.layers[i].up.weight
    return model


def tied_across_stacks() -> nn.Module:
    model = Stacks(2, 2)
    for i in (0, 1):
        model.more[i].down.weight = model.layers[1 - i].down.weight
    return model


def tied_with_the_shell() -> nn.Module:
    """Two users for each weight: how the gradients of three round depends on which two are added first."""
    model = Stacks(3)
    model.layers[0].up.weight = model.stem.weight
    model.layers[2].down.weight = model.head.weight
    return model


def occurring_twice() -> nn.Module:
    model = Stacks(3)
    model.layers.append(model.layers[0])
    return model


def flat() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(3)), nn.Linear(WIDTH, WIDTH), nn.Tanh())


def nested() -> nn.Module:
    """The second stack is a member of the Sequential that the first one is in, behind it."""
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(2)), nn.Sequential(*(Block() for _ in range(2))), nn.Tanh()
    )


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def decay_groups(model: nn.Module) -> Optimizer:
    params = list(model.parameters())
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)


def by_name(model: nn.Module) -> Optimizer:
    named = dict(model.named_parameters())
    return torch.optim.AdamW([named[name] for name in sorted(named)], lr=1e-2)


def backwards(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(list(model.parameters())[::-1], lr=1e-2, momentum=0.9)


def head_first(model: nn.Module) -> Optimizer:
    """Two groups in an order of their own: the shell's head before its stem, layers from the last to the first."""
    layers = [layer for layer in dict.fromkeys(model.layers)][::-1]
    rest = [*model.head.parameters(), *model.stem.parameters()]
    inside = [param for layer in layers for param in layer.parameters()]
    return torch.optim.AdamW([{"params": rest, "lr": 1e-3}, {"params": inside}], lr=1e-2)


@dataclass(frozen=True)
class Kind:
    """A kind of model to walk on."""

    model: Callable[[], nn.Module]
    make: Make = adamw
    stacks: tuple[str, ...] = ("layers",)
    layers: tuple[str, ...] | None = None
    config: RelayConfig = RelayConfig(micro_batches=2)  # noqa: RUF009, B008 - frozen
    commands: tuple[tuple[str, float], ...] = ()  # besides those of all kinds, with their weights

    def fresh(self) -> nn.Module:
        torch.manual_seed(0)
        return self.model().train()


CLIPPED = RelayConfig(micro_batches=2, update="deferred", max_grad_norm=0.05, stash="host")
KINDS = {
    "plain": Kind(plain),
    "tied in pairs": Kind(tied_in_pairs, decay_groups),
    "tied across stacks": Kind(tied_across_stacks, by_name, ("layers", "more")),
    "tied with the shell": Kind(tied_with_the_shell),
    "occurring twice": Kind(occurring_twice),
    "flat": Kind(flat, decay_groups, ("",), ("1", "2", "3")),
    "nested": Kind(nested, adamw, ("", "3"), ("1", "2", "3.0", "3.1")),
    "normed": Kind(normed, backwards, config=CLIPPED),
    "several": Kind(several, decay_groups, ("layers", "more"), config=CLIPPED),
    "head first": Kind(plain, head_first),
    "configured": Kind(configured, decay_groups),
    "beside": Kind(beside, decay_groups),
    "recurrent": Kind(recurrent, decay_groups, commands=(("loops", 6), ("unroll", 3))),
    "looped": Kind(looped, decay_groups, commands=(("loops", 6), ("unroll", 3))),
}

REFUSALS = [
    "one must stay", "one must run", "all of .* would be skipped", "out of range", "interpolate'\\) needs a layer on both sides",
    "share the weights .* would all be removed", "holds one module in several places", "there is nothing to (undo|redo)",
    "no layer there shares", "dropped with park=None", "cannot be mixed", "not interchangeable", "would hold the same",
    "no loop to replace", "by the position of the layers", "may be read by the position",
]  # fmt: skip

Command = tuple[str, int, int, int]
COMMANDS = {
    "step": 8, "skip": 2, "evaluate": 1, "verify": 1, "forecast": 0.2, "insert": 4, "duplicate": 2, "drop": 4, "swap": 3,
    "move": 2, "replace": 2, "interpolate": 2, "delink": 2, "freeze": 1, "unfreeze": 1, "group": 2, "inverse": 1, "undo": 5,
    "redo": 3, "fork": 1, "switch": 3, "discard": 1, "reload": 3, "reload as it is": 1,
}  # fmt: skip


@dataclass
class Walk:
    """A relay and its shadow, which are sent the same commands."""

    kind: Kind
    folder: Path
    refused: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.foreign: dict[str, int] = {}  # widths of layers of another kind, by key
        model = self.kind.fresh()
        layers = None if self.kind.layers is None else list(self.kind.layers)
        options = {"layers": layers} if layers else {}
        self.relay = Relay(model, self.kind.make(model), config=self.kind.config, **self._options(), **options)
        twin = self.kind.fresh()
        self.shadow = Shadow(twin, self.kind.stacks, Block, self.kind.make, loss, self.kind.config)
        self.number = 0

    def _options(self) -> dict[str, Any]:
        return {"device": EmulatedDevice(), "loss": loss}

    def do(self, command: Command) -> None:
        """One command, on both sides, and a look at them."""
        kind, a, b, c = command
        self.number += 1
        getattr(self, kind.replace(" ", "_"))(a, b, c)
        assert_equal(self.relay.optimizer, self.relay.model, self.shadow)
        assert _loops_of(self.relay.model) == _loops_of(self.shadow.world.model)
        assert self.relay.steps == self.shadow.world.steps and self.relay.branch == self.shadow.branch
        assert self.relay.can_undo == bool(self.shadow.world.done) and self.relay.can_redo == bool(
            self.shadow.world.undone
        )

    def close(self) -> None:
        """What is left is an ordinary model and an ordinary optimizer."""
        self.relay.close()
        assert_equal(self.relay.optimizer, self.relay.model, self.shadow)

    # -- where ---------------------------------------------------------------------------------------------------------

    def stack(self, a: int) -> tuple[str, str, int]:
        """A stack by its name in the shadow and in the relay, and its depth."""
        i = a % len(self.kind.stacks)
        name = self.kind.stacks[i]
        return name, list(self.relay.stacks)[i], len(self.shadow.world.layers[name])

    def layers(self, name: str) -> list[nn.Module]:
        return self.shadow.world.layers[name]

    def attempt(self, act: Callable[[], object], mirror: Callable[[], object]) -> bool:
        """Do it; what is refused for a good reason has changed nothing."""
        try:
            act()
        except (ValueError, TypeError) as error:
            reason = next((reason for reason in REFUSALS if re.search(reason, str(error))), None)
            if reason is None:
                raise
            self.refused[reason] += 1
            return False
        mirror()
        return True

    def apply(self, *edits: Edit) -> Edit:
        """Stacks of one length would not be edited otherwise: the other may have one member per layer."""
        return self.relay.apply(*edits, force=len(self.kind.stacks) > 1)

    # -- commands ------------------------------------------------------------------------------------------------------

    def step(self, a: int, b: int, c: int) -> None:
        batch = make_batch(a)
        assert self.relay.step(batch).loss == self.shadow.step(batch)

    def skip(self, a: int, b: int, c: int) -> None:
        name, there, depth = self.stack(a)
        out = {b % depth, c % depth}
        losses: list[float] = []
        self.attempt(
            lambda: losses.append(
                self.relay.step(make_batch(a), [(there, i) for i in out], len(self.kind.stacks) > 1).loss
            ),
            lambda: losses.append(self.shadow.step(make_batch(a), {(name, i) for i in out})),
        )
        assert len(set(losses)) <= 1

    def evaluate(self, a: int, b: int, c: int) -> None:
        assert self.relay.evaluate(make_batch(a)) == self.shadow.evaluate(make_batch(a))

    def verify(self, a: int, b: int, c: int) -> None:
        assert self.relay.verify(make_batch(a)).equal

    def forecast(self, a: int, b: int, c: int) -> None:
        self.relay.forecast(make_batch(a))

    def insert(self, a: int, b: int, c: int) -> None:
        name, there, depth = self.stack(a)
        at = b % (depth + 1)
        like, warmup = max(0, at - 1), (0, 3)[c % 2]
        policy: Any = ("fresh", "copy", 0.5)[c % 3]
        init = ("copy", "copy", "interpolate", "fresh", "identity")[c % 5]
        if depth >= MOST_LAYERS:
            return
        self.relay.expect(make_batch(a))
        before = self.relay.evaluate(make_batch(a))

        def mirror() -> None:
            made = self.shadow.insert(name, at, like, policy, warmup)
            mine = self.relay.stacks[list(self.relay.stacks)[self.kind.stacks.index(name)]][at].module
            with torch.no_grad():
                for new, param in zip(made.parameters(), mine.parameters(), strict=True):
                    if init == "interpolate":
                        left, right = (self.layers(name)[i] for i in (at - 1, at + 1))
                        inner = next(n for n, p in made.named_parameters() if p is new)
                        new.copy_(torch.lerp(left.get_parameter(inner), right.get_parameter(inner), 0.5))
                    elif init != "copy":
                        new.copy_(param)  # nobody else knows them
                for new, buffer in zip(made.buffers(), mine.buffers(), strict=True):
                    if init == "fresh":
                        new.copy_(buffer)
            if init == "identity":
                assert self.relay.evaluate(make_batch(a)) == before

        edit = Insert(at=(there, at), init=init, optimizer=policy, warmup=warmup)
        self.attempt(lambda: self.apply(edit), mirror)

    def duplicate(self, a: int, b: int, c: int) -> None:
        name, there, depth = self.stack(a)
        first = b % depth
        last = min(depth, first + 1 + c % 2)
        mode: Any = ("top", "middle", "interleaved")[c % 3]
        if depth + last - first > MOST_LAYERS:
            return

        def mirror() -> None:
            layers = self.layers(name)
            copies = {layer: self.shadow.copy_of(layer, "copy") for layer in layers[first:last]}
            if mode == "interleaved":
                after = [one for layer in layers for one in (layer, copies.get(layer)) if one is not None]
            else:
                end = len(layers) if mode == "top" else last
                after = [*layers[:end], *copies.values(), *layers[end:]]
            self.shadow.do(self.shadow.order(name, after))

        self.attempt(lambda: self.apply(Duplicate((there, slice(first, last)), mode)), mirror)

    def drop(self, a: int, b: int, c: int) -> None:
        name, there, depth = self.stack(a)
        edit = Drop((there, b % depth), park=("memory", "memory", "disk", None)[c % 4])
        self.attempt(lambda: self.apply(edit), lambda: self._without(name, b % depth))

    def _without(self, name: str, i: int) -> None:
        layers = self.layers(name)
        self.shadow.do(self.shadow.order(name, [*layers[:i], *layers[i + 1 :]]))

    def swap(self, a: int, b: int, c: int) -> None:
        name, there, depth = self.stack(a)
        self.attempt(
            lambda: self.apply(Swap((there, b % depth), (there, c % depth))),
            lambda: self._swapped(name, b % depth, c % depth),
        )

    def _swapped(self, name: str, i: int, j: int) -> None:
        layers = list(self.layers(name))
        layers[i], layers[j] = layers[j], layers[i]
        self.shadow.do(self.shadow.order(name, layers))

    def move(self, a: int, b: int, c: int) -> None:
        name, there, depth = self.stack(a)

        def mirror() -> None:
            layers = list(self.layers(name))
            layers.insert(c % depth, layers.pop(b % depth))
            self.shadow.do(self.shadow.order(name, layers))

        self.attempt(lambda: self.apply(Move((there, b % depth), (there, c % depth))), mirror)

    def replace(self, a: int, b: int, c: int) -> None:
        name, there, depth = self.stack(a)
        kind, inner = type(self.layers(name)[0]), (WIDTH, WIDTH + 1)[c % 2]
        torch.manual_seed(c)
        module = kind(inner)
        twin = copy.deepcopy(module)

        def mirror() -> None:
            layers, i = self.layers(name), b % depth
            unit = next(unit for unit in self.relay.stack if unit.module is module)
            if inner != WIDTH:
                self.foreign[unit.key] = inner
            self.shadow.do(self.shadow.order(name, [*layers[:i], twin, *layers[i + 1 :]]))

        self.attempt(lambda: self.apply(Replace((there, b % depth), module)), mirror)

    def interpolate(self, a: int, b: int, c: int) -> None:
        name, there, depth = self.stack(a)
        weight = (0.5, 0.25, 1.0)[a % 3]
        one, other = self.layers(name)[b % depth], self.layers(name)[c % depth]
        self.attempt(
            lambda: self.apply(Interpolate((there, b % depth), (there, c % depth), weight)),
            lambda: self.shadow.do(self.shadow.interpolate(one, other, weight)),
        )

    def delink(self, a: int, b: int, c: int) -> None:
        name, there, depth = self.stack(a)
        first = b % depth
        span = range(first, min(depth, first + 1 + c % 3))

        def mirror() -> None:
            layers, model = self.layers(name), self.shadow.world.model
            delinked = {layers[i] for i in span} - {layer for i, layer in enumerate(layers) if i not in span}
            inside = {module for layer in delinked for module in layer.modules()}
            outside = [module for module in model.modules() if module not in inside]
            taken = {param for module in outside for param in module.parameters(recurse=False)}
            after = list(layers)
            for i in span:
                if not taken.isdisjoint(layers[i].parameters()):
                    after[i] = self.shadow.copy_of(layers[i], "copy")
                    for new, old in zip(after[i].parameters(), layers[i].parameters(), strict=True):
                        new.requires_grad_(old.requires_grad)
                else:
                    taken |= set(layers[i].parameters())
            self.shadow.do(self.shadow.order(name, after))

        self.attempt(lambda: self.apply(Delink((there, slice(span.start, span.stop)))), mirror)

    def loops(self, a: int, b: int, c: int) -> None:
        count = 1 + a % 3
        self.relay.expect(make_batch(b))
        self.relay.apply(Loops(count))
        self.shadow.do(("loops", count))

    def unroll(self, a: int, b: int, c: int) -> None:
        """Copies behind the layers, and one loop."""
        layers = self.layers("layers")
        loops = _loops_of(self.shadow.world.model)
        if loops * len(layers) > MOST_LAYERS:
            return

        def mirror() -> None:
            copies = [self.shadow.copy_of(layer, "copy") for layer in layers * (loops - 1)]
            for made, layer in zip(copies, layers * (loops - 1), strict=True):
                for new, old in zip(made.parameters(), layer.parameters(), strict=True):
                    new.requires_grad_(old.requires_grad)
            self.shadow.do(self.shadow.order("layers", [*layers, *copies]), ("loops", 1))

        self.relay.expect(make_batch(b))
        self.attempt(lambda: self.relay.apply(Unroll()), mirror)

    def freeze(self, a: int, b: int, c: int) -> None:
        self._train(Freeze, False, a, b)

    def unfreeze(self, a: int, b: int, c: int) -> None:
        self._train(Unfreeze, True, a, b)

    def _train(self, edit: Callable[[Any], Edit], trained: bool, a: int, b: int) -> None:
        name, there, depth = self.stack(a)
        flags = dict.fromkeys(self.layers(name)[b % depth].parameters(), trained)
        self.attempt(lambda: self.apply(edit((there, b % depth))), lambda: self.shadow.do(("flags", flags)))

    def group(self, a: int, b: int, c: int) -> None:
        """Two edits, of which the second one may fail: then none is carried out."""
        name, there, depth = self.stack(a)

        def mirror() -> None:
            self._swapped(name, b % depth, c % depth)
            self._without(name, b % depth)
            done = self.shadow.world.done
            done[-2:] = [done[-1] + done[-2]]

        swap, drop = Swap((there, b % depth), (there, c % depth)), Drop((there, b % depth))
        self.attempt(lambda: self.apply(swap, drop), mirror)

    def inverse(self, a: int, b: int, c: int) -> None:
        """An edit and its inverse, as two edits."""
        name, there, depth = self.stack(a)

        def mirror() -> None:
            self._without(name, b % depth)
            self.shadow.do(*self.shadow.world.done[-1])

        self.attempt(lambda: self.apply(self.apply(Drop((there, b % depth)))), mirror)

    def undo(self, a: int, b: int, c: int) -> None:
        self.attempt(self.relay.undo, self.shadow.undo)

    def redo(self, a: int, b: int, c: int) -> None:
        self.attempt(self.relay.redo, self.shadow.redo)

    def fork(self, a: int, b: int, c: int) -> None:
        if len(self.shadow.others) + 1 < MOST_BRANCHES:
            self.relay.fork(f"branch {self.number}")
            self.shadow.fork(f"branch {self.number}")

    def switch(self, a: int, b: int, c: int) -> None:
        names = sorted([*self.shadow.others, self.shadow.branch])
        self.relay.switch(names[a % len(names)])
        self.shadow.switch(names[a % len(names)])

    def discard(self, a: int, b: int, c: int) -> None:
        if names := sorted(self.shadow.others):
            self.relay.discard(names[a % len(names)])
            del self.shadow.others[names[a % len(names)]]

    def reload(self, a: int, b: int, c: int) -> None:
        """Save, close, load into a model as it was made first."""
        self._reload(self.kind.fresh(), self.foreign)

    def reload_as_it_is(self, a: int, b: int, c: int) -> None:
        """The same into a model that has the layers which the saved one has now."""
        parked = [each.unit for each in self.relay._editor.detached]  # of these it may have none like them
        widths = {unit.key: unit.module.up.out_features for unit in parked}
        self._reload(copy.deepcopy(self.relay.model), widths)

    def _reload(self, model: nn.Module, widths: dict[str, int]) -> None:
        self.relay.save(self.folder)
        self.close()
        kinds = {key: type(self.layers(self.kind.stacks[0])[0])(inner) for key, inner in widths.items()}
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        self.relay = Relay.load(self.folder, model, self.kind.make(model), kinds, **self._options())


def _loops_of(model: Any) -> int:
    return getattr(model, "n_loops", 1)


def loss(outputs: Tensor, batch: Batch) -> Tensor:
    return (outputs - batch[1]).square().mean()


def make_batch(seed: int) -> Batch:
    """Rows that divide by the number of micro-batches, or not."""
    generator = torch.Generator().manual_seed(seed)
    rows = 4 + seed % 2
    return torch.randn(rows, WIDTH, generator=generator), torch.randn(rows, WIDTH, generator=generator)


def make_commands(seed: int, count: int, more: tuple[tuple[str, float], ...] = ()) -> list[Command]:
    chance, weights = random.Random(seed), {**COMMANDS, **dict(more)}
    kinds = chance.choices(list(weights), list(weights.values()), k=count)
    return [(kind, chance.randrange(60), chance.randrange(60), chance.randrange(60)) for kind in kinds]


def walk(kind: Kind, commands: list[Command], folder: Path) -> tuple[int, BaseException] | None:
    """The command that failed, and how; None if all is well."""
    shutil.rmtree(folder, ignore_errors=True)
    going, i = Walk(kind, folder), 0
    try:
        for i, command in enumerate(commands):  # noqa: B007 - told below
            going.do(command)
        going.close()
    except Exception as error:
        return i, error
    finally:
        going.relay.close()
    return None


def shortest(kind: Kind, commands: list[Command], folder: Path, tries: int = 300) -> list[Command]:
    """A part of the commands that still fails, from which none can be left out."""
    size = len(commands) // 2
    while size and tries:
        i = 0
        while i < len(commands) and tries:
            fewer, tries = commands[:i] + commands[i + size :], tries - 1
            if (failed := walk(kind, fewer, folder)) is not None:
                commands = fewer[: failed[0] + 1]
            else:
                i += size
        size //= 2
    return commands


def check(kind: Kind, seed: int, count: int, folder: Path) -> None:
    commands = make_commands(seed, count, kind.commands)
    if (failed := walk(kind, commands, folder)) is None:
        return
    commands = shortest(kind, commands[: failed[0] + 1], folder)
    failed = walk(kind, commands, folder) or failed
    raise AssertionError(f"seed {seed}, fails after {commands}") from failed[1]


@pytest.mark.parametrize("name", KINDS)
def test_a_relay_is_plain_training_whatever_it_is_told(name: str, tmp_path: Path) -> None:
    check(KINDS[name], 1, 30, tmp_path / "save")


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", KINDS)
def test_the_same_for_ten_thousand_commands(name: str, seed: int, tmp_path: Path) -> None:
    check(KINDS[name], 100 + seed, 100, tmp_path / "save")
