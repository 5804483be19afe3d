"""Key-value caches that a model makes itself for every forward, regardless of its configuration (XLM, Flaubert).

Such a cache is empty when the first layer receives it, so every run of a layer can use a fresh empty copy: it holds the keys and
values that the layer would find there in plain training, and is dropped after the run. This is right as long as the entries of
another layer, or of an earlier call, are not read. So a layer gets a view that only accepts its keys and values, and the cache
itself becomes unreadable.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any, NoReturn

from l2l_core.model import RelayCache, cache_message, holds_tensor

_PARTS = ("self_attention_cache", "cross_attention_cache")  # of a cache for encoder and decoder

CacheEntry = tuple[int, int]  # id of the cache or of its part, index of the layer in it


class EmptyCache:
    """An empty cache among the arguments of a layer's call; reading the model's own raises an error from now on.

    Raises:
        TypeError: the cache is not empty.
    """

    def __init__(self, cache: Any, where: str) -> None:
        self.original, self._where = cache, where
        if not isinstance(cache, RelayCache):
            if holds_tensor(cache, depth=6):
                raise TypeError(cache_message(cache, where))
            _make_unreadable(cache, set())
        self._pristine, self._written = object.__getattribute__(cache, "_relay_state")

    def make_view(self) -> CacheView:
        """Return a view of an empty copy, for one run of the layer."""
        return CacheView(copy.deepcopy(self._pristine), self.original, self._where, set())

    def check_first_run(self, view: CacheView) -> None:
        """Raise TypeError if in plain training the layer would have found an entry in the cache in its first run."""
        entries = view.entries()
        if entries & self._written:
            raise TypeError(cache_message(self.original, f"{self._where}, to which an earlier call has added,"))
        self._written |= entries


class CacheView(RelayCache):
    """View of a cache for one layer: it accepts the layer's keys and values; any other use raises TypeError."""

    def __init__(self, cache: Any, original: Any, where: str, entries: set[CacheEntry]) -> None:
        self._cache, self._where, self._key = cache, where, id(original)
        self._entries = entries  # that the layer has written, here or in a part
        self._queried: set[int] = set()
        for name in [name for name in _PARTS if name in vars(cache)]:
            vars(self)[name] = CacheView(vars(cache)[name], object.__getattribute__(original, name), where, entries)
        if isinstance(vars(cache).get("is_updated"), dict):
            self.is_updated = _QueriedFlags(self._queried)

    @property
    def __class__(self) -> type:
        """The class of the model's cache, since layers test it with isinstance."""
        return type(vars(self)["_cache"])

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        self._entries.add((self._key, layer))
        return self._cache.update(keys, values, layer, *args, **kwargs)

    def entries(self) -> set[CacheEntry]:
        """Return the entries that the layer has written; refuse a layer that has queried that of another one."""
        if self._queried - {layer for _, layer in self._entries}:
            self._refuse("another layer's part")
        return self._entries

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # probed by Python, e.g. in copy
            raise AttributeError(name)
        self._refuse(name)

    def __len__(self) -> int:
        self._refuse("its length")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("its layers")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(cache_message(vars(self)["_cache"], f"{vars(self)['_where']}, which reads {what} of it,"))


class _QueriedFlags(dict[int, bool]):
    """`is_updated` of a cache, with a record of the keys that were read."""

    def __init__(self, queried: set[int]) -> None:
        super().__init__()
        self._queried = queried

    def get(self, key: int, default: Any = None) -> Any:
        self._queried.add(key)
        return super().get(key, default)

    def __getitem__(self, key: int) -> bool:
        self._queried.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: Any) -> bool:
        self._queried.add(key)
        return super().__contains__(key)


def _make_unreadable(cache: Any, written: set[CacheEntry]) -> None:
    """Make a cache unreadable; its pristine state is kept in `_relay_state` for later calls."""
    parts = [vars(cache)[name] for name in _PARTS if name in vars(cache)]
    vars(cache)["_relay_state"] = copy.deepcopy(cache), written
    for part in parts:
        _make_unreadable(part, written)
    cache.__class__ = _unreadable_class(type(cache))


@cache
def _unreadable_class(kind: type) -> type:
    """Return a subclass of a cache's class whose attributes cannot be read."""

    def refuse(cache: Any, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(cache, name)
        raise RuntimeError(
            f"the model reads {name} of a key-value cache ({kind.__name__}) that a layer has received before: in a relay, layers "
            "store nothing in it. Train without it: config.use_cache = False, or use_cache=False in the batch"
        )

    return type(kind.__name__, (RelayCache, kind), {"__getattribute__": refuse, "__module__": kind.__module__})
