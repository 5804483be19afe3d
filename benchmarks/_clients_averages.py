"""Programs with averages of weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from _clients import Side, case
from _clients_small import adamw, chain, gpt2, tokens, vectors
from torch import nn
from torch.optim import swa_utils

STEPS = 4
average_case = partial(case, "averages of weights")


@average_case("torch_ema", "ExponentialMovingAverage after each step, evaluated with average_parameters()")
def ema(side: Side) -> Any:
    from torch_ema import ExponentialMovingAverage

    model = gpt2()
    average, evaluated = ExponentialMovingAverage(model.parameters(), decay=0.9), []
    with side.training(model, adamw(model)) as step:
        for n in range(STEPS):
            step(tokens(n))
            average.update()
            with average.average_parameters(), torch.no_grad():
                evaluated.append(model(**tokens(99)).loss.item())
    return evaluated, average.state_dict()["shadow_params"]


@average_case("torch", "swa_utils.AveragedModel, made before the relay, and SWALR")
def stochastic_average(side: Side) -> Any:
    model = gpt2()
    optimizer = adamw(model)
    average, schedule = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    with side.training(model, optimizer) as step:
        for n in range(STEPS):
            step(tokens(n))
            average.update_parameters(model)
            schedule.step()
    return average.state_dict()


@average_case("torch", "swa_utils.AveragedModel of an open relay's model with get_ema_multi_avg_fn, then update_bn")
def averaged_norms(side: Side) -> Any:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU()) for _ in range(3))
    model = nn.Sequential(*blocks, nn.Linear(32, 5))
    with side.training(model, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        for n in range(STEPS):
            step(vectors(n))
            average.update_parameters(model)
        swa_utils.update_bn([vectors(n)[0] for n in range(3)], average)
    return average.state_dict()


@average_case("timm", "ModelEmaV3, updated after each step")
def timm_ema(side: Side) -> Any:
    from timm.utils import ModelEmaV3

    model = chain()
    average = ModelEmaV3(model, decay=0.9)
    with side.training(model, adamw(model), loss=nn.CrossEntropyLoss()) as step:
        for n in range(STEPS):
            step(vectors(n))
            average.update(model, step=n)
    return average.module.state_dict()


@average_case("diffusers", "EMAModel with store(), copy_to() and restore() around an evaluation")
def diffusers_ema(side: Side) -> Any:
    from diffusers.training_utils import EMAModel

    model = gpt2()
    average, evaluated = EMAModel(model.parameters(), decay=0.9), []
    with side.training(model, adamw(model)) as step:
        for n in range(STEPS):
            step(tokens(n))
            average.step(model.parameters())
            average.store(model.parameters())
            average.copy_to(model.parameters())
            with torch.no_grad():
                evaluated.append(model(**tokens(99)).loss.item())
            average.restore(model.parameters())
    return evaluated
