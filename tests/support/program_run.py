"""One program both ways: plain accumulation, written here with torch alone, against the relay; and a verdict.

Of the relay's package only the public surface is used: `Relay`, `Device`, `RelayConfig` and its rule for seeds, `TornStep`.
One constant is changed from outside, so that small layers trickle over the link as large ones do.
"""

from __future__ import annotations

import math
import random
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from program import Built, Program

import l2l_core.schedule_rules
from l2l_core import Device, Relay, RelayConfig, TornStep

ENGINE = str(Path(l2l_core.__file__).parent)
BAD = ("wrong", "torn", "crash", "hang", "ugly", "late")
_REMEDY = re.compile(
    r"\b(instead|pass|use|keep|return|call|give|read|remove|register|copy|make|set|let|move|put|train|run|detach|clone|only)\b",
    re.IGNORECASE,
)
State = dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    `kind` is held, refused, untrainable (plain training fails, or is not a function of the seed), or one of `BAD`: wrong
    (other bits, or hooks that saw something else), torn (a step that failed and left another state), late (refused, but not
    when this way was taken first), ugly (refused without a sentence that says what to do), crash, hang. `cause` groups
    outcomes that are probably alike.
    """

    seed: int
    kind: str
    cause: str = ""
    features: list[str] = field(default_factory=list)
    trace: str = ""

    @property
    def is_bad(self) -> bool:
        return self.kind in BAD

    def __str__(self) -> str:
        return f"{self.seed:7} {self.kind:8} {self.cause}   [{', '.join(self.features)}]"


class Untrainable(Exception):
    """Plain training cannot run the program, or gives no finite or no definite result."""


@dataclass
class Step:
    """What a plain step gave."""

    loss: float
    state: State
    way: list[Any]


def judge(program: Program, device: Device | None = None) -> Outcome:
    """Run a program both ways and compare after every step; on the CPU, or on a GPU, where plain training runs there too."""

    def outcome(kind: str, cause: str = "", trace: str = "") -> Outcome:
        return Outcome(program.seed, kind, cause, program.features, trace)

    try:
        built, again = Built(program), Built(program)
        where = torch.device("cpu") if device is None else device.torch_device
        steps, repeated = list(_plain(program, built, where)), list(_plain(program, again, where))
        for one, other in zip(steps, repeated, strict=True):
            if differing(one.state, other.state) or one.loss != other.loss:
                raise Untrainable("two plain runs differ")
    except Exception as error:
        return outcome("untrainable", f"{type(error).__name__}: {error}"[:100], traceback.format_exc())
    kind, cause, trace = _compare(program, steps, built, device)
    return outcome(kind, cause, trace)


# -- plain training ----------------------------------------------------------------------------------------------------


def _micro_batches(tensors: tuple[torch.Tensor, ...], count: int) -> list[tuple[torch.Tensor, ...]]:
    size = math.ceil(len(tensors[0]) / count)
    if math.ceil(len(tensors[0]) / size) == count:
        parts = [tensor.split(size) for tensor in tensors]
    else:
        parts = [tensor.tensor_split(count) for tensor in tensors]
    return [tuple(part.clone() for part in each) for each in zip(*parts, strict=True)]


def _plain(program: Program, built: Built, where: torch.device) -> Iterator[Step]:
    """Gradient accumulation in core, step by step."""
    config = _config(program)
    built.model.to(where)
    layers = list(built.model.layers)
    for index, layer in enumerate(layers):
        layer.register_forward_pre_hook(_notes_way(built, index), with_kwargs=True)
    for step in range(len(program.settings.rows)):
        built.way.clear()
        batch = tuple(tensor.to(where) for tensor in program.batch(step))
        parts = _micro_batches(batch, config.micro_batches)
        counts = [len(part[0]) for part in parts]
        even = len(set(counts)) == 1
        losses = []
        for k, part in enumerate(parts):
            built.way.append(("rows", counts[k]))
            torch.manual_seed(config.micro_batch_seed(step, k))
            random.seed(config.micro_batch_seed(step, k))
            loss = built.objective(built.model, part) / (float(len(parts)) if even else sum(counts) / counts[k])
            loss.backward()
            losses.append(loss.detach())
        grads = [p.grad for p in built.model.parameters() if p.grad is not None]
        if not all(bool(torch.isfinite(t).all()) for t in losses + grads):
            raise Untrainable("loss or gradient is not finite")
        built.optimizer.step()
        built.optimizer.zero_grad(set_to_none=True)
        yield Step(float(sum(losses)), state_of(built.model, built.optimizer), [*built.way])


def _notes_way(built: Built, index: int) -> Any:
    def note(module: Any, args: Any, kwargs: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        shapes = [(tuple(t.shape), t.requires_grad, t.dtype) for t in leaves if isinstance(t, torch.Tensor)]
        built.way.append((index, shapes, torch.is_grad_enabled()))

    return note


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Parameters, buffers and the optimizer's state, in copies on the host."""
    state: State = {name: tensor.detach().cpu().clone() for name, tensor in model.named_parameters()}
    state |= {name: tensor.detach().cpu().clone() for name, tensor in model.named_buffers()}
    for index, entry in optimizer.state_dict()["state"].items():
        state |= {f"optimizer {index} {name}": torch.as_tensor(value).cpu().clone() for name, value in entry.items()}
    return state


def differing(one: State, other: State) -> list[str]:
    """Names under which the bits differ."""
    names = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        same = a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
        names += [] if same else [name]
    return sorted(names)


# -- the relay -----------------------------------------------------------------------------------------------------------


def _config(program: Program) -> RelayConfig:
    chosen = program.settings
    stay = len(program.layers) if chosen.schedule == "depth_first" else 0
    return RelayConfig(
        micro_batches=chosen.micro_batches,
        ahead=chosen.ahead,
        keep=stay,
        resident=max(0, stay - chosen.ahead - 1),
        schedule=chosen.schedule,  # type: ignore[arg-type]
        stash=chosen.stash,  # type: ignore[arg-type]
        update=chosen.update,  # type: ignore[arg-type]
        meter=chosen.meter,  # type: ignore[arg-type]
        seed=chosen.seed,
        verify="never" if "seen(" in program.source() else "first",  # calls are counted
    )


def _compare(program: Program, steps: list[Step], plain: Built, device: Device | None) -> tuple[str, str, str]:
    l2l_core.schedule_rules.MIN_CHUNK_BYTES = program.settings.piece_bytes
    built = Built(program)
    before = state_of(built.model, built.optimizer)
    try:
        relay = Relay(
            built.model,
            built.optimizer,
            device=device or "cpu",
            layers=list(built.model.layers),
            objective=built.objective,
            loss_over="micro-batch",  # the oracle accumulates
            config=_config(program),
        )
    except Exception as error:
        return _refusal(error, [], "")
    with relay:
        ways: list[list[Any]] = []
        for index, step in enumerate(steps):
            try:
                result = relay.step(program.batch(index))
            except Exception as error:
                changed = differing(before, state_of(relay.model, relay.optimizer))
                late = "" if step.way not in ways else f"at step {index}, "
                return _refusal(error, changed, late)
            before = state_of(relay.model, relay.optimizer)
            if names := differing(before, step.state):
                return "wrong", _cause(names, before, step.state, built), f"step {index}: {names}"
            if result.loss != step.loss:
                return "wrong", "loss", f"step {index}: {result.loss!r} and not {step.loss!r}"
            ways.append(step.way)
    if built.calls != plain.calls:
        tags = sorted(
            tag.rstrip(" 0123456789") for tag in built.calls | plain.calls if built.calls[tag] != plain.calls[tag]
        )
        return "wrong", f"number of hook calls: {', '.join(tags)}", f"{dict(built.calls)} and not {dict(plain.calls)}"
    if sorted(built.seen) != sorted(plain.seen):
        tags = sorted(
            {a[0].rstrip(" 0123456789") for a, b in zip(sorted(built.seen), sorted(plain.seen), strict=True) if a != b}
        )
        return "wrong", f"what hooks see: {', '.join(tags)}", ""
    return "held", "", ""


def _cause(names: list[str], one: State, other: State, built: Built) -> str:
    """What sort of state differs, and whether by more than rounding."""
    buffers = {name for name, _ in built.model.named_buffers()}
    kinds = sorted({"buffers" if name in buffers else "parameters" for name in names})
    if any(name not in one or name not in other for name in names):
        return f"other state of {' and '.join(kinds)}"
    gaps = [_gap(one[name].double(), other[name].double()) for name in names if not name.startswith("optimizer")]
    return f"{'rounding' if max(gaps, default=0.0) < 1e-5 else 'gross'} of {' and '.join(kinds)}"


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / (b.abs().max() + 1e-3))


def _refusal(error: Exception, changed: list[str], late: str) -> tuple[str, str, str]:
    trace = "".join(traceback.format_exception(error))
    cause = f"{late}{_summary(error)}"
    if isinstance(error, TornStep):
        return "torn", _summary(error.__cause__ or error), trace  # type: ignore[arg-type]
    if changed:
        return "torn", f"changed {changed[:3]}: {cause}", trace
    if not is_clear(error):
        return "ugly", cause, trace
    return ("late" if late else "refused"), cause, trace


def is_clear(error: BaseException) -> bool:
    """Whether an error was raised on purpose by the relay, in a sentence that says what to do."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not frames[-1].filename.startswith(ENGINE) or isinstance(error, AssertionError):
        return False
    on_purpose = (frames[-1].line or "").lstrip().startswith("raise")
    return on_purpose and len(str(error).split()) >= 10 and _REMEDY.search(str(error)) is not None


def _summary(error: BaseException) -> str:
    inside = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(ENGINE)]
    where = f" in {Path(inside[-1].filename).name}:{inside[-1].name}" if inside else ""
    text = re.sub(r"\d+", "N", re.sub(r"\[[^\]]*\]|\([^)]*\)", "", str(error)))[:90].replace("\n", " ")
    return f"{type(error).__name__}{where}: {text}"
