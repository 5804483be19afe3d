"""Randomized linear layers: exact gradients of input and bias, mean and variance of the weight gradient."""

import pytest
import torch
from torch import nn

from l2l_core.strategies import RandomizedLinear, randomized_linear

ROWS, IN, OUT = 40, 6, 5


def pair(share: float) -> tuple[nn.Linear, RandomizedLinear]:
    torch.manual_seed(0)
    plain = nn.Linear(IN, OUT).double()
    return plain, RandomizedLinear.of(plain, share)


def backward(layer: nn.Linear, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    layer.weight.grad = layer.bias.grad = None
    x = x.clone().requires_grad_()
    layer(x).backward(dy)
    grads = x.grad, layer.bias.grad, layer.weight.grad
    return tuple(grad for grad in grads if grad is not None)


def data() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, ROWS // 4, IN).double(), torch.randn(4, ROWS // 4, OUT).double()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_estimate_is_unbiased_with_the_variance_of_the_formula(share: float) -> None:
    """Variance: (|X|^2 |dY|^2 + |X^T dY|^2 - 2 sum over rows of |x|^2 |dy|^2) / k, Frobenius norms."""
    plain, random = pair(share)
    x, dy = data()
    exact = backward(plain, x, dy)
    assert torch.equal(random(x), plain(x))
    draws = []
    for _ in range(4000):
        dx, db, dw = backward(random, x, dy)
        draws.append(dw)
    torch.testing.assert_close((dx, db), exact[:2])
    errors = torch.stack(draws) - exact[2]
    squares = errors.square().sum((1, 2))
    rows, grads, kept = x.view(-1, IN), dy.view(-1, OUT), round(share * ROWS)
    variance = rows.square().sum() * grads.square().sum() + (rows.T @ grads).square().sum()
    variance = (variance - 2 * (rows.square().sum(1) * grads.square().sum(1)).sum()) / kept
    assert float(squares.mean()) == pytest.approx(float(variance), rel=0.05)
    bias = errors.mean(0).norm()
    assert bias < 3 * (variance / len(draws)).sqrt()


def test_it_saves_a_share_of_the_rows_and_repeats_its_draws() -> None:
    plain, random = pair(0.25)
    x, dy = data()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        random(x.clone().requires_grad_())
    kept = sum(t.nbytes for t in saved if t.data_ptr() != plain.weight.data_ptr())
    assert kept == x.nbytes // 4
    torch.manual_seed(7)
    first = backward(random, x, dy)
    other = backward(random, x, dy)
    torch.manual_seed(7)
    again = backward(random, x, dy)
    assert all(map(torch.equal, first, again)) and not torch.equal(first[2], other[2])


def test_parameters_ties_and_names_are_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4, bias=False))
    model.append(model[0])
    params, names = [id(param) for param in model.parameters()], list(model.state_dict())
    assert randomized_linear(model, 0.5) == ["0", "2", "3"]
    assert [id(param) for param in model.parameters()] == params and list(model.state_dict()) == names
    assert model[0] is model[3] and isinstance(model[2], RandomizedLinear) and model[2].bias is None
