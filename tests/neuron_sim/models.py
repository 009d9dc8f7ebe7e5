"""The model that the stand-in compiler is let loose on: a tiny Llama behind hashed features of its tokens."""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

VOCABULARY, WIDTH, BUCKETS = 96, 32, 32


class Buckets(nn.Module):
    """Which bucket each token falls into: 64-bit arithmetic whose products need more than 32 bits."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids + 7) * 2654435761 % 4294967291 % BUCKETS


class HashedLlama(nn.Module):
    """Token plus bucket embeddings, two Llama layers, a head. [batch, time] -> [batch, time, VOCABULARY]."""

    def __init__(self) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=32,
            use_cache=False,
        )
        self.buckets = Buckets()
        self.table = nn.Embedding(BUCKETS, WIDTH)
        self.llama = LlamaModel(config)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.llama.embed_tokens(ids) + self.table(self.buckets(ids))
        return self.head(self.llama(inputs_embeds=x).last_hidden_state)


def hashed_llama() -> HashedLlama:
    """The model with weights that are the same in every process."""
    torch.manual_seed(0)
    model = HashedLlama().eval()
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that attention looks at more than one place
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    return model


def tokens(batch: int = 2, time: int = 12) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(1))
