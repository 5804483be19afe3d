"""TRL's trainers give the loss, a relay runs the steps: preference pairs of the real collator, cut by `Views(2)`."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from l2l_core import Relay, RelayConfig, Views

WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(40))]
sgd = partial(torch.optim.SGD, lr=0.1)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def preferences() -> Dataset:
    """Eight prompts, each with a better and a worse answer, of different lengths."""
    generator = torch.Generator().manual_seed(0)

    def text(length: int) -> str:
        return " ".join(WORDS[number] for number in torch.randint(2, len(WORDS), (length,), generator=generator))

    return Dataset.from_list(
        [{"prompt": text(4), "chosen": " " + text(3 + i % 3), "rejected": " " + text(2 + i % 4)} for i in range(8)]
    )


def dpo_trainer(model: GPT2LMHeadModel, folder: Path) -> Any:
    trl = pytest.importorskip("trl")
    args = trl.DPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        report_to=[],
        per_device_train_batch_size=8,
        gradient_checkpointing=False,
    )
    return trl.DPOTrainer(model, copy.deepcopy(model), args, train_dataset=preferences(), processing_class=tokenizer())


# TRL 1.16 uses names that transformers 5 deprecates.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
def test_the_loss_of_a_dpo_trainer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        **{"vocab_size": len(WORDS), "n_positions": 32, "n_embd": 16, "n_layer": 4, "n_head": 2},
        **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        **{"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0},
    )
    model = GPT2LMHeadModel(config)
    trainer = dpo_trainer(model, tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    assert len(batch["input_ids"]) == 16, "the chosen answers, then the rejected ones"

    def loss_of(model: GPT2LMHeadModel, batch: Any) -> torch.Tensor:
        return trainer.compute_loss(model, batch)

    twin, settings = copy.deepcopy(model), RelayConfig(micro_batches=4)
    with (
        Relay(copy.deepcopy(model), sgd, objective=loss_of, config=settings) as relay,
        pytest.raises(ValueError, match=r"% apart.*Nothing was trained.*split=Views\(2\)"),
    ):
        relay.step(batch)

    optimizer = sgd(twin.parameters())
    with Relay(model, sgd, objective=loss_of, config=settings, split=Views(2)) as relay:
        for _ in range(3):
            whole = loss_of(twin, batch)
            whole.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert relay.step(batch).loss == pytest.approx(whole.item(), rel=1e-5)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
