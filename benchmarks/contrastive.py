"""In-batch negatives under a memory budget: one loss of the whole batch, beside GradCache's way and plain accumulation.

    python benchmarks/contrastive.py
    python benchmarks/contrastive.py --rows 512 --micro-batches 32 --steps 200

A text encoder learns to find a function by its docstring (InfoNCE over the batch); the pairs are the functions of Python's
standard library, a fifth of which are held out. All ways start from the same weights and see the same batches:

- undivided: plain training on the whole batch, the reference;
- relay: `loss_over="batch"`, the outputs of all micro-batches joined, one loss;
- GradCache (Gao et al., https://arxiv.org/abs/2101.06983): a forward without graphs for the embeddings, the loss and their
  gradients, then a second forward and the backward of each micro-batch;
- accumulation: every micro-batch is a loss of its own, with its own rows as negatives.

Quality is the share of held-out docstrings whose function is the most similar one of all held-out functions. Bytes are those on
the device at most in a step: the relay's ledger; otherwise every storage from the operation that makes it to its end, weights,
gradients and optimizer state included, which in core are on the device.
"""

from __future__ import annotations

import argparse
import ast
import copy
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _common import alternate, medians, ratio, report, show
from torch import Tensor, nn
from transformers import BertConfig, BertModel

from l2l_core import EmulatedDevice, Relay, RelayConfig
from workbench.lessons.plain_training import StorageMeter

VOCABULARY = 4096
Batch = dict[str, Tensor]


def docstring_pairs() -> Iterator[tuple[str, str]]:
    """First line of a docstring, and the body of its function without it."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(node.body) > 1 and (text := ast.get_docstring(node)):
                body = "\n".join(ast.unparse(statement) for statement in node.body[1:])
                yield text.split("\n\n")[0], f"{node.name} {ast.unparse(node.args)} {body}"


def tokens_of(text: str, length: int) -> list[int]:
    """Numbers of a text's words, parts of names apart; 0 pads."""
    words = re.findall(r"[A-Za-z][a-z]+|[A-Z]+|\d+|[^\sA-Za-z\d_]", text)[:length]
    numbers = [1 + zlib.crc32(word.lower().encode()) % (VOCABULARY - 1) for word in words]
    return numbers + [0] * (length - len(numbers))


class Encoder(nn.Module):
    """Both texts through one BERT; a mean over words, of length one."""

    def __init__(self, layers: int, width: int, length: int) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            max_position_embeddings=length,
        )
        self.bert = BertModel(config, add_pooling_layer=False)
        self.scale = nn.Parameter(torch.tensor(3.0))  # read by the loss

    def encode(self, tokens: Tensor) -> Tensor:
        mask = tokens != 0
        hidden = self.bert(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        return F.normalize((hidden * weights).sum(1) / weights.sum(1).clamp(min=1), dim=-1)

    def forward(self, text: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        return self.encode(text), self.encode(code)


def info_nce(model: Encoder, outputs: tuple[Tensor, Tensor], batch: Any = None) -> Tensor:
    similar = outputs[0] @ outputs[1].T * model.scale.exp()
    targets = torch.arange(len(similar))
    return (F.cross_entropy(similar, targets) + F.cross_entropy(similar.T, targets)) / 2


def parts_of(batch: Batch, count: int) -> list[Batch]:
    return [dict(zip(batch, each, strict=True)) for each in zip(*(v.chunk(count) for v in batch.values()), strict=True)]


def undivided(model: Encoder, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    loss = info_nce(model, model(**batch))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def accumulation(model: Encoder, optimizer: torch.optim.Optimizer, batch: Batch, count: int) -> float:
    total = 0.0
    for part in parts_of(batch, count):
        loss = info_nce(model, model(**part)) / count
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    return total


def grad_cache(model: Encoder, optimizer: torch.optim.Optimizer, batch: Batch, count: int) -> float:
    parts, states, embedded = parts_of(batch, count), [], []
    with torch.no_grad():
        for part in parts:
            states.append(torch.get_rng_state())  # the second forward needs the same dropout
            embedded.append(model(**part))
    whole = [torch.cat(each).requires_grad_() for each in zip(*embedded, strict=True)]
    loss = info_nce(model, (whole[0], whole[1]))
    loss.backward()
    after = torch.get_rng_state()
    grads = [each.grad.chunk(count) for each in whole if each.grad is not None]
    for k, part in enumerate(parts):
        torch.set_rng_state(states[k])
        torch.autograd.backward(model(**part), [each[k] for each in grads])
    torch.set_rng_state(after)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def found_share(model: Encoder, held_out: Batch) -> float:
    """Share of texts whose code is the most similar of all."""
    model.eval()
    with torch.no_grad():
        texts, codes = zip(*(model(**part) for part in parts_of(held_out, 8)), strict=True)
    model.train()
    best = (torch.cat(texts) @ torch.cat(codes).T).argmax(1)
    return float((best == torch.arange(len(best))).float().mean())


def main() -> None:
    """Train in all ways, and report quality, bytes and seconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=48)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--micro-batches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3, help="of timed steps, all ways in turn")
    args = parser.parse_args()

    pairs = list(dict.fromkeys(docstring_pairs()))
    columns = zip(*([tokens_of(each, args.length) for each in pair] for pair in pairs), strict=True)
    every = dict(zip(("text", "code"), map(torch.tensor, columns), strict=True))
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
    held_out = {name: value[order[: len(pairs) // 5]] for name, value in every.items()}
    train = {name: value[order[len(pairs) // 5 :]] for name, value in every.items()}
    draw = torch.Generator().manual_seed(1)
    choices = [torch.randperm(len(train["text"]), generator=draw)[: args.rows] for _ in range(args.steps)]
    batches = [{name: value[chosen] for name, value in train.items()} for chosen in choices]
    torch.manual_seed(0)
    first = Encoder(args.layers, args.width, args.length)
    make_optimizer = partial(torch.optim.AdamW, lr=1e-3)
    count = args.micro_batches

    models: dict[str, Encoder] = {}
    steps: dict[str, Callable[[Batch], float]] = {}
    peaks: dict[str, Callable[[], int]] = {}
    in_core: dict[str, Callable[..., float]] = {
        "undivided": undivided,
        "GradCache": partial(grad_cache, count=count),
        "accumulation": partial(accumulation, count=count),
    }
    for name, function in in_core.items():
        models[name] = model = copy.deepcopy(first)
        steps[name] = step = partial(function, model, make_optimizer(model.parameters()))
        peaks[name] = partial(measure_peak, model, step, batches[0])
    models["relay"] = model = copy.deepcopy(first)
    loss, config = partial(info_nce, model), RelayConfig(micro_batches=count, stash="host")
    with Relay(model, make_optimizer, EmulatedDevice(), loss=loss, loss_over="batch", config=config) as relay:
        steps["relay"] = lambda batch: relay.step(batch).loss
        peaks["relay"] = lambda: relay.step(batches[0]).peak_device_bytes
        rows, last = {}, {}
        for name, step in steps.items():
            torch.manual_seed(2)
            losses = [step(batch) for batch in batches]
            last[name] = sum(losses[-10:]) / len(losses[-10:])
        shares = {name: found_share(models[name], held_out) for name in steps}
        measured = {name: measure() for name, measure in peaks.items()}
        seconds = alternate({name: partial(step, batches[0]) for name, step in steps.items()}, args.rounds)
    for name in steps:
        rows[name] = [last[name], shares[name], measured[name] / 1e6, medians(seconds)[name]]
    print(f"{len(pairs)} pairs, {len(held_out['text'])} held out; {args.rows} rows in {count} micro-batches\n")
    show(["way", "last losses", "found", "device MB", "s per step"], [[name, *row] for name, row in rows.items()])
    ratios = {name: ratio(seconds, name, "GradCache") for name in steps}
    show(
        ["seconds over GradCache's", "median", "min", "max"], [[name, *each.values()] for name, each in ratios.items()]
    )
    report("contrastive", {"settings": vars(args), "ways": rows, "ratios": ratios})


def measure_peak(model: Encoder, step: Callable[[Batch], float], batch: Batch) -> int:
    """Bytes on the device at most in a step in core."""
    with StorageMeter([*model.parameters(), *model.buffers(), *batch.values()]) as meter:
        step(batch)  # makes the optimizer's state where there is none
        step(batch)
    return meter.peak


if __name__ == "__main__":
    main()
