"""Recomputes are compared with their forwards; here the way of a GPU, which settles when the step is over, on the CPU."""

import pytest
import torch

from l2l_core.step.micro_batch import recomputes
from l2l_core.step.micro_batch.recomputes import Recomputes, sums_of


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> Recomputes:
    monkeypatch.setattr(recomputes, "_sum", recomputes._sum_on_gpu)
    return Recomputes()


def test_the_first_layer_that_differs_is_named_when_the_step_is_over(compared: Recomputes) -> None:
    x = torch.randn(4, 8)
    for layer, again in (("layers.0", x), ("layers.1", x + 1), ("layers.2", x + 2)):
        compared.compare(layer, sums_of([x]), sums_of([again]))
    with pytest.raises(RuntimeError, match="layer layers.1 gave other outputs"):
        compared.settle()


def test_the_message_tells_rounding_from_another_value() -> None:
    compared = Recomputes()
    x = torch.full((4,), 0.25)
    with pytest.raises(
        RuntimeError, match=r"layer layers.0 gave other outputs .*; their sum was 1 and is 1\.00000012: it depends"
    ):
        compared.compare("layers.0", sums_of([x]), sums_of([torch.full((1,), 1.0) + torch.finfo(torch.float32).eps]))


def test_what_is_equal_or_not_finite_passes(compared: Recomputes) -> None:
    x = torch.randn(4, 8)
    compared.compare("layers.0", sums_of([x]), sums_of([x.clone()]))
    compared.compare("layers.1", sums_of([x]), sums_of([torch.full_like(x, torch.nan)]))
    compared.settle()
    compared.settle()
