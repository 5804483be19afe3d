"""The tables of TensorFlowMem (Wei et al., Training Larger Models on TensorFlow without Additional GPU), in their shapes.

    python benchmarks/larger.py                      (all parts)
    python benchmarks/larger.py --part experts       (one part; a later run continues where one was ended)
    python benchmarks/larger.py --part resnet --seconds    (without the search for the largest sizes)

A ResNet of growing depth, a mixture of experts with more experts per layer, and a recurrent network on longer sequences, at small
width on the emulated device. Its memory is what plain training needs at the largest size that the paper trained without swapping:
503 layers (the paper: 504), 12 experts per layer, 400 time steps. The rest is scaled from the paper's machine: the host has
64/12 of the device's bytes, and the link takes as large a share of a step as 12 GB/s took there (a figure of ours: PCIe 3.0).

    in core   plain training
    swap      `Offload` of `l2l_core.strategies`: activations to the host and back; weights stay on the device
    relay     weights and optimizer state on the host, layers recomputed from inputs that stay on the device
    both      the relay with its stash on the host: weights and activations there

Every size is tried by real steps with the device's limit enforced; one that raises is run again without it, for its bytes. So
the largest that fits and the one above were both run. Host bytes are those of the ledger of the relay, or of the plan: weights,
optimizer state, gradients in flight, activations; with the model in core and with swap, activations alone. At the size of
plain training's limit, losses, weights and buffers of three steps are compared with a plain loop, to the bit.

Seconds of "in core" and of relays are measured, with the link emulated in real time; those of swap are simulated from measured
operations, since its real steps count every storage. At this width they are Python's and not the arithmetic's.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from _common import report, show, threads
from _deepest import deepest
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from l2l_core import DeviceOutOfMemory, EmulatedDevice, Relay, RelayConfig
from l2l_core.strategies import Lab, Offload, Plain, Policy

STEPS = 3  # at every size
DEVICE_GB, HOST_GB, LINK_GB_PER_S = 12, 64, 12  # of the paper's machine; the link is our assumption
BLOCKS = 4  # of a layer of the ResNet, as a partition of the paper has many operations
Made = tuple[nn.Module, Any, dict[str, Any]]  # model, batch, options of `Relay` and `Lab`


# -- models ------------------------------------------------------------------------------------------------------------


def make_resnet(blocks: int, rows: int = 16) -> Made:
    """A ResNet of bottleneck blocks, whose third stage grows, as in the paper; some of its blocks are a layer."""
    depths = [3, 4, blocks - 10, 3]
    model = ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16, 32, 64], depths=depths, layer_type="bottleneck")
    ).train()
    layers = []
    for i, depth in enumerate(depths):
        stage = model.resnet.encoder.stages[i]
        blocks_of = [model.get_submodule(f"resnet.encoder.stages.{i}.layers.{j}") for j in range(depth)]
        parts = [nn.Sequential(*blocks_of[j : j + BLOCKS]) for j in range(0, depth, BLOCKS)]
        stage.layers = nn.Sequential(*parts)
        layers += [f"resnet.encoder.stages.{i}.layers.{j}" for j in range(len(parts))]
    batch = {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": torch.randint(2, (rows,))}
    return model, batch, {"layers": layers}


def make_mixture(experts: int, rows: int = 8) -> Made:
    """A translation model of four encoder and four decoder blocks, each with so many experts; a token goes to one of them."""
    config = SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=16, num_heads=2, d_ff=128, num_layers=4, num_decoder_layers=4,
        num_sparse_encoder_layers=4, num_sparse_decoder_layers=4, num_experts=experts, dropout_rate=0.0,
        router_jitter_noise=0.0, use_cache=False, pad_token_id=0,
    )  # fmt: skip
    config.decoder_start_token_id = 0
    model = SwitchTransformersForConditionalGeneration(config).train()
    tokens = torch.randint(1, 64, (rows, 8))
    return model, {"input_ids": tokens, "labels": tokens.flip(1)}, {}


class Span(nn.Module):
    """Some time steps of a recurrent network: a dense layer, an LSTM cell."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.dense, self.cell = nn.Linear(features, width), nn.LSTMCell(width, width)

    def forward(self, frames: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Frames (rows, steps, features) and state (rows, width) to outputs (rows, steps, width) and state."""
        outputs = []
        for frame in frames.unbind(1):
            hidden, cell = self.cell(torch.relu(self.dense(frame)), (hidden, cell))
            outputs.append(hidden)
        return torch.stack(outputs, 1), hidden, cell


class Unrolled(nn.Module):
    """A recurrent network that labels every frame, unrolled over time; a span of steps is a layer, called again and again."""

    STEPS = 25  # of a span

    def __init__(self, features: int = 8, width: int = 32, classes: int = 16) -> None:
        super().__init__()
        self.span, self.head, self.width = Span(features, width), nn.Linear(width, classes), width

    def forward(self, frames: dict[int, Tensor], labels: dict[int, Tensor]) -> Tensor:
        """Frames (rows, steps, features) and labels (rows, steps) of every span to the mean loss."""
        hidden = cell = frames[0].new_zeros(len(frames[0]), self.width)
        losses = []
        for i in frames:
            outputs, hidden, cell = self.span(frames[i], hidden, cell)
            losses.append(F.cross_entropy(self.head(outputs).flatten(0, 1), labels[i].flatten()))
        return torch.stack(losses).mean()


def make_unrolled(spans: int, rows: int = 16) -> Made:
    """The recurrent network on sequences of so many spans."""
    frames = {i: torch.randn(rows, Unrolled.STEPS, 8) for i in range(spans)}  # each can wait on the host by itself
    labels = {i: torch.randint(16, (rows, Unrolled.STEPS)) for i in range(spans)}
    return Unrolled(), {"frames": frames, "labels": labels}, {"layers": ["span"], "loss": lambda out, _: out}


# -- ways --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One table of the paper.

    Attributes:
        unit: of sizes, in words.
        make: returns the model of a number of blocks, experts or spans.
        in_units: converts such a number to the paper's unit.
        optimizer: factory.
        plain: the largest that the paper trained without swapping.
        sizes: whose seconds are shown.
        most: larger ones are not tried.
        step_s: seconds of a step of the paper at that size.
        paper: its largest sizes.
        rows: of a batch.
        doubled: whether swap is tried with twice the rows, too.
    """

    unit: str
    make: Callable[..., Made]
    in_units: Callable[[int], int]
    optimizer: Callable[..., torch.optim.Optimizer]
    plain: int
    sizes: Sequence[int]
    most: int
    step_s: float
    paper: str
    rows: int
    doubled: bool = False


PARTS = {
    "resnet": Part(
        "layers",
        make_resnet,
        lambda blocks: 3 * blocks + 2,  # convolutions, and the stem and the head
        partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
        plain=167,
        sizes=(84, 167, 333),
        most=1_000,
        step_s=16 / 11.43,
        paper="504 in core, 1,916 by swapping, with 32 images 1,001",
        rows=16,
        doubled=True,
    ),
    "experts": Part(
        "experts per layer",
        make_mixture,
        lambda experts: experts,
        partial(torch.optim.AdamW, lr=1e-3),
        plain=12,
        sizes=(6, 12, 24, 48),
        most=400,
        step_s=8 / 7.8,
        paper="12 in core, 48 by swapping",
        rows=8,
    ),
    "length": Part(
        "time steps",
        make_unrolled,
        lambda spans: Unrolled.STEPS * spans,
        partial(torch.optim.Adam, lr=1e-3),
        plain=16,
        sizes=(4, 8, 16, 32, 128),
        most=128,
        step_s=4.64,
        paper="400 in core, 800 by swapping",
        rows=16,
    ),
}


@dataclass(frozen=True)
class Steps:
    """Some steps of one way at one size.

    Attributes:
        device_bytes, host_bytes: peaks.
        seconds: of a step.
        losses: of the steps.
        parameters: of the model.
        raised: whether the device's limit was exceeded; all else is then of steps without it.
    """

    device_bytes: int
    host_bytes: int
    seconds: float
    losses: Sequence[float]
    raised: bool = False
    parameters: int = 0

    @property
    def bytes(self) -> tuple[int, int]:
        """Peaks of device and host."""
        return self.device_bytes, self.host_bytes


def train_in_core(part: Part, made: Made, steps: int) -> tuple[list[float], list[float]]:
    """A plain loop; return losses and seconds of its steps."""
    model, batch, options = made
    optimizer, loss_of = part.optimizer(model.parameters()), options.get("loss", lambda out, _: out.loss)
    losses, seconds = [], []
    for _ in range(steps):
        began_s = time.perf_counter()
        loss = loss_of(model(**batch), batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began_s)
    return losses, seconds


def run_plan(policy: Policy, part: Part, made: Made, device: EmulatedDevice) -> Steps:
    """Make steps by the plan of a policy; one that raises is made without the limit."""
    model, batch, options = made
    lab = Lab(model, batch, part.optimizer(model.parameters()), device, **options)
    plan, results, raised = lab.plan(policy), [], False
    for _ in range(STEPS):
        try:
            results.append(lab.step(plan))
        except DeviceOutOfMemory:
            # The plan foresees the bytes of the measured batch; experts that get no token may get one in a later step.
            raised, lab = True, lab.on_device(EmulatedDevice())
            results.append(lab.step(plan))
    device_bytes = max(each.peak_device_bytes for each in results)
    host_bytes = max(each.peak_host_bytes for each in results)
    return Steps(device_bytes, host_bytes, plan.seconds, [each.loss for each in results], raised)


def run_relay(stash: Literal["device", "host"], part: Part, made: Made, device: EmulatedDevice) -> Steps:
    """Make steps by relay; the first is metered, the fastest other one counts."""
    model, batch, options = made
    config = RelayConfig(stash=stash, seed=0, verify="never")
    with Relay(model, part.optimizer, device, config=config, **options) as relay:
        results = [relay.step(batch) for _ in range(STEPS)]
        host_bytes = relay.host.peak
    device_bytes = max(each.peak_device_bytes for each in results)
    seconds = min(each.seconds for each in results[1:])
    return Steps(device_bytes, host_bytes, seconds, [each.loss for each in results])


def run_in_core(part: Part, made: Made, device: EmulatedDevice) -> Steps:
    """Make steps by the plan that keeps everything, for its bytes, and others in a plain loop, for their seconds."""
    _, seconds = train_in_core(part, copy.deepcopy(made), 2 * STEPS)
    return replace(run_plan(Plain(), part, made, device), seconds=min(seconds[1:]))


Way = Callable[[Part, Made, EmulatedDevice], Steps]
WAYS: dict[str, Way] = {
    "in core": run_in_core,
    "swap": partial(run_plan, Offload()),
    "relay": partial(run_relay, "device"),
    "both": partial(run_relay, "host"),
}


# -- one part ----------------------------------------------------------------------------------------------------------


def make(part: Part, size: int, rows: int | None = None) -> Made:
    """Make the model of a size and its batch, each time the same."""
    torch.manual_seed(0)
    return part.make(size, rows or part.rows)


class Machine:
    """The paper's machine at the scale of a part.

    Attributes:
        budgets: bytes of the device and of the host.
        link: figures of the emulated link.
        plain_s: seconds of a step of plain training at the largest size in core.
    """

    def __init__(self, part: Part, device_bytes: int | None, plain_s: float | None) -> None:
        self._part, self._reference = part, make(part, part.plain)
        self._losses, seconds = train_in_core(part, self._reference, STEPS)
        if device_bytes is None:
            with closing(EmulatedDevice()) as device:
                device_bytes = run_plan(Plain(), part, make(part, part.plain), device).device_bytes
        self.budgets, self.plain_s = (device_bytes, device_bytes * HOST_GB // DEVICE_GB), plain_s or min(seconds[1:])
        bytes_per_s = device_bytes * LINK_GB_PER_S / DEVICE_GB * part.step_s / self.plain_s
        self.link = {"h2d_bytes_per_s": bytes_per_s, "d2h_bytes_per_s": bytes_per_s}

    def run(self, way: Way, size: int, rows: int) -> Steps:
        """Make steps with the device's limit enforced; if a relay raises, without it, for its bytes."""
        made, device_bytes = make(self._part, size, rows), self.budgets[0]
        try:
            steps = self._run(way, made, device_bytes)
        except DeviceOutOfMemory:
            steps = replace(self._run(way, make(self._part, size, rows), None), raised=True)
        if steps.raised != (steps.device_bytes > device_bytes):
            raise RuntimeError(f"{steps}: the limit of {device_bytes} bytes was not enforced")
        if size == self._part.plain and rows == self._part.rows and not steps.raised:
            self._compare(steps, made[0])
        return replace(steps, parameters=sum(param.numel() for param in made[0].parameters()))

    def _run(self, way: Way, made: Made, memory_bytes: int | None) -> Steps:
        with closing(EmulatedDevice(memory_bytes, **self.link)) as device:
            return way(self._part, made, device)

    def _compare(self, steps: Steps, model: nn.Module) -> None:
        """Raise unless losses, weights and buffers are those of the plain loop, to the bit."""
        theirs = self._reference[0].state_dict()
        differing = [name for name, value in model.state_dict().items() if not torch.equal(value, theirs[name])]
        if steps.losses != self._losses or differing:
            raise RuntimeError(f"other bits than in core: losses {steps.losses}, {self._losses}; {differing[:6]}")

    def load(self, steps: Steps) -> float:
        """Share in use of the fuller memory; more than 1 does not fit."""
        return max(used / budget for used, budget in zip(steps.bytes, self.budgets, strict=True))

    def bound(self, steps: Steps) -> str:
        """Name the memories that are too small."""
        places = zip(("device", "host"), steps.bytes, self.budgets, strict=True)
        return " and ".join(name for name, used, budget in places if used > budget)


def search(machine: Machine, part: Part, run: Callable[[int], Steps]) -> int:
    """Return the largest size that fits both memories.

    The first guess is where lines through the bytes of two small sizes meet the budgets.
    """

    def load(size: int) -> float:
        return machine.load(run(size))

    a, b = part.sizes[0], part.plain
    guesses = [part.most]
    for less, more, budget in zip(run(a).bytes, run(b).bytes, machine.budgets, strict=True):
        if more > less:
            guesses.append(b + (budget - more) * (b - a) // (more - less))
    most = deepest(load, max(1, min(guesses)), 1.0, part.most)
    for size in part.sizes:
        if size < most:
            run(size)
    return most


def run_kept(
    tried: dict[str, dict[str, Any]], keep: Callable[[], object], machine: Machine, way: Way, rows: int, size: int
) -> Steps:
    """Make the steps of a size unless they were made before, and keep their figures."""
    if str(size) not in tried:  # text, as in JSON
        tried[str(size)] = asdict(machine.run(way, size, rows))
        keep()
    return Steps(**tried[str(size)])


def measure(name: str, ways: Sequence[str], again: bool, seconds_alone: bool = False) -> None:
    """Find the largest sizes and the seconds of a part, or seconds alone; keep every try."""
    part, path = PARTS[name], Path("out", "benchmarks", f"larger_{name}.json")
    record: dict[str, Any] = {"results": {}} if again or not path.exists() else json.loads(path.read_text())
    results = record["results"]
    machine = Machine(part, record.get("device_bytes"), record.get("plain_s"))
    figures = {"device_bytes": machine.budgets[0], "host_bytes": machine.budgets[1], **machine.link}
    record |= figures | {"plain_s": machine.plain_s}
    cases = [(way, way, part.rows) for way in WAYS]
    cases += [("swap, twice the rows", "swap", 2 * part.rows)] if part.doubled else []
    for case, way, rows in cases:
        found = results.setdefault(case, {"most": None, "tried": {}})
        if found["most"] is None and way in ways:
            run = partial(run_kept, found["tried"], partial(report, f"larger_{name}", record), machine, WAYS[way], rows)
            if seconds_alone:
                steps = {size: run(size) for size in (*part.sizes, part.plain) if case in WAYS}
                fitting = {part.in_units(size): each.seconds for size, each in steps.items() if machine.load(each) <= 1}
                print(
                    f"{case}, seconds: {', '.join(f'{size} {part.unit} {each:.3g}' for size, each in fitting.items())}"
                )
                continue
            found["most"] = search(machine, part, run)
            print(f"{case}: {part.in_units(found['most'])} {part.unit}")
            report(f"larger_{name}", record)
    results = {case: found for case, found in results.items() if found["most"]}
    print(f"\n{name}: {figures}, a step in core {machine.plain_s:.3g} s. The paper: {part.paper}")
    show_part(part, machine, results)


def show_part(part: Part, machine: Machine, results: dict[str, Any]) -> None:
    """The largest sizes, and seconds over sizes."""
    rows, seconds = [], {}
    for case, found in results.items():
        tried = {int(size): Steps(**steps) for size, steps in found["tried"].items()}
        largest, above = tried[found["most"]], tried.get(found["most"] + 1)
        bound = machine.bound(above) if above else "none: the most tried"
        size = f"{part.in_units(found['most']):,}"
        rows.append(
            [case, size, f"{largest.parameters:,}", largest.device_bytes / 1e6, largest.host_bytes / 1e6, bound]
        )
        shown = {*part.sizes, part.plain, found["most"]} & tried.keys()
        seconds |= {(size, case): tried[size].seconds for size in shown if size <= found["most"]}
    show(["way", f"most {part.unit}", "parameters", "device MB", "host MB", "one more exceeds"], rows)
    sizes = sorted({size for size, _ in seconds})
    lines = [[f"{part.in_units(size):,}", *(seconds.get((size, case), "") for case in results)] for size in sizes]
    show([part.unit, *(f"{case}, s" for case in results)], lines)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--seconds", action="store_true", help="without the search for the largest sizes")
    parser.add_argument("--again", action="store_true", help="run also what out/benchmarks has the results of")
    args = parser.parse_args()
    with threads(1):
        for name in args.part:
            measure(name, args.ways, args.again, args.seconds)


if __name__ == "__main__":
    main()
