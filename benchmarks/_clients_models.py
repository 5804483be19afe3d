"""Programs with models of x_transformers, torch_geometric and transformers, and with wrapped models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _clients import Side, case
from _clients_small import WORDS, adamw, chain, gpt2, tokens, vectors
from _clients_vision import trains_on_pictures
from torch import Tensor, nn

STEPS = 3
model_case = partial(case, "models")


# -- x_transformers --------------------------------------------------------------------------------------------------


def register_intermediates(side: Side) -> None:
    """Make the class of the layers' second output known, as the refusal asks."""
    from torch.utils import _pytree
    from x_transformers.x_transformers import Intermediates

    if side.is_remedied and side.is_relay:
        _pytree.register_dataclass(Intermediates)


REGISTER = "register the class with torch.utils._pytree.register_pytree_node"


@model_case("x_transformers", "Decoder in an AutoregressiveWrapper, which returns the loss", REGISTER)
def autoregressive(side: Side) -> None:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    register_intermediates(side)
    torch.manual_seed(0)
    layers = Decoder(dim=32, depth=3, heads=2, rotary_pos_emb=True, attn_dim_head=16)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=WORDS, max_seq_len=16, attn_layers=layers))
    with side.training(model, adamw(model), objective=lambda model, batch: model(batch["input_ids"])) as step:
        for n in range(STEPS):
            step(tokens(n))


@model_case("x_transformers", "ViTransformerWrapper around an Encoder", REGISTER)
def vision_wrapper(side: Side) -> None:
    from x_transformers import Encoder, ViTransformerWrapper

    register_intermediates(side)
    layers = partial(Encoder, dim=32, depth=3, heads=2, attn_dim_head=16)
    make = lambda: ViTransformerWrapper(image_size=32, patch_size=8, num_classes=5, attn_layers=layers())  # noqa: E731
    trains_on_pictures(side, make)


# -- torch_geometric -------------------------------------------------------------------------------------------------


def graph(step: int, nodes: int = 12) -> Any:
    from torch_geometric.data import Data

    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(nodes, 16, generator=g), torch.randint(5, (nodes,), generator=g)
    return Data(x=x, y=y, edge_index=torch.randint(nodes, (2, 3 * nodes), generator=g))


class GraphNetwork(nn.Module):
    """Graph convolutions with skips."""

    def __init__(self) -> None:
        from torch_geometric.nn import GCNConv

        super().__init__()
        self.layers = nn.ModuleList(GCNConv(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, edge_index).relu()
        return self.head(x)


def node_loss(model: nn.Module, data: Any) -> Tensor:
    return nn.functional.cross_entropy(model(data.x, data.edge_index), data.y)


@model_case("torch_geometric", "GCNConv over one graph as the batch")
def one_graph(side: Side) -> None:
    torch.manual_seed(0)
    model, side.config = GraphNetwork(), replace(side.config, micro_batches=1)
    objective = lambda model, batch: node_loss(model, batch["graph"])  # noqa: E731
    with side.training(model, adamw(model), objective=objective) as step:
        for n in range(STEPS):
            step({"graph": graph(n)})


@model_case("torch_geometric", "GCNConv, batches of a DataLoader of graphs, one per micro-batch")
def graphs_of_a_loader(side: Side) -> None:
    from torch_geometric.loader import DataLoader

    torch.manual_seed(0)
    model = GraphNetwork()
    loader = DataLoader([graph(n) for n in range(12)], batch_size=2)
    side.config = replace(side.config, micro_batches=1)
    with side.training(model, adamw(model), objective=node_loss) as step:
        for batch in loader:
            step(batch)


# -- transformers ----------------------------------------------------------------------------------------------------


@model_case("transformers", "generate() and save_pretrained between steps")
def generated(side: Side) -> Any:
    model, texts = gpt2(), []
    with side.training(model, adamw(model)) as step:
        for n in range(STEPS):
            step(tokens(n))
            model.eval()
            texts.append(model.generate(tokens(9)["input_ids"], max_new_tokens=4, do_sample=False, use_cache=True))
            model.train()
        model.save_pretrained(side.folder / "model")
    loaded = type(model).from_pretrained(side.folder / "model")
    return texts, loaded.state_dict()


@model_case("transformers", "gradient_checkpointing_enable()", "gradient_checkpointing_disable()")
def checkpointing(side: Side) -> None:
    model = gpt2()
    if not side.is_remedied:
        model.gradient_checkpointing_enable()
    with side.training(model, adamw(model)) as step:
        step(tokens(0))


# -- torch -----------------------------------------------------------------------------------------------------------


def trains_wrapped(side: Side, wrap: Callable[[nn.Module], Any], unwrap: Callable[[Any], nn.Module]) -> None:
    model = chain()
    wrapped = wrap(model)
    trained = unwrap(wrapped) if side.is_remedied or not side.is_relay else wrapped
    with side.training(trained, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        step(vectors(0))


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


model_case("torch", "DataParallel(model)", "model.module")(
    partial(trains_wrapped, wrap=nn.DataParallel, unwrap=lambda wrapped: wrapped.module)
)
model_case("torch", "torch.compile(model)", "_orig_mod")(
    partial(trains_wrapped, wrap=compiled, unwrap=lambda wrapped: wrapped._orig_mod)
)


@model_case("torch", "layers compiled one by one")
def compiled_layers(side: Side) -> None:
    model = chain()
    for layer in model[:3]:
        layer.compile(backend="eager")
    with side.training(model, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        for n in range(STEPS):
            step(vectors(n))
