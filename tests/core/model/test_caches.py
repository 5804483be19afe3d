"""Decoders train as they are loaded, with config.use_cache on; what only a cache could carry is refused with a remedy."""

from __future__ import annotations

import logging
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from oracle import assert_equal, assert_state, both, copy_state
from torch import nn
from zoo import BY_NAME, Kind, adapted

from l2l_core import EmulatedDevice, Insert, Relay, RelayConfig

stashes = pytest.mark.parametrize("stash", ["device", "host"])
WRAPPED = ["llama", "gpt2", "t5", "bart", "opt", "lora_llama"]


class Wrapped(nn.Module):
    """Around a language model as peft's classes are: its forward says nothing of what the model takes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class AsksForCache(Wrapped):
    """Whatever the configuration says."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, use_cache=True, **kwargs)


class GivesCache(Wrapped):
    """As prefix tuning does: what is trained are keys and values that come before those of the tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner.requires_grad_(False))
        config = inner.config
        size = config.hidden_size // config.num_attention_heads
        self.prefix = nn.Parameter(torch.randn(config.num_hidden_layers, 2, 1, config.num_key_value_heads, 3, size))

    def forward(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        cache = hf.DynamicCache()
        for number, (keys, values) in enumerate(self.prefix.expand(-1, -1, len(input_ids), -1, -1, -1)):
            cache.update(keys, values, number)
        kwargs.pop("attention_mask", None)
        return self.inner(input_ids, past_key_values=cache, **kwargs)


def caching(kind: Kind, wrapper: type[Wrapped] = Wrapped) -> Kind:
    """The kind behind a wrapper, with caches on as the library has them by default."""

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        inner = kind.make_model()
        for config in configs_of(inner):
            config.use_cache = True
        return wrapper(inner).train()

    return replace(kind, make_model=make_model)


def configs_of(model: nn.Module) -> list[Any]:
    found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return list(found.values())


def caches_off(model: nn.Module) -> None:
    for config in configs_of(model):
        config.use_cache = False


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, max_position_embeddings=64)
    config = hf.LlamaConfig(**sizes, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2)
    return hf.LlamaForCausalLM(config)


def small_t5() -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, d_model=32, d_ff=64, d_kv=8, num_layers=2, num_heads=4, decoder_start_token_id=0)
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes))


def small_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def relay_of(model: nn.Module, **options: Any) -> Relay:
    config = RelayConfig(micro_batches=2, **options)
    return Relay(
        model, partial(torch.optim.AdamW, lr=1e-3), EmulatedDevice(), config=config, loss_over="micro-batch"
    )  # no evaluation of a few rows, which would fail before a step that shall fail


# -- by itself ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRAPPED)
@stashes
def test_a_wrapped_decoder_trains_as_it_is_loaded(name: str, stash: str, caplog: pytest.LogCaptureFixture) -> None:
    """Bit by bit as in core without caches; it is said once, and the configuration is as it was."""
    kind = caching(BY_NAME[name])
    with caplog.at_level(logging.INFO, "l2l_core"), both(kind, RelayConfig(micro_batches=2, stash=stash)) as pair:
        caches_off(pair.in_core.model)
        for seed in range(2):
            assert_equal([pair.step(kind.make_batch(5, seed))])
            assert all(config.use_cache is True for config in configs_of(pair.relay.model))
        batch = kind.make_batch(5, 2)
        assert pair.relay.verify(batch).equal
        pair.relay.forecast(batch), pair.relay.evaluate(batch), pair.relay.forward(batch)
        assert all(config.use_cache is True for config in configs_of(pair.relay.model))
    said = [record for record in caplog.records if "use_cache" in record.getMessage()]
    assert len(said) == 1 and said[0].name == "l2l_core"


def test_without_a_cache_nothing_is_said_and_nothing_changed(caplog: pytest.LogCaptureFixture) -> None:
    kind = BY_NAME["bert"]
    with caplog.at_level(logging.INFO, "l2l_core"), both(kind, RelayConfig(micro_batches=2)) as pair:
        caches_off(pair.relay.model)
        assert_equal([pair.step(kind.make_batch(4, 0))])
        assert not any(config.use_cache for config in configs_of(pair.relay.model))
    assert not [record for record in caplog.records if "use_cache" in record.getMessage()]


def test_it_is_off_in_the_step_and_on_again_after_one_that_fails() -> None:
    seen: list[bool] = []

    def fails(module: nn.Module, *_: Any) -> None:
        seen.append(model.config.use_cache)
        raise RuntimeError("on purpose")

    model = small_llama()
    with relay_of(model) as relay:
        relay.config = replace(relay.config, verify="never")
        hook = model.model.norm.register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            relay.step(small_batch())
        assert seen == [False] and model.config.use_cache is True
        hook.remove()
        relay.step(small_batch())


def test_an_edited_model_still_asks_for_caches() -> None:
    """An edit gives the model a configuration of its own, and runs layers to find an identity; a step skips one."""
    model = Wrapped(small_llama())
    with relay_of(model) as relay:
        relay.step(small_batch())
        relay.apply(Insert(at=3, like=2, init="identity"))
        relay.step(small_batch(), skip=[1])
        assert len(relay.stack) == 9 and {config.use_cache for config in configs_of(model)} == {True}


def test_a_configuration_of_ones_own_is_left_alone() -> None:
    """`use_cache` may mean anything there."""

    class Config:
        def __init__(self) -> None:
            self.use_cache = True

    kind = BY_NAME["chain"]
    seen: list[bool] = []
    model = kind.make_model()
    model.config = Config()
    model.head.register_forward_pre_hook(lambda *_: seen.append(model.config.use_cache))
    config = RelayConfig(micro_batches=2)
    with Relay(
        model,
        partial(torch.optim.SGD, lr=0.1),
        EmulatedDevice(),
        loss=kind.loss,
        loss_over=kind.loss_over,
        config=config,
    ) as relay:
        relay.step(kind.make_batch(4))
    assert seen and all(seen)


# -- caches that a forward makes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt", "bart"])
@stashes
def test_a_model_that_asks_for_a_cache_trains_as_in_core(name: str, stash: str) -> None:
    """In core the cache is filled and nobody reads it; every run of a layer has an empty one here."""
    kind = caching(BY_NAME[name], AsksForCache)
    with both(kind, RelayConfig(micro_batches=2, stash=stash)) as pair:
        assert_equal([pair.step(kind.make_batch(5, seed)) for seed in range(3)])


XLM = dict(vocab_size=64, emb_dim=32, n_layers=3, n_heads=4, n_words=64)


@pytest.mark.parametrize("model", ["XLMWithLMHeadModel", "FlaubertWithLMHeadModel"])
@stashes
def test_models_that_make_one_whatever_is_asked(model: str, stash: str) -> None:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return getattr(hf, model)(getattr(hf, model.replace("WithLMHeadModel", "Config"))(**XLM)).train()

    kind = Kind(model, make_model, lambda rows, seed: small_batch())
    with both(kind, RelayConfig(micro_batches=2, stash=stash)) as pair:
        assert_equal([pair.step(small_batch()) for _ in range(3)])
        assert pair.relay.verify(small_batch()).equal


class Caching(nn.Module):
    """A layer that uses its cache in one of several ways."""

    def __init__(self, number: int, way: str) -> None:
        super().__init__()
        self.number, self.way = number, way
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Any) -> Any:
        y = self.inner(x)
        if self.way == "asks_another" and cache.is_updated.get(0) and self.number:
            y = y * 2
        if self.way == "asks_length" and self.number and cache.get_seq_length():
            y = y * 2
        part = cache.self_attention_cache if isinstance(cache, hf.EncoderDecoderCache) else cache
        keys, _ = part.update(y[:, None], y[:, None], self.number)
        cache.is_updated[self.number] = True
        return (keys.sum((1, 2)) + y[:, 0], cache) if self.way == "returns" else keys.sum((1, 2)) + y[:, 0]


class MakesCache(nn.Module):
    """A model that makes a cache for its layers and treats it in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(Caching(number, way) for number in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = hf.EncoderDecoderCache(hf.DynamicCache(), hf.DynamicCache())
        inner = cache.self_attention_cache
        for layer in self.layers:
            x = layer(x[:, None], cache)
            if self.way == "returns":
                x, given = x
                assert given is cache
        if self.way == "calls_again":
            x = self.layers[0](x[:, None], cache)
        if self.way == "reads":
            x = x * cache.get_seq_length()
        if self.way == "reads_part":
            x = x * inner.get_seq_length()
        return x.sum()


def a_kind(way: str) -> Kind:
    def make_model() -> nn.Module:
        torch.manual_seed(0)
        return MakesCache(way)

    def make_batch(rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed)), torch.zeros(rows)

    return Kind(way, make_model, make_batch, loss=lambda out, batch: out, loss_over="micro-batch")


@pytest.mark.parametrize("way", ["plain", "returns"])
@stashes
def test_a_cache_that_goes_through_the_layers(way: str, stash: str) -> None:
    kind = a_kind(way)
    with both(kind, RelayConfig(micro_batches=2, stash=stash)) as pair:
        assert_equal([pair.step(kind.make_batch(4, seed)) for seed in range(3)])


@pytest.mark.parametrize(
    "way, error, words",
    [
        ("asks_another", TypeError, "layers.1, which reads another layer's part of it, is a key-value cache"),
        ("asks_length", TypeError, "layers.1, which reads get_seq_length of it, is a key-value cache"),
        ("calls_again", TypeError, "layers.0, to which an earlier call has added, is a key-value cache"),
        ("reads", RuntimeError, r"reads get_seq_length of a key-value cache \(EncoderDecoderCache\)"),
        ("reads_part", RuntimeError, r"reads get_seq_length of a key-value cache \(DynamicCache\)"),
    ],
)
@stashes
def test_what_another_run_has_put_there_cannot_be_read(
    way: str, error: type[Exception], words: str, stash: str
) -> None:
    kind = a_kind(way)
    model = kind.make_model()
    before = copy_state(model)
    options: dict[str, Any] = {"loss": kind.loss, "loss_over": kind.loss_over}
    config = RelayConfig(micro_batches=2, stash=stash)
    with Relay(model, partial(torch.optim.SGD, lr=0.1), EmulatedDevice(), config=config, **options) as relay:
        for _ in range(2):  # not in the metered step alone
            with pytest.raises(error, match=words):
                relay.step(kind.make_batch(4))
            assert_state(model, before)


# -- prefix tuning -----------------------------------------------------------------------------------------------------


@stashes
def test_a_cache_that_the_model_makes_is_refused_before_anything_is_trained(stash: str) -> None:
    """Trainable keys and values, as in prefix tuning: the cache would be filled once more at the recompute."""
    kind = caching(BY_NAME["llama"], GivesCache)
    model = kind.make_model()
    with relay_of(model, stash=stash) as relay:
        before = copy_state(model)
        with pytest.raises(
            TypeError, match=r"is a key-value cache \(DynamicCache\).*PromptTuningConfig or a LoraConfig"
        ):
            relay.step(kind.make_batch(4))
        assert_state(model, before)
        assert relay.steps == 0 and not relay.optimizer.state and model.config.use_cache is True


# -- the real one ------------------------------------------------------------------------------------------------------


def peft_model(model: nn.Module, config: str, **settings: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # between two libraries that are not ours
        peft = pytest.importorskip("peft")
        torch.manual_seed(1)
        return peft.get_peft_model(model, getattr(peft, config)(**settings)).train()


def real(name: str) -> nn.Module:
    causal, prompt = {"task_type": "CAUSAL_LM"}, {"num_virtual_tokens": 4}
    heads = {"r": 8, "lora_dropout": 0.1}
    return {
        "lora": lambda: peft_model(small_llama(), "LoraConfig", target_modules=["q_proj", "v_proj"], **heads, **causal),
        "t5": lambda: peft_model(
            small_t5(), "LoraConfig", target_modules=["q", "v"], **heads, task_type="SEQ_2_SEQ_LM"
        ),
        "prompt": lambda: peft_model(small_llama(), "PromptTuningConfig", **prompt, **causal),
        "prefix": lambda: peft_model(small_llama(), "PrefixTuningConfig", **prompt, **causal),
        "prefix_t5": lambda: peft_model(small_t5(), "PrefixTuningConfig", **prompt, task_type="SEQ_2_SEQ_LM"),
    }[name]()


@pytest.mark.parametrize("name", ["lora", "t5", "prompt"])
@stashes
def test_peft_trains_bit_by_bit_and_pushes_what_it_trains(name: str, stash: str) -> None:
    kind = Kind(name, lambda: real(name), lambda rows, seed: small_batch())
    with both(kind, RelayConfig(micro_batches=2, stash=stash)) as pair:
        caches_off(pair.in_core.model)
        steps = [pair.step(small_batch()) for _ in range(3)]
        assert_equal(steps)
        trained = sum(param.numel() for param in pair.relay.model.parameters() if param.requires_grad)
        assert steps[-1].result.bytes_pushed == 4 * trained


@pytest.mark.parametrize("name", ["prefix", "prefix_t5"])
def test_prefix_tuning_is_refused_with_a_remedy(name: str) -> None:
    """The remedy is the kind "prompt" above."""
    model = real(name)
    with relay_of(model) as relay:
        before = copy_state(model)
        with pytest.raises(TypeError, match=r"Prefix tuning \(peft\).*PromptTuningConfig or a LoraConfig"):
            relay.step(small_batch())
        assert_state(model, before)
        assert relay.steps == 0


def test_adapters_of_a_wrapped_llama_push_what_they_train() -> None:
    """The same without peft: 8 layers, adapters on q and v."""
    model = Wrapped(adapted(small_llama(), "q_proj", "v_proj"))
    with relay_of(model, stash="host") as relay:
        trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
        forecast = relay.forecast(small_batch())
        result = [relay.step(small_batch()) for _ in range(2)][-1]
        padded = sum(4 * (-(-p.numel() // 16) * 16) for p in model.parameters() if p.requires_grad)
        assert 4 * trained == padded == result.bytes_pushed
        assert forecast.check(result).peak_device.error == 0.0
