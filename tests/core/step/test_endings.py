"""A recompute leaves out a layer's last product where nothing reads it; whoever does finds it, whenever that begins."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import chain_of
from oracle import Both, adamw, assert_equal, both
from torch import Tensor, nn
from torch._C import _DisableTorchDispatch
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import WIDTH, Kind

from l2l_core import Relay, RelayConfig
from l2l_core.step.micro_batch import endings

ROWS, LAYERS, MICRO_BATCHES = 4, 3, 2
DRAWN = random.Random()  # its state is nobody's to put back
PRODUCTS = {torch.ops.aten.addmm.default, torch.ops.aten.mm.default, torch.ops.aten.convolution.default}


@pytest.fixture(autouse=True)
def any_size_is_worth_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(endings._WORTH_WHILE, "cpu", 0)


class Block(nn.Module):
    """A block with its norm in front, whose end can be exchanged while it is trained."""

    end: Callable[["Block", Tensor, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.seen: list[float] = []
        self.hold: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return type(self).end(self, x, self.down(F.gelu(self.up(self.norm(x)))))


def kind_with(end: Callable[[Any, Tensor, Tensor], Tensor]) -> tuple[Kind, type[Block]]:
    own = type("Own", (Block,), {"end": end})
    return chain_of(own, count=LAYERS), own


class Counted(TorchDispatchMode):
    """How many products ran."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def left_out(sides: Both, kind: Kind) -> int:
    """How many products the second step does without that the first one, which was metered, has made."""
    counts = []
    for seed in range(2):
        with Counted() as counted:
            assert_equal([sides.step(kind.make_batch(ROWS, seed))])
        counts.append(counted.count)
    return counts[0] - counts[1]


def residual(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y


def with_dropout(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + F.dropout(y, 0.2)


def scaled(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return (x - 0.5 * y / 2.0).unsqueeze(1).squeeze(1).clone()


def reordered(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return (x.transpose(-1, -2) + y.transpose(-1, -2)).transpose(-1, -2)


def cut(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y[..., :1] + y[..., 1, None] - y.detach()


def as_it_is(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return y


@pytest.mark.all_cases
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("end", [residual, with_dropout, scaled, reordered, cut, as_it_is])
def test_what_nobody_reads_is_left_out(end: Callable[..., Tensor], stash: str) -> None:
    kind, _ = kind_with(end)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES, stash=stash)) as sides:
        assert left_out(sides, kind) == (LAYERS - 1) * MICRO_BATCHES  # the last layer is not recomputed
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in (2, 3)])


class Held(torch.autograd.Function):
    """Keeps its input in its own way, of which autograd knows nothing."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.held = y
        return y * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2.0 * grad * (ctx.held > 0)


class Extension(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        with _DisableTorchDispatch():
            torch.add(x, y.relu(), out=out)
            ctx.positive = y > 0
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, grad * ctx.positive


def normalized(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return F.layer_norm(x + y, (WIDTH,))


def gained(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + block.gain * y


def branched(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y if y.mean().item() > 0 else x - y


def squared(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y * y


def through_a_function(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + Held.apply(y)


def in_place(block: Block, x: Tensor, y: Tensor) -> Tensor:
    y += x
    return y


def in_part(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[..., :1] * y[..., :1], x[..., 1:]], dim=-1)


def seen_by_numpy(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y * float(y.detach().numpy().max() > 0)


def seen_from_behind(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y * float(y.data.abs().max() > 0.1)


def told_as_numbers(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y * float(y.tolist()[0][0][0] > 0)


def seen_by_numpy_from_behind(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y * float(y.data.numpy().max() > 0)


def past_the_dispatcher(block: Block, x: Tensor, y: Tensor) -> Tensor:
    """As an extension does: no mode sees that it reads, and what it gives is new."""
    return Extension.apply(x, y)


def kept_by_a_view(block: Block, x: Tensor, y: Tensor) -> Tensor:
    z = y.unsqueeze(0)
    return (x * z).squeeze(0)


READERS = [
    normalized,
    gained,
    branched,
    squared,
    through_a_function,
    in_place,
    in_part,
    seen_by_numpy,
    seen_from_behind,
    told_as_numbers,
    past_the_dispatcher,
    seen_by_numpy_from_behind,
    kept_by_a_view,
]


@pytest.mark.all_cases
@pytest.mark.parametrize("end", READERS)
def test_what_is_read_is_there_from_the_first_step_on(end: Callable[..., Tensor]) -> None:
    kind, _ = kind_with(end)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in range(3)])


@pytest.mark.all_cases
@pytest.mark.parametrize("end", READERS)
def test_what_is_read_from_a_later_step_on_is_made_up(end: Callable[..., Tensor]) -> None:
    """Nothing relies on what was learned: it only says where to look."""
    kind, own = kind_with(with_dropout)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind)
        own.end = end
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in (2, 3)])
        own.end = with_dropout
        assert_equal([sides.step(kind.make_batch(ROWS, 4))])


@pytest.mark.all_cases
@pytest.mark.parametrize(
    "end",
    [
        lambda block, x, y: x + y * DRAWN.random(),
        lambda block, x, y: x + y * torch.tensor([DRAWN.random() for _ in range(WIDTH)]),
        lambda block, x, y: x * DRAWN.random() + y,
        lambda block, x, y: x + block.down(F.gelu(block.up(block.norm(x))) * DRAWN.random()),
        lambda block, x, y: x + y if DRAWN.random() < 0.5 else x - y,
        lambda block, x, y: F.layer_norm(x + y, (WIDTH,)) if DRAWN.random() < 0.5 else x + y,
        lambda block, x, y: x + y[..., DRAWN.randrange(WIDTH), None],
    ],
    ids=["a scale", "a mask", "what is added", "before the product", "a sign", "another end", "another part"],
)
def test_a_recompute_that_differs_is_noticed_though_its_end_is_left_out(end: Callable[..., Tensor]) -> None:
    kind, own = kind_with(residual)
    model = kind.make_model()
    DRAWN.seed(3)
    with Relay(model, adamw(model), loss=kind.loss, config=RelayConfig(micro_batches=4)) as relay:
        for seed in range(2):
            relay.step(kind.make_batch(ROWS, seed))
        own.end = end
        with pytest.raises(RuntimeError, match="gave other outputs when it was recomputed"):
            relay.step(kind.make_batch(ROWS, 2))


class Twice(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) + self.down(F.gelu(self.up(x)))


class Raw(nn.Module):
    """A layer without modules: the whole of it is watched."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) / 8),
            nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(x @ self.up) @ self.down


class Own(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class UnderAModeOfItsOwn(Block):
    def forward(self, x: Tensor) -> Tensor:
        with Own():
            y = self.down(F.gelu(self.up(self.norm(x))))
        return x + y


class Sideways(Block):
    """A second stream goes past the product."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return torch.stack([x + y]).squeeze(0) if self.hold else x + y + 0.1 * self.norm(x)


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("layer", "count"), [(Twice, 0), (Raw, 1), (UnderAModeOfItsOwn, 0), (Sideways, 1)], ids=lambda case: str(case)
)
def test_layers_of_other_makes(layer: Callable[[], nn.Module], count: int) -> None:
    kind = chain_of(layer, count=LAYERS)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind) == count * (LAYERS - 1) * MICRO_BATCHES
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in (2, 3)])


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Notes every time that something left out is computed after all."""
    times: list[object] = []
    make_up = endings._Recomputed._make_up

    def noted(self: Any) -> None:
        times.append(self)
        make_up(self)

    monkeypatch.setattr(endings._Recomputed, "_make_up", noted)
    yield times


def test_who_had_to_be_made_up_for_is_not_tried_again(made_up: list[object]) -> None:
    kind, own = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=1)) as sides:
        assert left_out(sides, kind) and not made_up
        own.end = gained
        for seed in range(2, 5):
            assert_equal([sides.step(kind.make_batch(ROWS, seed))])
        assert len(made_up) == LAYERS - 1


def test_meter_always_leaves_nothing_out() -> None:
    kind, _ = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES, meter="always")) as sides:
        assert left_out(sides, kind) == 0


def test_small_products_are_not_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of any size, again
    kind, _ = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind) == 0


@pytest.mark.parametrize("what", ["attribute", "list"])
def test_what_somebody_keeps_has_its_values(what: str) -> None:
    """On an attribute, or in a list: what is found there after a step is what plain training leaves."""

    def end(block: Block, x: Tensor, y: Tensor) -> Tensor:
        if what == "attribute":
            block.hold = y.detach()
        else:
            block.seen[:] = y.detach().flatten().tolist()[:3]
        return x + y

    kind, own = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind)
        own.end = end
        assert_equal([sides.step(kind.make_batch(ROWS, 2))])
        for mine, other in zip(sides.relay.model.layers, sides.in_core.model.layers, strict=True):
            assert mine.seen == other.seen
            assert (mine.hold is None) == (other.hold is None)
            if mine.hold is not None:
                assert torch.equal(mine.hold, other.hold)


def test_what_was_added_may_be_changed_afterwards() -> None:
    """What is kept was made of values that are gone when the layer is over."""

    def end(block: Block, x: Tensor, y: Tensor) -> Tensor:
        z = torch.full_like(x, 0.5)
        out = x + (y + z)
        block.hold = out.data
        z.zero_()
        return out

    kind, own = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind)
        own.end = end
        assert_equal([sides.step(kind.make_batch(ROWS, 2))])
        for mine, other in zip(sides.relay.model.layers[:-1], sides.in_core.model.layers[:-1], strict=True):
            assert torch.equal(mine.hold, other.hold)


def test_no_mode_and_no_hook_is_left_when_a_layer_fails() -> None:
    kind, own = kind_with(residual)
    model = kind.make_model()
    with ExitStack() as stack:
        relay = stack.enter_context(Relay(model, adamw(model), loss=kind.loss, config=RelayConfig(rollback=True)))
        for seed in range(2):
            relay.step(kind.make_batch(ROWS, seed))
        own.end = lambda block, x, y: 1 / 0
        with pytest.raises(ZeroDivisionError):
            relay.step(kind.make_batch(ROWS, 2))
        assert torch._C._len_torch_dispatch_stack() == 0
        assert not any(module._forward_pre_hooks for module in model.modules())
        own.end = residual
        relay.step(kind.make_batch(ROWS, 2))
