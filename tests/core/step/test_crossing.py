"""Shell code that reads across layer calls, weights that are read in many places, and what is refused before a step.

The in-core side is a loop of plain torch in this file.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from l2l_core import Relay, RelayConfig

WIDTH, ROWS, TIME, STEPS = 8, 6, 3, 3


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


class Model(nn.Module):
    """Layers, a Linear of the shell, and a forward of one's own."""

    def __init__(self, walk: Callable[[Any, Tensor], Tensor], layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.lin, self.walk = nn.ModuleList(layers), nn.Linear(WIDTH, WIDTH), walk

    def forward(self, x: Tensor) -> Tensor:
        return self.walk(self, x)


def objective(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return model(batch[0]).pow(2).mean()


def check(make: Callable[[], nn.Module], micro_batches: int, **settings: Any) -> None:
    """Train by relay and by hand, and compare the bits of every parameter after every step."""
    torch.manual_seed(0)
    model = make()
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    # By hand, losses are accumulated: some models mix rows, or cannot run without gradients.
    options: dict[str, Any] = {"objective": objective, "loss_over": "micro-batch"}
    config = RelayConfig(micro_batches=micro_batches, **settings)
    with Relay(
        model, lambda p: torch.optim.SGD(p, lr=0.05), layers=list(model.layers), config=config, **options
    ) as relay:
        for _ in range(STEPS):
            x = torch.randn(ROWS, TIME, WIDTH)
            for part in x.chunk(micro_batches):
                (objective(plain, (part,)) / micro_batches).backward()
            optimizer.step()
            optimizer.zero_grad()
            relay.step((x,))
            for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert torch.equal(ours, theirs), f"{name}: {float((ours - theirs).abs().max())}"


def check_refused(
    make: Callable[[], nn.Module], message: str, batches: list[Tensor] | None = None, micro_batches: int = 2
) -> None:
    """The last batch's step is refused in words, and nothing has changed."""
    torch.manual_seed(0)
    model = make()
    # The step must refuse by itself: no evaluation of a few rows fails first.
    options: dict[str, Any] = {"objective": objective, "loss_over": "micro-batch"}
    config = RelayConfig(micro_batches=micro_batches)
    with Relay(
        model, lambda p: torch.optim.SGD(p, lr=0.05), layers=list(model.layers), config=config, **options
    ) as relay:
        *before, last = batches or [torch.randn(ROWS, TIME, WIDTH)]
        for x in before:
            relay.step((x,))
        state = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises((RuntimeError, ValueError), match=message):
            relay.step((last,))
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name


# --- weights that are read in many places ----------------------------------------------------------------------------


class Scaled(Mlp):
    """Reads two weights of the shell, which it is given, more than once."""

    def forward(self, x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return x + self.a(x) * w + torch.tanh(x * w) * v * w + v * v


def weights_as_arguments() -> nn.Module:
    def walk(model: Any, x: Tensor) -> Tensor:
        x = x * model.w
        for layer in model.layers:
            x = layer(x, model.w, model.v) + model.w
        return x * model.w + x * model.w.exp() * model.v

    model = Model(walk, [Scaled() for _ in range(3)])
    model.w, model.v = (nn.Parameter(torch.randn(WIDTH) * 0.3) for _ in range(2))
    return model


class Twice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(torch.tanh(self.a(x))) + self.b(self.b(x))


def tied_and_read_twice() -> nn.Module:
    """A weight of the shell and of two layers, another one of both layers; each reads them twice."""

    def walk(model: Any, x: Tensor) -> Tensor:
        x = model.lin(model.lin(x))
        for layer in model.layers:
            x = layer(x)
        return model.lin(torch.tanh(model.lin(x)))

    model = Model(walk, [Twice() for _ in range(2)])
    model.layers[0].a.weight = model.layers[1].a.weight = model.lin.weight
    model.layers[1].b.weight = model.layers[0].b.weight
    return model


def recurrent_in_the_shell() -> nn.Module:
    def walk(model: Any, x: Tensor) -> Tensor:
        return model.gru(model.layers[0](model.gru(x)[0]))[0] + x

    model = Model(walk, [Mlp()])
    model.gru = nn.GRU(WIDTH, WIDTH, batch_first=True)
    return model


# --- tensors that cross layer calls ----------------------------------------------------------------------------------


def accumulators() -> nn.Module:
    """Sums and tables that are changed in place between layer calls."""

    def walk(model: Any, x: Tensor) -> Tensor:
        h, total, table = model.lin(x), torch.zeros_like(x), torch.zeros(len(model.layers), *x.shape)
        out = model.lin(x)
        for i, layer in enumerate(model.layers):
            h = layer(h)
            total += h
            table[i] = h * 2
            out += h
        return table.sum(0) + F.relu(total.clone(), inplace=True) + out

    return Model(walk, [Mlp() for _ in range(3)])


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


def custom_function_on_an_old_tensor() -> nn.Module:
    def walk(model: Any, x: Tensor) -> Tensor:
        first = h = model.lin(x)
        for layer in model.layers:
            h = layer(h) + 0.1 * Squares.apply(first)
        return h

    return Model(walk, [Mlp() for _ in range(2)])


class Silent(torch.autograd.Function):
    """Hands on no gradient at all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


def hooks_see_whole_gradients() -> nn.Module:
    """Hooks on tensors that are read before and after calls, and on modules; each is called once, with everything."""

    def walk(model: Any, x: Tensor) -> Tensor:
        h = model.lin(x)
        h.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        side = h + 0.0
        a = model.layers[0](h)
        a.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        b = model.layers[1](a + Silent.apply(h))
        return side + a + b + model.out(h)

    model = Model(walk, [Mlp() for _ in range(2)])
    model.out = nn.Linear(WIDTH, WIDTH)
    model.out.register_full_backward_hook(lambda module, ours, theirs: (ours[0].clamp(-1e-3, 1e-3),))
    return model


def older_tensors_in_transformed_functions() -> nn.Module:
    """They read, from outside, what was made before the last call."""

    def walk(model: Any, x: Tensor) -> Tensor:
        h = model.lin(x)
        a = model.layers[0](h)
        b = torch.vmap(lambda row: row * 2 + h.mean())(a)
        zeros = torch._efficientzerotensor(b.shape)  # as `jvp` makes them, without memory
        return model.layers[1](b) + h + zeros

    return Model(walk, [Mlp() for _ in range(2)])


RIGHT = [
    weights_as_arguments,
    tied_and_read_twice,
    recurrent_in_the_shell,
    accumulators,
    custom_function_on_an_old_tensor,
    hooks_see_whole_gradients,
    older_tensors_in_transformed_functions,
]


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("make", RIGHT, ids=lambda make: make.__name__)
def test_bits_of_plain_training(make: Callable[[], nn.Module], micro_batches: int, stash: str) -> None:
    check(make, micro_batches, stash=stash)


@pytest.mark.parametrize("make", [tied_and_read_twice, weights_as_arguments], ids=lambda make: make.__name__)
def test_bits_in_the_serial_relay(make: Callable[[], nn.Module]) -> None:
    check(make, 2, ahead=0, update="deferred")


# --- what is refused before anything is trained ----------------------------------------------------------------------


def chain(model: Any, x: Tensor) -> Tensor:
    h = model.lin(x)
    for layer in model.layers:
        h = layer(h)
    return h


def test_weight_cast_once_by_autocast() -> None:
    def walk(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.lin(chain(model, x)).float()

    check_refused(lambda: Model(walk, [Mlp()]), "cache_enabled=False")

    def uncached(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
            return model.lin(chain(model, x)).float()

    check(lambda: Model(uncached, [Mlp()]), 2)


def test_gradient_taken_across_a_layer_call() -> None:
    def walk(model: Any, x: Tensor) -> Tensor:
        h = model.lin(x)
        a = model.layers[0](h)
        return torch.autograd.grad((a * h).sum(), h, create_graph=True)[0] + a

    check_refused(lambda: Model(walk, [Mlp()]), "calls grad")


def test_code_across_a_layer_call_that_no_function_mode_sees() -> None:
    def walk(model: Any, x: Tensor) -> Tensor:
        h = model.lin(x)
        a = model.layers[0](h)
        return torch.vmap(lambda row: row * 2 + torch.tanh(row))(h) + a

    check_refused(lambda: Model(walk, [Mlp()]), r"x\.clone\(\)")


def test_code_that_no_function_mode_sees_reads_what_an_older_layer_gave_out() -> None:
    def walk(model: Any, x: Tensor) -> Tensor:
        h = model.layers[0](model.lin(x))
        a = model.layers[1](h * 1.5) * h
        return a + torch.vmap(lambda row: (row * 3).sin() * row)(h) + h * h

    check_refused(lambda: Model(walk, [Mlp() for _ in range(2)]), r"x\.clone\(\)")


@pytest.mark.parametrize("transform", ["vmap", "jvp"])
def test_a_layer_in_a_transformed_function(transform: str) -> None:
    """With one micro-batch, too: `jvp` ended the process there."""
    with warnings.catch_warnings(
        record=True
    ) as of_torch:  # the first jvp scripts code of PyTorch's, which is deprecated
        warnings.simplefilter("always")
        torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))
    assert all("`torch.jit.script` is deprecated" in str(each.message) for each in of_torch)

    def walk(model: Any, x: Tensor) -> Tensor:
        h = model.layers[0](model.lin(x))
        if transform == "vmap":
            return torch.vmap(lambda row: row + model.layers[1](h).mean())(x)
        return torch.func.jvp(lambda z: model.layers[1](h) * z, (h,), (h,))[1]

    for micro_batches in (1, 2):
        check_refused(lambda: Model(walk, [Mlp() for _ in range(2)]), "Call it outside", micro_batches=micro_batches)


@pytest.mark.parametrize(
    "exchange", [lambda h: h.expand(-1, 3, -1).clone(), lambda h: h.double()], ids=["another shape", "another type"]
)
@pytest.mark.parametrize("of", ["the shell", "a layer"])
def test_data_exchanged_under_a_tensor(exchange: Callable[[Tensor], Tensor], of: str) -> None:
    def walk(model: Any, x: Tensor) -> Tensor:
        h = model.layers[0](model.lin(x)[:, :1])
        h = h if of == "a layer" else h.mean((0, 1), keepdim=True)
        h.data = exchange(h)
        return model.layers[1](h.to(x.dtype)) + h if h.dtype != x.dtype else model.layers[1](h) + h

    check_refused(lambda: Model(walk, [Mlp() for _ in range(2)]), "assigns to .data")


def test_reentrant_checkpoint_of_a_weight_of_several_places() -> None:
    """It adds to gradients in a backward of its own."""

    class Checkpointed(Twice):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=True)

    def shell(model: Any, x: Tensor) -> Tensor:
        return checkpoint(model.lin, chain(model, model.lin(x)), use_reentrant=True)

    def again(model: Any, x: Tensor) -> Tensor:
        return model.layers[0](chain(model, x))

    check_refused(lambda: Model(shell, [Mlp()]), "use_reentrant=False")
    check_refused(lambda: Model(again, [Checkpointed()]), "use_reentrant=False")
    check(lambda: Model(chain, [Checkpointed(), Checkpointed()]), 2)


def test_hook_on_a_weight_of_several_places() -> None:
    def make() -> nn.Module:
        model = tied_and_read_twice()
        model.lin.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
        return model

    check_refused(make, "gradient hook")


def test_update_in_backward() -> None:
    def make() -> nn.Module:
        model = Model(chain, [Mlp()])
        model.lin.weight.register_post_accumulate_grad_hook(lambda param: None)
        return model

    check_refused(make, "EPS accumulates")


def test_weight_changed_in_forward() -> None:
    class Clamps(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.a.weight.clamp_(-0.1, 0.1)
            return super().forward(x)

    check_refused(lambda: Model(chain, [Clamps()]), "changes a weight")

    class ClampsData(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            self.a.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    check_refused(lambda: Model(chain, [ClampsData()]), "changes a weight")


def average(teacher: nn.Module, student: nn.Module, how: str) -> None:
    """Move the teacher's weights halfway to the student's: without effect where they are equal, as they begin."""
    old, new = list(teacher.parameters()), [param.detach() for param in student.parameters()]
    with torch.no_grad():
        if how == "foreach":
            torch._foreach_lerp_(old, new, 0.5)
        for mine, other in zip(old, new, strict=True):
            if how == "in place":
                mine.lerp_(other, 0.5)
            elif how == "data":
                mine.data.lerp_(other, 0.5)
            elif how == "out=":
                torch.lerp(mine, other, 0.5, out=mine)
            elif how == "assigned":
                mine.data = torch.lerp(mine, other, 0.5)
        if how == "state_dict":
            state = student.state_dict()
            for name, value in teacher.state_dict().items():
                value.lerp_(state[name], 0.5)


def with_teacher(how: str, begins_at: float) -> nn.Module:
    def walk(model: Any, x: Tensor) -> Tensor:
        if x[0, 0, 0] >= begins_at:
            average(model.layers[1], model.layers[0], how)
        return chain(model, x)

    model = Model(walk, [Mlp(), Mlp()])
    model.layers[1].load_state_dict(model.layers[0].state_dict())
    return model


@pytest.mark.parametrize("how", ["in place", "data", "foreach", "out=", "assigned", "state_dict"])
def test_weights_of_layers_that_the_shell_averages(how: str) -> None:
    """A momentum teacher: a first step, in which both are equal, did not show that the masters were changed."""
    check_refused(lambda: with_teacher(how, -torch.inf), "changes a weight, layers.1.*Change weights between steps")


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("how", ["in place", "foreach", "out=", "assigned", "state_dict"])
def test_weights_of_layers_that_the_shell_averages_from_a_later_step_on(how: str, stash: Any) -> None:
    """Nothing is trained, though the teacher may have its new weights: a later step is not watched from within."""
    model, x = with_teacher(how, begins_at=10), torch.randn(ROWS, TIME, WIDTH)
    options: dict[str, Any] = {"objective": objective, "loss_over": "micro-batch", "layers": list(model.layers)}
    with Relay(model, lambda p: torch.optim.SGD(p, lr=0.05), config=RelayConfig(stash=stash), **options) as relay:
        relay.step((x,))
        x[:, 0, 0] = 10
        student = [param.clone() for param in model.layers[0].parameters()]
        with pytest.raises(RuntimeError, match=r"changes a weight, layers\.1"):
            relay.step((x,))
        assert relay.steps == 1 and all(map(torch.equal, student, model.layers[0].parameters()))


def test_memory_from_one_micro_batch_to_the_next() -> None:
    """Set after a layer call, read before one: the next micro-batch would come too early."""

    def walk(model: Any, x: Tensor) -> Tensor:
        h = x if model.before is None else x + model.before
        h = chain(model, h)
        model.before = h.detach().mean((0, 1))
        return h

    def make() -> nn.Module:
        model = Model(walk, [Mlp()])
        model.before = None
        return model

    check_refused(make, "from one micro-batch's forward to the next")


def test_other_ways_in_later_steps() -> None:
    """A ban holds in every step: BatchNorm of the shell is met out of order only from the second step on."""

    def walk(model: Any, x: Tensor) -> Tensor:
        h = model.layers[0](x)
        if x[0, 0, 0] > 9:
            h = model.layers[1](h)
        return model.norm(h.transpose(1, 2)).transpose(1, 2)

    def make() -> nn.Module:
        model = Model(walk, [Mlp(), Mlp()])
        model.norm = nn.BatchNorm1d(WIDTH)
        return model

    regular = torch.randn(ROWS, TIME, WIDTH)
    irregular = regular.clone()
    irregular[0, 0, 0] = 10
    check_refused(make, "uses the buffer", [regular, regular, irregular])


def test_a_layer_that_counts_its_calls() -> None:
    """Its recompute finds the count of its first run, and does not count."""

    class Counts(Mlp):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return super().forward(x) * (1 + 0.01 * self.count)

    check(lambda: Model(chain, [Counts() for _ in range(3)]), 2)


def test_what_no_recompute_finds_again_is_refused_before_eager_updates() -> None:
    calls = count()

    class Counts(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 0.01 * next(calls))

    check_refused(lambda: Model(chain, [Counts() for _ in range(3)]), "recomputed")
