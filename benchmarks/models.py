"""Which model classes train by relay as they do in core: every class of transformers' auto mappings, made small.

    python benchmarks/models.py                               transformers; writes docs/MODELS.md
    python benchmarks/models.py --task causal --limit 20      some of them; writes nothing
    python benchmarks/models.py --only BertForMaskedLM GPT2LMHeadModel
    python benchmarks/models.py --set timm                    where it is installed; so with torchvision

Each class has a separate process, with a time limit. There it is made twice from one seed and trained for two steps: in
core by a plain loop of a few lines, and by relay with the stash on the host and the layers that it finds by itself. Losses,
parameters and buffers are compared by their bits. Exits with 1 if any is wrong or has crashed.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

import _shrink  # noqa: E402
from _children import Failure, first_line, run  # noqa: E402
from _common import show  # noqa: E402

from l2l_core import Relay, RelayConfig, TornStep  # noqa: E402

TASKS = {  # what a class is trained for -> mappings of transformers
    "causal": ["CAUSAL_LM"],
    "masked": ["MASKED_LM"],
    "sequence to sequence": ["SEQ_TO_SEQ_CAUSAL_LM"],
    "speech": ["SPEECH_SEQ_2_SEQ"],
    "image": ["IMAGE_CLASSIFICATION"],
    "audio": ["AUDIO_CLASSIFICATION"],
    "ctc": ["CTC"],
    "sequence": ["SEQUENCE_CLASSIFICATION"],
    "tokens": ["TOKEN_CLASSIFICATION"],
    "questions": ["QUESTION_ANSWERING"],
    "segmentation": ["SEMANTIC_SEGMENTATION"],
}
MICRO_BATCHES, STEPS, MOST_PARAMETERS = 2, 2, 60_000_000
GOOD, BAD = ("equal", "refused", "untrainable"), ("wrong", "torn", "failed", "crashed", "timed out")
CONFIG = RelayConfig(micro_batches=MICRO_BATCHES, stash="host", seed=1)


@dataclass
class Outcome:
    """Outcome of a class.

    Attributes:
        outcome: one of `GOOD` and `BAD`; "untrainable" means that plain training failed, or gives other bits each time.
        reason: the first line of the error, or how it was made small.
        layers: how many the relay has found.
        mixes: what the relay says of a loss whose parts do not give the loss of the batch: "refused" or "warned".
        gap: relative difference between the loss of the whole batch and the mean, or sum, of its micro-batches', in core.
    """

    name: str
    task: str
    outcome: str
    reason: str = ""
    layers: int = 0
    mixes: str = ""
    gap: float = 0.0


Make = Callable[[], tuple[nn.Module, Callable[[int], Any], Callable[[Any, Any], torch.Tensor] | None, str]]


class Untrainable(Exception):
    """Plain training of the class fails."""


# -- one class -------------------------------------------------------------------------------------------------------


def judge(name: str, task: str, make: Make) -> Outcome:
    """Train a class both ways."""
    try:
        losses, expected = in_core(make)
        outcome = by_relay(name, task, make, losses, expected)
        outcome.mixes, outcome.gap = mixing(make)
        if outcome.outcome != "equal":  # two plain runs may differ too; then there is nothing to be equal to
            again, other = in_core(make)
            if again != losses or differences(other, expected):
                raise Untrainable("plain training from one seed gives other bits each time: it draws unseeded numbers")
        return outcome
    except Untrainable as error:
        return Outcome(name, task, "untrainable", first_line(error))


def in_core(make: Make) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the results of plain training."""
    model, batch_of, loss, _ = make()
    losses, state = train_in_core(model, batch_of, loss)
    if not numpy.isfinite(losses).all():
        raise Untrainable("the loss is nan in core")
    return losses, state


def by_relay(name: str, task: str, make: Make, losses: list[float], expected: dict[str, torch.Tensor]) -> Outcome:
    """Return the outcome of the class by relay."""
    model, batch_of, loss, how = make()
    before = state_of(model)
    relay = None
    try:
        with Relay(model, optimizer_of, "cpu", loss=loss, config=CONFIG, loss_over="micro-batch") as relay:
            layers = len(relay.stack)
            numpy.random.seed(0)
            got = [relay.step(batch_of(step)).loss for step in range(STEPS)]
    except TornStep as error:
        return Outcome(name, task, "torn", first_line(error))
    except (ValueError, TypeError, RuntimeError) as error:
        unharmed = differences(state_of(model), before) == []
        is_clear = type(error) in (ValueError, TypeError, RuntimeError) and unharmed
        return Outcome(name, task, "refused" if is_clear else "failed", f"{type(error).__name__}: {first_line(error)}")
    except Exception as error:
        return Outcome(name, task, "failed", f"{type(error).__name__}: {first_line(error)}")
    wrong = differences(state_of(model), expected)
    if wrong or got != losses:
        return Outcome(
            name, task, "wrong", f"losses {got} for {losses}; {len(wrong)} tensors, {', '.join(wrong[:3])}", layers
        )
    return Outcome(name, task, "equal", how, layers)


def mixing(make: Make) -> tuple[str, float]:
    """Return what the relay says of the class's loss, and how far micro-batches are from the batch in evaluation mode."""
    model, batch_of, loss, _ = make()
    batch, said = batch_of(0), ""
    model.eval()
    with torch.no_grad():
        whole = float(call(model, batch, loss))
        parts = [float(call(model, part, loss)) for part in cut(batch)]
    model.train()
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            Relay(model, optimizer_of, "cpu", loss=loss, config=CONFIG) as relay,
        ):
            warnings.simplefilter("always")
            relay.evaluate(batch)
        said = "warned" if any("in two parts" in str(each.message) for each in caught) else ""
    except (ValueError, TypeError, RuntimeError) as error:
        said = "refused" if "in two parts" in str(error) else ""
    return said, min(abs(whole - sum(parts) / n) for n in (1, len(parts))) / max(abs(whole), 1e-12)


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def train_in_core(
    model: nn.Module, batch_of: Callable[[int], Any], loss_of: Callable[[Any, Any], torch.Tensor] | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The plain loop: losses and the state after it."""
    for module in model.modules():  # a cache gives keys other strides, by which kernels round
        if getattr(getattr(module, "config", None), "use_cache", None):
            module.config.use_cache = False
    optimizer = optimizer_of(model.parameters())
    losses = []
    numpy.random.seed(0)  # transformers draws masks of speech from it
    for step in range(STEPS):
        parts = cut(batch_of(step))
        total = torch.zeros(())
        for k, part in enumerate(parts):
            seed = CONFIG.micro_batch_seed(step, k)
            torch.manual_seed(seed), random.seed(seed)
            loss = call(model, part, loss_of) / len(parts)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(float(total))
    return losses, state_of(model)


def cut(batch: Any) -> list[Any]:
    if isinstance(batch, dict):
        return [{name: value.chunk(MICRO_BATCHES)[k] for name, value in batch.items()} for k in range(MICRO_BATCHES)]
    return [tuple(value.chunk(MICRO_BATCHES)[k] for value in batch) for k in range(MICRO_BATCHES)]


def call(model: nn.Module, part: Any, loss_of: Callable[[Any, Any], torch.Tensor] | None) -> torch.Tensor:
    if loss_of is not None:
        return loss_of(model(*part[:-1]), part)
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    return model(**part, **({"use_cache": False} if takes_cache else {})).loss


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in named}


def differences(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in one.items() if not same(tensor, other[name])]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


# -- the sets --------------------------------------------------------------------------------------------------------


def of_transformers(tasks: Sequence[str]) -> Iterator[tuple[str, str, Make]]:
    """Every class of the mappings once."""
    from transformers.models.auto import modeling_auto

    seen = set()
    for task in tasks:
        for mapping in TASKS[task]:
            named = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
            for kind, classes in named.items():
                for name in (classes,) if isinstance(classes, str) else classes:
                    if name not in seen:
                        seen.add(name)
                        yield name, task, partial(make_transformer, name, kind, task)


def make_transformer(name: str, kind: str, task: str) -> Any:
    """The class in the smallest form that trains in core, with a batch that it takes."""
    import transformers

    try:
        config = transformers.CONFIG_MAPPING[kind]()
        cls = getattr(transformers, name)
    except Exception as error:
        raise Untrainable(f"no configuration by default: {first_line(error)}") from error
    kind_of_config = getattr(cls, "config_class", None)
    if kind_of_config is not None and not isinstance(config, kind_of_config):
        config = next((part for part in _shrink.parts(config) if isinstance(part, kind_of_config)), config)
    reasons = []
    for how, small in _shrink.shrunk(config, task):
        make = partial(seeded, cls, small)
        try:
            model = make()
        except Exception as error:
            reasons.append(f"{how}: {first_line(error)}")
            continue
        for batch_of in _shrink.batches(model, task):
            try:
                way = trained_by(make, batch_of, task)
            except Exception as error:
                reasons.append(f"{how}: {first_line(error)}")
            else:
                return make(), *way, how
        gc.collect()
    raise Untrainable(reasons[0])


def trained_by(make: Callable[[], nn.Module], batch_of: Callable[[int], Any], task: str) -> tuple[Any, Any]:
    """The batch and the loss: the model's own, or that of its logits where a classifier of images has none."""
    try:
        try_out(make(), batch_of)
    except AttributeError as error:
        if task != "image" or "attribute 'loss'" not in str(error):
            raise
        batch_of = partial(values_of, batch_of)
        try_out(make(), batch_of, classify)
        return batch_of, classify
    return batch_of, None


def values_of(batch_of: Callable[[int], dict[str, Any]], seed: int) -> tuple[Any, ...]:
    return tuple(batch_of(seed).values())


def seeded(cls: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        if (count := sum(p.numel() for p in cls(config).parameters())) > MOST_PARAMETERS:
            raise Untrainable(f"{count / 1e6:.0f} million parameters at its smallest")
    torch.manual_seed(0)
    model = cls(config).float().train()
    if hasattr(model, "set_default_language"):
        model.set_default_language(model.config.languages[0])
    return model


def try_out(model: nn.Module, batch_of: Callable[[int], Any], loss_of: Any = None) -> None:
    """One micro-batch forward and backward."""
    loss = call(model, cut(batch_of(0))[0], loss_of)
    loss.backward()
    if not torch.isfinite(loss):
        raise Untrainable(f"the loss is {loss.item()}")


def of_timm() -> Iterator[tuple[str, str, Make]]:
    """The smallest model of each of its modules."""
    import timm

    for module in timm.list_modules():
        if names := timm.list_models(module=module):
            yield (
                min(names, key=lambda n: (len(n), n)),
                f"timm, {module}",
                partial(make_vision, timm.create_model, names),
            )


def of_torchvision() -> Iterator[tuple[str, str, Make]]:
    """Its classifiers."""
    import torchvision

    for name in torchvision.models.list_models(module=torchvision.models):
        yield name, "torchvision", partial(make_vision, torchvision.models.get_model, [name])


def make_vision(create: Callable[..., nn.Module], names: Sequence[str]) -> Any:
    name, reasons = min(names, key=lambda n: (len(n), n)), []
    for side in (64, 128, 224, 299):

        def batch_of(seed: int, side: int = side) -> tuple[torch.Tensor, torch.Tensor]:
            generator = torch.Generator().manual_seed(seed)
            shape = (4, 3, side, side)
            return torch.randn(shape, generator=generator), torch.randint(10, (4,), generator=generator)

        def make() -> nn.Module:
            torch.manual_seed(0)
            return create(name, num_classes=10).train()

        try:
            try_out(make(), batch_of, classify)
        except Exception as error:
            reasons.append(first_line(error))
        else:
            return make(), batch_of, classify, f"pictures of {side}"
    raise Untrainable(reasons[0])


def classify(outputs: Any, batch: Any) -> torch.Tensor:
    logits = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return nn.functional.cross_entropy(logits, batch[-1])


# -- processes -------------------------------------------------------------------------------------------------------


def judged(name: str, task: str, make: Make) -> dict[str, Any]:
    return asdict(judge(name, task, make))


def outcomes_of(candidates: Iterable[tuple[str, str, Make]], jobs: int, limit_s: float) -> Iterator[Outcome]:
    """Test each class in a separate process."""
    tasks = (((name, task), partial(judged, name, task, make)) for name, task, make in candidates)
    for (name, task), answer in run(tasks, jobs, limit_s):
        if isinstance(answer, Failure):
            yield Outcome(name, task, answer.kind, answer.reason)
        else:
            yield Outcome(**answer)


# -- words -----------------------------------------------------------------------------------------------------------


def summary(outcomes: Sequence[Outcome]) -> list[list[Any]]:
    tasks = dict.fromkeys(outcome.task.split(",")[0] for outcome in outcomes)
    rows = [[task, *counts([o for o in outcomes if o.task.split(",")[0] == task])] for task in tasks]
    return [*rows, ["all", *counts(outcomes)]]


HEADER = ["for", "classes", "train in core", "equal", "refused", "bad"]


def counts(outcomes: Sequence[Outcome]) -> list[int]:
    kinds = Counter(outcome.outcome for outcome in outcomes)
    bad = sum(kinds[kind] for kind in BAD)
    return [len(outcomes), len(outcomes) - kinds["untrainable"], kinds["equal"], kinds["refused"], bad]


def document(outcomes: Sequence[Outcome], versions: str) -> str:
    """docs/MODELS.md."""
    lines = [
        "# Models",
        "",
        "`python benchmarks/models.py` shrinks every class of transformers' auto mappings through its configuration and",
        f"trains it for {STEPS} steps: in core with a plain loop, and by relay with the stash on the host, the layers of",
        '`find_layers` and `loss_over="micro-batch"`, as the plain loop accumulates. *Equal* means the same bits in losses,',
        "parameters and buffers. *Refused* means an error before anything was trained. A *bad* class differs, fails in",
        "another way, or takes too long.",
        "",
        f"Made with {versions}.",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        *("| " + " | ".join(map(str, row)) + " |" for row in summary(outcomes)),
    ]
    for kind, title in (
        *((kind, kind.capitalize()) for kind in BAD),
        ("refused", "Refused"),
        ("untrainable", "Not trainable in core when shrunk, or not deterministic"),
    ):
        if some := [outcome for outcome in outcomes if outcome.outcome == kind]:
            lines += ["", f"## {title}", "", "| class | for | reason |", "|---|---|---|"]
            lines += [f"| {o.name} | {o.task} | {escaped(o.reason)} |" for o in some]
    lines += mixing_table(outcomes)
    lines += ["", "## Equal", ""]
    for task in dict.fromkeys(outcome.task for outcome in outcomes):
        if some := [outcome for outcome in outcomes if outcome.task == task and outcome.outcome == "equal"]:
            lines += [f"**{task}** (layers found): " + ", ".join(f"{o.name} ({o.layers})" for o in some), ""]
    return "\n".join(lines).rstrip() + "\n"


def mixing_table(outcomes: Sequence[Outcome]) -> list[str]:
    """Classes whose loss of a batch is not that of its micro-batches, by the relay's comparison or in core."""
    some = [o for o in outcomes if o.outcome != "untrainable" and (o.mixes or o.gap > 1e-5)]
    return [
        "",
        "## Losses that mix rows",
        "",
        "Without `loss_over`, the relay compares the loss of a few rows with that of their parts. *refused* and *warned* are",
        "what it says. The figure is measured in core, in evaluation mode: how far the mean loss of the two micro-batches, or",
        "their sum, is from the loss of the batch.",
        "",
        *(
            ["| class | for | relay | in core |", "|---|---|---|---|"]
            if some
            else ["None of the classes above, as shrunk here."]
        ),
        *(f"| {o.name} | {o.task} | {o.mixes or '-'} | {100 * o.gap:.2g} % |" for o in some),
    ]


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=["transformers", "timm", "torchvision"], default="transformers")
    parser.add_argument("--task", choices=list(TASKS), nargs="*")
    parser.add_argument("--only", nargs="*", help="names of classes")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2)))
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of a class")
    parser.add_argument("--out", type=Path, help="where the outcomes go, a line of JSON each")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()
    sets = {
        "transformers": partial(of_transformers, args.task or list(TASKS)),
        "timm": of_timm,
        "torchvision": of_torchvision,
    }
    candidates = list(sets[args.set]())
    if args.only:
        candidates = [each for each in candidates if each[0] in args.only]
        if missing := set(args.only) - {name for name, *_ in candidates}:
            parser.error(f"no such class: {', '.join(sorted(missing))}")
    outcomes = []
    for outcome in outcomes_of(candidates[: args.limit], args.jobs, args.seconds):
        outcomes.append(outcome)
        print(
            f"{outcome.outcome:12} {outcome.task:22} {outcome.name:50} {outcome.layers:3} {outcome.reason[:160]}",
            flush=True,
        )
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(asdict(outcome)) + "\n")
    order = {name: index for index, (name, *_) in enumerate(candidates)}
    outcomes.sort(key=lambda outcome: order[outcome.name])
    print()
    show(HEADER, summary(outcomes))
    if args.set == "transformers" and not (args.task or args.only or args.limit):
        versions = f"transformers {transformers.__version__}, torch {torch.__version__}"
        Path("docs/MODELS.md").write_text(document(outcomes, versions))
    sys.exit(any(outcome.outcome in BAD for outcome in outcomes))


if __name__ == "__main__":
    main()
