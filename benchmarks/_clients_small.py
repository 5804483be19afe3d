"""Small models and batches of the programs in `_clients_*.py`."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

WORDS, LENGTH, ROWS, WIDTH = 64, 8, 4, 32


def gpt2(**settings: Any) -> GPT2LMHeadModel:
    """Three blocks with a tied embedding, without dropout unless it is given."""
    sizes = {"n_layer": 3, "n_embd": WIDTH, "n_head": 2, "vocab_size": WORDS, "n_positions": 16, "use_cache": False}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes | dropout | {"bos_token_id": 0, "eos_token_id": 0} | settings)).train()


def llama(**settings: Any) -> LlamaForCausalLM:
    """Three blocks with grouped attention."""
    sizes = {
        "num_hidden_layers": 3, "hidden_size": WIDTH, "num_attention_heads": 2, "num_key_value_heads": 1,
        "intermediate_size": 48, "vocab_size": WORDS, "max_position_embeddings": 32, "use_cache": False,
    }  # fmt: skip
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes | special | settings)).train()


def bert(kind: str = "BertForSequenceClassification", **settings: Any) -> Any:
    """Two layers, without dropout."""
    sizes = {"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 48}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    config = BertConfig(**sizes | dropout | {"vocab_size": WORDS, "pad_token_id": 0} | settings)
    return getattr(transformers, kind)(config).train()


def tokens(step: int, rows: int = ROWS) -> dict[str, Tensor]:
    """Tokens to predict."""
    ids = torch.randint(4, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def chain(layers: int = 3, classes: int = 5) -> nn.Sequential:
    """Layers of a perceptron."""
    torch.manual_seed(0)
    hidden = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(layers))
    return nn.Sequential(*hidden, nn.Linear(WIDTH, classes))


def vectors(step: int, rows: int = ROWS, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Vectors and their classes."""
    g = torch.Generator().manual_seed(step)
    return torch.randn(rows, WIDTH, generator=g), torch.randint(classes, (rows,), generator=g)


def pictures(step: int, side: int = 32, rows: int = ROWS, classes: int = 5) -> tuple[Tensor, Tensor]:
    """Pictures and their classes."""
    g = torch.Generator().manual_seed(step)
    return torch.randn(rows, 3, side, side, generator=g), torch.randint(classes, (rows,), generator=g)


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained."""
    return torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=lr)


def rows_of_tokens(count: int) -> Any:
    """Rows of a data set."""
    return [{name: value[0] for name, value in tokens(n, rows=1).items()} for n in range(count)]
