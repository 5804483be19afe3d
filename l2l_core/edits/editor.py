"""Carries changes out, between two steps: in the model's containers, in the EPS, and in the books.

Invariant: a layer is in exactly one stack or parked, and the EPS holds it in the first case only.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from l2l_core.devices import Ledger
from l2l_core.edits.change import Change, Held
from l2l_core.edits.new_layers import check_new, initialise
from l2l_core.edits.parked import Parked, Parking
from l2l_core.eps import LayerStore, Side
from l2l_core.eps.blocks import Block, Unit, build_layer
from l2l_core.eps.optimizers import GroupOrder, Places, clone_state, state_bytes
from l2l_core.model import Resolver, Stack, Where, find_stacks
from l2l_core.surgery import anatomy, check_fit, rearrange, ties_of
from l2l_core.surgery.identity import IdentityPlan, Sample, apply_plan, capture_samples, plan_identity, sample_behind

State = Mapping[str, Any]
Inherit = Callable[
    [State], dict[str, Any] | None
]  # from the state of a parameter to that of its copy; None: start anew


class Editor:
    """Edits the stacks of one relay.

    Args:
        model: the user's.
        layers: the relay's, in order.
        store: the EPS.
        host: gets parked layers booked.
        empty: makes a float32 host buffer of so many elements.
        shell: the rest of the model.
        seed: of what is initialised anew.

    Attributes:
        parking: the layers that are in no stack.
        call: runs the model on a few rows of the last batch; None before the first step.
        trust: whether layers may stand where the evidence says that they cannot; see `rearrange`.
        needed_elsewhere: gives the layers that other branches need.
        first: the model as it was before any edit.
        group_order: of the optimizer's groups.
        put_back: of the group of changes under way, by inverse: what takes its change back more exactly than it would.
    """

    def __init__(
        self,
        model: nn.Module,
        shell: Unit,
        layers: Sequence[Unit],
        store: LayerStore,
        host: Ledger,
        empty: Callable[[int], torch.Tensor],
        seed: int,
    ) -> None:
        self.model, self.shell, self.store, self.seed = model, shell, store, seed
        self.call: Callable[[], Any] | None = None
        self.trust = False
        self.needed_elsewhere: Callable[[], set[Unit]] = set
        self._host, self._empty = host, empty
        self.layers = list(layers)
        self.made = len(layers)  # keys given out so far, or passed over
        self.origin = {unit.key: unit.key for unit in layers}  # by key, the original layer that it goes back to
        self._by_module = {unit.module: unit for unit in layers}
        self.parking = Parking(host, empty)
        self.untried: list[Unit] = []  # layers of the user's own making that an edit has put in
        self.put_back: dict[Change, Callable[[], None]] = {}
        self._plans: dict[int, IdentityPlan] = {}  # the last one by kind of layer
        self.stacks = find_stacks(model, [unit.module for unit in layers])  # as they are now
        self._names = {stack.container: stack.name for stack in self.stacks}  # for good
        self.first = self.built
        self.group_order = GroupOrder(store.groups, Places(model, self.stacks))
        for unit in layers:
            anatomy(unit.module)  # now rather than when the first edit has to wait for it

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def built(self) -> Built:
        """How the model is built now."""
        return Built(
            {unit.key: unit.name for unit in self.layers},
            {self.name_of(stack): stack.name for stack in self.stacks},
            {self.name_of(stack): [unit.key for unit in self.units_of(stack)] for stack in self.stacks},
            {self.name_of(stack): len(stack.container._modules) for stack in self.stacks},
            ties_of(self.model),
        )

    def name_of(self, stack: Stack) -> str:
        """The name that a stack had first: where several are in one Sequential, an edit of one may rename the others."""
        return self._names[stack.container]

    @property
    def first_names(self) -> Mapping[nn.Module, str]:
        """The first names of all stacks, by container."""
        return self._names

    def stack_called(self, name: str) -> Stack:
        """The stack of that first name, as it is now.

        Raises:
            ValueError: there is none.
        """
        for stack in self.stacks:
            if self.name_of(stack) == name:
                return stack
        raise ValueError(
            f"there is no stack {name!r}; there are {', '.join(map(repr, self._names.values())) or 'none'}"
        )

    @property
    def resolver(self) -> Resolver:
        """Finds the layer that a person means, as things are now."""
        keys = {unit.module: unit.key for unit in self.layers}
        return Resolver(self.stacks, keys, {unit.module: unit.name for unit in self.layers})

    def place_of(self, where: Where) -> tuple[Stack, int]:
        """The stack of a layer, and its position there."""
        module = self.resolver.layer(where)
        return self.resolver.place(module, after_last_allowed=False)

    def units_at(self, places: Iterable[Where]) -> set[Unit]:
        """The layers of stacks that a person means by several places.

        Raises:
            ValueError, TypeError: one of them is no layer of a stack.
        """
        if isinstance(places, str | nn.Module) or not isinstance(places, Iterable):
            raise TypeError(f"{places!r} is one layer, or none: give a collection of layers, as [{places!r}]")
        wanted = list(places)
        if not wanted:
            return set()
        resolver = self.resolver
        found = (resolver.place(resolver.layer(where), after_last_allowed=False) for where in wanted)
        return {self._by_module[stack.layers[i]] for stack, i in found}

    def states_of(self, unit: Unit) -> dict[nn.Parameter, State]:
        """What the optimizer knows of each parameter of a layer that is in a stack."""
        state = self.store.optimizer.state
        return {param: state[master] for param, master in self.store.masters_of(unit).items() if master in state}

    def optimized(self, unit: Unit) -> list[nn.Parameter]:
        """The parameters of a layer in a stack that the optimizer has been given."""
        pairs = [(block.params, self.store.side_of(block).groups) for block in unit.blocks]
        return [param for params, groups in pairs for param, group in zip(params, groups, strict=True) if group >= 0]

    def unit_of(self, module: nn.Module) -> Unit:
        """The layer that a module is."""
        return self._by_module[module]

    def units_of(self, stack: Stack) -> tuple[Unit, ...]:
        """The layers of a stack, in order."""
        return tuple(self._by_module[module] for module in stack.layers)

    # -- new layers ----------------------------------------------------------------------------------------------------

    def check_new(self, module: nn.Module) -> nn.Module:
        """A module that is to become a layer; refuses what `newcomers.check_new` does."""
        return check_new(self.model, {param for unit in (self.shell, *self.layers) for param in unit.params}, module)

    def initialise(self, module: nn.Module) -> None:
        """Give a module fresh values, the same ones for the same number of edits; see `newcomers.initialise`."""
        initialise(self.model, module, f"{self.seed}/layer/{self.made}")

    def plan_identity(self, module: nn.Module, stack: Stack, at: int) -> IdentityPlan:
        """How a layer becomes the identity at a place of a stack.

        Raises:
            ValueError: it cannot, or no step has been made yet from which a batch could be taken.
        """
        if self.call is None:
            raise ValueError("init='identity' is found by running layers: make a step first, or use init='copy'")
        layers = stack.layers
        wanted = list(dict.fromkeys(layers[max(0, at - 1) : at + 1]))
        try:
            plan = self._plan_from(self._capture_nearby(stack, wanted), module, layers, at)
        except Exception:  # of the model's own code too, which may need what is left out
            plan = None
        if plan is None or plan.handed_over:  # how exact it is depends on what the layers before make
            plan = self._plan_from(capture_samples(self.model, self.call, wanted), module, layers, at)
        return plan

    def _capture_nearby(self, stack: Stack, wanted: Sequence[nn.Module]) -> dict[nn.Module, Sample]:
        """What layers are called with in the model as it would be without most of the others, which takes less time."""
        kept = [layer for i, layer in enumerate(stack.layers) if i == 0 or layer in wanted]
        put_back = rearrange(self.model, stack, kept, trust=True)
        try:
            return capture_samples(self.model, self.call, wanted)  # type: ignore[arg-type] - the caller has looked
        finally:
            put_back()

    def _plan_from(
        self, samples: Mapping[nn.Module, Sample], module: nn.Module, layers: Sequence[nn.Module], at: int
    ) -> IdentityPlan:
        before = layers[at - 1] if at else None
        sample = samples[layers[at]] if at < len(layers) else sample_behind(layers[-1], samples[layers[-1]])
        kind = id(anatomy(module).features)  # the same object for layers built alike
        plan = plan_identity(module, sample, before, None if before is None else samples[before], self._plans.get(kind))
        self._plans[kind] = plan
        return plan

    def try_modules(self) -> None:
        """Run the model with the user's own modules where edits have put them, on a few rows of the last batch.

        Before the first step there are none, and nothing is tried.

        Raises:
            ValueError: it does not run; names the neighbours and the shapes.
        """
        new, self.untried = [unit for unit in self.untried if unit in self.layers], []
        for unit in new if self.call is not None else []:
            stack = next(stack for stack in self.stacks if unit.module in stack.layers)
            names = [f"{other.key} ({other.name})" for other in self.units_of(stack)]
            check_fit(self.model, self.call, stack, stack.layers.index(unit.module), names)  # type: ignore[arg-type]

    def make_identity(self, unit: Unit, plan: IdentityPlan, preceding: Unit) -> dict[nn.Parameter, Held]:
        """Make a new, parked layer the identity; what its predecessor has to be left with."""
        apply_plan(replace(plan, handed_over=()), unit.module)
        states, left = self.states_of(preceding), {}
        sides = [(m, side) for block, side in self.parking[unit].sides.items() for m in side.masters]
        master_of = dict(zip(unit.params, sides, strict=True))
        with torch.no_grad():
            for item in plan.handed_over:
                source = preceding.module.get_parameter(item.preceding)
                target = unit.module.get_parameter(item.new)
                target.copy_(source.view_as(target))
                master, side = master_of[target]
                if source in states:
                    side.state[master] = {name: _as(value, target) for name, value in states[source].items()}
                left[source] = torch.full_like(source, item.neutral), None
        return left

    # -- for a save that is loaded -------------------------------------------------------------------------------------

    def began_as(self, first: Built, containers: Mapping[str, str]) -> None:
        """The model was another one before the edits that a save tells of; `containers` are its stacks' names here."""
        self.first = first
        names = {now: name for name, now in containers.items()}
        self._names = {stack.container: names.get(stack.name, stack.name) for stack in self.stacks}

    def make_room(self, key: str, module: nn.Module) -> Unit:
        """A parked layer that is still to get its values, its optimizer state and its groups; it may share weights."""
        known = {block for unit in (self.shell, *self.layers) for block in unit.blocks if block.shared}
        shared = {param: block for block in known for param in block.params}
        unit = build_layer(key, key, module, self._empty, shared)
        self._by_module[module] = unit
        sides = {}
        for block in (block for block in unit.blocks if not block.shared):
            masters = [nn.Parameter(v, p.requires_grad) for p, v in zip(block.params, block.views, strict=True)]
            sides[block] = Side(masters, [-1] * len(masters), {})
        self.parking.put(Parked(unit, sides))
        return unit

    # -- what edits are made of ----------------------------------------------------------------------------------------

    def make_layer(self, module: nn.Module, like: Unit, inherit: Inherit, warmup: int = 0) -> Unit:
        """A new layer, parked for the time being.

        Args:
            module: has parameters of its own.
            like: whose groups of the optimizer its parameters join, and whose state they may inherit. A parameter without a
                counterpart (same name and shape) joins the group that most of the same kind are in: matrices, or the rest.
            inherit: what of that state.
            warmup: updates over which its learning rate rises.
        """
        key = self._new_key()
        unit = build_layer(key, key, module, self._empty)
        counterparts = {(name, param.shape): param for name, param in like.module.named_parameters()}
        self.origin[key] = self.origin[like.key]
        self._by_module[module] = unit
        sides = {}
        for block in unit.blocks:
            block.warmup = warmup
            names = [name.removeprefix(f"{key}.") for name in block.names]
            twins = [counterparts.get((name, param.shape)) for name, param in zip(names, block.params, strict=True)]
            known = [
                self._side_of(twin, like) if twin is not None else (self._usual_group(param, like), {})
                for twin, param in zip(twins, block.params, strict=True)
            ]
            masters = [nn.Parameter(v, p.requires_grad) for p, v in zip(block.params, block.views, strict=True)]
            states = {
                m: state for m, (_, old) in zip(masters, known, strict=True) if (state := inherit(old)) is not None
            }
            sides[block] = Side(masters, [group for group, _ in known], states)
        self.parking.put(Parked(unit, sides))
        return unit

    def restack(
        self,
        name: str,
        before: Sequence[Unit],
        after: Sequence[Unit],
        like: Mapping[Unit, Unit],
        trust: bool,
        passing: bool = False,
    ) -> Callable[[], None]:
        """Put the layers `after` in place of `before` in a stack; parked ones come back, those that leave are parked.

        Args:
            name: that the stack had first.
            before, after, like, trust: as of `Restack` and `rearrange`.
            passing: it will be taken back before anybody sees the optimizer's groups, whose order need not follow.

        Returns:
            What puts everything back, if nothing else was restacked since: to the same configuration objects, and to the same
            order of the optimizer's groups.
        """
        stack = self.stack_called(name)
        if self.units_of(stack) != tuple(before):
            raise ValueError(f"the stack {stack.title} has changed since: undo the later edits first")
        known = {*before, *(parked.unit for parked in self.parking)}
        if gone := [unit.key for unit in after if unit not in known]:
            raise ValueError(f"{', '.join(gone)} was dropped for good: its bytes are gone, it cannot come back")
        for unit in after:
            self.parking.fetch(unit)
        twins = {unit.module: like[unit].module for unit in after if unit in like}
        brought = {unit.module for unit in before if unit.key not in self.first.layers}
        modules = [unit.module for unit in after]
        trust = trust or self.trust
        layers, stacks = self.layers, self.stacks
        groups = list(map(_members, self.store.optimizer.param_groups))
        put_model_back = rearrange(self.model, stack, modules, like=twins, trust=trust, without_role=brought)
        self._take_over(name, before, after)
        if not passing:
            self.arrange()

        def put_back() -> None:
            put_model_back()
            self._take_over(name, after, before)
            self.stacks, self.layers = stacks, layers
            for group, members in zip(self.store.optimizer.param_groups, groups, strict=True):
                group.update(members)

        return put_back

    def take_back(self, inverse: Change) -> None:
        """Do the inverse of a change of the group under way, the last one first; what it changed is exactly as before."""
        put_back = self.put_back.pop(inverse, None)
        if put_back is not None:
            put_back()
        else:
            inverse.do(self)

    def arrange(self) -> None:
        """Let the optimizer's groups be in the order of a plain one over the model."""
        self.store.arrange(self.group_order.sorted(self.store.groups, Places(self.model, self.stacks)))

    def _take_over(self, name: str, before: Sequence[Unit], after: Sequence[Unit]) -> None:
        """The model holds the layers `after` in place of `before`: let the EPS and the books follow."""
        stack, staying = self.stack_called(name), set(after)
        for unit, sides in self.store.dismiss([unit for unit in before if unit not in staying]).items():
            self.parking.put(Parked(unit, sides))
        for unit in after:
            if unit in self.parking:
                self.store.admit(unit, self.parking.take(unit).sides)
        gone = set(before)
        first = next(i for i, unit in enumerate(self.layers) if unit in gone)
        self.layers = [*self.layers[:first], *after, *(unit for unit in self.layers[first:] if unit not in gone)]
        now = replace(stack, layers=tuple(unit.module for unit in after))
        self.stacks = tuple(now if old is stack else old for old in self.stacks)
        self._rename(now, staying)

    @contextmanager
    def without(self, units: Collection[Unit], trust: bool = False) -> Iterator[None]:
        """Let layers sit out in a block: parked where they are, as if dropped; afterwards everything is as it was.

        Args:
            units: the layers.
            trust: let them sit out against the evidence too; see `rearrange`.

        Raises:
            ValueError: a stack would be left without layers, or the model cannot be without one of these.
        """
        with ExitStack() as way_back:
            for stack in self.stacks:
                before = self.units_of(stack)
                after = [unit for unit in before if unit not in units]
                if not after:
                    raise ValueError(
                        f"all of {stack.title} ({_listed(before)}) would sit out, and one layer must run: leave one of them in"
                    )
                if len(after) < len(before):
                    name = self.name_of(stack)
                    way_back.callback(self.restack(name, before, after, {}, trust=trust, passing=True))
            self.check_shared()
            yield

    def exchange(self, unit: Unit, values: Mapping[nn.Parameter, Held]) -> dict[nn.Parameter, Held]:
        """Give parameters of a layer in a stack other values and state; what they had."""
        old, masters = {}, self._masters_of(unit)
        for block in unit.blocks:
            if not values.keys().isdisjoint(block.params):
                self.store.before_write(block)
        with torch.no_grad():
            for param, (value, state) in values.items():
                master = masters[param]
                known = self.store.optimizer.state.pop(master, None)
                old[param] = param.detach().clone(), dict(known) if known is not None else None
                param.copy_(value)
                if state is not None:
                    self.store.optimizer.state[master] = clone_state(state)
        self.store.book_optimizer()
        return old

    def book_kept(self, change: Change, values: Iterable[Held]) -> None:
        """Book what a change holds, for as long as somebody has it."""
        nbytes = sum(value.nbytes + state_bytes(state or {}) for value, state in values)
        self._host.book("other", "ways back", nbytes)
        weakref.finalize(change, self._host.release, "other", "ways back", nbytes)

    def set_trained(self, unit: Unit, flags: Mapping[nn.Parameter, bool]) -> dict[nn.Parameter, bool]:
        """Let parameters of a layer be trained or not; what they were."""
        old, masters = {param: param.requires_grad for param in flags}, self._masters_of(unit)
        for param, trained in flags.items():
            param.requires_grad_(trained)
            masters[param].requires_grad_(trained)
        return old

    def lose(self, unit: Unit) -> None:
        """Free a parked layer, for good; one that another branch has stays parked, one that is in a stack stays there."""
        if unit in self.parking and unit not in self.needed_elsewhere():
            self.parking.take(unit).empty()
            del self._by_module[unit.module]

    def forget(self, needed: set[Unit]) -> None:
        """Free parked layers that no change can bring back any more, and no other branch has."""
        needed = needed | self.needed_elsewhere()
        for unit in [parked.unit for parked in self.parking if parked.unit not in needed]:
            self.parking.take(unit)
            del self._by_module[unit.module]

    # -- for branches --------------------------------------------------------------------------------------------------

    @property
    def present(self) -> set[Unit]:
        """Everything that has values: the shell, the layers, and the parked ones."""
        return {self.shell, *self.layers, *(parked.unit for parked in self.parking)}

    def optimizer_side(self, block: Block) -> tuple[list[nn.Parameter], MutableMapping[nn.Parameter, dict[str, Any]]]:
        """The optimizer's parameters of a block, of a layer or parked, and where what it knows of them is."""
        if (side := self.parking.side_of(block)) is not None:
            return side.masters, side.state
        return self.store.masters_in(block), self.store.optimizer.state

    def train_only(self, block: Block, flags: Sequence[bool]) -> None:
        """Say which parameters of a block are trained."""
        for param, master, trained in zip(block.params, self.optimizer_side(block)[0], flags, strict=True):
            param.requires_grad_(trained)
            master.requires_grad_(trained)

    def book_again(self) -> None:
        """Values have been exchanged: what layers hold may have another size."""
        self.parking.book_again()
        self.store.book_optimizer()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _new_key(self) -> str:
        """A key that no layer has or had; the caller may have given out some of this form."""
        while (key := f"L{self.made:03d}") in self.origin:
            self.made += 1
        self.made += 1
        return key

    def _masters_of(self, unit: Unit) -> dict[nn.Parameter, nn.Parameter]:
        if unit not in self.store.units:
            raise ValueError(f"layer {unit.key} is in no stack now: bring it back first")
        return self.store.masters_of(unit)

    def _side_of(self, param: nn.Parameter, unit: Unit) -> tuple[int, State]:
        """The optimizer's group of a parameter, and what it knows of it."""
        block = next(block for block in unit.blocks if any(param is p for p in block.params))
        side = self.parking[unit].sides[block] if unit in self.parking else self.store.side_of(block)
        index = next(i for i, p in enumerate(block.params) if p is param)
        return side.groups[index], side.state.get(side.masters[index], {})

    def _usual_group(self, param: nn.Parameter, like: Unit) -> int:
        """The optimizer's group that most of a layer's parameters of the same kind are in, matrices or the rest."""
        alike = [other for other in like.params if (other.dim() > 1) == (param.dim() > 1)]
        groups = Counter(self._side_of(other, like)[0] for other in alike or like.params)
        return groups.most_common(1)[0][0] if groups else 0

    def _rename(self, stack: Stack, units: set[Unit]) -> None:
        """Let layers of a stack have their present names, and what else stands elsewhere with them.

        Beside the layers a Sequential may hold an embedding and a head, or layers of other stacks, which move with its depth.
        """
        moves = any(child not in self._by_module for child in stack.container._modules.values())
        if moves:
            names = {module: name for name, module in self.model.named_modules()}
            self.stacks = tuple(replace(each, name=names[each.container]) for each in self.stacks)
            for unit in self.layers:
                unit.rename(names[unit.module])
        else:
            for child, module in stack.container.named_children():
                if (unit := self._by_module.get(module)) in units:
                    unit.rename(f"{stack.name}.{child}" if stack.name else child)
        blocks = dict.fromkeys(block for unit in (self.shell, *self.layers) for block in unit.blocks)
        stale = [block for block in blocks if block.shared or (moves and block in self.shell.blocks)]
        if stale:
            now = {param: name for name, param in self.model.named_parameters()}
            for block in stale:
                known = zip(block.params, block.names, strict=True)
                self.store.rename(block, [now.get(param, name) for param, name in known])

    def check_shared(self) -> None:
        """Refuse to have let all users of a shared weight go: it would be in no layer, and could not be parked with one.

        Raises:
            ValueError: they have; names them.
        """
        held = {block for unit in (self.shell, *self.layers) for block in unit.blocks}
        for parked in self.parking:
            for block in parked.unit.blocks:
                if block.shared and block not in held:
                    users = [each.unit.key for each in self.parking if block in each.unit.blocks]
                    raise ValueError(
                        f"layers {', '.join(users)} share the weights {', '.join(block.names)}, and would all leave: let one "
                        "of them stay, or untie them before the relay takes over"
                    )


@dataclass(frozen=True)
class Built:
    """How a model is built, as far as edits change it.

    Attributes:
        layers: dotted names by key.
        containers: dotted names of the stacks, by the name that each had first.
        stacks: keys of the layers in order, by stack.
        sizes: number of members of the container, by stack.
        ties: names that stand for one tensor, see `ties_of`; None if that is not known.
    """

    layers: dict[str, str]
    containers: dict[str, str]
    stacks: dict[str, list[str]]
    sizes: dict[str, int]
    ties: list[list[str]] | None


def _members(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of the optimizer holds, and their names if it was told them."""
    return {name: group[name] for name in ("params", "param_names") if name in group}


def _listed(units: Sequence[Unit]) -> str:
    return units[0].key if len(units) == 1 else f"{units[0].key} to {units[-1].key}, {len(units)} layers"


def _as(value: Any, param: torch.Tensor) -> Any:
    """A copy of an optimizer's value for a parameter of another, equally large shape."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.clone().view_as(param) if value.numel() == param.numel() and value.dim() else value.clone()
