"""The optimizer's parameters over the host buffers, their groups and their state.

In memory and with one worker, the optimizer has the model's own parameters. They point to the device while their layer computes;
before its update they are pointed to the master, for the rest of the step. With a shelf or several workers the optimizer has
others, since a master may then be a part of a block, or be there while the model's parameters have no values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from l2l_core.devices import Ledger
from l2l_core.eps.blocks import Block, Unit, disable_packing, make_masters, restore_packing, shared_key
from l2l_core.eps.optimizers import (
    Findings,
    OptimizerList,
    StepGuard,
    clone_deep,
    members_of,
    refuse_other_params,
    replace_params,
    restrict_optimizer,
    snapshot_optimizer,
    state_bytes,
    user_objects_of,
)


@dataclass(eq=False)
class OptimizerEntry:
    """The optimizer's parameters of a block, the group of each (-1: none), and their state."""

    masters: list[nn.Parameter]
    groups: list[int]
    state: dict[nn.Parameter, dict[str, Any]]

    @property
    def nbytes(self) -> int:
        """Bytes of the state."""
        return state_bytes(*self.state.values())


class Masters:
    """The blocks of all units, and the optimizer over them.

    Invariant: the optimizer's groups hold the parameters over the masters of `blocks`, each at most once; the host's ledger has
    the bytes of masters and of the optimizer's state.

    `optimizer` is over the model's parameters; without `shares_params` it gets others in their place. `order` returns the
    model's parameters in the model's order.

    Attributes:
        blocks: all blocks, each once.
        owner: the unit of every block that is not shared.
        params: the optimizer's parameters of every block, in the block's order.
        shares_params: whether the optimizer has the model's own parameters.
        keeps_dtypes: whether frozen parameters of new layers may have other dtypes, which they keep.
        model_params: the model's parameter for each of the optimizer's.
        state_bytes: bytes of the optimizer's state, as of the last step or edit.
        before_write: called before a block's weights change, so that branches can copy them.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        optimizer: Optimizer,
        order: Callable[[], Iterable[nn.Parameter]],
        host: Ledger,
        findings: Findings = Findings(),  # noqa: B008 - frozen
        shares_params: bool = False,
        keeps_dtypes: bool = True,
    ) -> None:
        self.units, self.optimizer, self.findings = list(units), optimizer, findings
        self.shares_params, self.keeps_dtypes = shares_params, keeps_dtypes
        self._model_order, self._host = order, host
        self.blocks = list(dict.fromkeys(block for unit in units for block in unit.blocks))
        self.owner = {block: unit for unit in units for block in unit.blocks if not block.shared}
        masters = {p: master for b in self.blocks for p, master in zip(b.params, self.make_params(b), strict=True)}
        self.model_params = {master: param for param, master in masters.items()}
        if not shares_params:
            replace_params(optimizer, masters)
            guard = partial(refuse_other_params, self.model_params)
            for each in members_of(optimizer):
                guard(each)
            self._load_hooks = [each.register_load_state_dict_post_hook(guard) for each in members_of(optimizer)]
        # After the line above: a part is restricted by the parameters in the optimizer's groups
        self.params = {block: [masters[param] for param in block.params] for block in self.blocks}
        self._parts = {block: restrict_optimizer(optimizer, own) for block, own in self.params.items()}
        self.before_write: Callable[[Block], None] = _change_nothing
        self.step_guard = StepGuard(optimizer, self._before_user_step)
        self.state_bytes = 0
        for block in self.blocks:
            host.book("weights", block.key, block.nbytes)
        self.book_state()

    def make_params(self, block: Block) -> list[nn.Parameter]:
        """Return the optimizer's parameters of a new block: the model's own, or others over its master."""
        return list(block.params) if self.shares_params else make_masters(block)

    def return_params(self, block: Block) -> None:
        """Point a block's parameters to the master until the step ends; call it before an update is submitted.

        Nothing computes with the block any more in this step.
        """
        if self.shares_params:
            block.return_params()

    # -- of a block ----------------------------------------------------------------------------------------------------

    def params_of(self, block: Block) -> list[nn.Parameter]:
        """Return the optimizer's parameters of a block, in the block's order."""
        return self.params[block]

    def part_of(self, block: Block) -> Optimizer:
        """Return the optimizer restricted to a block; it shares the state of the whole optimizer."""
        return self._parts[block]

    def entry_of(self, block: Block) -> OptimizerEntry:
        """Return the optimizer's parameters, groups and state of a block."""
        masters = self.params_of(block)
        group_of = {p: i for i, group in enumerate(self.part_of(block).param_groups) for p in group["params"]}
        state = {p: self.optimizer.state[p] for p in masters if p in self.optimizer.state}
        return OptimizerEntry(masters, [group_of.get(p, -1) for p in masters], state)

    def master_by_param(self, unit: Unit) -> dict[nn.Parameter, nn.Parameter]:
        """Return the optimizer's parameter for each of a unit's parameters."""
        pairs = (zip(block.params, self.params_of(block), strict=True) for block in unit.blocks)
        return {param: master for pair in pairs for param, master in pair}

    def params_in_model_order(self) -> list[nn.Parameter]:
        """Return the optimizer's parameters in the model's order, in which a joint norm is summed."""
        order = {param: index for index, param in enumerate(self._model_order())}  # without parts of quantised ones
        own = (master for master, param in self.model_params.items() if param in order)
        return sorted(own, key=lambda master: order[self.model_params[master]])

    # -- edits ---------------------------------------------------------------------------------------------------------

    def add_units(self, entries: Mapping[Unit, Mapping[Block, OptimizerEntry]]) -> None:
        """Add layers between steps; `reorder_groups` then sorts their parameters."""
        self.units += entries
        for unit, block, side in ((unit, *pair) for unit, sides in entries.items() for pair in sides.items()):
            self.blocks.append(block)
            self.owner[block], self.params[block] = unit, side.masters
            self.model_params.update(zip(side.masters, block.params, strict=True))
            for master, group in zip(side.masters, side.groups, strict=True):
                if group >= 0:
                    self.optimizer.param_groups[group]["params"].append(master)
            self.optimizer.state.update(side.state.items())
            self._parts[block] = restrict_optimizer(self.optimizer, side.masters)
            self._host.book("weights", block.key, block.nbytes)
        disable_packing(_modules(entries))
        self.book_state()

    def remove_units(self, units: Collection[Unit]) -> dict[Unit, dict[Block, OptimizerEntry]]:
        """Remove layers between steps; the result is the argument of `add_units`.

        Blocks shared with other units stay.
        """
        kept = {unit: {block: self.entry_of(block) for block in unit.blocks if not block.shared} for unit in units}
        sides = {block: side for one in kept.values() for block, side in one.items()}
        masters = {master for side in sides.values() for master in side.masters}
        for group in self.optimizer.param_groups:  # new lists, since an undo holds the old ones
            group["params"] = [param for param in group["params"] if param not in masters]
        for master in masters:
            del self.model_params[master]
            self.optimizer.state.pop(master, None)
        for block in sides:
            del self.params[block], self._parts[block], self.owner[block]
            self._host.release("weights", block.key, block.nbytes)
        self.blocks = [block for block in self.blocks if block not in sides]
        self.units = [unit for unit in self.units if unit not in kept]
        restore_packing(_modules(kept))
        self.book_state()
        return kept

    def rename(self, block: Block, names: list[str]) -> None:
        """Rename a block's parameters; the key of a shared block follows."""
        key = shared_key(names[0]) if block.shared else block.key
        self._host.release("weights", block.key, block.nbytes)
        self._host.book("weights", key, block.nbytes)
        block.key, block.names = key, names

    @property
    def groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters in each group of the optimizer."""
        return [[self.model_params[master] for master in group["params"]] for group in self.optimizer.param_groups]

    def reorder_groups(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Reorder the parameters in the optimizer's groups, given as the model's parameters."""
        masters = {param: master for master, param in self.model_params.items()}
        names: dict[nn.Parameter, str] = {}
        for group, params in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [masters[param] for param in params]
            if "param_names" in group:
                names = names or {p: n for b in self.blocks for p, n in zip(self.params_of(b), b.names, strict=True)}
                group["param_names"] = [names[master] for master in group["params"]]

    def assign_groups(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        """Replace the parameters in the optimizer's groups, given as the model's parameters, between steps."""
        self.reorder_groups(groups)
        # A part uses settings by group, so it must have the new groups
        self._parts = {block: restrict_optimizer(self.optimizer, own) for block, own in self.params.items()}

    def check_groups(self) -> None:
        """Compare the optimizer's groups with those of its parts, which use settings by group.

        Raises:
            ValueError: groups, or parameters in them, were added, removed or moved.
        """
        groups, parts = self.optimizer.param_groups, [part.param_groups for part in self._parts.values()]
        before = [{param for group in alike for param in group["params"]} for alike in zip(*parts, strict=True)]
        changes = [
            f"group {index} has {len(group['params'])} parameters and had {len(own)}, or has others"
            for index, (group, own) in enumerate(zip(groups, before, strict=False))
            if len(group["params"]) != len(own) or not own.issuperset(group["params"])
        ]
        for part in [*self._parts.values()][:1]:
            for each, own in zip(members_of(self.optimizer), members_of(part), strict=True):
                if (now := len(each.param_groups)) != (had := len(own.param_groups)):
                    changes = [f"{type(each).__name__} has {now} groups and had {had}"]
        if changes:
            raise ValueError(
                f"the groups of the optimizer were changed behind the relay's back: {changes[0]} (add_param_group?). Close the "
                "relay, change the groups, and make a new relay with the same optimizer; or give the optimizer all parameters "
                "from the beginning, with later layers frozen until then (requires_grad_(False), or the edits Freeze and "
                "Unfreeze)"
            )

    @property
    def user_objects(self) -> list[object]:
        """The optimizer's class and attributes, for a snapshot of the state that they keep."""
        return user_objects_of(self.optimizer)

    # -- the whole optimizer -------------------------------------------------------------------------------------------

    def snapshot(self) -> Callable[[], None]:
        """Copy all weights, versions and optimizer state; call the result to restore them exactly."""
        masters = [(block, block.master.clone(), block.version) for block in self.blocks]
        restore_optimizer = snapshot_optimizer(self.optimizer, with_state=True)

        def undo() -> None:
            for block, master, version in masters:
                block.master.copy_(master)  # in place, since parameters are views
                block.version = version
            restore_optimizer()
            self.book_state()

        return undo

    def copy_optimizer(
        self, model_copy: nn.Module, model: nn.Module, states: Mapping[nn.Parameter, dict[str, Any]]
    ) -> Optimizer:
        """Return an independent copy of the optimizer over the parameters of `model_copy`, a copy of `model`.

        `states` are those of the copy, by parameter of this optimizer; not copied.
        """
        counterpart = dict(zip(model.parameters(), model_copy.parameters(), strict=True))
        copies = {p: counterpart[param] for p, param in self.model_params.items() if param in counterpart}
        factors = {p: warmup_factor(block) for block in self.blocks if block.warmup for p in self.params_of(block)}
        made: list[Optimizer] = []
        for each in members_of(self.optimizer):
            groups = []
            for group in each.param_groups:
                for factor in sorted({1.0, *(factors.get(p, 1.0) for p in group["params"])}):
                    equal = [copies[p] for p in group["params"] if factors.get(p, 1.0) == factor]
                    groups.append({**group, "params": equal, **({"lr": group["lr"] * factor} if factor != 1.0 else {})})
            others = (other for other in members_of(self.optimizer) if other is not each)
            foreign = {p for other in others for group in other.param_groups for p in group["params"]}
            own = {copies[p]: values for p, values in states.items() if p in copies and p not in foreign}
            made.append(clone_deep(each, groups, defaultdict(dict, own), {**copies, **counterpart, model: model_copy}))
        return OptimizerList(made) if isinstance(self.optimizer, OptimizerList) else made[0]

    def restore_model_params(self) -> None:
        """Give the optimizer the model's parameters again, move weights out of the masters, and release the masters' bytes."""
        self.step_guard.remove()
        self.before_write = _change_nothing
        if not self.shares_params:
            replace_params(self.optimizer, self.model_params)
            for hook in self._load_hooks:
                hook.remove()
            for each in members_of(self.optimizer):
                each.state = defaultdict(dict, each.state)
        for block in self.blocks:
            self._host.release("weights", block.key, block.nbytes)
            with torch.inference_mode(False):
                block.leave_master(() if self.shares_params else self.params[block])
        restore_packing(_modules(self.units))

    def _before_user_step(self) -> None:
        for block in self.blocks:
            self.before_write(block)

    def book_state(self) -> None:
        """Recount the bytes of the optimizer's state."""
        before, self.state_bytes = self.state_bytes, state_bytes(*self.optimizer.state.values())
        if self.state_bytes > before:
            self._host.book("optimizer", "state", self.state_bytes - before)
        elif self.state_bytes < before:
            self._host.release("optimizer", "state", before - self.state_bytes)


def _modules(units: Iterable[Unit]) -> Iterator[nn.Module]:
    return (module for unit in units for module, _, _ in unit.owners)


def _change_nothing(block: Block) -> None:
    pass


def warmup_factor(block: Block) -> float:
    """Return the factor of the learning rate in the block's next update; it rises to 1 during the warm-up."""
    return min(1.0, (block.version + 1) / block.warmup) if block.warmup else 1.0
