"""Find by observation which tensors, lists and containers beside a stack the model reads by the position of a layer.

Names and lengths prove nothing: a parameter with as many rows as layers may have nothing to do with them, and there is no word
for depth in `resid_lambdas`. So the reads of one forward are recorded, each with the layer that is called next or runs. An entry
that is read for one layer alone, and another one for another layer, belongs to the position.

Not found: values that are read in another way (``tanh(w)[i]``, a row of an embedding), which `code_between_layers.py` finds, and
things that the model reads in other batches only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from l2l_core._torch import pytree
from l2l_core.surgery import config_depth
from l2l_core.surgery.output_flow import OutputFlow
from l2l_core.surgery.stack_context import named_configs

_ENTRIES_PER_LAYER = 4  # as one parameter of 3 n scalars has
_OF_MODULE = frozenset(vars(nn.Module()))  # parameters, hooks and so on
_TORCH = "torch.nn."  # modules of torch have lists for dimensions of space (kernel_size), and none for layers

Key = int | str
Reads = dict[str, set[tuple[Key | None, int]]]  # by name: (entry, number of layer calls begun); None for the whole


@dataclass(frozen=True)
class DepthRead:
    """A thing beside a stack that is read by the position of layers, and which entries of it.

    Attributes:
        count: number of layers of the stack.
    """

    name: str
    kind: str  # "parameter", "buffer", "tensor", "list", "dict" or "modules"
    entries: Mapping[
        int, tuple[Key, ...]
    ]  # position of a layer -> entries read for it; n for those behind the last one
    count: int

    @property
    def has_one_place_between(self) -> bool:
        """Whether the entries are read at one place between layers and behind the last one, perhaps unrelated."""
        return (
            self.count > 2 and self.count in self.entries and len([at for at in self.entries if at % self.count]) == 1
        )

    def __str__(self) -> str:
        shown = [
            f"{', '.join(map(repr, keys))} {'behind the last layer' if at == self.count else f'for layer {at}'}"
            for at, keys in sorted(self.entries.items())
        ]
        dots = ["..."] if len(shown) > 3 else []
        return f"{self.kind} {self.name!r} (entry {'; '.join([*shown[:3], *dots])})"


class LayerClock:
    """The layer calls of one forward, in order.

    Attributes:
        calls: the layers called so far.
        running: the layers that run now, the innermost last.
    """

    def __init__(self) -> None:
        self.calls: list[nn.Module] = []
        self.running: list[nn.Module] = []

    @property
    def now(self) -> int:
        """Number of calls begun, without the one that runs: a read in a layer counts as one before it."""
        return len(self.calls) - bool(self.running)

    @contextmanager
    def call(self, layer: nn.Module) -> Iterator[None]:
        """Count a call of a layer, which runs in the block."""
        self.calls.append(layer)
        self.running.append(layer)
        try:
            yield
        finally:
            self.running.pop()

    def position(self, at: int, layers: Sequence[nn.Module]) -> int:
        """Return the position of the layer of a stack that follows after `at` calls; the length if none does."""
        positions = {layer: i for i, layer in reversed([*enumerate(layers)])}
        return next((positions[layer] for layer in self.calls[at:] if layer in positions), len(layers))


class DepthWatch:
    """Records the reads of one forward beside the layers of some stacks. Use `watching` around the model's call.

    Args:
        model: the model.
        stacks: the layers of each stack.

    Attributes:
        clock: the layer calls so far.
        flow: the use of their outputs by the model's own code.
        hidden_flow: the same of their hidden outputs alone, without what they return beside these.
    """

    def __init__(self, model: nn.Module, stacks: Sequence[Sequence[nn.Module]]) -> None:
        self.clock = LayerClock()
        self.flow, self.hidden_flow = OutputFlow(self.clock.running), OutputFlow(self.clock.running)
        self._reads: Reads = defaultdict(set)
        self._kinds: dict[str, str] = {}
        self._most = _ENTRIES_PER_LAYER * max(map(len, stacks), default=0)
        self._inside = inside = {layer for layers in stacks for layer in layers}
        self._all_modules = list(model.named_modules(memo={*inside}))
        self._modules = [(name, each) for name, each in self._all_modules if inside.isdisjoint(each._modules.values())]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record reads in the block."""
        tensors = _TensorReads(self.clock, self._reads)
        with ExitStack() as undo:
            for name, config in named_configs(self._all_modules):
                self._record_containers(name, config_depth.stored_fields(config), undo)
            for path, module in self._all_modules:
                for name, tensor in _tensors_of(module):
                    if isinstance(module, nn.ParameterList | nn.ParameterDict):
                        self._kinds[path] = "modules"
                        tensors.add_member(tensor, path, int(name) if name.isdigit() else name)
                    elif tensor.ndim and 2 <= tensor.shape[0] <= self._most:
                        tensors.add(tensor, full := f"{path}.{name}".lstrip("."))
                        self._kinds[full] = _kind_of(module, name)
                if not type(module).__module__.startswith(_TORCH):
                    self._record_containers(path, vars(module), undo)
            for path, module in self._modules:
                self._record_members(path, module, undo)
            undo.enter_context(tensors)
            undo.enter_context(self.flow)
            undo.enter_context(self.hidden_flow)
            yield

    def _record_containers(self, path: str, attributes: dict[str, Any], undo: ExitStack) -> None:
        """Put recording lists and dicts in the place of those among the attributes of a module or a configuration."""
        for name, value in list(attributes.items()):
            if (
                not isinstance(name, str)
                or name in _OF_MODULE
                or type(value) not in _RECORDING
                or not 2 <= len(value) <= self._most
            ):
                continue
            held = value.values() if isinstance(value, dict) else value
            if any(isinstance(each, nn.Module) for each in held):
                continue
            full = f"{path}.{name}".lstrip(".")
            self._kinds[full] = type(value).__name__
            recording = _RECORDING[type(value)](value)
            recording.see = partial(self._see, full)
            attributes[name] = recording
            undo.callback(_put_back, attributes, name, recording, value)

    def _record_members(self, path: str, module: nn.Module, undo: ExitStack) -> None:
        """Record calls of the members of a container of modules."""
        if not isinstance(module, nn.ModuleList | nn.ModuleDict) or not len(module):
            return
        if not self._inside.isdisjoint(module.modules()):
            return  # stages, whose members hold the layers
        self._kinds[path] = "modules"
        for name, member in module._modules.items():
            key = int(name) if name.isdigit() else name
            for inner in () if member is None else member.modules():
                undo.callback(inner.register_forward_pre_hook(partial(self._see_call, path, key)).remove)

    def _see_call(self, name: str, key: Key, *_: object) -> None:
        self._see(name, key)

    def _see(self, name: str, key: Key) -> None:
        self._reads[name].add((key, self.clock.now))

    # -- what was seen -------------------------------------------------------------------------------------------------

    def reads_by_depth(self, layers: Sequence[nn.Module]) -> list[DepthRead]:
        """List the things whose entries were read by the position of the layers of a stack."""
        found = []
        for name, reads in self._reads.items():
            by_position: dict[int, set[Key]] = defaultdict(set)
            for key, at in reads:
                if key is not None:
                    by_position[self.clock.position(at, layers)].add(key)
            if _is_by_depth(by_position, len(layers)):
                entries = {at: tuple(sorted(keys, key=str)) for at, keys in by_position.items()}
                found.append(DepthRead(name, self._kinds[name], entries, len(layers)))
        return found


def _is_by_depth(by_position: Mapping[int, set[Key]], count: int) -> bool:
    """Return whether every entry is read for one layer alone, or the entries read ascend with the layers.

    Entries that are read before the first or behind the last of the `count` layers may have nothing to do with them.
    """
    between = [keys for at, keys in by_position.items() if 0 < at < count]
    if not between or len(by_position) < 2:
        return False
    if len(between) > 1 and all(keys == between[0] for keys in between) and by_position.get(0) in (None, between[0]):
        return False  # one entry between all layers, and another one behind the last
    every = [key for keys in by_position.values() for key in keys]
    if len(every) == len({*every}):
        return True
    single = [next(iter(keys)) for _, keys in sorted(by_position.items()) if len(keys) == 1]
    numbers = [key for key in single if isinstance(key, int)]
    if len(numbers) < len(by_position):
        return False
    return len({*numbers}) > 1 and all(a <= b for a, b in pairwise(numbers))


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, buffers and tensors on plain attributes."""
    for held in (module._parameters, module._buffers, vars(module)):
        for name, value in held.items():
            if isinstance(value, torch.Tensor):
                yield name, value


def _kind_of(module: nn.Module, name: str) -> str:
    return "parameter" if name in module._parameters else "buffer" if name in module._buffers else "tensor"


# -- recorders ---------------------------------------------------------------------------------------------------------


class _RecordingEntries:
    """Reports the entries that are read of the list or tuple that it is mixed into."""

    see: Callable[[Key], None]

    def __getitem__(self: Any, index: Any) -> Any:
        if isinstance(index, int):
            self.see(index % len(self) if len(self) else index)
        entries: Any = super()  # the list or tuple
        return entries.__getitem__(index)

    def __iter__(self: Any) -> Iterator[Any]:
        entries: Any = super()
        for i, value in enumerate(entries.__iter__()):
            self.see(i)
            yield value


class _RecordingList(_RecordingEntries, list[Any]):
    pass


class _RecordingTuple(_RecordingEntries, tuple[Any, ...]):
    pass


class _RecordingDict(dict[Any, Any]):
    see: Callable[[Key], None]

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, Key):
            self.see(key)
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self and isinstance(key, Key):
            self.see(key)
        return super().get(key, default)


_RECORDING: dict[type, Any] = {list: _RecordingList, tuple: _RecordingTuple, dict: _RecordingDict}


def _put_back(attributes: dict[str, Any], name: str, recording: Any, value: Any) -> None:
    """Put the model's own container back, with what the forward has done to it."""
    if attributes.get(name) is not recording:
        return  # the forward has assigned another one
    if isinstance(value, list):
        value[:] = list.__getitem__(recording, slice(None))
    elif isinstance(value, dict):
        value.clear()
        value.update(recording)
    attributes[name] = value


class _TensorReads(TorchFunctionMode):
    """Records reads of tensors: a row by its index, or the whole."""

    def __init__(self, clock: LayerClock, reads: Reads) -> None:
        super().__init__()
        self._clock, self._reads = clock, reads
        self._names: dict[int, str] = {}  # by id of the tensor
        self._rows: dict[
            int, tuple[str, Key, torch.Tensor | None]
        ] = {}  # by id of a part; the part, which keeps its id

    def add(self, tensor: torch.Tensor, name: str) -> None:
        """Record reads of a tensor."""
        self._names[id(tensor)] = name

    def add_member(self, tensor: torch.Tensor, name: str, key: Key) -> None:
        """Record reads of a tensor that is an entry of the container `name`."""
        self._rows[id(tensor)] = name, key, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves((args, kwargs)):
            if id(leaf) in self._rows and isinstance(leaf, torch.Tensor):
                name, key, _ = self._rows[id(leaf)]
                self._reads[name].add((key, self._clock.now))
            elif id(leaf) in self._names and isinstance(leaf, torch.Tensor):
                self._record(func, args, leaf, out)
        return out

    def _record(self, func: Any, args: Any, tensor: torch.Tensor, out: Any) -> None:
        name, operation = self._names[id(tensor)], getattr(func, "__name__", "")
        if operation in ("__get__", "size", "dim", "__len__"):
            return  # its shape or device, not its values
        index = None
        if args and args[0] is tensor and len(args) > 1:
            if operation == "__getitem__":
                index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            elif operation == "select" and len(args) > 2 and args[1] == 0:
                index = args[2]
        if isinstance(index, torch.Tensor) and index.numel() == 1 and not index.is_floating_point():
            index = int(index)
        if isinstance(index, int) and not isinstance(index, bool):
            self._reads[name].add((index % len(tensor), self._clock.now))
        elif operation in ("unbind", "__iter__", "split", "chunk") and isinstance(out, tuple | list):
            if len(out) == len(tensor):
                self._rows.update({id(part): (name, i, part) for i, part in enumerate(out)})
        else:
            self._reads[name].add((None, self._clock.now))
