"""Decoding without a cache computes the whole prefix again. Ref: huggingface/transformers#25420 (family), lucidrains/native-sparse-attention-pytorch#20 (family)"""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


class Decode(torch.nn.Module):
    def __init__(self, cached):
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
        self.lm, self.cached = LlamaForCausalLM(config).eval(), cached

    def forward(self, ids):
        cache, logits = DynamicCache(), []
        for at in range(ids.shape[1]):
            if self.cached:
                out = self.lm(ids[:, at : at + 1], cache=cache, use_cache=True)
            else:
                out = self.lm(ids[:, : at + 1], use_cache=False)
            logits.append(out.logits[:, -1])
        return torch.stack(logits, dim=1)


def reference():
    return Decode(True)


def target():
    return Decode(False)


def inputs():
    return (torch.tensor([[5, 17, 33, 2]]),)


EXPECT = {
    "where": None,
    "kind": "benign-cache",
    "tol": 5e-6,
    "note": "one row for each call on one side, all rows so far on the other",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
