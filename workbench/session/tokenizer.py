"""Search for a tokenizer, so that tokens are shown as text without `decode=`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Decode = Callable[[Sequence[int]], str]

_NAMES = ("tokenizer", "processing_class", "processor", "vocab")  # attributes in which a tokenizer is kept
_HOLDERS = ("dataset", "collate_fn")  # attributes of a DataLoader, and of wrappers of a data set


def find_decode(model: Any, batches: Any) -> Decode | None:
    """Return the decoder of the first tokenizer that is found and has no more tokens than the model.

    It is searched in attributes of the model (`tokenizer`, `processing_class`, `processor`), then in those of the batches,
    of their `dataset` and of their `collate_fn`, then among the variables of the notebook, the last defined first. A
    tokenizer is an object with `encode` and `decode`.
    """
    num_tokens = getattr(getattr(model, "config", None), "vocab_size", None)
    for found in _candidates(model, batches):
        if _is_tokenizer(found) and not _has_more_tokens(found, num_tokens):
            return _decoder(found)
    return None


def _candidates(model: Any, batches: Any) -> Iterable[Any]:
    for holder in (model, *_holders(batches)):
        for name in _NAMES:
            kept = getattr(holder, name, None)
            yield from (kept, getattr(kept, "tokenizer", None))
    yield from reversed([value for name, value in _notebook_variables() if not name.startswith("_")])


def _holders(batches: Any, depth: int = 3) -> Iterable[Any]:
    yield batches
    if depth:
        for name in _HOLDERS:
            if (inner := getattr(batches, name, None)) is not None:
                yield from _holders(inner, depth - 1)


def _notebook_variables() -> list[tuple[str, Any]]:
    ipython = sys.modules.get("IPython")  # not imported: outside of a notebook there are no variables
    shell = ipython.get_ipython() if ipython is not None else None
    return [] if shell is None else list(shell.user_ns.items())


def _is_tokenizer(found: Any) -> bool:
    """Return True for an object with `encode` and `decode`, which is no class and no codec."""
    if found is None or isinstance(found, type) or type(found).__module__ in ("builtins", "codecs"):
        return False
    return callable(getattr(found, "decode", None)) and callable(getattr(found, "encode", None))


def _has_more_tokens(tokenizer: Any, num_tokens: Any) -> bool:
    """Return True if the tokenizer belongs to a model with more tokens."""
    size = getattr(tokenizer, "vocab_size", None)
    return isinstance(size, int) and isinstance(num_tokens, int) and size > num_tokens


def _decoder(tokenizer: Any) -> Decode:
    """Return the tokenizer's `decode`, as a function that raises for no token: then it gives the number."""

    def decode(tokens: Sequence[int]) -> str:
        try:
            return str(tokenizer.decode(list(tokens)))
        except Exception:  # a number without a token, as in padding; the picture must still be drawn
            return " ".join(map(str, tokens))

    return decode
