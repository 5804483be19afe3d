"""Programs with torch alone: objectives, hooks, optimizers and layers as users write them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _clients import Side, case
from _clients_small import WIDTH, adamw, chain, gpt2, tokens, vectors
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

STEPS = 3
loop_case = partial(case, "loops of the user", "torch")


def trains(side: Side, model: nn.Module, optimizer: Any = None, **options: Any) -> None:
    options = options or {"loss": nn.CrossEntropyLoss()}
    with side.training(model, optimizer or adamw(model), **options) as step:
        for n in range(STEPS):
            step(vectors(n))


# -- objectives ------------------------------------------------------------------------------------------------------


@loop_case("gradient penalty, by second derivatives")
def gradient_penalty(side: Side) -> None:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].clone().requires_grad_()
        outputs = model(x)
        (grad,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
        return cross_entropy(outputs, batch[1]) + (grad.norm(dim=1) - 1).square().mean()

    trains(side, chain(), objective=objective)


@loop_case("penalty on all weights in the objective")
def penalty(side: Side) -> None:
    def objective(model: nn.Module, batch: Any) -> Tensor:
        squares = torch.stack([param.square().sum() for param in model.parameters()])
        return cross_entropy(model(batch[0]), batch[1]) + 1e-3 * squares.sum()

    trains(side, chain(), objective=objective)


@loop_case("outputs of layers, collected by forward hooks for distillation")
def distillation(side: Side) -> None:
    model, teacher = chain(), chain()
    collected: list[Tensor] = []
    for layer in model[:3]:
        layer.register_forward_hook(lambda *call: collected.append(call[-1]))

    def objective(model: nn.Module, batch: Any) -> Tensor:
        collected.clear()
        outputs, x, loss = model(batch[0]), batch[0], torch.zeros(())
        for layer, found in zip(teacher[:3], collected, strict=True):
            x = layer(x).detach()
            loss = loss + (found - x).square().mean()
        return loss + cross_entropy(outputs, batch[1])

    trains(side, model, objective=objective)


# -- gradients and rates ---------------------------------------------------------------------------------------------


@loop_case("norms of gradients, logged by hooks on parameters", "register_step_pre_hook")
def logged_norms(side: Side) -> list[float]:
    model, norms = chain(), list[float]()
    optimizer = adamw(model)
    if side.is_remedied:
        side.config = replace(side.config, update="deferred")
        optimizer.register_step_pre_hook(lambda *_: norms.extend(p.grad.norm().item() for p in model.parameters()))
    else:
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm().item()))
    trains(side, model, optimizer)
    return norms


@loop_case("clip_grad_norm_ in a step hook of the optimizer")
def clips_in_a_hook(side: Side) -> None:
    model = chain()
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(model.parameters(), 0.1) and None)
    trains(side, model, optimizer)


class Scaled(torch.optim.SGD):
    """A rate for each parameter, kept as its attribute, as muP does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * param.rate_scale)


@loop_case("rates that are attributes of parameters, in an optimizer of the user")
def attributes(side: Side) -> None:
    model = chain()
    for param in model.parameters():
        param.rate_scale = 1.0 / param.shape[-1]  # pyright: ignore[reportAttributeAccessIssue]
    trains(side, model, Scaled(model.parameters(), lr=0.1))


# -- layers ----------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """A layer that counts the calls of its class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        return x + torch.tanh(self.inner(x)) / (1 + self.calls % 3)


@loop_case("layers that count calls on their class")
def counting(side: Side) -> int:
    Counting.calls = 0
    trains(side, nn.Sequential(*(Counting() for _ in range(3)), nn.Linear(WIDTH, 5)))
    return Counting.calls


@loop_case("two relays, a generator and a discriminator")
def adversaries(side: Side) -> None:
    torch.manual_seed(0)
    generator = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
    critic = chain(classes=1)

    def of_critic(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.softplus(model(batch[1])).mean() + nn.functional.softplus(-model(batch[0])).mean()

    def of_generator(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.softplus(-critic(model(batch[0]))).mean()

    with (
        side.training(critic, adamw(critic), objective=of_critic) as step_of_critic,
        side.training(generator, adamw(generator), objective=of_generator) as step_of_generator,
    ):
        for n in range(STEPS):
            noise = vectors(n + 100)[0]
            with torch.no_grad():
                made = generator(noise)
            step_of_critic((vectors(n)[0], made))
            step_of_generator((noise,))
            critic.zero_grad()


@loop_case("dropout, drawn from the seed of torch.manual_seed")
def dropout(side: Side) -> None:
    torch.manual_seed(3)
    side.config = replace(side.config, seed=torch.initial_seed() if not side.is_relay else None)
    model = gpt2(resid_pdrop=0.1)
    torch.manual_seed(3)
    with side.training(model, adamw(model)) as step:
        for n in range(STEPS):
            step(tokens(n))
