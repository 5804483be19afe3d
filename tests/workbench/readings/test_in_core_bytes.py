"""The estimate of in-core memory against the measured peak."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from l2l_core import EmulatedDevice, Relay, RelayConfig, Trace
from l2l_core.simulator.cost_formula import Machine, Shapes
from l2l_core.simulator.profile import Profile
from l2l_core.simulator.simulation import simulate
from l2l_core.trace.events import Event
from workbench.lessons.plain_training import PlainTrainer
from workbench.readings.memory_estimate import estimate_in_core_bytes, estimate_peak_bytes

Batch = dict[str, torch.Tensor]
MakeOptimizer = Callable[..., torch.optim.Optimizer]

ADAMW = partial(torch.optim.AdamW, fused=True)
SGD = partial(torch.optim.SGD, lr=1e-3)


def gpt2(width: int = 32, dropout: float = 0.0, layers: int = 6) -> tuple[nn.Module, Batch]:
    config = hf.GPT2Config(
        vocab_size=128,
        bos_token_id=None,
        eos_token_id=None,
        n_positions=32,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    model = hf.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, 128, (8, 32))
    return model.train(), {"input_ids": ids, "labels": ids}


def bert() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=128, max_position_embeddings=32, **sizes))
    ids = torch.randint(0, 128, (8, 32))
    return model.train(), {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}


def llama() -> tuple[nn.Module, Batch]:
    sizes = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 80}
    model = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes))
    ids = torch.randint(0, 128, (8, 32))
    return model.train(), {"input_ids": ids, "labels": ids}


class Stack(nn.Module):
    """Residual layers between a stem and a head."""

    def __init__(self, stem: nn.Module, layers: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers, self.head = stem, nn.ModuleList(layers), head

    def forward(self, x: torch.Tensor, labels: torch.Tensor, use_cache: bool = False) -> SimpleNamespace:
        x = self.stem(x)
        for layer in self.layers:
            x = torch.relu(x + layer(x))
        return SimpleNamespace(loss=nn.functional.cross_entropy(self.head(x.flatten(2).mean(2)), labels))


def mlp(width: int = 64) -> tuple[nn.Module, Batch]:
    layers = [nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width)) for _ in range(6)]
    model = Stack(nn.Sequential(nn.Linear(16, width), nn.Unflatten(1, (width, 1))), [], nn.Linear(width, 10))
    model.layers.extend(nn.Sequential(nn.Flatten(), layer, nn.Unflatten(1, (width, 1))) for layer in layers)
    return model, {"x": torch.randn(128, 16), "labels": torch.randint(0, 10, (128,))}


def conv(channels: int = 8) -> tuple[nn.Module, Batch]:
    def block() -> nn.Module:
        parts = (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        return nn.Sequential(*parts, nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels))

    model = Stack(nn.Conv2d(3, channels, 3, padding=1), [block() for _ in range(5)], nn.Linear(channels, 10))
    return model, {"x": torch.randn(16, 3, 8, 8), "labels": torch.randint(0, 10, (16,))}


MODELS = {
    "gpt2": gpt2,
    "gpt2 wide": partial(gpt2, width=128, layers=3),
    "gpt2 dropout": partial(gpt2, dropout=0.1),
    "bert": bert,
    "llama": llama,
    "mlp": mlp,
    "conv": conv,
}


def errors(name: str, config: RelayConfig, optimizer: MakeOptimizer = ADAMW) -> list[float]:
    """Return the relative errors of the estimates from a metered step and from a later one."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()

    def make(of: nn.Module) -> torch.optim.Optimizer:
        return optimizer(of.parameters())

    def schedule(of: torch.optim.Optimizer) -> LambdaLR:
        return LambdaLR(of, lambda _: 1.0)

    needed = PlainTrainer(model, make, schedule, config, torch.device("cpu")).measure_peak_bytes(batch)
    with Relay(model, make(model), device=EmulatedDevice(), config=config) as relay:
        return [estimate_in_core_bytes(relay, relay.step(batch).trace) / needed - 1 for _ in range(2)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("stash", "micro_batches"), [("device", 1), ("host", 2), ("device", 4), ("host", 4)])
def test_estimate_is_within_five_percent(name: str, stash: str, micro_batches: int) -> None:
    measured_errors = errors(name, RelayConfig(seed=0, micro_batches=micro_batches, stash=stash))  # type: ignore[arg-type]
    assert all(abs(error) < 0.05 for error in measured_errors), measured_errors


@pytest.mark.parametrize("name", ["gpt2", "conv"])
def test_estimate_from_a_depth_first_step_is_within_three_percent(name: str) -> None:
    measured_errors = errors(name, RelayConfig(seed=0, micro_batches=2, keep=99, resident=99, schedule="depth_first"))
    assert all(abs(error) < 0.03 for error in measured_errors), measured_errors


@pytest.mark.parametrize("name", ["gpt2", "mlp"])
def test_optimizer_without_state_needs_less(name: str) -> None:
    assert all(abs(error) < 0.05 for error in errors(name, RelayConfig(seed=0, micro_batches=2), SGD))


@pytest.mark.parametrize("name", ["gpt2", "gpt2 dropout", "bert", "llama", "mlp"])
def test_estimate_from_bfloat16_is_within_twenty_percent(name: str) -> None:
    measured_errors = errors(name, RelayConfig(seed=0, micro_batches=2, stash="host", precision="bf16"))
    assert all(abs(error) < 0.20 for error in measured_errors), measured_errors


def test_frozen_layers_have_no_gradient() -> None:
    model, batch = mlp()
    for param in model.layers[:3].parameters():
        param.requires_grad_(False)
    with Relay(model, ADAMW, device=EmulatedDevice(), config=RelayConfig(seed=0, micro_batches=2)) as relay:
        frozen = estimate_in_core_bytes(relay, relay.step(batch).trace)
    for param in model.parameters():
        param.requires_grad_(True)
    with Relay(model, ADAMW, device=EmulatedDevice(), config=RelayConfig(seed=0, micro_batches=2)) as relay:
        trained = estimate_in_core_bytes(relay, relay.step(batch).trace)
    saved_bytes = sum(3 * 4 * param.numel() for param in model.layers[:3].parameters())  # gradient and two moments
    assert trained - frozen >= saved_bytes


def test_a_trace_without_events_needs_weights_and_gradients() -> None:
    assert estimate_peak_bytes(Trace(), 100, {"L000": 60, "shell": 30}) == 190


def test_a_trace_without_samples_needs_weights_and_gradients() -> None:
    events = [Event("compute", kind, t, t + 1.0, "L000", 0, 0, t) for t, kind in enumerate(("forward", "backward"))]
    assert estimate_peak_bytes(Trace.of(events, []), 100, {"L000": 60}) == 160
    assert estimate_peak_bytes(Trace.of([events[0]._replace(visit=-1)], []), 100, {"L000": 60}) == 160


def test_a_simulated_step_can_be_estimated() -> None:
    shapes = Shapes(layer_params=[1000] * 50, shell_params=10, tokens=8, boundary_bytes=64, micro_batches=2)
    trace = simulate(Profile.of_shapes(shapes, Machine(1e9, 1e9, 1e9, 1e9)), RelayConfig(seed=0, micro_batches=2))
    gradients = {f"L{i:03d}": 4000 for i in range(50)}
    assert estimate_peak_bytes(trace, 200_040, gradients) >= 200_040 + 200_000
