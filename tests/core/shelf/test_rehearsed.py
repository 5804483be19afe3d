"""What is asked of rehearsals is answered from files too: how many graphs fit, and what would fit where a step does not."""

from pathlib import Path
from typing import Any

import pytest
import torch
from on_shelf import ROWS, assert_same, compared, relay_on, smallest, stack, state_of, train, weights_of
from oracle import adamw

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig


def kept_in_memory(config: RelayConfig) -> int:
    kind = stack(5)
    model = kind.make_model()
    with Relay(model, adamw(model), EmulatedDevice(), loss=kind.loss, config=config) as relay:
        return int(relay.step(kind.make_batch(ROWS, 0)).trace.settings["keep"])


@pytest.mark.parametrize("keep", ["64 kB", "128 kB"])
def test_graphs_are_kept_by_bytes(keep: str, folder: Path) -> None:
    config = RelayConfig(micro_batches=3, keep=keep, resident=1)
    with compared(folder, stack(5), config=config) as (relay, plain):
        train(relay, plain, 2)
        assert relay.trace is not None and relay.trace.settings["keep"] == kept_in_memory(config) > 0


def test_the_smallest_pool_suffices_for_a_rehearsal(folder: Path) -> None:
    kind, config = stack(5), RelayConfig(micro_batches=3, keep="64 kB")
    nbytes = smallest(folder, kind, config=config)
    with compared(folder, kind, config=config, memory_bytes=nbytes) as (relay, plain):
        train(relay, plain, 2)
        held = relay.host.by_category()
        assert held["weights"] + held["optimizer"] <= nbytes


class Counted(torch.optim.AdamW):
    """Needs its state where its settings say that there is some."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert group.get("counted", 0) == 0 or all(p in self.state for p in group["params"] if p.grad is not None)
        result = super().step(closure)
        for group in self.param_groups:
            group["counted"] = 1
        return result


def test_a_rehearsal_begins_with_the_state_in_the_files(folder: Path) -> None:
    config = RelayConfig(micro_batches=3)
    with compared(folder, stack(3), lambda model: Counted(model.parameters(), lr=1e-3), config=config) as (
        relay,
        plain,
    ):
        train(relay, plain, 1)
        relay.config = RelayConfig(micro_batches=3, keep="64 kB")
        train(relay, plain, 1)


def test_a_step_that_does_not_fit_says_what_would(folder: Path) -> None:
    kind = stack(4)
    with relay_on(folder, kind, device=EmulatedDevice(memory_bytes=9_000)) as relay:
        before = weights_of(relay)
        with pytest.raises(DeviceOutOfMemory) as refused:
            relay.step(kind.make_batch(64, 0))
        assert refused.value.least_bytes is not None and "Remedy" in str(refused.value)
        assert_same(weights_of(relay), before)
        least = refused.value.least_bytes
    assert_same(before, state_of(kind.make_model()))
    assert least > 0
