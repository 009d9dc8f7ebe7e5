"""Speculative decoding keeps the keys of drafts that were rejected. Ref: ml-explore/mlx-lm#1109, paiml/aprender#2014 (family)"""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


class Decode(torch.nn.Module):
    """A prompt, two drafts of which the second is rejected, and one more token."""

    def __init__(self, forgets):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
        )
        self.lm, self.forgets = LlamaForCausalLM(config).eval(), forgets

    def forward(self, prompt, drafts, token):
        cache = DynamicCache()
        length = prompt.shape[1]
        self.lm(prompt, past_key_values=cache, use_cache=True)
        made = [self.lm(drafts, past_key_values=cache, use_cache=True).logits]
        if not self.forgets:
            cache.crop(-1)
        at = torch.tensor([[length + 1]])
        made.append(self.lm(token, past_key_values=cache, position_ids=at, use_cache=True).logits)
        return torch.cat(made, 1)


def reference():
    return Decode(False)


def target():
    return Decode(True)


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 64, (1, 6)), torch.randint(0, 64, (1, 2)), torch.randint(0, 64, (1, 1))


EXPECT = {
    "where": {"module": "lm.model.layers.0.self_attn", "op": "aten.cat.default"},
    "call": 2,
    "accept": ["aten.slice.Tensor"],
    "accept_modules": [""],
    "kind": "kv-cache",
    "note": "the caller should have cut the cache; the attention joins one key too many",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
