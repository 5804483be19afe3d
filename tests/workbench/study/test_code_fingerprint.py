"""Changed recipes, relays and batches are noticed when a study is run again; moved, reloaded and commented ones are not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from l2l_core import Depth, EmulatedDevice, Insert, LayerDrop, Relay, Schedule, WarmupStableDecay
from workbench import Study, Variant
from workbench.study.code_fingerprint import describe_change, fingerprint

SOURCE = """
import torch
from functools import cache, partial
from torch import nn
from l2l_core import Insert, Schedule

RATE, calls = 0.1, 0

class Block(nn.Module):
    width = 4
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return self.linear(x).tanh()

@cache
def helper(x):
    return {name for name in ("a", "b", "c") if name in {"b", "c", "d"}}

def growing(at, init="copy"):
    def edits(relay, step):
        class Local:
            number = 3
        helper(1)
        return [Insert(1, module=Block())] if step == at else []
    return edits

class Grow(Schedule):
    def __init__(self, at): self.at = at
    @property
    def due(self): return self.at
    def edits(self, relay): return [Insert(1)] if relay.steps == self.due else []

class Trial:
    def __init__(self, seeds): self.rate, self.seeds = 0.1, seeds
    def make(self, seed): return self._model(seed), self.rate
    def _model(self, seed): return Block()

def batches(seed, *, rows=4):
    while True:
        yield torch.ones(rows)

ROOTS = [growing(5), Grow(4), Trial([1]).make, batches, partial(batches, rows=2), Block(), Block]
"""


def loaded(source: str) -> Any:
    module = ModuleType("recipes_of_a_user")
    exec(compile(source, "recipes.py", "exec"), vars(module))
    return module


def parts(source: str) -> list[dict[str, str]]:
    return [fingerprint(root, "root") for root in loaded(source).ROOTS]


def test_moved_reloaded_and_commented_code_is_the_same() -> None:
    before = parts(SOURCE)
    moved = "# first\n\n" + SOURCE.replace("return edits", "# why\n\n    return edits")
    moved = moved.replace("def edits(relay, step):", 'def edits(relay, step):\n        "Insert a block."\n')
    moved = moved.replace("calls = 0.1, 0", "calls = 0.1, 7")  # a global
    assert parts(moved) == before == parts(SOURCE)
    module = loaded(SOURCE)
    for _ in range(500):  # which Python specialises
        module.growing(5)(None, 3)
    assert [fingerprint(root, "root") for root in module.ROOTS] == before


def test_another_process_finds_the_same() -> None:
    """Sets are ordered otherwise there, and functions have other addresses."""
    here = Path(__file__)
    program = (
        f"import sys, json; sys.path.insert(0, {str(here.parent)!r})\n"
        "from test_code_fingerprint import SOURCE, parts; print(json.dumps(parts(SOURCE)))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert json.loads(found) == parts(SOURCE)


@pytest.mark.parametrize(
    ("old", "new", "root", "message"),
    [
        ("step == at else", "step >= at else", 0, "the code of root has changed"),
        ("number = 3", "number = 4", 0, "the code of root has changed"),
        ("growing(5)", "growing(9)", 0, "at in root was 5 and is 9"),
        ('"c", "d"}', '"c", "e"}', 0, "the code of helper has changed"),
        (".tanh()", ".relu()", 0, "the code of Block.forward has changed"),
        ("width = 4", "width = 8", 0, "Block.width was 4 and is 8"),
        ("Grow(4)", "Grow(8)", 1, "root.at was 4 and is 8"),
        ("[Insert(1)]", "[Insert(2)]", 1, "the code of Grow.edits has changed"),
        ("return self.at", "return self.at + 1", 1, "the code of Grow.due has changed"),
        ("self.rate, self.seeds = 0.1", "self.rate, self.seeds = 0.2", 2, "root.rate was 0.1 and is 0.2"),
        ("): return Block()", "): return Block(), 1", 2, "the code of root._model has changed"),
        ("rows=4", "rows=8", 3, "default rows of root was 4 and is 8"),
        ("torch.ones(rows)", "torch.zeros(rows)", 3, "the code of root has changed"),
        ("batches, rows=2", "batches, rows=3", 4, r"root.partial\['rows'\] was 2 and is 3"),
        ("Linear(4, 4)", "Linear(4, 4, bias=False)", 5, "root was Block"),
        (".tanh()", ".relu()", 6, "the code of Block.forward has changed"),
    ],
)
def test_a_change_is_named(old: str, new: str, root: int, message: str) -> None:
    assert SOURCE.count(old) == 1
    change = describe_change(parts(SOURCE)[root], parts(SOURCE.replace(old, new))[root])
    assert re.match(message, change), change


def test_attributes_that_a_bound_method_does_not_use_may_change() -> None:
    assert parts(SOURCE.replace("Trial([1])", "Trial([1, 2])")) == parts(SOURCE)


def test_a_variable_that_a_function_counts_in_may_change() -> None:
    def make_batches(rows: int) -> Callable[[], int]:
        calls = 0

        def batches() -> int:
            nonlocal calls
            calls += rows
            return calls

        return batches

    batches = make_batches(2)
    before = fingerprint(batches, "batches")
    batches()
    assert fingerprint(batches, "batches") == before and before["rows in batches"] == "2"


def test_values_of_libraries_are_compared_as_far_as_they_are_plain() -> None:
    data = torch.utils.data.TensorDataset(torch.ones(8, 2))
    loader = partial(torch.utils.data.DataLoader, data)
    drop: Callable[..., Any] = lambda depth, step: 0.1  # noqa: E731
    pairs: list[tuple[Any, Any]] = [
        (Depth({0: 2, 5: 4}), Depth({0: 2, 6: 4})),
        (LayerDrop(drop), LayerDrop(lambda depth, step: 0.2)),
        (Depth(2) + WarmupStableDecay(9, 2), Depth(2) + WarmupStableDecay(9, 3)),
        (loader(batch_size=2), loader(batch_size=4)),
        ([torch.zeros(3)], [torch.ones(3)]),
        ({"a": [1, 2]}, {"a": [1, 3]}),
        ([*range(100)], [*range(1, 101)]),
        (nn.Linear(2, 2), nn.Linear(2, 3)),
        (Insert(1, init="copy"), Insert(1, init="fresh")),
        ({1, 2}, {1, 3}),
        (cache(lambda: 1), cache(lambda: 2)),
        (Path("a"), Path("b")),
        ([], ["a"]),
        (numpy.array(["a", "b"]), numpy.array(["a", "c"])),
        (numpy.zeros(3, [("x", "f4")]), numpy.ones(3, [("x", "f4")])),
    ]
    for one, other in pairs:
        assert fingerprint(one, "root") == fingerprint(one, "root")
        assert describe_change(fingerprint(one, "root"), fingerprint(other, "root")), one
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    assert fingerprint(cyclic, "root") and fingerprint(torch.zeros(3, 3).to_sparse(), "root")
    assert fingerprint(numpy.array([print]), "root") == {"root": "object [1]"} and fingerprint(torch.tensor(1), "root")
    assert len(json.dumps(fingerprint([{"x": torch.ones(2, 2)}] * 500, "root"))) < 100
    assert fingerprint(nn.Linear(2, 2), "root") == fingerprint(nn.Linear(2, 2), "root")  # other weights


# -- in a study --------------------------------------------------------------------------------------------------------


def grown(at: int) -> Callable[[Relay, int], Any]:
    return lambda relay, step: Insert(1, init="copy") if step == at else None


class Growth(Schedule):
    def __init__(self, at: int) -> None:
        self.at = at

    def edits(self, relay: Any) -> Any:
        return [Insert(1, init="copy")] if relay.steps == self.at else []


def make_small_study(folder: Path, at: int = 2, rate: float = 0.1, rows: int = 4, schedule: int = 2) -> Study:
    def make(seed: int) -> Relay:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)), nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        return Relay(model, optimizer, EmulatedDevice(), layers=[*model[:2]], loss=nn.MSELoss())

    def draw(seed: int) -> Any:
        while True:
            yield torch.randn(rows, 4), torch.randn(rows, 1)

    variants = {"plain": None, "grown": grown(at), "class": Variant(Growth(schedule))}
    return Study(
        make, variants, seeds=[0], steps=3, batches=draw, held_out=[(torch.ones(4, 4), torch.ones(4, 1))], folder=folder
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": 1}, "variant 'grown': at in schedule was 2 and is 1"),
        ({"schedule": 1}, "variant 'class': schedule.at was 2 and is 1"),
        ({"rate": 0.2}, "rate in make_relay was 0.1 and is 0.2"),
        ({"rows": 2}, "rows in batches was 4 and is 2"),
    ],
)
def test_a_changed_study_is_refused_with_remedies(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_small_study(tmp_path / "one").run(report=None)
    make_small_study(tmp_path / "one").run(report=None)
    rows = (tmp_path / "one" / "segments" / "s0-g0" / "rows.jsonl").read_bytes()
    changed = make_small_study(tmp_path / "one", **change)
    with pytest.raises(ValueError, match=rf"other code. {message}. Pass another folder=.*run\(accept_changes=True\)"):
        changed.run(report=None)
    make_small_study(tmp_path / "two", **change).run(report=None)
    changed.run(report=None, accept_changes=True)
    changed.run(report=None)  # it was recorded
    assert (tmp_path / "one" / "segments" / "s0-g0" / "rows.jsonl").read_bytes() == rows
    with pytest.raises(ValueError, match="other code"):
        make_small_study(tmp_path / "one").run(report=None)


def test_code_that_has_trained_nothing_may_change_and_older_folders_are_taken(tmp_path: Path) -> None:
    study = make_small_study(tmp_path)

    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.run(report=interrupt)
    make_small_study(tmp_path, rate=0.2).run(report=None)
    record = json.loads((tmp_path / "study.json").read_text())
    for code in (None, {**record["code"], "python": "3.0"}):
        (tmp_path / "study.json").write_text(json.dumps({**record, "code": code}))
        make_small_study(tmp_path, rate=0.3).run(report=None)
