"""A look at models of many kinds: each says what can be seen of it and why not the rest, and trains on as if unseen."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from zoo import BY_NAME

from l2l_core import EmulatedDevice, Inside, Relay, RelayConfig

# Whether layers have attention, how many of the depths can be run, and whether the head gives tokens.
SEEN: dict[str, tuple[bool, int, bool]] = {
    "gpt2_padded": (True, 4, True),
    "llama": (True, 3, True),
    "gemma3": (True, 4, True),
    "mixtral": (True, 3, True),
    "t5": (True, 2, True),
    "vit": (True, 3, True),
    "albert": (True, 1, True),
    "lora_tied": (False, 3, True),
    "random_skip": (False, 4, True),
    "reversible": (False, 2, True),
    "spectral_norm": (False, 3, True),
    "unet": (False, 1, False),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SEEN)
def test_it_is_seen_and_trains_on_to_the_bit(name: str) -> None:
    seen, loss, weights = trained(name, True)
    assert seen is not None
    has_attention, runs, has_tokens = SEEN[name]
    assert any(one.attention for one in seen.passings) == has_attention
    assert all(one.attention or one.why_no_attention for one in seen.passings)
    assert sum(one.loss is not None for one in seen.depths) == runs
    assert all(one.why_not or one.tokens is not None for one in seen.depths)
    assert (seen.depths[-1].tokens is not None) == has_tokens
    _, alone, untouched = trained(name, False)
    assert loss == alone and all(torch.equal(a, b) for a, b in zip(weights, untouched, strict=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("whisper", "does not depend on the token there"),
        ("t5", "not causal"),
        ("bert_classifier", "no logits"),
        ("llama", ""),
    ],
)
def test_only_what_writes_from_left_to_right_is_let_write(name: str, words: str) -> None:
    kind: Any = BY_NAME[name]
    with Relay(kind.make_model(), partial(torch.optim.SGD, lr=0.05), EmulatedDevice(), kind.layers, kind.loss) as relay:
        for one in relay.look(
            kind.make_batch(4, 3), [-1] if name == "llama" else None, generate=2, positions=4
        ).written:
            assert (words in one.why_not and not one.tokens) if words else (len(one.tokens) == 2 and not one.why_not)


def trained(name: str, looks: bool) -> tuple[Inside | None, float, list[torch.Tensor]]:
    kind: Any = BY_NAME[name]
    config = RelayConfig(micro_batches=2, stash="host")
    sgd = partial(torch.optim.SGD, lr=0.05)
    torch.manual_seed(1)
    with Relay(
        kind.make_model(), sgd, EmulatedDevice(), kind.layers, kind.loss, config=config, loss_over=kind.loss_over
    ) as relay:
        relay.step(kind.make_batch(4, 0))
        options: dict[str, Any] = {"attention": True, "lens": True, "row": 1, "positions": 4}
        seen = relay.look(kind.make_batch(4, 3), **options) if looks else None
        result = relay.step(kind.make_batch(4, 1))
        return seen, result.loss, [param.detach().clone() for param in relay.model.parameters()]
