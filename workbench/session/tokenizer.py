"""Search for a tokenizer, so that tokens are shown as text without `decode=`, and text as tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from torch import nn

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], Sequence[int]]

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
            return _TokenizerDecode(found)
    return None


def find_encode(decode: Decode | None, model: Any) -> Encode | None:
    """Return the inverse of a decoder; None without a decoder, or without a number of tokens to search.

    It is `encode` of the decoder's tokenizer. For another function, the text of each single token is tabulated when the
    first text is encoded, the longest matching one is taken at each place, and the result is decoded as a check.
    """
    owner = getattr(decode, "__self__", decode)
    if _is_tokenizer(tokenizer := getattr(owner, "tokenizer", owner)):
        return partial(_encode_by_tokenizer, tokenizer)
    count = _count_tokens(model)
    if decode is None or count is None:
        return None
    table = lru_cache(partial(_tabulate, decode, count))
    return lambda text: _encode_by_table(text, table(), decode)


def _encode_by_tokenizer(tokenizer: Any, text: str) -> Sequence[int]:
    found = tokenizer.encode(text)
    return [int(token) for token in getattr(found, "ids", found)]  # `tokenizers` returns an object with `ids`


def _count_tokens(model: Any) -> int | None:
    """Return the number of tokens of a model: that of its config, or the size of its first embedding."""
    count = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(count, int):
        return count
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module.num_embeddings for module in modules if isinstance(module, nn.Embedding)), None)


def _tabulate(decode: Decode, count: int) -> dict[str, int]:
    """Return the tokens by their text."""
    table: dict[str, int] = {}
    for token in range(count):
        try:
            table.setdefault(decode([token]), token)
        except Exception:  # a number without a token, or a part of a character
            continue
    table.pop("", None)
    return table


def _encode_by_table(text: str, table: dict[str, int], decode: Decode) -> Sequence[int]:
    longest, at, tokens = max(map(len, table), default=0), 0, list[int]()
    while at < len(text):
        parts = (text[at : at + size] for size in range(longest, 0, -1))
        part = next((part for part in parts if part in table), None)
        if part is None:
            raise ValueError(f"text={text!r}: no token of the model stands for {text[at]!r}: leave it out")
        tokens.append(table[part])
        at += len(part)
    if decode(tokens) != text:
        raise ValueError(
            f"text={text!r}: its tokens decode to {decode(tokens)!r}, so decode= has no simple inverse: pass decode= as the "
            "bound method of a tokenizer with `encode`, such as tokenizer.decode"
        )
    return tokens


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


@dataclass(frozen=True)
class _TokenizerDecode:
    """The `decode` of a tokenizer, which returns the numbers where it raises, as for padding."""

    tokenizer: Any

    def __call__(self, tokens: Sequence[int]) -> str:
        try:
            return str(self.tokenizer.decode(list(tokens)))
        except Exception:  # a number without a token; the picture must still be drawn
            return " ".join(map(str, tokens))
