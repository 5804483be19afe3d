"""What a save holds beside the present: undo and branches go on in another process as they would have here."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import assert_same, keys, make_batch, make_gpt, make_relay, whole
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GPT2LMHeadModel

from l2l_core import (
    Drop,
    Duplicate,
    EmulatedDevice,
    Freeze,
    Insert,
    Interpolate,
    Move,
    Relay,
    Replace,
    Swap,
)
from l2l_core.edits import commands
from l2l_core.saves.codec import PlainReader, plain_command


@pytest.fixture
def relay() -> Iterator[Relay]:
    with make_relay(make_gpt()) as made:
        made.step(make_batch(0))
        yield made


def load(folder: Path, model: nn.Module | None = None, **options: Any) -> Relay:
    model = make_gpt() if model is None else model
    return Relay.load(folder, model, partial(torch.optim.AdamW, lr=1e-2), device=EmulatedDevice(), **options)


def journal_of(relay: Relay) -> list[tuple[Any, ...]]:
    return [(e.kind, e.what, e.step, e.layers, e.params, e.nbytes) for e in relay.journal]


def turn_both(relay: Relay, again: Relay, how: str) -> bool:
    """Undo or redo in both; whether there was anything to."""
    try:
        getattr(relay, how)()
    except ValueError as error:
        with pytest.raises(ValueError) as found:
            getattr(again, how)()
        assert str(found.value) == str(error)
        return False
    getattr(again, how)()
    assert keys(again) == keys(relay)
    assert_same(whole(again), whole(relay))
    return True


EDIT = st.sampled_from(
    [
        Insert(at=1, init="copy", warmup=5), Insert(at=0, init="fresh"), Duplicate(0, mode="top", optimizer=0.5),
        Drop(1), Drop(-1, park="disk"), Swap(0, 1), Interpolate(0, 1), Freeze(0),
    ]
)  # fmt: skip


@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(EDIT, min_size=2, max_size=7), undone=st.integers(0, 2))
def test_a_saved_relay_undoes_and_redoes_like_the_one_that_was_saved(
    edits: list[Any], undone: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("save")
    with make_relay(make_gpt(3)) as relay:
        relay.step(make_batch(0))
        for number, edit in enumerate(edits):
            try:
                relay.apply(edit)
            except ValueError:
                continue
            if number % 2:
                relay.step(make_batch(number))
        for _ in range(min(undone, len(relay.journal))):
            relay.undo()
        relay.save(folder)
        deep = copy.deepcopy(relay.model)  # has been edited as well
        with load(folder, deep) as again:
            assert journal_of(again) == journal_of(relay)
            assert_same(whole(again), whole(relay))
        with load(folder, make_gpt(3)) as again:
            while turn_both(relay, again, "redo"):
                pass
            assert relay.step(make_batch(9)).loss == again.step(make_batch(9)).loss
            while turn_both(relay, again, "undo"):
                pass
            assert again.verify(make_batch(2)).equal


def test_undo_in_a_model_that_was_loaded_at_its_new_depth(relay: Relay, tmp_path: Path) -> None:
    relay.apply(Drop(slice(0, 2)), Duplicate(0))
    relay.step(make_batch(1))
    relay.save(tmp_path / "relay")
    relay.model.save_pretrained(tmp_path / "model")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "model").train()
    model.loss_type = "ForCausalLM"
    with load(tmp_path / "relay", model) as again:
        assert turn_both(relay, again, "undo") and keys(again) == ["L000", "L001", "L002", "L003"]
        assert relay.step(make_batch(2)).loss == again.step(make_batch(2)).loss
        assert again.model.config.n_layer == 4 and [block.attn.layer_idx for block in again.model.transformer.h] == [
            0, 1, 2, 3,
        ]  # fmt: skip


def test_branches_go_on_after_loading(relay: Relay, tmp_path: Path) -> None:
    relay.fork("deep")
    relay.apply(Duplicate(mode="interleaved"))
    relay.step(make_batch(1))
    relay.fork("frozen")
    relay.apply(Freeze(0), Interpolate(1, 2), Drop(3, park="disk"))
    relay.step(make_batch(2))
    relay.switch("deep")
    relay.step(make_batch(3))
    relay.save(tmp_path)
    with load(tmp_path) as again:
        assert [(b.name, b.active, b.steps, b.layers, b.loss) for b in again.branches] == [
            (b.name, b.active, b.steps, b.layers, b.loss) for b in relay.branches
        ]
        for name in ("frozen", "main", "deep", "frozen"):
            relay.switch(name), again.switch(name)
            assert keys(again) == keys(relay) and journal_of(again) == journal_of(relay)
            assert_same(whole(again), whole(relay))
            assert relay.step(make_batch(4)).loss == again.step(make_batch(4)).loss
        while turn_both(relay, again, "undo"):
            pass
        again.save(tmp_path)
        with load(tmp_path) as third:
            third.switch("main"), again.switch("main")
            assert_same(whole(third), whole(again))


def test_entries_of_the_configuration_come_back_with_a_layer(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        config = Gemma2Config(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=4, num_attention_heads=2, head_dim=8,
            num_key_value_heads=1, max_position_embeddings=8, sliding_window=4, attn_implementation="eager",
            layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        )  # fmt: skip
        return Gemma2ForCausalLM(config).train()

    with make_relay(make()) as relay:
        relay.step(make_batch(0))
        types = list(relay.model.config.layer_types)
        relay.apply(Drop(0))
        assert relay.model.config.layer_types == types[1:]
        relay.save(tmp_path)
        with load(tmp_path, make()) as again:
            assert turn_both(relay, again, "undo")
            assert again.model.config.layer_types == types
            assert relay.step(make_batch(1)).loss == again.step(make_batch(1)).loss


def test_a_layer_of_a_kind_of_its_own_needs_its_module(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make_relay(nn_chain(), loss=square) as chain:
        batch = (torch.ones(2, 4),)
        chain.step(batch)
        chain.apply(Replace(1, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))))
        chain.step(batch)
        chain.apply(Drop(1))
        chain.save(tmp_path)
        with caplog.at_level(logging.WARNING, "l2l_core"), load(tmp_path, nn_chain(), loss=square) as again:
            assert "modules={'L003': ...}" in caplog.text
            with pytest.raises(ValueError, match="L003, a Sequential like none in the model.*modules="):
                again.undo()
        modules = {"L003": nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))}
        with load(tmp_path, nn_chain(), loss=square, modules=modules) as again:
            while turn_both(chain, again, "undo"):
                pass
            assert keys(again) == ["L000", "L001", "L002"]
        chain.redo()
        chain.fork("other")
        chain.undo()
        chain.save(tmp_path)
        with pytest.raises(
            ValueError, match="the branch .main. cannot be restored: layer L003, a Sequential.*modules="
        ):
            load(tmp_path, nn_chain(), loss=square)
        modules = {"L003": nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))}
        with load(tmp_path, nn_chain(), loss=square, modules=modules) as again:
            again.switch("main"), chain.switch("main")
            assert_same(whole(again), whole(chain))


def nn_chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3)))


def square(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return (out**2).mean()


def test_a_load_that_is_refused_leaves_model_and_optimizer_as_they_were(relay: Relay, tmp_path: Path) -> None:
    relay.apply(Drop(0), Duplicate(0), Freeze(1), Insert(at=0, init="copy"))
    relay.save(tmp_path)
    model = make_gpt()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before, params = list(model.transformer.h), list(optimizer.param_groups[0]["params"])
    with pytest.raises(ValueError, match="optimizer"):
        Relay.load(tmp_path, model, optimizer, device=EmulatedDevice())
    assert list(model.transformer.h) == before and model.config.n_layer == 4
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], params, strict=True))
    assert all(param.requires_grad for param in model.parameters())
    with load(tmp_path, model) as again:  # nothing stands in the way of another try
        assert keys(again) == keys(relay)


def test_what_was_dropped_for_good_stays_so(relay: Relay, tmp_path: Path) -> None:
    relay.apply(Drop(0, park=None))
    relay.apply(Swap(0, 1))
    relay.save(tmp_path)
    with load(tmp_path) as again:
        assert turn_both(relay, again, "undo")
        with pytest.raises(ValueError, match="L000 was dropped for good"):
            again.undo()


class Nothing(nn.Sequential):
    """A layer without parameters that is false in a condition."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_layer_without_members_is_one_all_the_same(tmp_path: Path) -> None:
    with make_relay(nn_chain(), loss=square) as chain:
        chain.step((torch.ones(2, 4),))
        chain.apply(Insert(at=1, module=Nothing()), force=True)
        chain.apply(Swap("L003", 0))
        assert chain.verify((torch.ones(2, 4),)).equal
        chain.save(tmp_path)
        with load(tmp_path, nn_chain(), loss=square, modules={"L003": Nothing()}) as again:
            assert keys(again) == keys(chain) == ["L003", "L000", "L001", "L002"]
            assert_same(whole(again), whole(chain))


def test_what_one_branch_dropped_for_good_another_has_after_loading(relay: Relay, tmp_path: Path) -> None:
    relay.fork("thin")
    relay.apply(Drop(1, park=None))
    relay.step(make_batch(1))
    relay.save(tmp_path)
    with load(tmp_path) as again:
        for name in ("main", "thin"):
            relay.switch(name), again.switch(name)
            assert keys(again) == keys(relay)
            assert_same(whole(again), whole(relay))


def test_a_load_that_is_refused_for_a_branch_changes_nothing(tmp_path: Path) -> None:
    with make_relay(nn_chain(), loss=square) as chain:
        chain.fork("odd")
        chain.apply(Replace(1, nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))))
        chain.switch("main")
        chain.step((torch.ones(2, 4),))
        chain.save(tmp_path)
    model = nn_chain()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match="the branch 'odd' cannot be restored"):
        Relay.load(tmp_path, model, optimizer, device=EmulatedDevice(), loss=square)
    assert_same(model.state_dict(), before)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 3e-4
    assert torch.equal(torch.get_rng_state(), random)


class Block(nn.Module):
    def __init__(self, dilation: int = 1) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(4, 4, 3, padding=dilation, dilation=dilation), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(self.conv(x)))


def blocks(*ties: tuple[int, int], dilations: tuple[int, ...] = (1, 1, 1, 1)) -> nn.Module:
    """Residual blocks, of which some have one weight in common."""
    torch.manual_seed(0)
    model = nn.Sequential(*map(Block, dilations))
    for a, b in ties:
        model[b].out.weight = model[a].out.weight
    return model.train()


def rows(seed: int = 0) -> tuple[torch.Tensor]:
    return (torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(seed)),)


def ties(model: nn.Module) -> set[tuple[str, ...]]:
    """Names of parameters that are one."""
    named = list(model.named_parameters(remove_duplicate=False))
    return {tuple(name for name, other in named if other is param) for _, param in named}


PAIRS = ((0, 2), (1, 3))


@pytest.mark.parametrize("as_it_is", [False, True], ids=["fresh", "as it is"])
@pytest.mark.parametrize(
    "edits",
    [
        [Swap(0, 1)], [Swap(0, 2)], [Move(1, 3), Swap(1, 2)], [Move(0, 3)], [Drop(2)], [Drop(0), Duplicate(0)],
        [Drop(2, park="disk")], [Drop(3, park=None)], [Insert(at=1, init="copy"), Drop(0), Swap(0, 1)], [Drop(slice(0, 2))],
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("forked", [False, True], ids=["", "forked"])
def test_layers_that_share_weights_are_loaded_with_what_they_share(
    edits: list[Any], as_it_is: bool, forked: bool, tmp_path: Path
) -> None:
    with make_relay(blocks(*PAIRS), loss=square) as relay:
        relay.step(rows())
        if forked:
            relay.fork("other")
        relay.apply(*edits)
        relay.step(rows(1))
        relay.save(tmp_path)
        model = copy.deepcopy(relay.model) if as_it_is else blocks(*PAIRS)
        with load(tmp_path, model, loss=square) as again:
            assert keys(again) == keys(relay) and ties(again.model) == ties(relay.model)
            assert_same(whole(again), whole(relay))
            assert again.evaluate(rows()) == relay.evaluate(rows())
            if forked:
                for name in ("main", "other"):
                    relay.switch(name), again.switch(name)
                    assert_same(whole(again), whole(relay))
            turn_both(relay, again, "undo")
            assert ties(again.model) == ties(relay.model)
            assert relay.step(rows(2)).loss == again.step(rows(2)).loss
            assert_same(whole(again), whole(relay))


@pytest.mark.parametrize("edits", [[], [Swap(0, 1)], [Drop(2)]], ids=repr)
def test_a_model_that_shares_other_weights_is_refused_before_it_is_changed(edits: list[Any], tmp_path: Path) -> None:
    with make_relay(blocks(*PAIRS), loss=square) as relay:
        relay.step(rows())
        if edits:
            relay.apply(*edits)
        relay.save(tmp_path)
    model = blocks((0, 3), (1, 2)) if not edits else blocks((0, 1), (2, 3))
    before, layers = copy.deepcopy(model.state_dict()), list(model)
    with pytest.raises(ValueError, match="(?i)shared"):
        load(tmp_path, model, loss=square)
    assert_same(model.state_dict(), before)
    assert list(model) == layers


def test_layers_that_differ_in_a_setting_only_are_told_apart(tmp_path: Path) -> None:
    with make_relay(blocks(dilations=(1, 2, 1, 3)), loss=square) as relay:
        relay.step(rows())
        relay.apply(Swap(0, 1), Drop("L003"), Duplicate("L001"))
        relay.save(tmp_path)
        for model in (blocks(dilations=(1, 2, 1, 3)), copy.deepcopy(relay.model)):
            with load(tmp_path, model, loss=square, modules={"L003": Block(3)}) as again:
                assert [unit.module.conv.dilation for unit in again.stack] == [(2,), (2,), (1,), (1,)]
                assert again.evaluate(rows()) == relay.evaluate(rows())
                assert again.undo() and again.stack[3].module.conv.dilation == (3,)


def test_a_layer_of_other_parts_is_not_taken_for_another(tmp_path: Path) -> None:
    def chain() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))

    def sigmoid() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())

    batch = (torch.ones(2, 4),)
    with make_relay(chain(), loss=square) as relay:
        relay.step(batch)
        relay.apply(Replace(1, sigmoid()))
        relay.save(tmp_path)
        with pytest.raises(ValueError, match="L003.*modules="):
            load(tmp_path, chain(), loss=square)
        with pytest.raises(ValueError, match="modules={'L003': ...}.*of another kind"):
            load(tmp_path, chain(), loss=square, modules={"L003": nn.Sequential(nn.Linear(4, 4), nn.Tanh())})
        with load(tmp_path, chain(), loss=square, modules={"L003": sigmoid()}) as again:
            assert again.evaluate(batch) == relay.evaluate(batch)


def test_a_run_may_go_on_with_other_settings_of_its_layers(tmp_path: Path) -> None:
    with make_relay(make_gpt()) as relay:
        relay.apply(Swap(0, 1), Insert(at=2, init="copy"), Drop(0))
        relay.save(tmp_path)
    model = make_gpt()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.3
    with load(tmp_path, model) as again:
        assert keys(again) == keys(relay) and again.step(make_batch()).loss


@pytest.mark.parametrize(
    "edits", [[Duplicate("L000")], [Drop("L001")], [Insert(at="L000", init="copy"), Swap("L000", "L001")]], ids=repr
)
@pytest.mark.parametrize("as_it_is", [False, True], ids=["fresh", "as it is"])
def test_stem_layers_and_head_in_one_sequential(edits: list[Any], as_it_is: bool, tmp_path: Path) -> None:
    """The head's name, and those of other stacks behind these layers, change with the depth."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        return nn.Sequential(nn.Linear(4, 8), *layers, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Linear(8, 1))

    batch = (torch.ones(2, 4),)
    with make_relay(make(), loss=square, layers=["1", "2", "3", "4.0", "4.1"]) as relay:
        relay.step(batch)
        relay.apply(*edits, force=True)
        relay.apply(Drop((list(relay.stacks)[1], 0)))
        named, units = dict(relay.model.named_parameters()), (relay.shell, *relay.stack)
        for name, param in ((n, p) for u in units for b in u.blocks for n, p in zip(b.names, b.params, strict=True)):
            assert named[name] is param
        relay.step(batch)
        relay.save(tmp_path)
        model = copy.deepcopy(relay.model) if as_it_is else make()
        with load(tmp_path, model, loss=square) as again:
            assert_same(whole(again), whole(relay))
            assert list(again.stacks) == list(relay.stacks)
            while turn_both(relay, again, "undo"):
                pass
            assert [unit.name for unit in again.stack] == ["1", "2", "3", "4.0", "4.1"]
            assert relay.step(batch).loss == again.step(batch).loss


def test_every_kind_of_change_is_written_and_read_alike(relay: Relay) -> None:
    one, other, *_ = relay.stack
    param = one.params[1]
    changes = [
        commands.RestackCommand("transformer.h", (one, other), (other,), {other: one}, proven=True),
        commands.RewriteCommand(one, {param: (param.detach(), {"step": 3})}),
        commands.SetTrainedCommand(one, {param: False}),
        *(kind((one, other)) for kind in (commands.SpillCommand, commands.FetchCommand, commands.FreeCommand)),
        commands.ImpossibleCommand("it is gone"),
        commands.SetLoopsCommand("transformer.h", {"n_loops": 2}),
    ]
    assert {type(each) for each in changes} == kinds(commands.EditCommand)
    reader = PlainReader(relay._editor, {unit.key: unit for unit in relay.stack}, {}, relay.config)
    for each in changes:
        again = reader.read_command(*plain_command(each))
        assert type(again) is type(each) and vars(again) == vars(each)


def kinds(base: type) -> set[type]:
    """The kinds that have none below them."""
    below = base.__subclasses__()
    return set().union(*map(kinds, below)) if below else {base}
