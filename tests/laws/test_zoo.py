"""Every kind of the zoo trains in plain torch, is the same every time, and has layers."""

from collections import Counter

import pytest
import torch
from patience import with_extra
from torch import Tensor, nn
from zoo import BY_NAME, KEPT_DTYPES, KINDS, QUANTISED_KINDS, Kind, loss_of

from l2l_core.model.layer_selection import resolve_layers

EXTRA = with_extra(QUANTISED_KINDS, "quant", "bitsandbytes", "peft")
every_kind = pytest.mark.parametrize("kind", [*KINDS, *EXTRA], ids=str)


def train_twice(kind: Kind) -> tuple[nn.Module, list[Tensor]]:
    model, losses = kind.make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for seed in range(2):
            optimizer.zero_grad()
            losses.append(loss_of(kind, model, kind.make_batch(4, seed)))
            losses[-1].backward()
            optimizer.step()
    return model, losses


def test_names_are_unique() -> None:
    assert len(BY_NAME) == len(KINDS)


@every_kind
def test_trains(kind: Kind) -> None:
    model, losses = train_twice(kind)
    assert all(loss.isfinite() and loss.ndim == 0 for loss in losses)
    kept = {KEPT_DTYPES[kind.name]} if kind.name in KEPT_DTYPES else set()
    assert {p.dtype for p in model.parameters()} == {torch.float32, *kept}
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    assert all(module.training for module in model.modules())


@every_kind
def test_is_the_same_every_time(kind: Kind) -> None:
    before = torch.get_rng_state()
    (first, losses), (second, losses_again) = train_twice(kind), train_twice(kind)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(losses, losses_again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


@every_kind
def test_has_layers(kind: Kind) -> None:
    layers = resolve_layers(kind.make_model(), kind.layers)
    assert len(layers) >= 2 or "albert" in kind.name


@every_kind
def test_every_layer_runs(kind: Kind) -> None:
    """What find_layers calls a layer is called as a module, once per forward (ALBERT's shared layer three times)."""
    model, calls = kind.make_model(), Counter()
    layers = resolve_layers(model, kind.layers)
    for name, layer in layers.items():
        layer.register_forward_hook(lambda *_, name=name: calls.update([name]))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        loss_of(kind, model, kind.make_batch(4, 0))
    expected = {"albert": {3}, "looped": {2}, "lora_albert": {3}, "random_skip": {0, 1}}.get(kind.name, {1})
    assert {calls[name] for name in layers} == expected


@every_kind
def test_batch_has_rows_first(kind: Kind) -> None:
    batches = [kind.make_batch(6, seed) for seed in range(2)]
    entries = [batch.values() if isinstance(batch, dict) else batch for batch in batches]
    pairs = list(zip(*entries, strict=True))
    assert all(len(tensor) == 6 for tensor, _ in pairs)
    assert not all(torch.equal(a, b) for a, b in pairs)


@every_kind
def test_runs_single_rows(kind: Kind) -> None:
    model = kind.make_model()
    with torch.random.fork_rng(devices=[]):
        assert all(loss_of(kind, model, kind.make_batch(1, seed)).isfinite() for seed in range(4))


@every_kind
def test_dropout_is_alive(kind: Kind) -> None:
    """Two runs from different seeds differ, so an equality test over this kind says something about random state."""
    if kind.name == "resnet":
        pytest.skip("ResNet has no dropout")
    model, batch, losses = kind.make_model(), kind.make_batch(4, 0), []
    with torch.random.fork_rng(devices=[]):
        for seed in range(2):
            torch.manual_seed(seed)
            losses.append(loss_of(kind, model, batch))
    assert not torch.equal(*losses)
