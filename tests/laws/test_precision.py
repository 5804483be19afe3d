"""precision="bf16": bfloat16 weights on the device and compute under autocast; masters, sums and updates in float32."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from zoo import BY_NAME, Kind

from l2l_core import Relay, RelayConfig
from l2l_core.batches.batch import split

K = 3
CONFIG = RelayConfig(seed=0, micro_batches=K, precision="bf16")


class Oracle:
    """The same by hand: weights rounded before every step, gradients of micro-batches added up in float32."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.model = kind, kind.make_model()
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3)
        self.steps = 0

    def step(self, batch: Any) -> float:
        params, losses = list(self.model.parameters()), []
        for param, master in zip(params, self.masters, strict=True):
            param.data = master.detach().to(torch.bfloat16)
        for k, part in enumerate(split(batch, K)):
            torch.manual_seed(CONFIG.micro_batch_seed(self.steps, k))
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                outputs = self.model(**part) if isinstance(part, dict) else self.model(*part[:-1])
                loss = (outputs.loss if self.kind.loss is None else self.kind.loss(outputs, part)) / K
            loss.backward()
            losses.append(loss.detach())
            for param, master in zip(params, self.masters, strict=True):
                if param.grad is not None:
                    grad, param.grad = param.grad.float(), None
                    master.grad = grad if master.grad is None else master.grad + grad
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        return float(sum(losses))


@pytest.mark.parametrize("stash", ["device", "host"])
@pytest.mark.parametrize("name", ["chain", "residual_outside", "gpt2_untied", "bert_classifier", "vit"])
def test_bf16_is_what_its_definition_says_bit_by_bit(name: str, stash: str) -> None:
    kind, oracle = BY_NAME[name], Oracle(BY_NAME[name])
    config = RelayConfig(seed=0, micro_batches=K, precision="bf16", stash=stash)
    with Relay(
        kind.make_model(),
        partial(torch.optim.AdamW, lr=1e-3),
        loss=kind.loss,
        loss_over=kind.loss_over,
        layers=kind.layers,
        config=config,
    ) as relay:
        for step in range(3):
            batch = kind.make_batch(2 * K, step)
            assert relay.step(batch).loss == oracle.step(batch)
            for param, master in zip(relay.model.parameters(), oracle.masters, strict=True):
                assert param.dtype == torch.float32
                assert torch.equal(param, master)


def test_bf16_halves_what_is_loaded_and_the_slots() -> None:
    kind, results = BY_NAME["gpt2"], {}
    for precision in ("fp32", "bf16"):
        with Relay(kind.make_model(), config=RelayConfig(seed=0, micro_batches=2, precision=precision)) as relay:
            results[precision] = relay.step(kind.make_batch(4, 0))
    full, half = results["fp32"], results["bf16"]
    assert half.bytes_loaded * 2 == full.bytes_loaded
    assert half.bytes_pushed == full.bytes_pushed, "gradients travel in float32"
    weights = [r.trace.peak_sample("device").bytes_by_category["weights"] for r in (half, full)]
    assert weights[0] * 2 == weights[1]


def test_bf16_learns_like_fp32() -> None:
    kind, losses = BY_NAME["gpt2"], {}
    for precision in ("fp32", "bf16"):
        optimizer = partial(torch.optim.AdamW, lr=3e-3)
        with Relay(
            kind.make_model(), optimizer, config=RelayConfig(seed=0, micro_batches=2, precision=precision)
        ) as relay:
            losses[precision] = [relay.step(kind.make_batch(8, 0)).loss for _ in range(40)]
            assert relay.evaluate(kind.make_batch(8, 0)) < losses[precision][0]
    assert losses["fp32"][-1] < 0.8 * losses["fp32"][0]
    assert losses["bf16"][-1] == pytest.approx(losses["fp32"][-1], rel=0.02)
