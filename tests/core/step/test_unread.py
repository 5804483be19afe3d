"""By what the operands of a product that was left out are compared."""

from __future__ import annotations

import pytest
import torch

from l2l_core.step.micro_batch.unread import marks_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool]


@pytest.mark.all_cases
@pytest.mark.parametrize("shape", [(512, 2048), (7, 5, 3)])
def test_the_last_place_of_one_element_is_noticed(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    marks = marks_of(values)
    for at in torch.randint(values.numel(), (40,)).tolist():
        other = values.clone()
        other.view(-1)[at] = torch.nextafter(values.view(-1)[at], torch.tensor(torch.inf))
        assert marks_of(other) != marks


@pytest.mark.all_cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_marks_are_those_of_the_values_wherever_they_lie(dtype: torch.dtype) -> None:
    for shape in ((3, 5), (), (1,), (2, 4, 7), (0, 3)):
        values = (3 * torch.randn(shape)).to(dtype)
        within = torch.zeros(values.numel() + 1, dtype=dtype)[1:].view(shape).copy_(values)
        assert marks_of(within) == marks_of(values)
        if values.dim() > 1:
            turned = values.transpose(-1, -2).contiguous().transpose(-1, -2)
            assert marks_of(turned) == marks_of(values)
