"""Fingerprints of a user's functions and objects, by which a study notices changed code.

Compared are instructions with their constants and names, defaults, values of closures, attributes of objects, and the functions
and classes of the user that these name. Not compared are comments, line numbers, docstrings, libraries, values of globals, and
the contents of large tensors. Instructions differ between versions of Python, so fingerprints of two versions are not compared.
"""

from __future__ import annotations

import dataclasses
import dis
import hashlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from functools import cache, partial
from itertools import islice
from pathlib import Path, PurePath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
LIBRARIES = sys.stdlib_module_names - {"__main__"} | {"l2l_core", "workbench"}
PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    PurePath,
    Enum,
    range,
    slice,
    torch.dtype,
    torch.device,
    numpy.generic,
)
CACHED = type(cache(len))
MOST_ELEMENTS = 2**16  # of a tensor whose contents are compared
MOST_ITEMS = 1_000  # of a container; a longer one holds data
MOST_PARTS, MOST_CHARACTERS = 20, 60  # of a container and of a text; longer ones are recorded as a digest
LINE_NAMES = ("__firstlineno__", "__static_attributes__")  # set in the body of a class, by Python 3.13


def fingerprint(value: object, name: str) -> dict[str, str]:
    """Return texts that describe a function or an object, by the part; `name` is that of the whole."""
    walk = _Walk()
    walk.add(value, name)
    return walk.parts


def describe_change(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the first part in which two fingerprints differ, in words; empty if they are equal."""
    for part in {**before, **after}:
        old, new = before.get(part), after.get(part)
        if old != new:
            if part.startswith("code of") and old and new:
                return f"the {part} has changed"
            return f"{part} was {old or 'not there'} and is {new or 'not there'}"
    return ""


class _Walk:
    """Parts of a value, each function and object once."""

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}
        self._seen: dict[int, object] = {}

    def add(self, value: Any, path: str) -> None:
        """Add a value and everything that it holds."""
        if isinstance(value, PLAIN):
            self.parts[path] = _shorten(str(value) if isinstance(value, PurePath) else repr(value))
        elif isinstance(value, set | frozenset):
            self.parts[path] = _shorten(_constant_text(value))
        elif isinstance(value, torch.Tensor | numpy.ndarray):
            self.parts[path] = _describe_tensor(value)
        elif id(value) in self._seen:
            return
        elif isinstance(value, Mapping | list | tuple):
            self._seen[id(value)] = value
            items = value.items() if isinstance(value, Mapping) else enumerate(value)
            self._add_items([*islice(items, MOST_ITEMS)], path)
            del self._seen[id(value)]  # equal constants are one object or several, as Python likes
        else:
            self._seen[id(value)] = value
            self._add_once(value, path)

    def _add_once(self, value: Any, path: str) -> None:
        if isinstance(value, FunctionType):
            self._add_function(value, path)
        elif isinstance(value, MethodType):
            self._add_method(value, path)
        elif isinstance(value, partial):
            self.add(value.func, path)
            self._add_items([*enumerate(value.args), *value.keywords.items()], f"{path}.partial")
        elif isinstance(value, CACHED):
            self.add(value.__wrapped__, path)
        elif isinstance(value, type):
            self._add_class(value)
        else:
            self._add_object(value, path)

    def _add_function(self, function: FunctionType, path: str) -> None:
        if not _is_users(function.__module__):
            self.parts[path] = function.__qualname__
            return
        code = function.__code__
        self.parts[f"code of {path}"] = _digest(_code_text(code))
        positional = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        given = dict(zip(positional[len(positional) - len(defaults) :], defaults, strict=True))
        for name, value in {**given, **(function.__kwdefaults__ or {})}.items():
            self.add(value, f"default {name} of {path}")
        state = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_DEREF"}  # as of a counter
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name not in state and (value := _content(cell)) is not cell:
                self.add(value, f"{name} in {path}")
        for name, value in _globals_of(function):
            self.add(value, name)

    def _add_method(self, method: MethodType, path: str) -> None:
        """Add a function and those attributes and methods of its object that it uses."""
        owner, names, functions = method.__self__, set[str](), [method.__func__]
        self.add(method.__func__, path)
        if isinstance(owner, type):
            self.add(owner, path)
        for function in functions:  # which grows
            for name in sorted({*_names_in(function.__code__)} - names):
                names.add(name)
                member = getattr(type(owner), name, None)
                if isinstance(member, FunctionType):
                    functions.append(member)
                    self.add(member, f"{path}.{name}")
                elif name in getattr(owner, "__dict__", {}):
                    self.add(vars(owner)[name], f"{path}.{name}")

    def _add_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if not _is_users(base.__module__):
                continue
            for name, value in vars(base).items():
                part = f"{base.__qualname__}.{name}"
                for function in _functions_of(value):
                    self.add(function, part)
                if isinstance(value, PLAIN) and not name.startswith("__"):
                    self.add(value, part)

    def _add_object(self, value: Any, path: str) -> None:
        cls = type(value)
        self.parts[path] = cls.__qualname__
        if isinstance(value, nn.Module):
            self.parts[path] = _shorten(_without_addresses(repr(value)))
            self._add_items([(name, parameter) for name, parameter in value.named_parameters()], f"{path}.parameters")
            for module in value.modules():
                self._add_class(type(module))
            return
        if isinstance(value, DataLoader):
            attributes = {name: getattr(value, name) for name in ("dataset", "batch_size", "drop_last", "collate_fn")}
        elif dataclasses.is_dataclass(value):
            attributes = {each.name: getattr(value, each.name, None) for each in dataclasses.fields(value)}
        else:
            attributes = getattr(value, "__dict__", {}) if _is_users(cls.__module__) else {}
        for name, each in attributes.items():
            self.add(each, f"{path}.{name}")
        self._add_class(cls)

    def _add_items(self, items: Sequence[tuple[object, object]], path: str) -> None:
        before, self.parts = self.parts, {}
        for key, value in items:
            self.add(value, f"{path}[{_constant_text(key)}]")
        found, self.parts = self.parts, before
        many = len(found) > MOST_PARTS
        self.parts |= {path: f"{len(items)} items, digest {_digest(repr(found))}"} if many else found
        if not items:
            self.parts[path] = "empty"


# -- code ----------------------------------------------------------------------------------------------------------------


def _code_text(code: CodeType) -> str:
    """Return the instructions of a function and of those in it, with their constants and names."""
    lines: list[str] = []
    for each in dis.get_instructions(code):
        if each.opname == "STORE_NAME" and each.argval in LINE_NAMES:
            lines.pop()  # its value
            continue
        lines.append(f"{each.opname} {_constant_text(each.argval)}")
    return "\n".join(
        [*lines, repr(code.co_exceptiontable), f"{code.co_argcount} {code.co_kwonlyargcount} {code.co_flags}"]
    )


def _constant_text(value: object) -> str:
    if isinstance(value, CodeType):
        return _code_text(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant_text, value))})"
    if isinstance(value, set | frozenset):  # in an order that differs between processes
        return f"{{{', '.join(sorted(map(_constant_text, value)))}}}"
    return _without_addresses(repr(value))


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes that a function and those in it use."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names_in(const)


def _globals_of(function: FunctionType) -> Iterator[tuple[str, object]]:
    """Yield functions and classes of the user that a function names, alone or in a module."""
    names = sorted({*_names_in(function.__code__)})
    for name in names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType) and _is_users(value.__name__):
            members = {f"{name}.{each}": vars(value)[each] for each in names if each in vars(value)}
        else:
            members = {name: value}
        for path, each in members.items():
            if isinstance(each, FunctionType | type | partial | CACHED):
                yield path, each


def _functions_of(member: object) -> list[object]:
    """Return the functions of a member of a class: a method, a property, or another descriptor."""
    if isinstance(member, FunctionType):
        return [member]
    inner = [getattr(member, name, None) for name in ("__func__", "fget", "fset", "func")]
    return [each for each in inner if isinstance(each, FunctionType)]


def _is_users(module: str | None) -> bool:
    """Return True if a module is neither a part of Python, of this package, nor of an installed one."""
    top = (module or "").partition(".")[0]
    if top in LIBRARIES:
        return False
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return not {"site-packages", "dist-packages"} & {*Path(file).parts}


def _content(cell: CellType) -> Any:
    """Return the value of a variable of a closure; the cell itself if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return cell


# -- texts ---------------------------------------------------------------------------------------------------------------


def _describe_tensor(value: Any) -> str:
    """Return type and shape, with a digest of the contents if they are few and no weights."""
    text = f"{value.dtype} {[*value.shape]}"
    if isinstance(value, numpy.ndarray):
        data = value.tobytes() if value.size <= MOST_ELEMENTS and not value.dtype.hasobject else b""
    elif isinstance(value, nn.Parameter) or value.is_meta or value.layout != torch.strided or value.is_quantized:
        data = b""
    else:
        few = value.numel() <= MOST_ELEMENTS
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if few else b""
    return f"{text}, digest {hashlib.sha256(data).hexdigest()[:12]}" if data else text


def _shorten(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..., digest {_digest(text)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)
