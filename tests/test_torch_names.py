"""Private names of PyTorch are in one file; private attributes of its objects are listed there."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from l2l_core import _torch

ROOT = Path(__file__).resolve().parents[1]
HERE = "l2l_core/_torch.py"
ORACLE = "l2l_core/model/reference.py"  # shares no code with what it judges: torch alone
FOREIGN = {  # private attributes of others
    "_asdict", "_fields", "_replace",  # NamedTuple
    "_exit", "_getframe", "_inst",  # os, sys, random
    "_bit_generator", "_rand",  # numpy.random
    "_view_count",  # ipywidgets
    "_heterogeneity_spec", "_init_weights",  # transformers
    "_accelerator_connector", "_after_closure", "_device", "_devices_flag", "_num_nodes_flag",  # Lightning
    "_results", "_should_accumulate",  # Lightning
    "_models",  # accelerate
    "_relay_guard", "_relay_state",  # ours, on objects of others
}  # fmt: skip


@cache
def trees() -> dict[str, ast.Module]:
    paths = sorted(path for package in ("l2l_core", "workbench") for path in (ROOT / package).rglob("*.py"))
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_modules(tree: ast.Module) -> Iterator[str]:
    """Names of torch with a private part: in imports, and in chains of attributes that begin at a name imported from torch."""
    known = {}  # what a name of the file stands for
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from (
                    [alias.name]
                    if alias.name.startswith("torch.") and any(map(is_private, alias.name.split(".")))
                    else []
                )
                known[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                known[alias.asname or alias.name] = name = f"{node.module}.{alias.name}"
                yield from [name] if any(map(is_private, name.split("."))) else []
    for node in ast.walk(tree):
        chain, base = [], node
        while isinstance(base, ast.Attribute):
            chain.append(base.attr)
            base = base.value
        if (
            isinstance(base, ast.Name)
            and known.get(base.id, "").partition(".")[0] == "torch"
            and any(map(is_private, chain))
        ):
            name = ".".join([known[base.id], *reversed(chain)])
            yield from [] if name.startswith("torch.ops.") else [name]  # operators


def private_attributes(tree: ast.Module) -> Iterator[str]:
    """Private attributes of whatever is not `self` or `cls`, and text that is one, as of `getattr`; not `__slots__`."""
    slots = [
        node for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__"
    ]
    own = {id(node) for each in slots for node in ast.walk(each)}
    for node in (node for node in ast.walk(tree) if id(node) not in own):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in _torch.ATTRIBUTES:
            yield node.value


def own_names(tree: ast.Module) -> Iterator[str]:
    """What is defined, or assigned to `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else []


def test_one_file_names_private_modules_of_torch() -> None:
    found = {name: {*private_modules(tree)} for name, tree in trees().items() if name not in (HERE, ORACLE)}
    assert not (strays := {name: names for name, names in found.items() if names}), f"put into {HERE}: {strays}"
    assert len({*private_modules(trees()[HERE])}) > 40 and len(found) > 400
    assert {*private_modules(trees()[ORACLE])} == {"torch.utils._pytree"}


def test_private_attributes_are_listed() -> None:
    every = {name: tree for name, tree in trees().items() if name != HERE}
    own = {name for tree in every.values() for name in own_names(tree)}
    found = defaultdict(set)
    for name, tree in every.items():
        for attribute in private_attributes(tree):
            found[attribute].add(name.removeprefix("l2l_core/").removesuffix(".py"))
    listed = {*_torch.ATTRIBUTES}
    assert not (unused := listed - found.keys()), f"take out of ATTRIBUTES of {HERE}: {unused}"
    unknown = {attribute: files for attribute, files in found.items() if attribute not in own | FOREIGN | listed}
    assert not unknown, f"list in ATTRIBUTES of {HERE}, or in FOREIGN here: {unknown}"


def test_the_reader_sees_every_form() -> None:
    text = (
        "import torch, torch._dynamo\nimport torch.nn as nn\nfrom torch import _C\nfrom torch.utils import _pytree as p, data\n"
        "torch._C.x()\nnn.modules._m\ndata._utils\ntorch.ops.aten._to_copy\nself._mine\nx._version\ngetattr(x, '_cdata')\n"
    )
    tree = ast.parse(text)
    modules = {
        "torch._dynamo",
        "torch._C",
        "torch.utils._pytree",
        "torch._C.x",
        "torch.nn.modules._m",
        "torch.utils.data._utils",
    }
    assert {*private_modules(tree)} == modules
    assert {*private_attributes(tree)} >= {"_version", "_cdata"} and "_mine" not in {*private_attributes(tree)}
