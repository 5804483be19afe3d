"""A small text that needs no download: sentences of praise and blame, put together by a grammar of four patterns.

They were written for this project and are under its licence. They are no real reviews: a model that can tell these apart
has learnt two dozen words.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

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
KEEP_EVERY = 3  # one sentence in so many that the grammar allows is kept


def make_sample_sentences() -> list[tuple[str, int]]:
    """Return pairs of a sentence and 1 for praise or 0 for blame; they are always the same."""
    return [each for each in _all_sentences() if zlib.crc32(each[0].encode()) % KEEP_EVERY == 0]


def _all_sentences() -> Iterator[tuple[str, int]]:
    for label, words in ((1, PRAISE), (0, BLAME)):
        for subject in SUBJECTS:
            for i, word in enumerate(words):
                other = words[(i + 5) % len(words)]
                yield f"{subject} is {word} and {other}", label
                yield f"{subject}, all told, is {word}", label
                yield f"i found {subject} {word}", label
                yield f"{subject} seems {word} to me", label
