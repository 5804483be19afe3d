"""A recompute leaves out a layer's last product where nothing reads it; whoever does finds it, whenever that begins."""

import copy
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import chain_of
from oracle import Both, adamw, assert_equal, both
from torch import Tensor, nn
from torch._C import _DisableTorchDispatch
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import WIDTH, Chain, Kind

from l2l_core import Relay, RelayConfig
from l2l_core.step.micro_batch import endings, last_product, unread

ROWS, LAYERS, MICRO_BATCHES = 4, 3, 2
DRAWN = random.Random()  # its state is nobody's to put back
OWN = torch.Generator()


@pytest.fixture(autouse=True)
def any_size_is_worth_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(last_product.WORTH_WHILE, "cpu", 0)


class Block(nn.Module):
    """A block with its norm in front, whose end can be exchanged while it is trained."""

    end: Callable[["Block", Tensor, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("level", torch.ones(WIDTH))
        self.seen: list[float] = []
        self.hold: Any = None
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return type(self).end(self, x, self.down(F.gelu(self.up(self.norm(x)))))


def kind_with(end: Callable[[Any, Tensor, Tensor], Tensor]) -> tuple[Kind, type[Block]]:
    own = type("Own", (Block,), {"end": end})
    return chain_of(own, count=LAYERS), own


@pytest.fixture(autouse=True)
def empty(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is handed on in place of products; it holds what would be noticed."""
    made: list[Any] = []
    form = unread.Form.empty

    def noted(self: Any) -> Tensor:
        made.append(self)
        return form(self).fill_(torch.nan)

    monkeypatch.setattr(unread.Form, "empty", noted)
    return made


def left_out(sides: Both, kind: Kind, empty: list[Any]) -> int:
    """How many products the second step leaves out."""
    for seed in range(2):
        empty.clear()
        assert_equal([sides.step(kind.make_batch(ROWS, seed))])
    return len(empty)


def residual(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y


def with_dropout(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + F.dropout(y, 0.2)


def scaled(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return (x - 0.5 * y / 2.0).unsqueeze(1).squeeze(1).clone()


def reordered(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return (x.transpose(-1, -2) + y.transpose(-1, -2)).transpose(-1, -2)


def cut(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y[..., :1] + y[..., 1, None]


def as_it_is(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return y


@pytest.mark.all_cases
@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("end", [residual, with_dropout, scaled, reordered, cut, as_it_is])
def test_what_nobody_reads_is_left_out(end: Callable[..., Tensor], stash: str, empty: list[Any]) -> None:
    kind, _ = kind_with(end)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES, stash=stash)) as sides:
        assert left_out(sides, kind, empty) == (LAYERS - 1) * MICRO_BATCHES  # the last layer is not recomputed
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


class Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        with _DisableTorchDispatch():
            ctx.positive = (y > 0).float()
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, grad * ctx.positive


def past_the_dispatcher_and_before_it(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return Beside.apply(x, y)


def in_another_class(block: Block, x: Tensor, y: Tensor) -> Tensor:
    return x + y * float((TwoTensor(y.data, y.data) > 0).a.sum() > 9)


def added_to_a_buffer_that_changes(block: Block, x: Tensor, y: Tensor) -> Tensor:
    z = y + block.level
    block.level += 1.0
    return x + (block.gain * z if x.mean() > 0 else z)


def read_now_and_then(block: Block, x: Tensor, y: Tensor) -> Tensor:
    """In a recompute, say, and not in the first run."""
    block.calls += 1
    if block.calls % 3 == 0:
        block.seen.append(y.mean().item())
    return x + y


def beside_a_copy(block: Block, x: Tensor, y: Tensor) -> Tensor:
    copy.deepcopy(block.down)
    return x + y


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
    past_the_dispatcher_and_before_it,
    in_another_class,
    added_to_a_buffer_that_changes,
    read_now_and_then,
    beside_a_copy,
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
def test_what_is_read_from_a_later_step_on_is_made_up(end: Callable[..., Tensor], empty: list[Any]) -> None:
    """Nothing relies on what was learned: it only says where to look."""
    kind, own = kind_with(with_dropout)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind, empty)
        own.end = end
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in (2, 3)])
        own.end = with_dropout
        assert_equal([sides.step(kind.make_batch(ROWS, 4))])


def _signs(count: int) -> Tensor:
    return 1.0 - 2.0 * (torch.arange(count) % 2)


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
        lambda block, x, y: x - y if DRAWN.random() < 0.5 else y - x,
        lambda block, x, y: x + (y * 2.0 if [y * 3.0, DRAWN.random()][1] < 0.5 else y * 3.0),
        lambda block, x, y: [x + y, x + 2 * y][DRAWN.randrange(2)],
        lambda block, x, y: x + y + (block.norm.bias if DRAWN.random() < 0.5 else block.down.bias),
        lambda block, x, y: x + y * torch.randperm(WIDTH, generator=OWN).float().sub(WIDTH // 2).sign(),
        lambda block, x, y: x + y * (torch.randperm(x.shape[0] * 2, generator=OWN)[: x.shape[0], None, None] % 2),
        lambda block, x, y: x + y * block.level.fill_(DRAWN.random()),
        lambda block, x, y: x + y * (DRAWN.choice([1.0, -1.0]) * torch.outer(_signs(x.shape[1]), _signs(WIDTH))),
    ],
    ids=[
        "a scale",
        "a mask",
        "what is added",
        "before the product",
        "a sign",
        "another end",
        "another part",
        "which way round",
        "one of two",
        "what is given out",
        "a weight",
        "a permuted mask",
        "stochastic depth",
        "a buffer",
        "a chequerboard",
    ],
)
def test_a_recompute_that_differs_is_noticed_though_its_end_is_left_out(end: Callable[..., Tensor]) -> None:
    kind, own = kind_with(residual)
    model = kind.make_model()
    DRAWN.seed(3)
    OWN.manual_seed(3)
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


class OfFewTokens(Block):
    """Attention to some of the tokens, of which there may be none."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        some = h[:, h[:, :, 0].amax(0) > 1.2]
        return x + torch.bmm(torch.bmm(h, some.transpose(1, 2)), some)


class Complex(Chain):
    def walk(self, x: Tensor) -> Tensor:
        h = torch.complex(x, 0.5 * x)
        for layer in self.layers:
            h = layer(h)
        return torch.view_as_real(h)[..., 0]


class Conjugate(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.complex(self.norm(x.real), self.norm(x.imag))
        weight = torch.complex(*self.down.weight.chunk(2, dim=1))
        return x + (h.flatten(0, 1) @ weight.conj().T).view_as(x)


class Permuted(Block):
    def forward(self, x: Tensor) -> Tensor:
        order = torch.eye(x.shape[1])
        if self.hold:
            order = order[DRAWN.sample(range(len(order)), len(order))]
        return x + torch.bmm(order.repeat(len(x), 1, 1), self.up(self.norm(x))[..., :WIDTH])


class Signed(Block):
    """Has two masks of signs; the sum of both is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("even", _signs(WIDTH))
        self.register_buffer("odd", -_signs(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        signs = self.odd if self.hold and DRAWN.random() < 0.5 else self.even
        return x + self.down(F.gelu(self.up(self.norm(x)))) * signs


class OfNested(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = torch.nested.as_nested_tensor([row[: 2 + at % 2] for at, row in enumerate(self.norm(x).unbind())])
        own = torch.bmm(torch.bmm(h, h.transpose(1, 2)), h)
        return x + torch.nested.to_padded_tensor(own, 0.0, tuple(x.shape))


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
@pytest.mark.parametrize(("layer", "count"), [(Twice, 0), (Raw, 1), (UnderAModeOfItsOwn, 0), (Sideways, 1)], ids=str)
def test_layers_of_other_makes(layer: Callable[[], nn.Module], count: int, empty: list[Any]) -> None:
    kind = chain_of(layer, count=LAYERS)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind, empty) == count * (LAYERS - 1) * MICRO_BATCHES
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in (2, 3)])


@pytest.mark.parametrize(("layer", "shell"), [(OfFewTokens, Chain), (Conjugate, Complex)])
def test_operands_without_elements_and_conjugate_ones(layer: Callable[[], nn.Module], shell: type[Chain]) -> None:
    kind = chain_of(layer, shell=shell, count=LAYERS)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in range(6)])


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # of PyTorch, wherever one is made
def test_products_of_nested_tensors_are_not_looked_at() -> None:
    kind = chain_of(OfNested, count=LAYERS)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in range(3)])


@pytest.mark.parametrize("layer", [Permuted, Signed])
def test_other_operands_with_the_same_sums_are_noticed(layer: Callable[[], nn.Module], empty: list[Any]) -> None:
    """Of all elements, of rows and of columns; drawn anew in a recompute, or a buffer."""
    kind = chain_of(layer, count=LAYERS)
    DRAWN.seed(3)
    model = kind.make_model()
    with Relay(model, adamw(model), loss=kind.loss, config=RelayConfig(micro_batches=MICRO_BATCHES)) as relay:
        for seed in range(2):
            relay.step(kind.make_batch(ROWS, seed))
        assert empty
        for each in model.layers:
            each.hold = True
        with pytest.raises(RuntimeError, match="gave other outputs when it was recomputed"):
            relay.step(kind.make_batch(ROWS, 2))


class Probed(Block):
    """Looks at what its last module gives in a thread of its own."""

    pool: ThreadPoolExecutor

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if self.hold:
            self.pool.submit(self._look, h.detach()).result()
        return x + self.down(h)

    def _look(self, h: Tensor) -> None:
        with torch.no_grad():
            self.down(h)


def test_a_module_that_is_called_in_another_thread_leaves_no_mode_there(
    empty: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = chain_of(Probed, count=LAYERS)
    with ThreadPoolExecutor(1) as pool, both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        monkeypatch.setattr(Probed, "pool", pool, raising=False)
        assert left_out(sides, kind, empty)
        for model in (sides.relay.model, sides.in_core.model):
            for layer in model.layers:
                layer.hold = True
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in (2, 3)])
        assert pool.submit(torch._C._len_torch_dispatch_stack).result() == 0


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Notes every time that something left out is computed after all."""
    times: list[object] = []
    give_up = endings._Recomputed._give_up

    def noted(self: Any) -> None:
        times.append(self)
        give_up(self)

    monkeypatch.setattr(endings._Recomputed, "_give_up", noted)
    yield times


def test_who_had_to_be_made_up_for_is_not_tried_again(made_up: list[object], empty: list[Any]) -> None:
    kind, own = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=1)) as sides:
        assert left_out(sides, kind, empty) and not made_up
        own.end = gained
        for seed in range(2, 5):
            assert_equal([sides.step(kind.make_batch(ROWS, seed))])
        assert len(made_up) == LAYERS - 1


def test_meter_always_leaves_nothing_out(empty: list[Any]) -> None:
    kind, _ = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES, meter="always")) as sides:
        assert left_out(sides, kind, empty) == 0


def test_small_products_are_not_worth_it(monkeypatch: pytest.MonkeyPatch, empty: list[Any]) -> None:
    monkeypatch.undo()  # of any size, again
    kind, _ = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind, empty) == 0


@pytest.mark.parametrize("what", ["attribute", "list"])
def test_what_somebody_keeps_has_its_values(what: str, empty: list[Any]) -> None:
    """On an attribute, or in a list: what is found there after a step is what plain training leaves."""

    def end(block: Block, x: Tensor, y: Tensor) -> Tensor:
        if what == "attribute":
            block.hold = y.detach()
        else:
            block.seen[:] = y.detach().flatten().tolist()[:3]
        return x + y

    kind, own = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind, empty)
        own.end = end
        assert_equal([sides.step(kind.make_batch(ROWS, 2))])
        for mine, other in zip(sides.relay.model.layers, sides.in_core.model.layers, strict=True):
            assert mine.seen == other.seen
            assert (mine.hold is None) == (other.hold is None)
            if mine.hold is not None:
                assert torch.equal(mine.hold, other.hold)


def test_what_was_added_may_be_changed_afterwards(empty: list[Any]) -> None:
    """What is kept was made of values that are gone when the layer is over."""

    def end(block: Block, x: Tensor, y: Tensor) -> Tensor:
        z = torch.full_like(x, 0.5)
        out = x + (y + z)
        block.hold = out.data
        z.zero_()
        return out

    kind, own = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind, empty)
        own.end = end
        assert_equal([sides.step(kind.make_batch(ROWS, 2))])
        for mine, other in zip(sides.relay.model.layers[:-1], sides.in_core.model.layers[:-1], strict=True):
            assert torch.equal(mine.hold, other.hold)


class Module(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class WithAModuleForIt(Raw):
    def __init__(self) -> None:
        super().__init__()
        self.times: nn.Module = Module()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.times(F.gelu(x @ self.up), self.down)


def test_the_module_that_makes_it_may_go(empty: list[Any]) -> None:
    kind = chain_of(WithAModuleForIt, count=LAYERS)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind, empty)
        for model in (sides.relay.model, sides.in_core.model):
            for layer in model.layers:
                layer.times = Module()
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in (2, 3)])


def test_hooks_that_run_in_the_first_run_alone(empty: list[Any]) -> None:
    """A recompute does not fire them again, and ends in fewer operations."""
    kind, _ = kind_with(residual)
    seen: list[Tensor] = []
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind, empty)
        for model in (sides.relay.model, sides.in_core.model):
            model.layers[0].down.register_forward_hook(lambda module, args, out: seen.append(out.data.clone()))
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in (2, 3)])
    assert len(seen) == 2 * 2 * MICRO_BATCHES and not any(each.isnan().any() for each in seen)


def test_what_is_made_up_is_made_outside_of_autocast(empty: list[Any]) -> None:
    def end(block: Block, x: Tensor, y: Tensor) -> Tensor:
        return x + (block.gain * y if x.mean() > 0 else y)

    class Own(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().forward(x.float())

        end = residual

    kind = chain_of(Own, count=LAYERS)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides, torch.autocast("cpu", torch.bfloat16):
        assert left_out(sides, kind, empty)
        Own.end = end
        assert_equal([sides.step(kind.make_batch(ROWS, seed)) for seed in range(2, 6)])


class Strict(TorchDispatchMode):
    """Refuses what is no number, as people who look for it do; views of memory that nobody has filled yet compute nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        computes = not func.is_view and "empty" not in str(func)
        if computes and isinstance(out, Tensor) and out.is_floating_point() and out.isnan().any():
            raise FloatingPointError(f"nan from {func}")
        return out


def test_nothing_is_left_out_before_the_eyes_of_a_mode(empty: list[Any]) -> None:
    kind, _ = kind_with(residual)
    with both(kind, RelayConfig(micro_batches=MICRO_BATCHES)) as sides:
        assert left_out(sides, kind, empty)
        empty.clear()
        with Strict():
            assert_equal([sides.step(kind.make_batch(ROWS, 2))])
        assert not empty
        assert_equal([sides.step(kind.make_batch(ROWS, 3))])
        assert empty


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
