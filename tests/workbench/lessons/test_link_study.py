"""Tests of the best plans on a link: all plans by brute force, both limits of the link, and the picture's numbers."""

from itertools import product

import pytest
import torch
from torch import nn

from l2l_core.strategies import Full, Lab, Plain
from workbench.lessons.link_study import LinkStudy, compare_links


def make_lab() -> Lab:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(3)]
    model, batch = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1)), (torch.randn(64, 8), torch.randn(64, 1))
    return Lab(model, batch, layers=blocks, loss=lambda out, batch: nn.functional.mse_loss(out, batch[1]))


@pytest.fixture(scope="module")
def links() -> LinkStudy:
    lab = make_lab()
    budget = (lab.plan(Plain()).peak_device_bytes + lab.plan(Full()).peak_device_bytes) // 2
    return compare_links(lab, budget, shares=(0.01, 1000.0))


def test_a_slow_link_recomputes_and_a_fast_one_offloads(links: LinkStudy) -> None:
    slow, fast = links.results
    assert "O" not in slow.letters("both") and "R" in slow.letters("both")
    assert "R" not in fast.letters("both") and "O" in fast.letters("both")
    for one in links.results:
        alone = [x for name in ("recompute only", "offload only") if (x := one.overhead(name)) is not None]
        both = one.overhead("both")
        assert alone and both is not None and both <= min(alone)


def test_letters_say_what_the_plan_does_with_each_layer(links: LinkStudy) -> None:
    every = {"".join(letters) for letters in product("KRO", repeat=3)}
    for one in links.results:
        row = one.rows["both"]
        letters = one.letters("both")
        assert letters in every and row.plan is not None
        assert row.layer_forwards == 3 + letters.count("R")
        assert sum(kind == "Off" for kind, _ in row.plan.operations) == letters.count("O")


def test_picture_table_and_slider_say_the_same(links: LinkStudy) -> None:
    table = links.picture.table
    for one, row in zip(links.results, table.rows, strict=True):
        assert row[-1] == one.letters("both") and f">{row[-1]}<" in links.picture.svg
        both = one.overhead("both")
        assert both is not None and row[3] == f"{100 * both:+.0f} %"
    bundle = links._repr_mimebundle_()
    assert "<svg" in bundle["text/html"] and "K: the layer" in bundle["text/plain"]
    assert links.results[1].letters("both") in links.plan_output.value
    links.slider.value = 0
    assert f"<strong>{links.results[0].letters('both')}</strong>" in links.plan_output.value


def test_a_budget_in_which_nothing_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="smallest budget"):
        compare_links(make_lab(), 1000, shares=(1.0,))
