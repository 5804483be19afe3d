"""Saves of several workers: each writes its part, any number loads them, and none is lost whoever fails or dies."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from crew import Crew
from crew_cases import Case, adafactor
from crew_saves import (
    SAVED,
    load_alone,
    load_and_go_on,
    one_dies_in_a_save,
    resume,
    save_alone,
    save_and_go_on,
    save_that_fails,
    save_to_other_folders,
    uninterrupted,
)
from safetensors.torch import load_file


def assert_same(seen: dict[str, Any], expected: dict[str, Any]) -> None:
    assert seen["losses"] == expected["losses"]
    assert_same_state(seen["state"], expected["state"])


def assert_same_state(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert state.keys() == expected.keys()
    assert not [name for name, value in state.items() if not torch.equal(value, expected[name])]


def by_hand(folder: Path, count: int) -> dict[str, torch.Tensor]:
    """Put a save together with nothing but the names in it; of parameters whose elements lie in their natural order."""
    [generation] = folder.glob("step-*")
    found: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for rank in range(count):
        here = generation / f"rank-{rank:03d}"
        part = json.loads((here / "part.json").read_text())
        for file in part["files"]:
            for name, tensor in load_file(here / file).items():
                kind, _, rest = name.partition("/")
                param = rest if kind == "weights" else rest.rpartition("/")[0]
                if kind != "buffers":
                    first = part["ranges"].get(param, [0])[0] if tensor.dim() else 0
                    found.setdefault(rest, []).append((first, tensor))
    return {
        name: torch.cat([tensor.flatten() for _, tensor in sorted(pieces, key=lambda piece: piece[0])])
        if pieces[0][1].dim()
        else pieces[0][1]
        for name, pieces in found.items()
    }


@pytest.mark.parametrize("case", [SAVED, replace(SAVED, optimizer=adafactor)], ids=["ranges", "whole parameters"])
def test_two_save_and_two_or_one_load(case: Case, two: Crew, tmp_path: Path) -> None:
    first, second = two.run(save_and_go_on, str(tmp_path), case)
    assert first["losses"] == second["losses"] and first["more bytes"] == second["more bytes"] == 0
    sizes = [
        sum(path.stat().st_size for path in tmp_path.glob(f"step-*/rank-00{rank}/*.safetensors")) for rank in (0, 1)
    ]
    assert min(sizes) > 0.35 * sum(sizes), "each writes about a half"
    read = by_hand(tmp_path, 2)
    assert {name: value.flatten().tolist() for name, value in read.items()} == {
        name: value.flatten().tolist() for name, value in first["state"].items()
    }
    for seen in two.run(load_and_go_on, str(tmp_path), case, 2):
        assert_same(seen, first)
    assert_same(two.run(load_alone, str(tmp_path), case, 2)[0], first)


def test_one_saves_and_two_load(two: Crew, tmp_path: Path) -> None:
    expected = two.run(save_alone, str(tmp_path), SAVED, 2)[0]
    for seen in two.run(load_and_go_on, str(tmp_path), SAVED, 2):
        assert_same(seen, expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "bert", "convnext", "tied_layers", "frozen_layer", "lora_int8"])
def test_four_save_and_two_load_and_two_save_and_four_load(kind: str, two: Crew, four: Crew, tmp_path: Path) -> None:
    case = Case(kind, rows=(4, 4, 4, 4))
    expected = four.run(save_and_go_on, str(tmp_path / "4"), case, False)[0]
    for seen in two.run(load_and_go_on, str(tmp_path / "4"), case, 4):
        assert_same(seen, expected)
    twice = replace(case, micro_batches=4)
    expected = two.run(save_and_go_on, str(tmp_path / "2"), twice, False)[0]
    for seen in four.run(load_and_go_on, str(tmp_path / "2"), twice, 2):
        assert_same(seen, expected)


@pytest.mark.parametrize("where, who", [("files", 1), ("part", 1), ("files", 0), ("switch", 0)])
def test_a_disk_that_is_full_on_one_worker(where: str, who: int, two: Crew, tmp_path: Path) -> None:
    answers = two.run(save_that_fails, str(tmp_path), where, who)
    here, there = answers[who], answers[1 - who]
    assert here["type"] == "OSError" and "The last save in this folder is as it was" in here["text"], here
    assert there["type"] == "WorkerError" and f"worker {who}: OSError" in there["text"], there
    assert len(here["left"]) == 1 and here["saved"] != here["left"], "half a save is left, or the old one is gone"
    assert len(here["saved"]) == 1 and there["left"] == here["left"] and there["saved"] == here["saved"]


def test_workers_that_see_other_folders(two: Crew, tmp_path: Path) -> None:
    here, there = two.run(save_to_other_folders, str(tmp_path))
    assert there["type"] == "FileNotFoundError" and "does not see" in there["text"] and "share" in there["text"], there
    assert here["type"] == "WorkerError" and "worker 1: FileNotFoundError" in here["text"], here
    assert "latest.json is missing: there is no such folder" in there["none"]["text"], there
    assert here["none"]["type"] == "WorkerError" and "worker 1: ValueError" in here["none"]["text"], here
    for seen in (here, there):
        assert seen["other"]["type"] == "ValueError" and "workers find different saves" in seen["other"]["text"], seen


# where a worker dies, which one, and which step is in the folder then
DEATHS = [("files", 1, 1), ("part", 1, 1), ("part", 0, 1), ("switch", 0, 1), ("end", 0, 2)]


@pytest.mark.parametrize(
    "where, who, left", [DEATHS[0], *(pytest.param(*death, marks=pytest.mark.slow) for death in DEATHS[1:])]
)
def test_a_worker_is_killed_in_a_save(where: str, who: int, left: int, two: Crew, tmp_path: Path) -> None:
    with Crew(2) as crew:
        seen = crew.run_while_one_dies(one_dies_in_a_save, str(tmp_path), where, who)[1 - who]
    assert seen["type"] == "WorkerLostError" and f"worker {who} of 2 is lost" in seen["text"], seen
    assert seen["seconds"] < 15, seen
    expected = two.run(uninterrupted, 4)[0]
    for seen in two.run(resume, str(tmp_path), 4):
        assert seen["began"] == left and seen["losses"] == expected["losses"][left:]
        assert_same_state(seen["state"], expected["state"])
    assert len([*tmp_path.glob("step-*")]) == 1
