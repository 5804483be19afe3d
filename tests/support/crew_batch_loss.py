"""What worker processes of `crew.py` do in tests of losses over the whole batch."""

import copy
from functools import partial
from typing import Any

import torch
from batch_losses import CASES, adam, add_gradients, batch_of

from l2l_core import Relay, RelayConfig, Workers


def train_together(rank: int, count: int, name: str, reduce: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Train by all workers, and in core on the rows of all."""
    build, loss = CASES[name]
    torch.manual_seed(0)
    model = build()
    twin = copy.deepcopy(model)
    optimizer, config = adam(twin.parameters()), RelayConfig(seed=0, micro_batches=2, **settings)
    seen: dict[str, Any] = {"losses": [], "expected": [], "verified": True}
    options: dict[str, Any] = {"loss": partial(loss, model), "loss_over": "batch", "workers": Workers(reduce=reduce)}
    with Relay(model, adam, layers=list(model.layers), config=config, **options) as relay:
        for step in range(3):
            batch = batch_of(twin, 4 * count, step)
            with torch.random.fork_rng():
                seeds = [config.micro_batch_seed(step, k) for k in range(2 * count)]
                seen["expected"].append(add_gradients(twin, loss, batch, seeds))
            if config.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(twin.parameters(), config.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            own = {key: value[4 * rank : 4 * rank + 4] for key, value in batch.items()}
            seen["losses"].append(relay.step(own).loss)
        seen["verified"] = relay.verify(own).equal
        seen["evaluated"] = relay.evaluate(own)
        relay.forecast(own)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    seen["different"] = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
    return seen
