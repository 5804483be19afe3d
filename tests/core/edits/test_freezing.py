"""Frozen layers: what thaws, with which state, and what cannot."""

from __future__ import annotations

import pytest
import torch
from small import make_batch, make_gpt, new_block, state_of

from l2l_core import EmulatedDevice, Freeze, Insert, Relay, Unfreeze


def test_what_a_person_has_frozen_in_a_module_stays_frozen(relay: Relay) -> None:
    module = new_block(relay)
    module.mlp.requires_grad_(False)
    relay.apply(Freeze(1))
    relay.apply(Insert(at=2, module=module), Insert(at=2, init="copy"))
    assert not relay.stack[2].frozen and not any(p.requires_grad for p in relay.stack[3].module.mlp.parameters())
    assert relay.stack[3].module.attn.c_attn.weight.requires_grad


def test_frozen_layers_thaw_with_the_state_they_had(relay: Relay) -> None:
    before = state_of(relay)
    relay.apply(Freeze(1))
    relay.step(make_batch())
    frozen = state_of(relay)
    own = [name for name in before if name.startswith("transformer.h.1.")]
    assert all(torch.equal(before[name], frozen[name]) for name in own)
    relay.apply(Unfreeze(1))
    relay.step(make_batch())
    assert not torch.equal(state_of(relay)[own[0]], before[own[0]])
    assert relay.verify(make_batch()).equal


def test_what_the_optimizer_was_not_given_cannot_thaw() -> None:
    model = make_gpt()
    model.transformer.h[0].requires_grad_(False)
    model.transformer.h[1].ln_1.requires_grad_(False)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    with Relay(model, optimizer, EmulatedDevice()) as relay:
        relay.step(make_batch())
        with pytest.raises(ValueError, match=r"L000 \(transformer.h.0\) is in no group of the optimizer"):
            relay.apply(Unfreeze(slice(0, 2)))
        relay.apply(Freeze(1))
        relay.apply(Unfreeze(1))
        trained = {name for name, param in model.transformer.h[1].named_parameters() if param.requires_grad}
        assert trained and not any(name.startswith("ln_1") for name in trained)
        assert relay.verify(make_batch()).equal
