"""Make a program smaller while its outcome stays of the same kind and cause: delta debugging over lines and settings."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

from program import Layer, Program, Settings
from program_run import Outcome, judge

Judge = Callable[[Program], Outcome]
_NAME = re.compile(r"\bh\d+\b")


def reduce(program: Program, verdict: Judge = judge, limit_s: float = 300.0) -> tuple[Program, Outcome]:
    """The smallest program found with an outcome like that of `program`.

    Raises:
        ValueError: the program is not bad or refused, so that there is nothing to keep.
    """
    outcome, until = verdict(program), time.monotonic() + limit_s
    if outcome.kind in ("held", "untrainable"):
        raise ValueError(f"program {program.seed} is {outcome.kind}: nothing to reduce ({outcome.cause})")
    before = None
    while program != before and time.monotonic() < until:
        before = program
        for candidates in _PASSES:
            tried = 0
            while tried is not None and time.monotonic() < until:
                tried, program = _first_alike(
                    islice(candidates(program), tried, None), tried, program, outcome, verdict, until
                )
    return program, outcome


def _first_alike(
    candidates: Iterable[Program], tried: int, program: Program, outcome: Outcome, verdict: Judge, until: float
) -> tuple[int | None, Program]:
    """The first candidate with the same outcome, and how many come before it; None and `program` if there is none."""
    for number, candidate in enumerate(candidates, start=tried):
        if time.monotonic() > until:
            break
        found = verdict(candidate)
        if (found.kind, found.cause) == (outcome.kind, outcome.cause):
            return number, candidate
    return None, program


def _places(program: Program) -> Iterator[tuple[list[str], Callable[[list[str]], Program]]]:
    """Every list of lines, with how to put another one in its place."""
    yield program.body, lambda lines: replace(program, body=lines)
    yield program.parts, lambda lines: replace(program, parts=lines)
    yield program.loss, lambda lines: replace(program, loss=lines)
    for index, layer in enumerate(program.layers):
        yield layer.body, lambda lines, i=index: _with_layer(program, i, replace(program.layers[i], body=lines))
        yield layer.init, lambda lines, i=index: _with_layer(program, i, replace(program.layers[i], init=lines))


def _with_layer(program: Program, index: int, layer: Layer) -> Program:
    return replace(program, layers=[*program.layers[:index], layer, *program.layers[index + 1 :]])


def _fewer_lines(program: Program) -> Iterator[Program]:
    for size in (8, 4, 2, 1):
        for lines, put in _places(program):
            for start in range(len(lines) - size, -1, -1):
                yield put(lines[:start] + lines[start + size :])


def _fewer_layers(program: Program) -> Iterator[Program]:
    for gone in reversed(range(len(program.layers) if len(program.layers) > 1 else 0)):
        if any(f"layers[{gone}]" in line for line in program.body + program.parts + program.loss):
            continue

        def renumber(lines: list[str], gone: int = gone) -> list[str]:
            return [
                re.sub(r"layers\[(\d+)\]", lambda m: f"layers[{int(m[1]) - (int(m[1]) > gone)}]", line)
                for line in lines
            ]

        layers = program.layers[:gone] + program.layers[gone + 1 :]
        parts, body, loss = map(renumber, (program.parts, program.body, program.loss))
        yield replace(program, layers=layers, parts=parts, body=body, loss=loss)


def _plainer_settings(program: Program) -> Iterator[Program]:
    now, plain = program.settings, Settings()
    changes: list[dict[str, object]] = [{"rows": now.rows[:-1]}] if len(now.rows) > 1 else []
    changes += [{"rows": now.rows[1:]}] if len(now.rows) > 1 else []
    changes += [{"rows": [4] * len(now.rows)}] if now.rows != [4] * len(now.rows) else []
    changes += [{"micro_batches": k} for k in range(1, now.micro_batches)]
    for name in ("ahead", "stash", "schedule", "update", "meter", "optimizer", "seed"):
        if getattr(now, name) != getattr(plain, name):
            changes.append({name: getattr(plain, name)})
    for change in changes:
        yield replace(program, settings=replace(now, **change))  # type: ignore[arg-type]


def _plainer_layers(program: Program) -> Iterator[Program]:
    for index, layer in enumerate(program.layers):
        plain = Layer("x", ["self.a = nn.Linear(8, 8)"], ["return self.a(x)"])
        for candidate in (plain, replace(plain, body=["return x + self.a(x)"])):
            if layer not in (candidate, plain):
                yield _with_layer(program, index, candidate)


def _fewer_names(program: Program) -> Iterator[Program]:
    """Leave a statement out, and read another tensor where its own was read."""
    for at in reversed(range(len(program.body) - 1)):
        target = program.body[at].split(" = ")[0].strip()
        if not _NAME.fullmatch(target):
            continue
        rest = program.body[:at] + program.body[at + 1 :]
        earlier = ["x", *dict.fromkeys(_NAME.findall("\n".join(program.body[:at])))]
        read = [name for name in _NAME.findall(program.body[at].partition(" = ")[2])]
        for name in dict.fromkeys([*read, *reversed(earlier)]):
            if name != target:
                yield replace(program, body=[re.sub(rf"\b{target}\b", name, line) for line in rest])


def _unwrapped(program: Program) -> Iterator[Program]:
    """Leave the head of a block out: what was under it stands by itself."""
    for lines, put in _places(program):
        for at, line in enumerate(lines):
            if not line.rstrip().endswith(":"):
                continue
            depth = len(line) - len(line.lstrip())
            end = next(
                (i for i in range(at + 1, len(lines)) if len(lines[i]) - len(lines[i].lstrip()) <= depth), len(lines)
            )
            yield put(lines[:at] + [each[4:] for each in lines[at + 1 : end]] + lines[end:])


_SIMPLER = [
    (r"way\(([^()]*(?:\([^()]*\))*[^()]*)\)", r"\1"),
    (r"F\.cross_entropy\(out\[:, -1\], y\)|F\.mse_loss\(out, x\)|0\.01 \* out\.abs\(\)\.sum\(\)", "out.pow(2).mean()"),
    (r"\bself\.(head|lin|stem|norm)\((h\d+|x)\)", r"\2"),
    (r"torch\.(?:tanh|sigmoid)\((h\d+|h|x)\)", r"\1"),
    (r"(?<== )(\S+) [+*] (.+)$", r"\1"),
    (r"(?<== )(.+) [+*] (\S+)$", r"\2"),
    (r"(?<=return )(\S+) [+*] (.+)$", r"\1"),
    (r"(?<=return )(.+) [+*] (\S+)$", r"\2"),
]


def _plainer_text(program: Program) -> Iterator[Program]:
    for lines, put in _places(program):
        for at, line in enumerate(lines):
            for pattern, simpler in _SIMPLER:
                if (other := re.sub(pattern, simpler, line)) != line:
                    yield put([*lines[:at], other, *lines[at + 1 :]])


def _inlined(program: Program) -> Iterator[Program]:
    """A layer's `h` that is only another name."""
    for index, layer in enumerate(program.layers):
        for at, line in enumerate(layer.body):
            if line in ("h = x", "h = y"):
                rest = [re.sub(r"\bh\b", line[-1], each) for each in layer.body[at + 1 :]]
                yield _with_layer(program, index, replace(layer, body=layer.body[:at] + rest))
            if line.startswith("h = ") and layer.body[at + 1 :] == ["return h"]:
                yield _with_layer(program, index, replace(layer, body=[*layer.body[:at], f"return {line[4:]}"]))
    if len(program.body) > 1 and program.body[-1] == f"return {program.body[-2].split(' = ')[0]}":
        body = [*program.body[:-2], f"return {program.body[-2].partition(' = ')[2]}"]
        yield replace(program, body=body)


# The boldest first; settings before all, since a step less is time saved.
_PASSES = [
    _plainer_settings,
    _fewer_lines,
    _fewer_layers,
    _plainer_layers,
    _fewer_names,
    _unwrapped,
    _plainer_text,
    _inlined,
]
