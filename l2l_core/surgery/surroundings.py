"""What is around a stack in its model, and assignments that are made and undone together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from l2l_core.model import Stack
from l2l_core.surgery import config_depth
from l2l_core.surgery.config_depth import Place

REMEDY = "trust=True does it all the same"
_MISSING = object()


@dataclass(frozen=True)
class Surroundings:
    """What is around a stack.

    Attributes:
        chain: (name, module) from the model down to the owner of the container.
        shell: (name, module) of everything but the stack's container and what is in its layers.
        place: names and numbers to recognise what belongs to the stack.
        configs: (first module of the chain that holds it, config), nearest to the stack first.
    """

    stack: Stack
    chain: list[tuple[str, nn.Module]]
    shell: list[tuple[str, nn.Module]]
    place: Place
    configs: list[tuple[nn.Module, Any]]

    @property
    def owner(self) -> nn.Module:
        """The module that holds the container; the container itself if that is the model."""
        return self.chain[-1][1]

    @classmethod
    def of(cls, model: nn.Module, stack: Stack) -> Surroundings:
        modules = [("", model)]
        for part in filter(None, stack.name.split(".")):
            name, module = modules[-1]
            child = module._modules.get(part)
            if child is None:
                break
            modules.append((f"{name}.{part}".lstrip("."), child))
        if modules[-1][1] is not stack.container:
            raise ValueError(
                f"{stack.title} is not where the stack says: the model was changed; call find_stacks again"
            )
        around, stage, stages = modules[:-1] or modules, None, 0
        for (_, outer), (name, _) in reversed(list(zip(modules, modules[1:], strict=False))):
            if isinstance(outer, nn.ModuleList | nn.Sequential) and name.rpartition(".")[2].isdigit():
                stage, stages = (int(name.rpartition(".")[2]), len(outer)) if len(outer) > 1 else (None, 0)
                break
        owner = next((m for _, m in reversed(around) if not isinstance(m, nn.ModuleList)), model)
        names = config_depth.words(stack.name.replace(".", "_")) | config_depth.words(type(owner).__name__)
        configs: dict[int, tuple[nn.Module, Any]] = {}
        for _, module in around:
            for name, value in vars(module).items():
                if config_depth.is_config(name, value):
                    configs.setdefault(id(value), (module, value))
        chain = around[: [m for _, m in around].index(owner) + 1]
        inside = set(stack.layers)
        shell = list(_outside(model, "", inside, set()))
        place = Place(names, len(stack.layers), stage, stages)
        return cls(stack, chain, shell, place, list(configs.values())[::-1])


def _outside(
    module: nn.Module, name: str, layers: set[nn.Module], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    if module in seen or module in layers:
        return
    seen.add(module)
    yield name, module
    for part, child in module._modules.items():
        if child is not None:
            yield from _outside(child, f"{name}.{part}".lstrip("."), layers, seen)


def distinct(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


class Edits:
    """Assignments to dicts (attributes of modules, members of the container), made together and undone together."""

    def __init__(self) -> None:
        self._sets: dict[tuple[int, Any], tuple[MutableMapping[Any, Any], Any, Any]] = {}
        self._fills: list[tuple[dict[str, Any], dict[str, Any]]] = []

    def set(self, target: MutableMapping[Any, Any], name: Any, value: Any) -> None:
        self._sets[id(target), name] = (target, name, value)

    def fill(self, target: dict[str, Any], content: dict[str, Any]) -> None:
        self._fills.append((target, content))

    def apply(self, stack: Stack, new: tuple[nn.Module, ...]) -> Callable[[], None]:
        before = [(target, name, target.get(name, _MISSING)) for target, name, _ in self._sets.values()]
        filled = [(target, dict(target)) for target, _ in self._fills]
        ours = [content for _, content in self._fills]
        for target, name, value in self._sets.values():
            target[name] = value
        for target, content in self._fills:
            _refill(target, content)

        def undo() -> None:
            if any(
                list(target.items()) != list(content.items()) for (target, _), content in zip(filled, ours, strict=True)
            ):
                raise RuntimeError(
                    f"{stack.title} does not hold the layers that this edit put there: undo later edits first, each once"
                )
            for target, content in filled:
                _refill(target, content)
            for target, name, value in before:
                if value is _MISSING:
                    del target[name]
                else:
                    target[name] = value

        return undo


def _refill(target: dict[str, Any], content: dict[str, Any]) -> None:
    target.clear()
    target.update(content)
