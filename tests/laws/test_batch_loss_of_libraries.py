"""`loss_over="batch"` with losses and models of libraries, beside plain training on the undivided batch."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from batch_losses import Tower
from torch import Tensor, nn
from transformers import CLIPConfig, CLIPModel, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from l2l_core import Relay, RelayConfig

sgd = partial(torch.optim.SGD, lr=0.1)
CONFIG = RelayConfig(micro_batches=4, stash="host")


def compare(
    model: nn.Module,
    loss: Callable[[nn.Module, Any, Any], Tensor],
    batch: dict[str, Tensor],
    inputs: list[str],
    **options: Any,
) -> None:
    """Train two steps on the batch, cut into four and undivided; equal to rounding, and `verify` to the bit."""
    twin, options = copy.deepcopy(model), {"config": CONFIG} | options
    optimizer = sgd(twin.parameters())
    with Relay(model, sgd, loss=partial(loss, model), loss_over="batch", **options) as relay:
        for _ in range(2):
            whole = loss(twin, twin(**{name: batch[name] for name in inputs}), batch)
            whole.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert relay.step(batch).loss == pytest.approx(whole.item(), rel=1e-4)
        assert relay.verify(batch).equal
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_clip() -> None:
    """Two towers of other kinds, a temperature that the loss reads; some outputs are matrices between rows."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    text = sizes | {"vocab_size": 50, "max_position_embeddings": 8, "eos_token_id": 2, "pad_token_id": 1}
    config = CLIPConfig(text_config=text, vision_config=sizes | {"image_size": 16, "patch_size": 8}, projection_dim=8)
    torch.manual_seed(0)
    model = CLIPModel(config)

    def loss(model: Any, outputs: Any, batch: Any) -> Tensor:
        similar = outputs.text_embeds @ outputs.image_embeds.T * model.logit_scale.exp()
        targets = torch.arange(len(similar))
        return (F.cross_entropy(similar, targets) + F.cross_entropy(similar.T, targets)) / 2

    tokens = torch.randint(3, 50, (12, 8))
    tokens[:, -1] = 2
    compare(
        model, loss, {"input_ids": tokens, "pixel_values": torch.randn(12, 3, 16, 16)}, ["input_ids", "pixel_values"]
    )


class Frames(nn.Module):
    """Sound to letters, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(3))
        self.out = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.out(x).log_softmax(-1)  # (time, rows, letters)


def ctc(model: nn.Module, outputs: Tensor, batch: Any) -> Tensor:
    times = torch.full((outputs.shape[1],), outputs.shape[0])
    return F.ctc_loss(outputs, batch["targets"], times, batch["lengths"])


def test_ctc_whose_targets_stand_in_one_row() -> None:
    """Nobody can cut the targets: only the sound is cut, and the loss gets the whole batch."""
    torch.manual_seed(0)
    lengths = torch.tensor([2, 3, 1, 4, 2, 2, 3, 1])
    batch = {"x": torch.randn(12, 8, 6), "targets": torch.randint(1, 5, (int(lengths.sum()),)), "lengths": lengths}
    compare(Frames(), ctc, batch, ["x"], split={"x": 1, "targets": None})


def test_a_normaliser_over_the_whole_batch() -> None:
    """As in detectors: a sum over rows, divided by what all rows of the batch count."""

    def loss(model: nn.Module, outputs: Tensor, batch: Any) -> Tensor:
        focal = (1 - outputs.softmax(1).gather(1, batch["y"][:, None])) ** 2
        positive = batch["y"] > 2
        return (focal[:, 0] * F.cross_entropy(outputs, batch["y"], reduction="none") * positive).sum() / positive.sum()

    torch.manual_seed(0)
    batch = {"a": torch.randint(40, (16, 5)), "y": torch.randint(8, (16,))}
    compare(Tower(dropout=0.0), loss, batch, ["a"])


def test_preference_pairs() -> None:
    """DPO: chosen answers in the first half, rejected ones in the second, beside a frozen reference."""
    torch.manual_seed(0)
    model = Tower(dropout=0.0)
    reference = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, outputs: Tensor, batch: Any) -> Tensor:
        with torch.no_grad():
            base = reference(batch["a"]).log_softmax(-1)[:, 0]
        ratio = outputs.log_softmax(-1)[:, 0] - base
        chosen, rejected = ratio.chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    compare(model, loss, {"a": torch.randint(40, (16, 5))}, ["a"], layers=list(model.layers))


def test_balance_of_a_router() -> None:
    """The balance over all tokens of the batch; router logits are (rows * tokens, experts), and one output is a scalar."""
    config = MixtralConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    model = MixtralForCausalLM(config)

    def loss(model: nn.Module, outputs: Any, batch: Any) -> Tensor:
        logits, routers = outputs["logits"], outputs["router_logits"]
        predicted = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())
        return predicted + 0.5 * load_balancing_loss_func(routers, 4, 2)

    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor) -> dict[str, Any]:
            outputs = self.model(input_ids, output_router_logits=True, use_cache=False)
            return {"logits": outputs.logits, "router_logits": outputs.router_logits}

    compare(Outputs(), loss, {"input_ids": torch.randint(50, (8, 6))}, ["input_ids"])


class Sentences(nn.Module):
    """Two columns of texts through one encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Tower(dropout=0.0)

    def forward(self, anchor: Tensor, positive: Tensor) -> list[Tensor]:
        return [self.encoder(anchor), self.encoder(positive)]


def test_multiple_negatives_ranking_of_sentence_transformers() -> None:
    """Their own loss, from embeddings."""
    losses = pytest.importorskip("sentence_transformers.losses")
    ranking = losses.MultipleNegativesRankingLoss(model=None)

    def loss(model: nn.Module, outputs: list[Tensor], batch: Any) -> Tensor:
        return ranking.compute_loss_from_embeddings(outputs, None)

    torch.manual_seed(0)
    batch = {name: torch.randint(40, (16, 5)) for name in ("anchor", "positive")}
    compare(Sentences(), loss, batch, ["anchor", "positive"], layers=[f"encoder.layers.{i}" for i in range(3)])
