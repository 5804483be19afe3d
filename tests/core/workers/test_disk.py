"""Workers with shards in files train the bits of plain training, in little memory, and go on after the death of one."""

import re
import shutil
from pathlib import Path

import pytest
from crew import Crew
from crew_cases import Case, adafactor, sgd, train_beside_plain
from crew_shelf import (
    begin_with_integers,
    begin_without_a_layer,
    bytes_in_memory,
    fail_once,
    go_on_from_files,
    load_onto_files,
    lose_one_in_a_step,
    save_from_files,
    train_a_step,
    train_from_files_beside_plain,
)
from on_shelf import assert_same, relay_on
from zoo import BY_NAME

from l2l_core import Drop, FileShelf, Relay

CLIPPED = {"update": "deferred", "max_grad_norm": 0.1}
CASES = [
    Case("chain"),
    Case("gpt2", config={"stash": "disk", "ahead": 2}),
    Case("tied_layers", config=CLIPPED),
    Case("chain", optimizer=adafactor),
    Case("chain", optimizer=sgd, config={"ahead": 0}, skips=((), ("L001",), ())),
]


@pytest.mark.all_cases
@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_workers_on_disk_equal_plain_training(case: Case, two: Crew, tmp_path: Path) -> None:
    """In the files, in memory inside of `gathered`, and after it; `verify` finds the same, and changes nothing."""
    for seen in two.run(train_from_files_beside_plain, case, tmp_path):
        if not any(case.skips):
            assert seen["losses"] == seen["expected"], seen
            assert not seen["differences"] and not seen["state differs in"] and not seen["after"], seen
        assert seen["nan"] and seen["verified"], seen["report"]


@pytest.mark.all_cases
@pytest.mark.parametrize(
    ("where", "steps", "whole"), [("update", 2, 2), ("write", 2, 2), ("rename", 2, 3), ("rename", -1, 0)]
)
def test_a_worker_is_killed(where: str, steps: int, whole: int, tmp_path: Path) -> None:
    """Both go on from the same step: that before, or the next if one worker has renamed its manifest already."""
    case = Case("chain")
    with Crew(2) as crew:
        said, _ = crew.run_while_one_dies(lose_one_in_a_step, case, tmp_path, where, steps)
        assert "worker 1 of 2 is lost" in said
        for seen in crew.run(go_on_from_files, case, tmp_path, 4):
            assert seen == {"began": whole, "losses": True, "unlike": []}


@pytest.mark.parametrize("where", ["read", "write", "manifest"])
def test_a_disk_fails_once(where: str, two: Crew, tmp_path: Path) -> None:
    """That of worker 1: both keep the old step, are told of the disk, and make the step again."""
    first, second = two.run(fail_once, Case("chain"), tmp_path, where)
    assert second["error"] == "OSError: a disk of tests" and "worker 1: OSError: a disk of tests" in first["error"]
    for seen in (first, second):
        assert seen["kept"] and seen["losses"] and not seen["unlike"], seen


def test_folders_of_different_times_are_refused(two: Crew, tmp_path: Path) -> None:
    """Worker 1's is a copy made a step earlier; with the right one both go on."""
    case, own = Case("chain"), tmp_path / "shelf" / "rank-001"
    two.run(train_a_step, case, tmp_path / "shelf", False)
    shutil.copytree(own, tmp_path / "old")
    two.run(train_a_step, case, tmp_path / "shelf", True)
    own.rename(tmp_path / "new")
    shutil.copytree(tmp_path / "old", own)
    for said in two.run(train_a_step, case, tmp_path / "shelf", True):
        assert "is older than the folders of other workers (number of commits by worker: [3, 2])" in said
    shutil.rmtree(own)
    (tmp_path / "new").rename(own)
    for seen in two.run(go_on_from_files, case, tmp_path / "shelf", 3):
        assert seen == {"began": 2, "losses": True, "unlike": []}


def test_folders_of_two_runs_are_refused(two: Crew, tmp_path: Path) -> None:
    """They have as many steps. With the right one, which the error asks for, both go on."""
    case, own, other = Case("chain"), tmp_path / "one" / "rank-001", tmp_path / "other" / "rank-001"
    for folder in ("one", "other"):
        two.run(train_a_step, case, tmp_path / folder, False)
    own.rename(tmp_path / "kept")
    shutil.copytree(other, own)
    for said in two.run(train_a_step, case, tmp_path / "one", True):
        assert "are not of one shelf" in said and "put the folders of one shelf side by side" in said
    shutil.rmtree(own)
    (tmp_path / "kept").rename(own)
    for seen in two.run(go_on_from_files, case, tmp_path / "one", 3):
        assert seen == {"began": 1, "losses": True, "unlike": []}


def test_saves_and_weights_go_on_anywhere(two: Crew, tmp_path: Path) -> None:
    """On two workers and another shelf, and on one; what is refused says why, and its remedy works."""
    case = Case("chain")
    for said in two.run(save_from_files, case, tmp_path):
        edit, forecast, fork, fit, keep = said
        assert "an edit needs whole layers" in edit and "without the shards of the others" in forecast
        assert "branches share weights in memory" in fork and "without the shards of the others" in keep
        assert "without the shards of the others" in fit
    for seen in two.run(load_onto_files, case, tmp_path):
        assert seen == {"steps": 3, "unlike": [], "begun": []}
    kind = BY_NAME[case.kind]
    with pytest.raises(ValueError, match=r"is the shelf of 2 worker\(s\), and this relay has 1: resume it with 2"):
        relay_on(tmp_path / "shelf", kind, resume=True)
    with pytest.raises(ValueError, match="is the shelf of a model already"):
        relay_on(tmp_path / "shelf", kind)
    model = kind.make_model()
    shelf = FileShelf(folder=tmp_path / "alone", memory_bytes="8 MB")
    with Relay.load(tmp_path / "save", model, case.optimizer(model), loss=kind.loss, shelf=shelf) as relay:
        assert relay.steps == 2
        relay.apply(Drop(1))  # the remedy of edits
        assert relay.shelf is not None
        relay.shelf.save_pretrained(tmp_path / "edited")
        expected = {name: tensor.clone() for name, tensor in relay.shelf.weights()}
    for weights in two.run(begin_without_a_layer, case, tmp_path):
        assert_same(weights, expected)


def test_frozen_integers_on_files_of_several_workers_are_refused(two: Crew, tmp_path: Path) -> None:
    """As buffers they train as in memory."""
    expected = two.run(train_beside_plain, Case("lora_int8", steps=1))
    for (text, loss), plain in zip(two.run(begin_with_integers, tmp_path), expected, strict=True):
        assert "torch.int8 and not trained" in text and "Make it a buffer (register_buffer)" in text
        assert [loss] == plain["losses"]


def test_memory_of_a_worker_does_not_grow_with_depth(two: Crew, tmp_path: Path) -> None:
    """The smallest memory is less than that of one worker, and is kept; gathered layers come on top, as without files."""
    needed = {}
    for depth in (4, 12):
        said = two.run(bytes_in_memory, depth, 1, tmp_path / f"none {depth}")
        found = re.findall(r"the smallest that works is ([\d,]+)", " ".join(said))
        needed[depth] = max(int(each.replace(",", "")) for each in found)
    assert needed[4] == needed[12]
    for depth, nbytes in needed.items():
        assert "smallest" in two.run(bytes_in_memory, depth, nbytes - 1, tmp_path / f"less {depth}")[1]
        for seen in two.run(bytes_in_memory, depth, nbytes, tmp_path / f"enough {depth}"):
            assert seen["held"] <= nbytes
            assert seen["gathered"] <= seen["at most gathered"]
