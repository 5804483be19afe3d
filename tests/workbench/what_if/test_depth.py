"""Edits to another depth: description, code and edits agree, and lead to that depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from sessions import make_batches, make_relay

from l2l_core import Drop, Duplicate, Edit, Insert
from workbench.session.snapshot_rows import layer_rows
from workbench.session.snapshot_values import LayerRow
from workbench.what_if.depth_change import depth_edits


class Workbench:
    """Returns the edits that a line of code applies."""

    def edit(self, *edits: Edit) -> Sequence[Edit]:
        return edits


def run(code: str) -> list[Any]:
    return list(eval(code, {"workbench": Workbench(), "Insert": Insert, "Duplicate": Duplicate, "Drop": Drop}))


def rows(**stacks: int) -> list[LayerRow]:
    return [
        LayerRow(f"{name}{i}", "", 1, 4, 1, False, None, None, None, name, i, num_trained=1)
        for name in stacks
        for i in range(stacks[name])
    ]


@pytest.mark.parametrize("depth", [1, 3, 4, 5, 7, 8, 9, 21, 64])
def test_each_way_leads_to_the_depth(depth: int) -> None:
    ways = len(depth_edits(rows(h=4), depth))
    assert ways == (0 if depth == 4 else 1 if depth < 4 else 2)
    for way in range(ways):
        with make_relay() as relay:
            relay.step(make_batches()[0])
            edit = depth_edits(layer_rows(relay), depth)[way]
            assert run(edit.code) == list(edit.edits)
            keys = [unit.key for unit in relay.stack]
            relay.apply(*edit.edits)
            assert len(relay.stack) == depth and [unit.key for unit in relay.stack][:depth][:4] == keys[:depth]
            assert relay.journal[-1].preserves_function == ("computes the same" in edit.description)


def test_of_several_stacks_the_last_one_is_edited() -> None:
    insert, duplicate = depth_edits(rows(up=2, down=3), 6)
    assert insert.code == "workbench.edit(Insert(('down', 3)))" and run(insert.code) == [Insert(("down", 3))]
    assert run(duplicate.code) == list(duplicate.edits) == [Duplicate(("down", slice(2, 3)), "top")]
    assert "of down" in insert.description and "of down" in duplicate.description
    twice = depth_edits(rows(up=2, down=3), 16)[1]
    assert run(twice.code) == list(twice.edits)
    (drop,) = depth_edits(rows(up=2, down=3), 3)
    assert run(drop.code) == list(drop.edits) == [Drop(("down", slice(1, 3)))]
    with pytest.raises(ValueError, match="3 layers fewer: the last stack, down, has 3 and one must stay"):
        depth_edits(rows(up=2, down=3), 2)


def test_layers_in_no_stack_have_no_edits() -> None:
    unstacked = [LayerRow("a", "a", 1, 4, 1, False, None, None, num_trained=1)]
    assert depth_edits(unstacked, 1) == ()
    with pytest.raises(ValueError, match="in no ModuleList or Sequential"):
        depth_edits(unstacked, 2)
