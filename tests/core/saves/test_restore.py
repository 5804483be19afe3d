"""A save taken over by a relay that exists: equal to the bit, or refused, and the relay is as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import assert_same, keys, make_batch, make_gpt, make_relay, whole
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from l2l_core import Drop, Duplicate, FileShelf, Insert, Interpolate, Relay, RelayConfig, Replace


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A save of an edited relay with two branches and an edit to undo."""
    with make_relay(make_gpt(), config=RelayConfig(micro_batches=2, seed=4)) as relay:
        relay.step(make_batch(0))
        relay.fork("deep")
        relay.apply(Duplicate(0), Insert(at=1, init="copy", warmup=3))
        relay.step(make_batch(1))
        relay.apply(Interpolate(1, 2), Drop(0))
        relay.step(make_batch(2))
        relay.save(tmp_path / "save")
    return tmp_path / "save"


def test_it_goes_on_like_a_relay_that_was_loaded(saved: Path) -> None:
    with make_relay(make_gpt()) as restored:
        scheduler = torch.optim.lr_scheduler.StepLR(restored.optimizer, 1)  # keeps its optimizer
        restored.restore(saved)
        with Relay.load(saved, make_gpt()) as loaded:
            assert restored.config == loaded.config and scheduler.optimizer is restored.optimizer
            acts: list[Callable[[Relay], Any]] = [
                lambda relay: relay.step(make_batch(3)),
                Relay.undo,
                lambda relay: relay.step(make_batch(4)),
                lambda relay: relay.switch("main"),
                lambda relay: relay.step(make_batch(5)),
            ]
            for act in acts:
                act(restored), act(loaded)
                assert keys(restored) == keys(loaded) and restored.journal == loaded.journal
                assert_same(whole(restored), whole(loaded))


def test_what_is_refused_leaves_the_relay_as_it_was(saved: Path, tmp_path: Path) -> None:
    with make_relay(make_gpt(3)) as relay:
        before = whole(relay)
        with pytest.raises(ValueError, match="neither as it was when the relay was made .*Build the model"):
            relay.restore(saved)
        with pytest.raises(ValueError, match="is missing"):
            relay.restore(tmp_path / "elsewhere")
        relay.save(tmp_path / "plain")
        assert_same(whole(relay), before)
        relay.step(make_batch(0))
        with pytest.raises(ValueError, match="has made 1 steps, 0 edits .* Make the model and the relay again"):
            relay.restore(saved)
    narrow = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))
    with make_relay(narrow, loss=_square) as relay, pytest.raises(ValueError, match="saved with other layers"):
        relay.restore(tmp_path / "plain")
    shelf = FileShelf(folder=tmp_path / "shelf", memory_bytes="1 GB")
    with make_relay(make_gpt(), shelf=shelf) as relay, pytest.raises(ValueError, match=r"Relay\.load\(folder"):
        relay.restore(saved)
    with make_relay(make_gpt()) as relay:  # the remedy
        relay.restore(saved)


def make_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=32, max_position_embeddings=8))


def test_the_depth_of_the_configuration_follows_edits_after_loading(tmp_path: Path) -> None:
    """Llama runs as many layers as its configuration has; a single layer that runs once is no loop."""
    with make_relay(make_llama()) as relay:
        relay.apply(Drop(slice(1, 4)))
        relay.step(make_batch(0))
        relay.save(tmp_path / "save")
        with Relay.load(tmp_path / "save", make_llama()) as loaded, make_relay(make_llama()) as restored:
            restored.restore(tmp_path / "save")
            for each in (relay, loaded, restored):
                each.apply(Duplicate(0))
                assert each.model.config.num_hidden_layers == 2 and not each.loops
                each.step(make_batch(1))
            assert_same(whole(loaded), whole(relay))
            assert_same(whole(restored), whole(relay))


def test_a_relay_is_closed_if_a_layer_cannot_be_built(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))

    with make_relay(make(), loss=_square) as relay:
        relay.apply(Replace(1, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))))
        relay.save(tmp_path)
    model = make()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with make_relay(model, loss=_square) as relay:
        with pytest.raises(ValueError, match="modules="):
            relay.restore(tmp_path)
        with pytest.raises(
            RuntimeError, match="closed since restoring a save into it failed half-way: make a new Relay"
        ):
            relay.step((torch.ones(2, 4),))
    assert_same(dict(model.state_dict()), weights)
    with make_relay(make(), loss=_square) as relay:
        relay.restore(tmp_path, {"L003": nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))})
        relay.step((torch.ones(2, 4),))


def _square(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return out.square().mean()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_save_of_a_run_with_its_own_loss_does_not_go_on_with_the_models(micro_batches: int, tmp_path: Path) -> None:
    def twice(outputs: Any, batch: Any) -> Any:
        return 2 * outputs.loss

    with make_relay(make_gpt(), loss=twice, config=RelayConfig(micro_batches=micro_batches)) as relay:
        relay.step(make_batch(0))
        relay.save(tmp_path)
        expected = relay.step(make_batch(1)).loss
        weights = whole(relay)
    with Relay.load(tmp_path, make_gpt()) as loaded:
        before = whole(loaded)
        with pytest.raises(ValueError, match=r"loss= or objective= of yours.*Relay\.load"):
            loaded.step(make_batch(1))
        with pytest.raises(ValueError, match=r"loss= or objective= of yours.*Relay\.load"):
            loaded.evaluate(make_batch(1))
        with pytest.raises(ValueError, match=r"loss= or objective= of yours"):
            loaded.probe([make_batch(1)])
        assert loaded.forward(make_batch(1)).loss < expected, "outputs do not depend on the loss"
        assert_same(whole(loaded), before)
        loaded.save(tmp_path / "again")
    with (
        Relay.load(tmp_path / "again", make_gpt()) as loaded,
        pytest.raises(ValueError, match=r"loss= or objective= of yours"),
    ):
        loaded.step(make_batch(1))
    with Relay.load(tmp_path, make_gpt(), loss=twice) as loaded:  # the remedy
        assert loaded.step(make_batch(1)).loss == expected
        assert_same(whole(loaded), weights)
    with Relay.load(tmp_path, make_gpt(), objective=lambda model, batch: model(**batch).loss) as loaded:
        assert loaded.evaluate(make_batch(1)) < expected, "the other remedy"
