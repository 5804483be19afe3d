"""The table in the docstring of the loop, turn by turn, is what a step does."""

import inspect
import re
from collections import defaultdict

import pytest
from oracle import both
from zoo import BY_NAME, Chain, Kind, ResidualMlp

from l2l_core import RelayConfig, Trace
from l2l_core.step import loop

HEAD = "    visit  k  computes"


def table() -> list[tuple[str, ...]]:
    """The rows of the docstring, cell by cell; what stands right of them is a remark."""
    lines = (loop.__doc__ or "").splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(HEAD))
    starts = [lines[first].index(name) for name in ("visit", "k  ", "computes", "arrives", "leaves")]
    ends = [*starts[1:], starts[-1] + len("stash 1, dw1  ")]
    rows = lines[first + 1 : lines.index("", first)]
    return [tuple(row[a:b].strip() for a, b in zip(starts, ends, strict=True)) for row in rows]


def turns(trace: Trace, layers: list[str]) -> list[tuple[str, ...]]:
    """The same from a trace: copies belong to the turn that they are for, or that they come from."""
    number = {key: str(i) for i, key in enumerate(layers)}
    computes, rows = defaultdict(list), dict[tuple[int, int], list[tuple[int, str]]]()
    turned = {e.visit: None for e in trace.events if e.kind == "backward"}
    last = min(turned)  # backward of the last layer: in the visit before it
    for event in sorted(trace.events, key=lambda event: event.start_s):
        if event.kind in ("forward", "backward"):
            turn = (event.visit - 1 if event.visit == last else event.visit, event.k)
            rows.setdefault(turn, []).append((event.visit, f"{event.kind} {number[event.layer]}"))
            computes[event.layer].append(turn)
    arrives, leaves = defaultdict(list), defaultdict(list)
    for event in trace.events:
        if event.kind == "load" and event.layer in number:
            arrives[computes[event.layer][0]].append(f"w{number[event.layer]}")
    for event in trace.events:
        if event.kind == "fetch" and event.layer in number:
            arrives[event.visit, event.k].append(f"x({number[event.layer]},{event.k})")
        elif event.kind == "stash" and event.visit >= 0:
            leaves[event.visit, event.k].append(f"stash {event.k}")
    for event in trace.events:
        if event.kind == "push" and event.layer in number:
            leaves[computes[event.layer][-1]].append(f"dw{number[event.layer]}")
    return [
        (
            ", ".join(dict.fromkeys(str(visit) for visit, _ in done)),
            str(turn[1]),
            ", ".join(what for _, what in done),
            ", ".join(arrives[turn]),
            ", ".join(leaves[turn]),
        )
        for turn, done in rows.items()
    ]


def test_every_mark_of_the_diagram_stands_in_the_code() -> None:
    doc, code = (loop.__doc__ or ""), inspect.getsource(loop).split('"""', 2)[2]
    marks = set(re.findall(r"\[\d\]", doc))
    assert len(marks) == 4 and marks == set(re.findall(r"# (\[\d\])", code))


@pytest.mark.parametrize("step", [1, 2])
def test_the_table_is_what_happens(step: int) -> None:
    chain = BY_NAME["chain"]
    kind = Kind("two", lambda: Chain([ResidualMlp() for _ in range(2)]), chain.make_batch, chain.loss)
    with both(kind, RelayConfig(micro_batches=2, ahead=1, stash="host")) as pair:
        pair.relay.model.load_state_dict(pair.in_core.model.state_dict())
        results = [pair.step(kind.make_batch(4, seed)).result for seed in range(step + 1)]
        layers = [unit.key for unit in pair.relay.stack]
    assert turns(results[-1].trace, layers) == table()
