"""Programs with trainers of TRL and sentence-transformers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _clients import Side, case
from _clients_small import ROWS, WORDS, adamw, bert, llama, tokens
from _clients_trainers import settings, train
from torch import nn

trainer_case = partial(case, "trainers")


# -- TRL -------------------------------------------------------------------------------------------------------------


def tokenizer() -> Any:
    """Return a tokenizer of words w4 to w63."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, "[UNK]": 3} | {f"w{n}": n for n in range(4, WORDS)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def trains_with_trl(side: Side, trainer: str, config: str, data: list[dict[str, Any]], **options: Any) -> Any:
    import trl
    from datasets import Dataset

    more = options.pop("settings", {})
    args = getattr(trl, config)(**settings(side, activation_checkpointing=False, **more))
    made = {name: make() for name, make in ({"model": llama} | options).items()}
    made["train_dataset"] = Dataset.from_list(data)
    return train(side, getattr(trl, trainer), made.pop("model"), args=args, processing_class=tokenizer(), **made)


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], init_lora_weights="gaussian")


def classifier() -> nn.Module:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    return LlamaForSequenceClassification(llama(num_labels=1).config)


def longer(completions: list[str], **others: Any) -> list[float]:
    return [float(len(each)) for each in completions]


TEXTS = [{"text": f"w{n + 4} w{n + 9} w7 w{n + 20} w8"} for n in range(12)]
PAIRS = [{"prompt": f"w{10 + n} w5", "chosen": f"w{20 + n} w6 w7", "rejected": f"w{30 + n} w8"} for n in range(12)]
JUDGED = [{"prompt": f"w{10 + n} w5", "completion": f"w{20 + n} w6 w7", "label": bool(n % 2)} for n in range(12)]
short = {"max_length": 16}
sft = partial(trains_with_trl, trainer="SFTTrainer", config="SFTConfig", data=TEXTS)
dpo = partial(trains_with_trl, trainer="DPOTrainer", config="DPOConfig", data=PAIRS)
TRL = {
    "SFTTrainer": partial(sft, settings=short),
    "SFTTrainer, completion_only_loss": partial(
        sft, data=[{"prompt": each["prompt"], "completion": f" {each['chosen']}"} for each in PAIRS], settings=short
    ),
    "SFTTrainer with LoRA": partial(sft, settings=short, peft_config=lora),
    "DPOTrainer with a reference model": partial(dpo, ref_model=llama),
    "DPOTrainer with LoRA, whose disabled adapter is the reference": partial(dpo, peft_config=lora),
    "DPOTrainer, loss_type='ipo'": partial(dpo, ref_model=llama, settings={"loss_type": ["ipo"]}),
    "RewardTrainer": partial(
        trains_with_trl, trainer="RewardTrainer", config="RewardConfig", data=PAIRS, model=classifier, settings=short
    ),
    "KTOTrainer": partial(trains_with_trl, trainer="KTOTrainer", config="KTOConfig", data=JUDGED, ref_model=llama),
}
for what, program in TRL.items():
    trainer_case("trl", what)(program)


@trainer_case("trl", "GRPOTrainer, generations of the model and a reward", "gradient_accumulation_steps=1")
def generates(side: Side) -> Any:
    batches = 1 if side.is_remedied else 2
    more = {
        "num_generations": 2,
        "max_completion_length": 4,
        "num_train_epochs": 1,
        "gradient_accumulation_steps": batches,
    }
    made = {"trainer": "GRPOTrainer", "config": "GRPOConfig", "data": PAIRS, "reward_funcs": lambda: longer}
    return trains_with_trl(side, **made, settings=more)


# -- sentence-transformers -------------------------------------------------------------------------------------------


def sentence_model(side: Side) -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    bert("BertModel").save_pretrained(side.folder / "bert")
    tokenizer().save_pretrained(side.folder / "bert")
    return SentenceTransformer(modules=[Transformer(str(side.folder / "bert")), Pooling(32)], device="cpu")


def trains_sentences(side: Side, loss: str, scored: bool = False, **options: Any) -> Any:
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments, losses

    model = sentence_model(side)
    pairs = [
        {"a": f"w{n + 4} w9", "b": f"w{n + 20} w8 w7"} | ({"score": n % 2 / 1} if scored else {}) for n in range(12)
    ]
    chosen = getattr(losses, loss)(model, **options)
    args = SentenceTransformerTrainingArguments(**settings(side, per_device_train_batch_size=ROWS))
    data = Dataset.from_list(pairs)
    return train(side, SentenceTransformerTrainer, model, args=args, train_dataset=data, loss=chosen)


trainer_case("sentence-transformers", "SentenceTransformerTrainer, CosineSimilarityLoss")(
    partial(trains_sentences, loss="CosineSimilarityLoss", scored=True)
)
trainer_case("sentence-transformers", "SentenceTransformerTrainer, MultipleNegativesRankingLoss")(
    partial(trains_sentences, loss="MultipleNegativesRankingLoss")
)


@trainer_case(
    "sentence-transformers",
    "SentenceTransformerTrainer, CachedMultipleNegativesRankingLoss",
    remedy="use the loss without a cache",
)
def trains_with_cached_negatives(side: Side) -> Any:
    return trains_sentences(side, ("" if side.is_remedied else "Cached") + "MultipleNegativesRankingLoss")


@trainer_case(
    "sentence-transformers", "CrossEncoderTrainer, BinaryCrossEntropyLoss, weights copied from the mapped file"
)
def trains_cross_encoder(side: Side) -> Any:
    from datasets import Dataset
    from sentence_transformers import CrossEncoder, CrossEncoderTrainer, CrossEncoderTrainingArguments
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss

    bert(num_labels=1).save_pretrained(side.folder / "bert")
    tokenizer().save_pretrained(side.folder / "bert")
    model = CrossEncoder(str(side.folder / "bert"), device="cpu")
    for param in model.parameters():  # kernels round by the alignment of weights, and those of a file may have any
        param.data = param.data.clone()
    data = Dataset.from_list([{"a": f"w{n + 4} w9", "b": f"w{n + 20} w8 w7", "label": n % 2 / 1} for n in range(12)])
    args = CrossEncoderTrainingArguments(**settings(side))
    return train(side, CrossEncoderTrainer, model, args=args, train_dataset=data, loss=BinaryCrossEntropyLoss(model))


@trainer_case("sentence-transformers", "MatryoshkaLoss in a loop of the user, as the relay's objective")
def sentences_by_hand(side: Side) -> None:
    from sentence_transformers import losses

    model = sentence_model(side).train()
    loss = losses.MatryoshkaLoss(model, losses.CoSENTLoss(model), [32, 16])
    side.config = replace(side.config, micro_batches=1)

    def objective(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        pairs = [{"input_ids": batch[k], "attention_mask": torch.ones_like(batch[k])} for k in ("a", "b")]
        return loss(pairs, batch["score"])

    with side.training(model, adamw(model), objective=objective) as step:
        for n in range(3):
            ids = [tokens(2 * n + k)["input_ids"] for k in range(2)]
            step({"a": ids[0], "b": ids[1], "score": torch.arange(ROWS) / ROWS})
