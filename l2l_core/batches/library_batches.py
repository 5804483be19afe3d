"""Batches of PyTorch Geometric and TensorDict, cut by these libraries' own functions.

- A ``Batch`` of graphs has one row per graph.
- A TensorDict, or a tensorclass, with batch dimensions has the rows of the first one, also for values that are no tensors.
- Another graph (``Data``, ``HeteroData``) is one sample and cannot be cut.

Neither library is imported here: until the program imports it, no batch is of its types.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

OpenedBatch = tuple[
    list[Any], list[str], Callable[[Sequence[Any]], Any]
]  # parts, their names, a function to replace them


def count_library_rows(value: Any) -> int | None:
    """Return the rows of a value that its library can cut; None for other values."""
    if _is_tensordict(value):
        return value.batch_size[0] if value.batch_size else None
    # A batch that was put together by hand has no record of the limits of its graphs.
    return value.num_graphs if _is_graph(value, "Batch") and hasattr(value, "_slice_dict") else None


def select_library_rows(value: Any, where: str, choice: slice | list[int]) -> Any:
    """Return a value with the chosen rows, which `count_library_rows` counts.

    Raises:
        TypeError: a part of a batch of graphs would lack an attribute.
    """
    if _is_tensordict(value):
        return value[choice]
    names = _attributes(value)
    followed = [name for name in names if {f"{name}_batch", f"{name}_ptr"} <= names]
    part = (
        type(value)
        .__bases__[0]
        .from_data_list(  # the class is made for the type of its graphs
            value.index_select(choice), follow_batch=followed
        )
    )
    if lost := names - _attributes(part):
        raise TypeError(
            f"{where} is a {type(value).__name__} with {', '.join(sorted(lost))}, which belongs to none of its graphs, so it "
            "cannot be cut: set it on every graph before Batch.from_data_list, or use RelayConfig(micro_batches=1)"
        )
    return part


def is_uncut_graph(value: Any) -> bool:
    """Return whether `value` is a graph, or a batch of graphs without a record of their limits."""
    return _is_graph(value, "Data", "HeteroData") and count_library_rows(value) is None


def open_library_batch(value: Any) -> OpenedBatch | None:
    """Return the parts of a graph, a batch of graphs or a TensorDict; None for other values."""
    return _open_tensordict(value) if _is_tensordict(value) else _open_graph(value)


def _open_tensordict(value: Any) -> OpenedBatch | None:
    library: Any = sys.modules["tensordict"]
    if isinstance(value, library.LazyStackedTensorDict):
        return None  # pytrees open it
    # PyTorch's pytrees would change an entry with as many equal strings as rows into one string.
    held = {name: part for name, part in value.items() if isinstance(part, torch.Tensor) or _is_tensordict(part)}
    held = {name: part for name, part in held.items() if not library.is_non_tensor(part)}

    def rebuild(parts: Sequence[Any]) -> Any:
        other = value.clone(recurse=False)
        if any(part.device != value.device for part in parts):
            other.clear_device_()  # otherwise `set` would copy the parts to the old device
        for name, part in zip(held, parts, strict=True):
            other.set(name, part)
        return other

    return list(held.values()), [f"[{name!r}]" for name in held], rebuild


def _open_graph(value: Any) -> OpenedBatch | None:
    if not _is_graph(value, "Data", "HeteroData", "TemporalData"):
        return None

    def rebuild(parts: Sequence[Any]) -> Any:
        other, remaining = copy.copy(value), iter(parts)
        for store in other.stores:
            for name in list(store):
                store[name] = next(remaining)
        return other

    stores = [(f"[{store._key!r}]" if store._key else "", store) for store in value.stores]
    names = [f"{key}.{name}" for key, store in stores for name in store]
    return [each for _, store in stores for each in store.values()], names, rebuild


def graph_columns(value: Any) -> Iterator[tuple[str, list[Any]]]:
    """Yield each attribute of a batch of graphs as a list with one value per graph, except indices of nodes."""
    opened = [_open_graph(graph) for graph in value.to_data_list()] if _is_graph(value, "Batch") else []
    found = [(parts, names) for parts, names, _ in filter(None, opened)]
    for i, name in enumerate(found[0][1] if found else []):
        if "index" not in name and all(names == found[0][1] for _, names in found):
            yield name, [parts[i] for parts, _ in found]


def _attributes(graph: Any) -> set[str]:
    return {name for store in graph.stores for name in store}


def _is_graph(value: Any, *kinds: str) -> bool:
    library: Any = sys.modules.get("torch_geometric.data")
    return library is not None and isinstance(value, tuple(getattr(library, kind) for kind in kinds))


def _is_tensordict(value: Any) -> bool:
    library: Any = sys.modules.get("tensordict")
    return library is not None and library.is_tensor_collection(value)
