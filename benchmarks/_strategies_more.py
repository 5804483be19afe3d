"""Further tables of `strategies.py`: gradients of fewer bytes, the gain of dropping kept values, and activations by
shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from _common import show
from _exhaustive_search import find_fastest
from torch import nn
from transformers import GPT2Config, GPT2Model
from transformers.activations import GELUActivation, NewGELUActivation

from l2l_core import EmulatedDevice, find_layers
from l2l_core.strategies import Lab, Plain, activation_map, few_bit, randomized_linear
from l2l_core.strategies.few_bits import SMOOTH_ACTIVATIONS
from l2l_core.strategies.rotor import Chain, RotorSolution

Made = tuple[nn.Module, Any, dict[str, Any]]
CHAINS, ROWS, LENGTHS = 300, (1, 2, 4, 8, 16, 32), (64, 128, 256, 384, 512, 768, 1024, 2048)
V100_BYTES = 16e9


def approximate(make: Callable[[], Made], micro_batches: int) -> list[dict[str, Any]]:
    """Plain training with activations of k bits, or half of the rows in linear layers: metered bytes, distance of gradients."""
    changes: dict[str, Callable[[nn.Module], Any]] = {
        "as it is": lambda model: None,
        **{
            f"activations of {k} bits": lambda model, k=k: few_bit(
                model, k, (*SMOOTH_ACTIVATIONS, GELUActivation, NewGELUActivation)
            )
            for k in (1, 3)
        },
        "randomized linear, half": lambda model: randomized_linear(model, 0.5),
    }
    rows, exact = [], None
    for name, change in changes.items():
        torch.manual_seed(0)
        model, batch, options = make()
        try:
            # In the model's own code between layers, functions with a custom backward are refused.
            change(nn.ModuleList(model.get_submodule(layer) for layer in options.get("layers") or find_layers(model)))
        except ValueError as error:
            rows.append({"model": name, "why": str(error)})
            continue
        lab = Lab(model, batch, device=EmulatedDevice(), micro_batches=micro_batches, **options)
        grads = _gradients(lab)
        exact = grads if exact is None else exact
        rows.append(
            {
                "model": name,
                "device_bytes": lab.plan(Plain()).peak_device_bytes,
                "record_bytes": sum(
                    lab.cost_model.costs[0].record_bytes.get((i, True), 0) for i in range(lab.cost_model.stages - 1)
                ),
                "cosine": float(nn.functional.cosine_similarity(exact.double(), grads.double(), dim=0)),
            }
        )
    return rows


def _gradients(lab: Lab) -> torch.Tensor:
    model = lab._copy_model()[0]
    course = lab._make_runner(model)
    with course.metered() as meter:
        course.run(lab.plan(Plain()).operations, lab._own_inputs, meter)
    return torch.cat([param.grad.flatten() for param in model.parameters() if param.grad is not None])


def gap(measured: Chain) -> dict[str, Any]:
    """Compare plans that drop kept values and make them again with the fastest persistent ones."""
    rng = random.Random(0)
    gains, only = [], 0
    for _ in range(CHAINS):
        n = rng.randint(3, 5)
        sizes = [rng.randint(1, 4) for _ in range(n)] + [0]

        def numbers(low: int, high: int, n: int = n) -> tuple[int, ...]:
            return tuple(rng.randint(low, high) for _ in range(n))

        records = tuple(sizes[i + 1] + rng.randint(0, 5) for i in range(n))
        times = (numbers(1, 9), numbers(1, 9), numbers(1, 9))
        chain, budget = (
            Chain(tuple(sizes), records, *times, numbers(0, 6), numbers(0, 2), numbers(0, 4)),
            rng.randint(6, 30),
        )
        kept, free = RotorSolution(chain, budget).seconds(budget), find_fastest(chain, budget).seconds
        if free < float("inf"):
            only += kept == float("inf")
            gains += [kept / free - 1] if kept < float("inf") else []
    faster = [gain for gain in gains if gain > 1e-9]
    solution = RotorSolution(measured, 1000)
    least = next(m for m in range(1001) if solution.seconds(m) < float("inf"))
    most = next(m for m in range(1001) if solution.seconds(m) == solution.seconds(1000))
    budgets = [least + (most - least) * i // 4 for i in range(5)]
    of_model = [solution.seconds(m) / find_fastest(measured, m).seconds - 1 for m in budgets]
    return {
        "chains": len(gains) + only,
        "faster": len(faster),
        "only_without": only,
        "median_gain": median(faster) if faster else 0.0,
        "largest_gain": max(faster, default=0.0),
        "measured_gains": of_model,
    }


def activations() -> dict[str, int]:
    """Bytes that GPT-2 small saves for backward, without its head: 48 cells of fake tensors; and prints them."""

    def make() -> nn.Module:
        config = GPT2Config(n_positions=2048, attn_implementation="eager", use_cache=False)
        return GPT2Model(config).train()

    def forward(model: nn.Module, rows: int, length: int) -> torch.Tensor:
        return model(torch.zeros(rows, length, dtype=torch.long)).last_hidden_state

    found = activation_map(make, forward, ROWS, LENGTHS)
    print("GPT-2 small: GB that backward needs, by rows and length (* more than 16 GB)")
    cells = [[f"{found[n, t] / 1e9:.2f}{'*' if found[n, t] > V100_BYTES else ''}" for n in ROWS] for t in LENGTHS]
    show(("length", *map(str, ROWS)), [(t, *row) for t, row in zip(LENGTHS, cells, strict=True)])
    return {f"{n}x{t}": nbytes for (n, t), nbytes in found.items()}
