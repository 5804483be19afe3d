"""Rough figures of a step before the first measured step, from parameter counts and an assumed machine.

Such a guess is not a forecast: it lists its assumptions and is never compared with the measured step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from l2l_core import Machine, Profile, Shapes
from l2l_core.schedule_rules import weight_itemsize
from workbench.session import Snapshot
from workbench.what_if.answer import Answer, simulate_profile
from workbench.what_if.measured_step import MeasuredStep
from workbench.what_if.question import Question
from workbench.what_if.rescale import rescale

_ASSUMED_TOKENS = 512  # per micro-batch
_ASSUMED_MACHINE = Machine(2e10, 2e8, 1e10, 1e10, "a core of about 20 GFLOP/s, and memory of 10 GB/s")
# Bytes that autograd keeps of a layer per token and unit of width: GPT-2 without attention scores (forecast/model_shapes.py).
_GRAPH_BYTES = {"fp32": 54 + 4 * 20, "bf16": 33 + 4 * 10}
_MAX_LAYERS = 256  # deeper stacks repeat these


@dataclass(frozen=True, kw_only=True)
class AssumedCosts:
    """Assumptions about a step before the first measured step.

    Attributes:
        layer_params: number of parameters of each layer.
        shell_params: number of parameters of the shell.
        layer_trained, shell_trained: numbers of trained parameters; None if all are trained.
        micro_batches: number of micro-batches of the step.
        tokens: tokens per micro-batch.
        machine: throughput and bandwidth.
    """

    layer_params: tuple[int, ...]
    shell_params: int
    micro_batches: int = 1
    tokens: int = _ASSUMED_TOKENS
    machine: Machine = field(default=_ASSUMED_MACHINE)
    layer_trained: tuple[int, ...] | None = None
    shell_trained: int | None = None

    @staticmethod
    def of(snapshot: Snapshot) -> AssumedCosts:
        """Return the assumptions for a session; if no parameter is trained, all count as trained."""
        trained = [row.num_trained for row in snapshot.layers]
        trains = any([snapshot.shell_trained, *trained])
        return AssumedCosts(
            layer_params=tuple(row.num_params for row in snapshot.layers),
            shell_params=snapshot.shell_params,
            micro_batches=snapshot.config.micro_batches,
            layer_trained=tuple(trained) if trains else None,
            shell_trained=snapshot.shell_trained if trains else None,
        )

    def trained_shares(self, depth: int) -> list[float]:
        """Return the trained share of each of `depth` layers, from the layer at the same relative depth."""
        trained = self.layer_params if self.layer_trained is None else self.layer_trained
        each = [n / params if params else 0.0 for n, params in zip(trained, self.layer_params, strict=True)]
        shares = [each[i * len(each) // depth] for i in range(depth)]
        # A step without trained parameters is refused, so at least one layer is trained at every depth.
        return shares if any(shares) or self.shell_trained else [*shares[:-1], max(each)]


def assumed_answer(costs: AssumedCosts, question: Question) -> Answer:
    """Guess the figures of a step from parameter counts; see `Profile.of_shapes`.

    Each layer is assumed to be a transformer layer with 12 * width**2 parameters (Kaplan et al., arXiv 2001.08361, section 2.1).
    """
    params = sorted(costs.layer_params)[len(costs.layer_params) // 2]
    rows = costs.micro_batches / question.micro_batches if question.same_batch else 1.0
    tokens = max(1, round(costs.tokens * rows))
    width = math.sqrt(params / 12) * question.width
    depth, layer = min(question.depth, _MAX_LAYERS), max(1, round(params * question.width**2))
    shell, trained = costs.shell_params, costs.shell_trained
    shapes = Shapes(
        layer_params=[layer] * depth,
        shell_params=round(shell * question.width),
        # Rounded up, so that the few trained parameters of an adapter do not become 0.
        layer_trained=[math.ceil(share * layer) for share in costs.trained_shares(depth)],
        shell_trained=round((shell if trained is None else trained) * question.width),
        tokens=tokens,
        boundary_bytes=max(1, round(weight_itemsize(question.precision) * tokens * width)),
        micro_batches=question.micro_batches,
        stash=question.stash,
        precision=question.precision,
    )
    base = MeasuredStep(Profile.of_shapes(shapes, costs.machine))
    # The shapes include the width and the rows already.
    graph_bytes = round(_GRAPH_BYTES[question.precision] * tokens * width)
    profile, per_layer = rescale(base, replace(question, width=1.0, same_batch=False), graph_bytes)
    trace = simulate_profile(profile, question, {})
    assumed = f"{costs.tokens:,} tokens per micro-batch on {costs.machine.name}"
    basis = f"a guess by formula, no step measured yet: {assumed} are assumed"
    return Answer(question=question, trace=trace, basis=basis, guessed=True, per_layer=per_layer)
