"""Programs with optimizers and schedulers of libraries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch
from _clients import Side, case
from _clients_small import adamw, chain, gpt2, tokens, vectors
from torch import nn

STEPS = 4
optimizer_case = partial(case, "optimizers")


def trains_with(side: Side, make: Callable[[nn.Module], Any], instead: Callable[[nn.Module], Any] = adamw) -> None:
    """A language model with an optimizer, or with another one where the relay refuses it."""
    model = gpt2()
    optimizer = instead(model) if side.is_remedied else make(model)
    if hasattr(optimizer, "train"):
        optimizer.train()
    with side.training(model, optimizer) as step:
        for n in range(STEPS):
            step(tokens(n))


def of(module: str, name: str, **settings: Any) -> Callable[[nn.Module], Any]:
    """Return a function that makes an optimizer over all parameters."""
    return lambda model: getattr(import_module(module), name)(model.parameters(), **settings)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() > 1]


def others(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() < 2]


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Muon(matrices(model), lr=1e-2), torch.optim.AdamW(others(model), lr=1e-2)]


def galore(name: str, **settings: Any) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        projected = {"params": matrices(model), "rank": 4, "update_proj_gap": 2, "scale": 0.25, "proj_type": "std"}
        return getattr(import_module("galore_torch"), name)([{"params": others(model)}, projected], lr=1e-2, **settings)

    return make


def pytorch_optimizer(name: str, **settings: Any) -> Callable[[nn.Module], Any]:
    return of("pytorch_optimizer", name, **settings)


def lookahead(model: nn.Module) -> Any:
    return import_module("pytorch_optimizer").Lookahead(adamw(model), k=2)


def timm_factory(model: nn.Module) -> Any:
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(model, opt="adamw", lr=1e-2, weight_decay=0.1)


def torchao(name: str) -> Callable[[nn.Module], Any]:
    def make(model: nn.Module) -> Any:
        torch.compiler.set_stance("force_eager")  # its update takes a minute to compile
        return getattr(import_module("torchao.optim"), name)(model.parameters(), lr=1e-2)

    return make


relative = {"lr": None, "scale_parameter": True, "relative_step": True, "warmup_init": True}
OPTIMIZERS = [
    ("torch", "AdamW(fused=True)", of("torch.optim", "AdamW", lr=1e-2, fused=True)),
    ("torch", "list of Muon for matrices and AdamW for the rest", muon_and_adamw),
    ("torch", "Adafactor", of("torch.optim", "Adafactor", lr=1e-2)),
    ("transformers", "Adafactor with a fixed rate", of("transformers.optimization", "Adafactor", lr=1e-2, relative_step=False)),
    ("transformers", "Adafactor with relative steps", of("transformers.optimization", "Adafactor", **relative)),
    ("schedulefree", "SGDScheduleFree", of("schedulefree", "SGDScheduleFree", lr=0.1)),
    ("schedulefree", "RAdamScheduleFree", of("schedulefree", "RAdamScheduleFree", lr=1e-2, silent_sgd_phase=False)),
    ("prodigyopt", "Prodigy", of("prodigyopt", "Prodigy", d0=1e-3)),
    ("dadaptation", "DAdaptAdam", of("dadaptation", "DAdaptAdam")),
    ("dadaptation", "DAdaptLion", of("dadaptation", "DAdaptLion")),
    ("lion_pytorch", "Lion", of("lion_pytorch", "Lion", lr=1e-3, weight_decay=0.1)),
    ("came_pytorch", "CAME", of("came_pytorch", "CAME", lr=1e-3)),
    ("galore_torch", "GaLoreAdamW with projected matrices", galore("GaLoreAdamW")),
    ("galore_torch", "GaLoreAdafactor with projected matrices", galore("GaLoreAdafactor", relative_step=False)),
    ("bitsandbytes", "Adam8bit", of("bitsandbytes.optim", "Adam8bit", lr=1e-2, min_8bit_size=64)),
    ("bitsandbytes", "AdamW8bit", of("bitsandbytes.optim", "AdamW8bit", lr=1e-2, min_8bit_size=64)),
    ("bitsandbytes", "Lion8bit", of("bitsandbytes.optim", "Lion8bit", lr=1e-3, min_8bit_size=64)),
    ("bitsandbytes", "PagedAdamW", of("bitsandbytes.optim", "PagedAdamW", lr=1e-2)),
    ("torchao", "AdamW8bit, not compiled", torchao("AdamW8bit")),
    ("torchao", "AdamW4bit, not compiled", torchao("AdamW4bit")),
    ("timm", "Lamb", of("timm.optim", "Lamb", lr=1e-2)),
    ("timm", "Lars", of("timm.optim", "Lars", lr=0.1, momentum=0.9, always_adapt=True)),
    ("timm", "Adan", of("timm.optim", "Adan", lr=1e-2)),
    ("timm", "create_optimizer_v2, groups with and without weight decay", timm_factory),
    ("pytorch_optimizer", "AdEMAMix", pytorch_optimizer("AdEMAMix", lr=1e-2)),
    ("pytorch_optimizer", "SOAP", pytorch_optimizer("SOAP", lr=1e-2)),
    ("pytorch_optimizer", "Ranger21", pytorch_optimizer("Ranger21", lr=1e-2, num_iterations=STEPS * 4)),
    ("pytorch_optimizer", "StableAdamW", pytorch_optimizer("StableAdamW", lr=1e-2)),
    ("pytorch_optimizer", "Adai", pytorch_optimizer("Adai", lr=1e-2)),
]  # fmt: skip
WITH_OTHER_STATE = ("galore_torch", "torchao")  # state that is neither tensors nor plain data
for library, what, make in OPTIMIZERS:
    remedy = "as those of torch do" if library in WITH_OTHER_STATE else ""
    optimizer_case(library, what, remedy)(partial(trains_with, make=make))

optimizer_case("pytorch_optimizer", "Lookahead around AdamW", "Give that optimizer by itself")(
    partial(trains_with, make=lookahead)
)


@optimizer_case("schedulefree", "AdamWScheduleFree, train() before each step and eval() before each evaluation")
def schedule_free(side: Side) -> Any:
    from schedulefree import AdamWScheduleFree

    model, evaluated = gpt2(), []
    optimizer = AdamWScheduleFree(model.parameters(), lr=1e-2, warmup_steps=2)
    with side.training(model, optimizer) as step:
        for n in range(STEPS):
            optimizer.train()
            step(tokens(n))
            optimizer.eval()
            with torch.no_grad():
                evaluated.append(model(**tokens(99)).loss.item())
    return evaluated


@optimizer_case("pytorch_optimizer", "SAM, whose step takes a closure", "Use the optimizer inside of it by itself")
def sam(side: Side) -> None:
    from pytorch_optimizer import SAM

    trains_by_closure(side, lambda model: SAM(model.parameters(), torch.optim.SGD, lr=0.1))


@optimizer_case("torch", "LBFGS, whose step takes a closure", "Use AdamW or SGD")
def lbfgs(side: Side) -> None:
    trains_by_closure(side, lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1))


def trains_by_closure(side: Side, make: Callable[[nn.Module], Any]) -> None:
    """One step that evaluates the loss again, or steps of SGD where the relay refuses the optimizer."""
    model, loss = chain(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if side.is_remedied else make(model)
    if side.is_relay or side.is_remedied:
        with side.training(model, optimizer, loss=loss) as step:
            step(vectors(0))
        return

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model(vectors(0)[0]), vectors(0)[1])
        value.backward()
        return value

    side.watch(model)
    closure()
    optimizer.step(closure)
    side.trained(optimizer, [])


# -- schedulers ------------------------------------------------------------------------------------------------------


@optimizer_case("transformers", "get_cosine_schedule_with_warmup over the user's optimizer")
def cosine(side: Side) -> Any:
    from transformers import get_cosine_schedule_with_warmup

    model = gpt2()
    optimizer = adamw(model)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, STEPS)
    with side.training(model, optimizer) as step:
        for n in range(STEPS):
            step(tokens(n))
            schedule.step()
    return schedule.get_last_lr()


@optimizer_case("torch", "a list of Muon and AdamW, each with a OneCycleLR")
def one_cycle(side: Side) -> Any:
    model = gpt2()
    optimizers = muon_and_adamw(model)
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=STEPS + 1)
    schedules = [cycle(optimizers[0], cycle_momentum=False), cycle(optimizers[1])]
    with side.training(model, optimizers) as step:
        for n in range(STEPS):
            step(tokens(n))
            for schedule in schedules:
                schedule.step()
    return [schedule.get_last_lr() for schedule in schedules]


@optimizer_case("torch", "ReduceLROnPlateau of the losses")
def plateau(side: Side) -> Any:
    model = gpt2()
    optimizer = adamw(model, lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    with side.training(model, optimizer) as step:
        for n in range(STEPS):
            schedule.step(step(tokens(n)))
    return optimizer.param_groups[0]["lr"]


@optimizer_case("pytorch_warmup", "UntunedLinearWarmup with dampening around a scheduler")
def warmup(side: Side) -> Any:
    import pytorch_warmup

    model = gpt2()
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    dampened = pytorch_warmup.UntunedLinearWarmup(optimizer)
    with side.training(model, optimizer) as step:
        for n in range(STEPS):
            step(tokens(n))
            with dampened.dampening():
                schedule.step()
    return optimizer.param_groups[0]["lr"]


@optimizer_case("timm", "create_optimizer_v2 with layer decay, and CosineLRScheduler")
def timm_schedule(side: Side) -> Any:
    import timm
    from _clients_small import pictures
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=5, img_size=32)
    optimizer = create_optimizer_v2(model, opt="adamw", lr=1e-2, layer_decay=0.7)
    schedule = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=2, warmup_lr_init=1e-4)
    with side.training(model, optimizer, loss=nn.CrossEntropyLoss()) as step:
        for n in range(STEPS):
            step(pictures(n))
            schedule.step(n + 1)
    return [group["lr"] for group in optimizer.param_groups]
