"""A relay step equals in-core gradient accumulation to the bit: losses, weights and buffers (invariant 1)."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    InCore,
    adamw,
    assert_equal,
    assert_state,
    both,
    copy_state,
    decay_groups,
    differences,
    has_gradient,
    micro_batches_of,
    run_both,
)
from patience import rarely, with_extra
from torch import Tensor, nn
from torch.optim import Optimizer
from zoo import BY_NAME, IGNORED, KINDS, QUANTISED_KINDS, Chain, Kind, ResidualMlp, loss_of

from l2l_core import Relay, RelayConfig

FEW = ["chain", "gpt2", "t5", "qwen3_moe", "resnet", "unet", "random_skip", "albert", "tied_layers"]

few_kinds = pytest.mark.parametrize("kind", [BY_NAME[name] for name in FEW], ids=str)
stashes = pytest.mark.parametrize("stash", ["device", "host"])


# --- every kind ----------------------------------------------------------------------------------------------------


@pytest.mark.all_cases
@stashes
@pytest.mark.parametrize("kind", [*KINDS, *with_extra(QUANTISED_KINDS, "quant", "bitsandbytes", "peft")], ids=str)
def test_every_kind(kind: Kind, stash: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five AdamW steps with decay groups, dropout on, an uneven last micro-batch (3, 3 and 1 rows)."""
    monkeypatch.setattr("l2l_core.schedule_rules.MIN_CHUNK_BYTES", 64)  # so that small layers trickle as large ones do
    assert_equal(run_both(kind, 5, RelayConfig(micro_batches=3, stash=stash)))


def test_with_threads() -> None:
    torch.set_num_threads(2)
    assert_equal(run_both(BY_NAME["chain"], 2, RelayConfig(micro_batches=3)))


@few_kinds
def test_verify_agrees(kind: Kind) -> None:
    with both(kind, RelayConfig(micro_batches=3)) as pair:
        pair.relay.step(kind.make_batch(7, 0))
        before = copy_state(pair.relay.model)
        report = pair.relay.verify(kind.make_batch(7, 1))
        assert report.equal and report.max_abs_diff == 0.0, str(report)
        assert_state(pair.relay.model, before)


# --- every setting -------------------------------------------------------------------------------------------------


@stashes
@pytest.mark.parametrize("ahead", [0, 1, rarely(2)])
@pytest.mark.parametrize("micro_batches", [1, 2, rarely(4)])
@few_kinds
def test_settings(kind: Kind, micro_batches: int, ahead: int, stash: str) -> None:
    assert_equal(run_both(kind, 2, RelayConfig(micro_batches=micro_batches, ahead=ahead, stash=stash)))


@few_kinds
def test_deferred_update(kind: Kind) -> None:
    assert_equal(run_both(kind, 2, RelayConfig(micro_batches=3, update="deferred")))


@few_kinds
def test_clipping(kind: Kind) -> None:
    """The bits of `clip_grad_norm_` over all parameters in the model's order; 0.1 does clip."""
    config = RelayConfig(micro_batches=3, update="deferred", max_grad_norm=0.1)
    clipped = run_both(kind, 2, config, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
    assert_equal(clipped)
    free = run_both(kind, 2, RelayConfig(micro_batches=3), optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=1.0))
    assert clipped[1].result.loss != free[1].result.loss


def test_config_may_change_between_steps() -> None:
    kind = BY_NAME["gpt2"]
    with both(kind, RelayConfig(micro_batches=1)) as pair:
        for step, settings in enumerate(
            [{}, {"micro_batches": 3}, {"stash": "host"}, {"ahead": 0}, {"update": "deferred", "micro_batches": 2}]
        ):
            pair.relay.config = RelayConfig(**settings)
            pair.in_core.config = pair.relay.config  # with the seed
            assert_equal([pair.step(kind.make_batch(7, step))])


# --- optimizers ----------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(decay_groups(m), lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda m: torch.optim.Adagrad(decay_groups(m), lr=0.01),
    "rmsprop": lambda m: torch.optim.RMSprop(decay_groups(m), lr=1e-3, momentum=0.9, centered=True),
    "amsgrad": partial(adamw, amsgrad=True),
    "fused": partial(adamw, fused=True),
    "foreach": partial(adamw, foreach=True),
    "adafactor": lambda m: torch.optim.Adafactor(decay_groups(m), lr=1e-2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
@pytest.mark.parametrize("name", ["chain", "gpt2", "tied_layers"])
def test_optimizers(name: str, make: Callable[[nn.Module], Optimizer]) -> None:
    assert_equal(run_both(BY_NAME[name], 3, RelayConfig(micro_batches=3), optimizer=make))


@pytest.mark.parametrize("name", ["chain", "gpt2"])
def test_muon_over_some_parameters(name: str) -> None:
    """Muon takes matrices only, so the optimizer holds the matrices of the layers and the rest of the model stays."""

    def muon(model: nn.Module) -> Optimizer:
        params = [p for n, p in model.named_parameters() if p.dim() == 2 and (".h." in n or "layers." in n)]
        return torch.optim.Muon(params, lr=1e-2)

    with both(BY_NAME[name], RelayConfig(micro_batches=3), muon) as pair:
        before = copy_state(pair.relay.model)
        assert_equal([pair.step(BY_NAME[name].make_batch(7, step)) for step in range(3)])
        changed = {n for n, p in pair.relay.model.named_parameters() if not torch.equal(p, before[n])}
        assert changed == {n for n in before if before[n].dim() == 2 and (".h." in n or "layers." in n)}


def test_factory_is_called_once_with_all_parameters() -> None:
    kind, calls = BY_NAME["chain"], []

    def factory(params: Any) -> Optimizer:
        calls.append(list(params))
        return torch.optim.AdamW(calls[-1], lr=1e-3)

    model = kind.make_model()
    with Relay(model, factory, loss=kind.loss, loss_over=kind.loss_over) as relay:
        assert len(calls) == 1 and all(a is b for a, b in zip(calls[0], model.parameters(), strict=True))
        in_core = InCore(kind, twin := kind.make_model(), factory(twin.parameters()), relay.config)
        batch = kind.make_batch(4, 0)
        assert relay.step(batch).loss == in_core.step(batch)
        assert not differences(model, twin)


def test_optimizer_is_adopted_with_its_state() -> None:
    """Two steps in core, two by relay, two in core again: one optimizer throughout."""
    kind, config = BY_NAME["gpt2"], RelayConfig(micro_batches=3)
    sides = []
    for _ in range(2):
        model = kind.make_model()
        sides.append(InCore(kind, model, adamw(model), config))
    ours, theirs = sides
    for step in range(2):
        assert ours.step(kind.make_batch(7, step)) == theirs.step(kind.make_batch(7, step))
    with Relay(ours.model, ours.optimizer, config=config) as relay:
        theirs.steps = 0  # the relay counts from 0, and with it the random streams
        for step in range(2, 4):
            assert relay.step(kind.make_batch(7, step)).loss == theirs.step(kind.make_batch(7, step))
    ours.steps = 2
    for step in range(4, 6):
        assert ours.step(kind.make_batch(7, step)) == theirs.step(kind.make_batch(7, step))
    assert not differences(ours.model, theirs.model)


@pytest.mark.parametrize("name", ["gpt2", "tied_layers"])
def test_state_dict_continues_in_core(name: str) -> None:
    """The state of the relay's optimizer fits a plain one, which goes on with the same bits."""
    kind = BY_NAME[name]
    with both(kind, RelayConfig(micro_batches=3)) as pair:
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2)])
        model = copy.deepcopy(pair.relay.model)
        optimizer = adamw(model, lr=0.5)  # the loaded state brings the right rate
        optimizer.load_state_dict(copy.deepcopy(pair.relay.optimizer.state_dict()))  # loading itself does not copy
        plain = InCore(kind, model, optimizer, pair.relay.config, steps=2)
        for step in range(2, 4):
            assert plain.step(kind.make_batch(7, step)) == pair.step(kind.make_batch(7, step)).result.loss
        assert not differences(model, pair.relay.model)


def test_the_relays_optimizer_loads_a_state() -> None:
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=3)) as pair:
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2)])
        for optimizer in (pair.relay.optimizer, pair.in_core.optimizer):
            held = copy.deepcopy(optimizer.state_dict())
            for known in held["state"].values():
                known["exp_avg"].zero_()
            optimizer.load_state_dict(held)
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2, 4)])


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1.0 / (1 + step)),
        partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=10),  # moves the betas too
    ],
    ids=["lambda", "one_cycle"],
)
def test_schedulers(make: Callable[[Optimizer], Any]) -> None:
    """Driven as ever, without a warning about the order of calls (warnings are errors here)."""
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=3)) as pair:
        schedulers = [make(pair.relay.optimizer), make(pair.in_core.optimizer)]
        for step in range(4):
            assert_equal([pair.step(kind.make_batch(7, step))])
            for scheduler in schedulers:
                scheduler.step()
        assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr() != [1e-3, 1e-3]
        assert pair.relay.verify(kind.make_batch(7, 9)).equal


def test_scheduler_made_before_the_relay() -> None:
    kind = BY_NAME["chain"]
    model = kind.make_model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    in_core = InCore(kind, kind.make_model(), None, RelayConfig())  # type: ignore[arg-type]
    in_core.optimizer = adamw(in_core.model)
    other = torch.optim.lr_scheduler.LambdaLR(in_core.optimizer, lambda step: 1.0 / (1 + step))
    with Relay(model, optimizer, loss=kind.loss, loss_over=kind.loss_over) as relay:
        for step in range(3):
            assert relay.step(kind.make_batch(4, step)).loss == in_core.step(kind.make_batch(4, step))
            scheduler.step(), other.step()
    assert not differences(model, in_core.model)


def test_step_hooks_fire_once_per_step() -> None:
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(update="deferred")) as pair:
        seen: list[str] = []
        pair.relay.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
        pair.relay.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
        pair.step(kind.make_batch(4, 0))
        pair.step(kind.make_batch(4, 1))
    assert seen == ["before", "after"] * 2


# --- which modules are layers --------------------------------------------------------------------------------------

GPT2_LAYERS = ["transformer.wte", *(f"transformer.h.{i}" for i in range(4)), "lm_head"]


@stashes
@pytest.mark.parametrize("name", ["gpt2", "gpt2_untied"])
def test_embedding_and_head_as_layers(name: str, stash: str) -> None:
    assert_equal(run_both(BY_NAME[name], 3, RelayConfig(micro_batches=3, stash=stash), layers=GPT2_LAYERS))


def test_nothing_big_stays_resident() -> None:
    """With embedding and head as layers the shell is the position table and the last norm."""
    kind, ahead = BY_NAME["gpt2_untied"], 1
    with both(kind, RelayConfig(micro_batches=3, ahead=ahead), layers=GPT2_LAYERS) as pair:
        result = pair.step(kind.make_batch(7, 0)).result
        relay = pair.relay
    assert relay.shell.num_params == sum(
        p.numel() for n, p in relay.model.named_parameters() if "wpe" in n or "ln_f" in n
    )
    on_device = [sample.bytes_by_category for sample in result.trace.memory if sample.place == "device"]
    weights = max(sample.get("weights", 0) for sample in on_device)
    assert weights <= (ahead + 1) * max(layer.nbytes for layer in relay.stack) + relay.shell.nbytes


def test_everything_is_a_layer() -> None:
    layers = ["embed", *(f"layers.{i}" for i in range(4)), "head"]
    assert_equal(run_both(BY_NAME["chain"], 3, RelayConfig(micro_batches=3), layers=layers))


def test_one_layer_among_many_modules() -> None:
    assert_equal(run_both(BY_NAME["chain"], 3, RelayConfig(micro_batches=3, ahead=2), layers=["layers.2"]))


class HandsOn(nn.Module):
    """Gives out the very tensor that it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Silent(nn.Linear):
    """Gives out nothing that a gradient could reach."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return 0.1 * super().forward(x)


class Added(nn.Module):
    """A stem, and layers whose outputs are added to what they are given; those that hand it on alone are not."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(8, 8), nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x) if isinstance(layer, HandsOn) else x + layer(x)
        return x


@pytest.mark.parametrize("odd", [HandsOn, lambda: Silent(8, 8)], ids=["hands on", "silent"])
@pytest.mark.parametrize("at", [0, 1, 2])
@stashes
def test_what_is_behind_a_layer_without_a_graph_learns(odd: Callable[[], nn.Module], at: int, stash: str) -> None:
    layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
    layers.insert(at, odd())
    config = RelayConfig(micro_batches=2, stash=stash)  # type: ignore[arg-type]
    names = [f"layers.{i}" for i in range(3)]
    with Relay(Added(*layers), layers=names, loss=lambda out, _: out.square().mean(), config=config) as relay:
        report = relay.verify((torch.randn(4, 8),))
        assert report.equal, str(report)


def test_layer_without_parameters() -> None:
    kind = BY_NAME["inplace"]
    assert_equal(run_both(kind, 2, RelayConfig(micro_batches=3), layers=["0", "2", "8", "11"]))


# --- batches, losses, weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2_padded", "bert", "llama", "t5", "bert_classifier"])
def test_step_loss_is_the_mean_over_the_batch(name: str) -> None:
    """Not the mean of micro-batch means: rows have different numbers of targets."""
    kind = BY_NAME[name]
    model, batch = kind.make_model().eval(), kind.make_batch(7, 0)
    with torch.no_grad():
        expected = float(loss_of(kind, model, batch))
        means = [float(loss_of(kind, model, part)) for part in micro_batches_of(batch, 3)]
    with Relay(model, config=RelayConfig(micro_batches=3)) as relay:
        assert relay.evaluate(batch) == pytest.approx(expected, rel=1e-6)
        assert relay.step(batch).loss == pytest.approx(expected, rel=1e-6)
    assert sum(means) / 3 != pytest.approx(expected, rel=1e-6)


def test_a_micro_batch_without_targets_adds_nothing_and_a_batch_without_any_is_refused() -> None:
    kind = BY_NAME["gpt2"]
    batch = kind.make_batch(4, 0)
    batch["labels"][2:] = IGNORED
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        expected = pair.in_core.step_on([{name: rows[:2] for name, rows in batch.items()}])
        assert pair.relay.step(batch).loss == expected
        assert not differences(pair.relay.model, pair.in_core.model)
        before = copy_state(pair.relay.model)
        batch["labels"][:] = IGNORED
        with pytest.raises(ValueError, match="no target"):
            pair.relay.step(batch)
        assert_state(pair.relay.model, before)


def test_own_weight() -> None:
    kind = BY_NAME["gpt2_padded"]
    with both(kind, RelayConfig(micro_batches=3), weight=lambda part: len(part["labels"]) ** 2) as pair:
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2)])


def test_own_objective() -> None:
    kind = BY_NAME["gpt2"]

    def smoothed(model: nn.Module, part: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=part["input_ids"], use_cache=False).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), part["labels"][:, 1:].flatten(), label_smoothing=0.1)

    with both(kind, RelayConfig(micro_batches=3, stash="host"), objective=smoothed) as pair:
        assert_equal([pair.step(kind.make_batch(7, step)) for step in range(2)])


def test_dict_with_loss() -> None:
    """Entries that the model's forward does not take are left to the loss."""
    kind = BY_NAME["chain"]
    loss = lambda outputs, batch: F.cross_entropy(outputs, batch["target"], label_smoothing=0.1)  # noqa: E731
    with both(kind, RelayConfig(micro_batches=3), loss=loss) as pair:
        pair.in_core.objective = lambda model, part: loss(model(part["x"]), part)
        for step in range(2):
            assert_equal([pair.step(dict(zip(("x", "target"), kind.make_batch(7, step), strict=True)))])


def test_tuple_without_loss() -> None:
    """All entries go to the model, which returns something with `.loss`."""
    assert BY_NAME["mixture"].loss is None
    assert_equal(run_both(BY_NAME["mixture"], 2, RelayConfig(micro_batches=2)))


def test_extra_values_go_to_every_micro_batch() -> None:
    kind = BY_NAME["gpt2"]
    shared = {"position_ids": torch.arange(12).flip(0)[None]}  # one row for all
    with both(kind, RelayConfig(micro_batches=3)) as pair:
        pair.in_core.objective = lambda model, part: model(**part, **shared, use_cache=False).loss
        for step in range(2):
            batch = kind.make_batch(7, step)
            result = pair.relay.step(batch | shared)
            assert result.loss == pair.in_core.step(batch) and not differences(pair.relay.model, pair.in_core.model)


# --- modes, frozen parts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain", "gpt2", "resnet", "spectral_norm", "lstm_stack"])
def test_training_in_evaluation_mode(name: str) -> None:
    kind = BY_NAME[name]
    with both(kind, RelayConfig(micro_batches=3)) as pair:
        for step, mode in enumerate([False, True, False]):
            pair.relay.model.train(mode), pair.in_core.model.train(mode)
            assert_equal([pair.step(kind.make_batch(7, step))])
            assert all(module.training == mode for module in pair.relay.model.modules())


@stashes
def test_requires_grad_may_change_between_steps(stash: str) -> None:
    kind = BY_NAME["gpt2_untied"]
    with both(kind, RelayConfig(micro_batches=3, stash=stash)) as pair:
        for step, (name, trained) in enumerate(
            [("h.1.", False), ("wte", False), ("h.1.", True), ("h.0.ln_1", False), ("wte", True), ("h.", False)]
        ):
            for model in (pair.relay.model, pair.in_core.model):
                for param in (p for n, p in model.named_parameters() if name in n):
                    param.requires_grad_(trained)
            assert_equal([pair.step(kind.make_batch(7, step))])


def test_unfreezing_in_any_order() -> None:
    """Fine-tuning that starts with the head alone."""
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=3), partial(adamw, lr=1e-2)) as pair:
        for model in (pair.relay.model, pair.in_core.model):
            model.requires_grad_(False).head.requires_grad_(True)
        for step, layer in enumerate([2, 0, 3, 1]):
            assert_equal([pair.step(kind.make_batch(7, step))])
            for model in (pair.relay.model, pair.in_core.model):
                model.layers[layer].requires_grad_(True)
        assert_equal([pair.step(kind.make_batch(7, 4))])
        assert [layer.version for layer in pair.relay.stack] == [3, 1, 4, 2]


class SometimesEmpty(Chain):
    """Skips all layers at once for about half of the micro-batches."""

    def walk(self, h: Tensor) -> Tensor:
        return super().walk(h) if torch.rand(()).item() < 0.5 else h


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_layer_skipped(micro_batches: int) -> None:
    def make_model() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return SometimesEmpty([ResidualMlp() for _ in range(3)])

    chain = BY_NAME["chain"]
    kind = Kind("sometimes_empty", make_model, chain.make_batch, chain.loss, loss_over="micro-batch")
    assert_equal(run_both(kind, 5, RelayConfig(micro_batches=micro_batches)))


# --- the model stays the user's model ------------------------------------------------------------------------------


def test_model_is_ordinary_between_steps(tmp_path: Any) -> None:
    kind = BY_NAME["gpt2"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        relay, model = pair.relay, pair.relay.model
        identities = [id(p) for p in model.parameters()]
        pair.step(kind.make_batch(4, 0))
        assert [id(p) for p in model.parameters()] == identities and not any(map(has_gradient, model.parameters()))
        model.save_pretrained(tmp_path)
        loaded = type(model).from_pretrained(tmp_path)
        assert not differences(loaded, pair.in_core.model)
        batch = kind.make_batch(4, 1)
        with torch.no_grad():
            assert torch.equal(model.eval()(**batch).loss, loaded.eval()(**batch).loss)
        model.load_state_dict(kind.make_model().state_dict())  # in place: the relay goes on from there
        pair.in_core.model.load_state_dict(kind.make_model().state_dict())
        model.train()
        assert_equal([pair.step(batch)])
    assert all(p.is_leaf and p.grad_fn is None for p in relay.model.parameters())


def test_a_step_trains_under_no_grad_too() -> None:
    kind = BY_NAME["chain"]
    with both(kind, RelayConfig(micro_batches=2)) as pair:
        reference = pair.in_core.step(kind.make_batch(4, 0))
        with torch.no_grad():
            assert pair.relay.step(kind.make_batch(4, 0)).loss == reference
        assert not differences(pair.relay.model, pair.in_core.model)


def test_a_wholly_frozen_model_is_refused_as_in_plain_training() -> None:
    kind = BY_NAME["chain"]
    batch = kind.make_batch(4, 0)
    model = kind.make_model().requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="does not require grad"):
        loss_of(kind, model, batch).backward()
    with Relay(model, partial(torch.optim.SGD, lr=0.1), loss=kind.loss, loss_over=kind.loss_over) as relay:
        with pytest.raises(RuntimeError, match="frozen"):
            relay.step(batch)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        model.requires_grad_(True)
        relay.step(batch)
    assert not all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
