"""Key-value caches that a model makes itself for every forward, whatever its configuration says (XLM, Flaubert).

Such a cache is empty when the first layer gets it, so every run of a layer may have an empty one of its own: what the layer
puts into it is what it would find there in plain training, and is forgotten with the run. That is right as long as nobody
reads what another layer, or the same one in an earlier call, has put in. So a layer sees no more of its cache than it needs to
add its own keys and values, and the cache itself can no longer be read once a layer has been given it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any, NoReturn

from l2l_core.model import RelayCache, cache_message, holds_tensor

_PARTS = ("self_attention_cache", "cross_attention_cache")  # of a cache for encoder and decoder


CacheEntry = tuple[int, int]  # id of the cache, or of a part of it, and number of the layer in it


class EmptyCache:
    """An empty cache among the arguments of a layer's call.

    Args:
        cache: as the model has made it. From now on reading it raises an error.
        where: names it in errors.

    Raises:
        TypeError: it is not empty.
    """

    def __init__(self, cache: Any, where: str) -> None:
        self.original, self._where = cache, where
        if not isinstance(cache, RelayCache):
            if holds_tensor(cache, depth=6):
                raise TypeError(cache_message(cache, where))
            _make_unreadable(cache, set())
        self._pristine, self._written = object.__getattribute__(cache, "_relay_state")

    def make_view(self) -> CacheView:
        """Make a copy for one run of the layer."""
        return CacheView(copy.deepcopy(self._pristine), self.original, self._where)

    def check_first_run(self, view: CacheView) -> None:
        """The layer has run for the first time, with `lent`.

        Raises:
            TypeError: in plain training it would have found something there.
        """
        entries = view.entries()
        if entries & self._written:
            raise TypeError(cache_message(self.original, f"{self._where}, to which an earlier call has added,"))
        self._written |= entries


class CacheView(RelayCache):
    """What a layer sees of its cache: a place for its own keys and values, and whether it has put any there.

    Anything else that is asked of it raises TypeError.
    """

    def __init__(self, cache: Any, original: Any, where: str) -> None:
        self._cache, self._where, self._key = cache, where, id(original)
        self._entries: set[CacheEntry] = set()
        self._queried: set[int] = set()
        self._parts = [name for name in _PARTS if name in vars(cache)]
        for name in self._parts:
            vars(self)[name] = CacheView(vars(cache)[name], object.__getattribute__(original, name), where)
        if isinstance(vars(cache).get("is_updated"), dict):
            self.is_updated = _QueriedFlags(self._queried)

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """The model's own kind of cache: layers ask for it with isinstance."""
        return type(vars(self)["_cache"])

    def update(self, keys: Any, values: Any, layer: int, *args: Any, **kwargs: Any) -> Any:
        """Add the keys and values of one layer; returns all there are of it."""
        self._entries.add((self._key, layer))
        return self._cache.update(keys, values, layer, *args, **kwargs)

    def entries(self) -> set[CacheEntry]:
        """Return what the layer has written.

        Raises:
            TypeError: it has asked whether there was anything in another layer's place.
        """
        found = self._entries.union(*(vars(self)[name].entries() for name in self._parts))
        if self._queried - {layer for _, layer in found}:
            self._refuse("another layer's part")
        return found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own questions, as of copy
            raise AttributeError(name)
        self._refuse(name)

    def __len__(self) -> int:
        self._refuse("its length")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("its layers")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(cache_message(vars(self)["_cache"], f"{vars(self)['_where']}, which reads {what} of it,"))


class _QueriedFlags(dict[int, bool]):
    """`is_updated` of a cache, which notes what was asked."""

    def __init__(self, queried: set[int]) -> None:
        super().__init__()
        self._queried = queried

    def get(self, key: int, default: Any = None) -> Any:
        self._queried.add(key)
        return super().get(key, default)

    def __getitem__(self, key: int) -> bool:
        self._queried.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self._queried.add(key)  # type: ignore[arg-type]
        return super().__contains__(key)


def _make_unreadable(cache: Any, written: set[CacheEntry]) -> None:
    """Make a cache unreadable; what it was stays on it for layers that are given it later."""
    parts = [vars(cache)[name] for name in _PARTS if name in vars(cache)]
    vars(cache)["_relay_state"] = copy.deepcopy(cache), written
    for part in parts:
        _make_unreadable(part, written)
    cache.__class__ = _unreadable_class(type(cache))


@cache
def _unreadable_class(kind: type) -> type:
    """Make a subclass of a cache's class of which nothing can be read."""

    def refuse(cache: Any, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(cache, name)
        raise RuntimeError(
            f"the model reads {name} of a key-value cache ({kind.__name__}) that a layer was given before: in a relay a layer "
            "keeps nothing there. Train without it: config.use_cache = False, or use_cache=False in the batch"
        )

    return type(kind.__name__, (RelayCache, kind), {"__getattribute__": refuse, "__module__": kind.__module__})
