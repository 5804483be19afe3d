"""Search for a tokenizer on the model, the batches and among the variables of a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import IPython
import pytest
import torch
from sessions import make_batches
from torch.utils.data import DataLoader, Dataset

from l2l_core import Relay
from workbench.lessons.corpus import Corpus
from workbench.session.session import Session
from workbench.session.tokenizer import find_decode


class Letters:
    """A tokenizer of letters."""

    vocab_size = 26

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 97 for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz"[token] for token in tokens)


class Rows(Dataset[Any]):
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor([index])


def text_of(model: Any = None, batches: Any = ()) -> str | None:
    decode = find_decode(model, batches)
    return None if decode is None else decode([7, 8])


def test_tokenizer_is_found_on_model_and_batches() -> None:
    for model in (
        SimpleNamespace(tokenizer=Letters()),
        SimpleNamespace(processor=SimpleNamespace(tokenizer=Letters())),
    ):
        assert text_of(model) == "hi"
    assert text_of(batches=DataLoader(Rows(tokenizer=Letters()))) == "hi"
    assert text_of(batches=DataLoader(torch.utils.data.Subset(Rows(tokenizer=Letters()), [0]))) == "hi"
    collator: Any = SimpleNamespace(tokenizer=Letters())
    assert text_of(batches=SimpleNamespace(collate_fn=collator)) == "hi"
    assert text_of() is None and text_of(batches=make_batches()) is None


def test_tokenizer_of_another_model_is_left_out() -> None:
    small = SimpleNamespace(tokenizer=Letters(), config=SimpleNamespace(vocab_size=20))
    assert text_of(small) is None


def test_tokenizer_is_found_among_the_variables_of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    names = {"text": "a text", "raw": b"bytes", "kind": Letters, "_": Letters(), "corpus": Corpus(empty, empty, 0)}
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(user_ns=names))
    decode = find_decode(None, ())
    assert decode is not None and decode([104, 105]) == "hi"
    names["tokenizer"] = Letters()
    assert text_of() == "hi", "the last defined"


def test_number_without_a_token_is_shown_as_a_number() -> None:
    decode = find_decode(SimpleNamespace(tokenizer=Letters()), ())
    assert decode is not None and decode([7, 99]) == "7 99"


def test_session_uses_it_unless_one_is_given(relay: Relay) -> None:
    model: Any = relay.model
    model.tokenizer = Letters()
    with Session(relay, make_batches()) as session:
        assert session.decode is not None and session.decode([7, 8]) == "hi"
    with Session(relay, make_batches(), decode=str) as session:
        assert session.decode is str
