"""What has come of a step's gradients: summed in the order of plain training, and never more buffers than there is room for."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import weakref
from collections.abc import Callable
from itertools import permutations

import pytest
import torch
from patience import HANG_S
from torch import nn

from l2l_core.devices import Ledger
from l2l_core.eps import NonFiniteError
from l2l_core.eps.blocks import Block, BlockGradient, build_layer
from l2l_core.eps.gradient_buffers import GradientBuffers, check_finite, joint_norm
from l2l_core.schedule_rules import MAX_PENDING_GRADIENTS

VALUES = [1e8, -1e8, 1.0]  # by micro-batch: 1.0 in ascending order, 0.0 if the last one is added to another first


@pytest.fixture
def host() -> Ledger:
    return Ledger("host", "The host")


@pytest.fixture
def gradients(host: Ledger) -> GradientBuffers:
    return GradientBuffers(host, torch.empty)


@pytest.fixture
def block() -> Block:
    return build_layer("L000", "layers.0", nn.Linear(2, 3)).blocks[0]


def piece(gradients: GradientBuffers, block: Block, value: float) -> BlockGradient:
    flat = gradients.acquire(block.trained.numel).fill_(value)
    return BlockGradient(flat, block.trained, (True, True))


@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_parts_are_added_in_ascending_order_however_they_come(
    gradients: GradientBuffers, block: Block, order: tuple[int, ...]
) -> None:
    for k in order:
        gradients.add_part(block, k, piece(gradients, block, VALUES[k]))
    assert list(gradients.parts) == [block]
    whole = gradients.sum_parts(gradients.parts.pop(block, {}))
    assert whole is not None and {float(v) for view in whole.views().values() for v in view.flatten()} == {1.0}
    assert not gradients.parts and gradients.sum_parts(gradients.parts.pop(block, {})) is None


def test_a_part_that_is_taken_out_is_not_in_the_sum(gradients: GradientBuffers, block: Block) -> None:
    gradients.add_part(block, 0, piece(gradients, block, 2.0))
    gradients.add_part(block, 0, piece(gradients, block, 3.0))
    taken = gradients.take_part(block, 0, wanted=[1])
    assert {i: view.unique().tolist() for i, view in taken.items()} == {1: [5.0]}
    whole = gradients.sum_parts(gradients.parts.pop(block, {}))
    assert whole is not None and {i: view.unique().tolist() for i, view in whole.views().items()} == {0: [5.0]}


@pytest.mark.parametrize(
    ("layer", "covers", "in_one"),
    [
        (nn.Linear(16, 16), (True, True), True),
        (nn.Linear(16, 16), (True, False), False),
        (nn.Linear(2, 3), (True, True), False),  # places are aligned, and between them is garbage
    ],
    ids=["full", "one has none", "padded"],
)
def test_a_norm_is_of_the_gradient_and_of_no_garbage(
    layer: nn.Module, covers: tuple[bool, ...], in_one: bool, gradients: GradientBuffers
) -> None:
    unit = build_layer("L000", "layers.0", layer)
    (block,) = unit.blocks
    whole = BlockGradient(gradients.acquire(block.trained.numel).fill_(torch.nan), block.trained, covers)
    for view in whole.views().values():
        view.fill_(2.0)
    count = sum(view.numel() for view in whole.views().values())
    assert check_finite(unit, block, whole) == pytest.approx(2 * count**0.5)
    assert (len(whole.tensors()) == 1 and whole.tensors()[0].numel() == whole.flat.numel()) == in_one
    next(iter(whole.views().values()))[0] = torch.inf
    other = pickle.loads(pickle.dumps(whole))
    next(iter(other.views().values())).fill_(7.0)
    assert (other.flat == 7.0).any() and not (whole.flat == 7.0).any()
    with pytest.raises(NonFiniteError, match=r"Affected: layers\.0\.weight\."):
        check_finite(unit, block, whole)


def test_layers_that_are_alike_have_one_layout_as_long_as_one_of_them_is_there() -> None:
    one, other, unlike = (build_layer(f"L{n:03d}", f"layers.{n}", nn.Linear(2, n // 2 + 3)) for n in range(3))
    (ours,), (theirs,), (another,) = ([block.layout for block in unit.blocks] for unit in (one, other, unlike))
    assert ours is theirs and another is not ours and another != ours
    assert copy.deepcopy(ours) == ours and hash(copy.deepcopy(ours)) == hash(ours)
    seen = weakref.ref(ours)
    del one, other, ours, theirs
    gc.collect()
    assert seen() is None


def test_buffers_are_used_again_and_booked_while_anybody_has_them(gradients: GradientBuffers, host: Ledger) -> None:
    first = gradients.acquire(16)
    gradients.release(first)
    assert gradients.acquire(16) is first and gradients.acquire(16) is not first
    assert host.by_category()["gradients"] == first.nbytes, "nobody has the second one"
    gradients.release(first)
    gradients.clear()
    assert host.by_category()["gradients"] == first.nbytes, "forgotten, but somebody has it"
    del first
    assert not host.by_category().get("gradients")


def other_thread(run: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("how", ["release", "give_up"])
def test_who_brings_a_gradient_waits_for_room_until_one_is_used_or_the_step_has_failed(
    gradients: GradientBuffers, how: str
) -> None:
    gradients.begin(bounded=True)
    held = [gradients.acquire(16, bounded=True) for _ in range(MAX_PENDING_GRADIENTS)]
    brought = threading.Event()
    thread = other_thread(lambda: (gradients.acquire(16, bounded=True), brought.set()))
    gradients.acquire(16)  # what has no bound does not wait
    assert not brought.wait(0.05)
    gradients.release(held[0]) if how == "release" else gradients.abort()
    assert brought.wait(HANG_S)
    thread.join()


def test_deferred_updates_have_no_bound(gradients: GradientBuffers) -> None:
    gradients.begin(bounded=False)
    assert len({id(b) for b in [gradients.acquire(16, bounded=True) for _ in range(2 * MAX_PENDING_GRADIENTS)]}) == 6


@pytest.mark.parametrize(
    "shapes", [[(3,)], [(2, 3), ()], [(2**20,)], [(1025, 1025), (7,), ()]], ids=["one", "two", "pieces", "a rest"]
)
def test_a_norm_is_that_of_all_elements(shapes: list[tuple[int, ...]]) -> None:
    """Large ones are computed in pieces."""
    parts = [torch.randn(shape) for shape in shapes]
    parts[0] = parts[0].t() if parts[0].dim() == 2 else parts[0]  # not contiguous
    together = torch.cat([part.double().flatten() for part in parts])
    assert joint_norm(parts) == pytest.approx(float(together.norm()), rel=1e-6)
    parts[-1].fill_(torch.nan)
    assert math.isnan(joint_norm(parts))


def test_no_tensors_have_no_norm() -> None:
    assert joint_norm([]) == 0.0
