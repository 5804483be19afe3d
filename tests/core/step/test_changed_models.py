"""Changes of a model while a relay trains it: the remedy of each refusal gives the bits of plain training."""

from collections.abc import Callable

import pytest
import torch
from oracle import assert_state, copy_state
from torch import nn
from torch.nn.utils import prune
from zoo import BY_NAME

from l2l_core import Relay, RelayConfig

Change = Callable[[nn.Module, torch.optim.Optimizer], None]
KIND, SEED = BY_NAME["gpt2"], 3


class LowRank(nn.Module):
    """A projection with an adapter of rank 2."""

    def __init__(self, base: nn.Module, width: int, outputs: int) -> None:
        super().__init__()
        self.base, self.down = base, nn.Parameter(torch.randn(width, 2) / 10)
        self.up = nn.Parameter(torch.randn(2, outputs) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.down @ self.up


def _another_head(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.lm_head = nn.Linear(model.config.n_embd, model.config.vocab_size, bias=False)
    optimizer.add_param_group({"params": [model.lm_head.weight], "lr": 0.02})


def _more_tokens(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 3, mean_resizing=False)
    optimizer.state.pop(model.transformer.wte.weight, None)  # of the old shape


def _adapters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for layer in model.transformer.h:
        attention = layer.attn
        attention.c_attn = LowRank(attention.c_attn, model.config.n_embd, 3 * model.config.n_embd)
        optimizer.add_param_group({"params": [attention.c_attn.down, attention.c_attn.up], "weight_decay": 0.0})


def _masks(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for layer in model.transformer.h:
        prune.l1_unstructured(layer.mlp.c_fc, "weight", 0.3)


def _halved(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.data = param.data / 2


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    loss = model(**KIND.make_batch(4, step)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("change", [_another_head, _more_tokens, _adapters, _masks, _halved])
def test_a_relay_over_the_changed_model_goes_on(change: Change) -> None:
    """The relay is closed after the change, and the next one has its optimizer, steps and seed."""
    plain, model = KIND.make_model(), KIND.make_model()
    model.load_state_dict(plain.state_dict())
    config, losses = RelayConfig(seed=SEED), []
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (plain, model)]
    for step in range(4):
        if step == 2:
            torch.manual_seed(7)
            change(plain, optimizers[0])
        torch.manual_seed(config.micro_batch_seed(step, 0))
        losses.append(plain_step(plain, optimizers[0], step))

    with Relay(model, optimizers[1], "cpu", config=config) as relay:
        got = [relay.step(KIND.make_batch(4, step)).loss for step in range(2)]
        torch.manual_seed(7)
        change(model, optimizers[1])
        changed = copy_state(model)
        with pytest.raises((RuntimeError, ValueError), match="make a new (one|relay)"):
            relay.step(KIND.make_batch(4, 2))
    assert_state(model, changed)
    with Relay(model, optimizers[1], "cpu", config=config) as following:
        following.load_state_dict(relay.state_dict())
        got += [following.step(KIND.make_batch(4, step)).loss for step in range(2, 4)]
    assert got == losses
    assert_state(model, copy_state(plain))


class WithPrior(nn.Module):
    """Adds a buffer through an operation that returns its argument, in layers that are dropped at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(4))
        self.register_buffer("prior", torch.tensor([[0.2, 0.3, 0.5]]).log())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index and torch.rand([]) < 0.5:
                continue
            input = layer(input)
        return input + self.prior.to(input.device)


@pytest.mark.parametrize("seed", range(3))
def test_a_buffer_that_to_returns_belongs_to_no_micro_batch(seed: int) -> None:
    torch.manual_seed(seed)
    model = WithPrior()
    batch = torch.randn(6, 3), torch.randint(0, 3, (6,))
    config = RelayConfig(micro_batches=3)
    with Relay(
        model, torch.optim.SGD(model.parameters(), 0.1), "cpu", loss=nn.CrossEntropyLoss(), config=config
    ) as relay:
        for _ in range(4):
            relay.step(batch)
        assert relay.verify(batch).equal
