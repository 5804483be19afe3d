"""Trainers of TRL and sentence-transformers by relay, beside the same trainers in core, to the bit."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="accelerate, which transformers' Trainer needs, is not installed")
pytest.importorskip("datasets", reason="datasets is not installed")

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Trainer
from transformers.utils import logging

from l2l_core import RelayConfig
from l2l_core.integrations import RelayTrainer

WORDS = 64


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def tokenizer() -> PreTrainedTokenizerFast:
    special = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, "[UNK]": 3}
    made = Tokenizer(models.WordLevel(special | {f"w{i}": i for i in range(len(special), WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="[PAD]", bos_token="[BOS]", eos_token="[EOS]", unk_token="[UNK]"
    )


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=3, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, intermediate_size=48,
            vocab_size=WORDS, max_position_embeddings=32, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        )
    )  # fmt: skip


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "per_device_eval_batch_size": 4, "num_train_epochs": 3,
        "gradient_accumulation_steps": 3, "learning_rate": 1e-3, "logging_steps": 2, "seed": 0, "save_strategy": "steps",
        "save_steps": 4, "report_to": [], "use_cpu": True, "disable_tqdm": True, "bf16": False,
    } | more  # fmt: skip


def relayed(kind: type[Trainer]) -> type[Trainer]:
    return type(f"Relay{kind.__name__}", (RelayTrainer, kind), {})


def assert_equal_tensors(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def logs(trainer: Trainer) -> list[dict[str, float]]:
    times = ("runtime", "per_second", "preparation_time")
    return [{k: v for k, v in each.items() if not any(t in k for t in times)} for each in trainer.state.log_history]


def compare(make: Any, folder: Path) -> None:
    """Three epochs and a second time from the checkpoint in the middle, by relay and in core; then an evaluation."""
    both = []
    for name in ("relay", "plain"):
        for resume in (None, str(folder / name / "checkpoint-4")):
            trainer = make(name, folder / name)
            trainer.train(resume_from_checkpoint=resume)
            both.append(trainer)
    for relay, plain in zip(both[:2], both[2:], strict=True):
        assert relay.state.global_step == plain.state.global_step == relay.relay.steps == 9
        assert_equal_tensors(relay.model.state_dict(), plain.model.state_dict())
        assert_equal_tensors(relay.optimizer.state_dict(), plain.optimizer.state_dict())
        metrics = [relay.evaluate(), plain.evaluate()]
        assert metrics[0]["eval_loss"] == metrics[1]["eval_loss"]
        assert logs(relay) == logs(plain)
        assert len(relay.relay.stack) >= 2
        relay.relay.close()


RELAY = {"relay_config": RelayConfig(stash="host")}


def test_supervised_fine_tuning_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    generator = torch.Generator().manual_seed(0)
    rows = [{"input_ids": torch.randint(4, WORDS, (5 + i % 5,), generator=generator).tolist()} for i in range(14)]
    data = datasets.Dataset.from_list(rows)

    def make(name: str, folder: Path) -> Trainer:
        kind = relayed(trl.SFTTrainer) if name == "relay" else trl.SFTTrainer
        prepared = {
            "activation_checkpointing": False,
            "max_length": 16,
            "dataset_kwargs": {"skip_prepare_dataset": True},
        }
        return kind(
            model=llama(), args=trl.SFTConfig(**settings(folder, **prepared)), train_dataset=data, eval_dataset=data,
            processing_class=tokenizer(), **(RELAY if name == "relay" else {}),
        )  # fmt: skip

    compare(make, tmp_path)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # trl reads it
def test_preferences_of_trl(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    rows = [{"prompt": f"w{10 + i} w5", "chosen": f"w{20 + i} w6 w7", "rejected": f"w{30 + i} w8"} for i in range(14)]
    data = datasets.Dataset.from_list(rows)

    def make(name: str, folder: Path) -> Trainer:
        kind = relayed(trl.DPOTrainer) if name == "relay" else trl.DPOTrainer
        return kind(
            model=llama(), ref_model=llama(), args=trl.DPOConfig(**settings(folder, activation_checkpointing=False)),
            train_dataset=data, eval_dataset=data, processing_class=tokenizer(), **(RELAY if name == "relay" else {}),
        )  # fmt: skip

    compare(make, tmp_path)


@pytest.mark.all_cases
@pytest.mark.parametrize("name_of_loss", ["CosineSimilarityLoss", "MultipleNegativesRankingLoss"])
def test_sentence_transformers(tmp_path: Path, name_of_loss: str) -> None:
    library = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
    parts = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    losses = pytest.importorskip("sentence_transformers.losses")
    pairs = [{"a": f"w{i + 4} w9", "b": f"w{i + 20} w8 w7"} for i in range(14)]
    if name_of_loss == "CosineSimilarityLoss":
        pairs = [pair | {"score": float(i % 2)} for i, pair in enumerate(pairs)]
    data = datasets.Dataset.from_list(pairs)

    def make_model() -> Any:
        torch.manual_seed(0)
        config = BertConfig(
            num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=48, vocab_size=WORDS,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        BertModel(config).save_pretrained(tmp_path / "bert")
        tokenizer().save_pretrained(tmp_path / "bert")
        transformer = parts.Transformer(str(tmp_path / "bert"))
        return library.SentenceTransformer(modules=[transformer, parts.Pooling(32)], device="cpu")

    def make(name: str, folder: Path) -> Trainer:
        kind = library.SentenceTransformerTrainer
        model = make_model()
        return (relayed(kind) if name == "relay" else kind)(
            model=model, args=library.SentenceTransformerTrainingArguments(**settings(folder)),
            train_dataset=data, eval_dataset=data, loss=getattr(losses, name_of_loss)(model),
            **(RELAY if name == "relay" else {}),
        )  # fmt: skip

    compare(make, tmp_path)
