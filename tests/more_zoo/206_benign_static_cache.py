"""Decoding with a preallocated cache instead of a growing one. Ref: onnxruntime/mobius#365 (family)"""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache


class Decode(torch.nn.Module):
    def __init__(self, static):
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
        self.lm, self.static = LlamaForCausalLM(config).eval(), static

    def forward(self, ids, prompt):
        config = self.lm.config
        cache = StaticCache(config=config, max_cache_len=12) if self.static else DynamicCache(config=config)
        out = self.lm(ids[:, :prompt], cache=cache, use_cache=True)
        logits = [out.logits]
        for at in range(prompt, ids.shape[1]):
            logits.append(self.lm(ids[:, at : at + 1], cache=cache, use_cache=True).logits)
        return torch.cat(logits, dim=1)


def reference():
    return Decode(False)


def target():
    return Decode(True)


def inputs():
    return torch.tensor([[5, 17, 33, 2, 8, 40]]), 3


EXPECT = {
    "where": None,
    "kind": "benign-cache",
    "tol": 5e-6,
    "note": "keys and values are longer by rows of zeros that a mask leaves out; writes instead of joins",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
