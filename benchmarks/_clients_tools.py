"""Programs with metrics, data, interpretation and files beside the relay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _clients import Side, case
from _clients_small import ROWS, adamw, bert, chain, gpt2, rows_of_tokens, tokens, vectors
from torch import Tensor, nn
from torch.utils.data import DataLoader

STEPS = 3
tool_case = partial(case, "metrics, data, files, inspection")


@tool_case("torchmetrics", "Accuracy, updated in the loss")
def metric_in_loss(side: Side) -> Any:
    import torchmetrics

    model, accuracy = chain(), torchmetrics.Accuracy(task="multiclass", num_classes=5)

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        accuracy.update(outputs.detach(), batch[1])
        return nn.functional.cross_entropy(outputs, batch[1])

    found = []
    with side.training(model, adamw(model), loss=loss) as step:
        for n in range(STEPS):
            step(vectors(n))
            found.append((accuracy.compute().item(), accuracy.update_count))
    return found


@tool_case("torchmetrics", "MetricCollection over predictions between steps")
def metrics_between(side: Side) -> Any:
    import torchmetrics

    kinds = [torchmetrics.Accuracy(task="multiclass", num_classes=5), torchmetrics.F1Score("multiclass", num_classes=5)]
    model, metrics = chain(), torchmetrics.MetricCollection(kinds)
    with side.training(model, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        for n in range(STEPS):
            step(vectors(n))
            metrics.update(model(vectors(99)[0]), vectors(99)[1])
    return metrics.compute()


@tool_case("tensordict", "TensorDict as the batch")
def tensor_dict(side: Side) -> None:
    from tensordict import TensorDict

    model = gpt2()
    objective = lambda model, batch: model(input_ids=batch["input_ids"], labels=batch["labels"]).loss  # noqa: E731
    with side.training(model, adamw(model), objective=objective) as step:
        for n in range(STEPS):
            batch = tokens(n) if not side.is_relay else TensorDict(tokens(n), batch_size=[ROWS])
            step(batch)


@tool_case("datasets", "Dataset with_format('torch') in a DataLoader, shuffled")
def formatted(side: Side) -> None:
    from datasets import Dataset

    data = Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in rows_of_tokens(12)]).with_format(
        "torch"
    )
    loader = DataLoader(data, batch_size=ROWS, shuffle=True, generator=torch.Generator().manual_seed(0))
    model = gpt2()
    with side.training(model, adamw(model)) as step:
        for batch in loader:
            step(batch)


@tool_case("datasets", "IterableDataset in a DataLoader with two workers")
def streamed(side: Side) -> None:
    from datasets import Dataset

    data = Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in rows_of_tokens(16)])
    stream = data.to_iterable_dataset(num_shards=2).with_format("torch")
    model = gpt2()
    with side.training(model, adamw(model)) as step:
        for batch in DataLoader(stream, batch_size=ROWS, num_workers=2):
            step(batch)


@tool_case("transformers", "DataCollatorWithPadding, rows of unequal length")
def collated(side: Side) -> None:
    from _clients_trl import tokenizer
    from transformers import DataCollatorWithPadding

    rows = [{"input_ids": list(range(4, 8 + n % 4)), "labels": n % 2} for n in range(12)]
    model = bert()
    with side.training(model, adamw(model)) as step:
        for batch in DataLoader(rows, batch_size=ROWS, collate_fn=DataCollatorWithPadding(tokenizer())):
            step(dict(batch) if not side.is_relay else batch)


# -- inspection ------------------------------------------------------------------------------------------------------


@tool_case("captum", "IntegratedGradients between steps")
def attributions(side: Side) -> Any:
    from captum.attr import IntegratedGradients

    model, found = chain(), []
    with side.training(model, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        for n in range(STEPS):
            step(vectors(n))
            found.append(IntegratedGradients(model).attribute(vectors(9)[0], target=1, n_steps=8))
    return found


@tool_case("captum", "LayerActivation and LayerGradientXActivation of a layer between steps")
def activations(side: Side) -> Any:
    from captum.attr import LayerActivation, LayerGradientXActivation

    model, found = chain(), []
    with side.training(model, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        for n in range(STEPS):
            step(vectors(n))
            found.append(LayerActivation(model, model[1]).attribute(vectors(9)[0]))
            found.append(LayerGradientXActivation(model, model[1]).attribute(vectors(9)[0], target=1))
    return found


@tool_case("nnsight", "trace of a layer between steps")
def traced(side: Side) -> Any:
    from nnsight import NNsight

    model, found = chain(), []
    with side.training(model, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        for n in range(STEPS):
            step(vectors(n))
            seen = NNsight(model)
            with seen.trace(vectors(9)[0]):
                hidden = seen[1].output.save()
            found.append(hidden)
    return found


@tool_case("opacus", "model and optimizer of PrivacyEngine.make_private", "Give that optimizer by itself")
def private(side: Side) -> None:
    from opacus import PrivacyEngine

    data = DataLoader(torch.utils.data.TensorDataset(*vectors(0, rows=8)), batch_size=4)
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=data,
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )
    side.config = replace(side.config, micro_batches=1)
    if side.is_remedied:  # without privacy
        model, optimizer = model._module, optimizer.original_optimizer
    with side.training(model, optimizer, loss=nn.CrossEntropyLoss()) as step:
        step(vectors(0))


# -- files -----------------------------------------------------------------------------------------------------------


@tool_case("safetensors", "save_file of a state_dict between steps")
def saved_state(side: Side) -> Any:
    from safetensors.torch import load_file, save_file

    model = chain()
    with side.training(model, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        step(vectors(0))
        save_file({name: value.clone() for name, value in model.state_dict().items()}, side.folder / "model")
        step(vectors(1))
    return load_file(side.folder / "model")


def trains_with_files(side: Side, between: Callable[[nn.Module, str], Any]) -> None:
    """Two steps, and something with a file between them."""
    model = gpt2()
    with side.training(model, adamw(model)) as step:
        step(tokens(0))
        between(model, str(side.folder / "model.safetensors"))
        step(tokens(1))


@tool_case("safetensors", "save_model of a copy of the open relay's model")
def saved_copy(side: Side) -> Any:
    from safetensors.torch import load_file, save_model

    trains_with_files(side, lambda model, path: save_model(copy.deepcopy(model), path))
    return load_file(side.folder / "model.safetensors")


@tool_case("safetensors", "save_model of the open relay's model")
def saved_model(side: Side) -> Any:
    from safetensors.torch import load_file, save_model

    trains_with_files(side, save_model)
    return load_file(side.folder / "model.safetensors")


@tool_case("safetensors", "load_model into the open relay's model")
def loaded_model(side: Side) -> None:
    from safetensors.torch import load_model, save_model

    save_model(gpt2(n_positions=16), str(side.folder / "model.safetensors"))
    trains_with_files(side, load_model)


@tool_case("torch", "torch.save of model and optimizer, and a resume in a new program")
def resumed(side: Side) -> None:
    model = gpt2()
    optimizer = adamw(model)
    with side.training(model, optimizer) as step:
        step(tokens(0))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, side.folder / "both")
    found = torch.load(side.folder / "both")
    model = gpt2()
    model.load_state_dict(found["model"])
    optimizer = adamw(model)
    optimizer.load_state_dict(found["optimizer"])
    with side.training(model, optimizer) as step:
        step(tokens(1))
