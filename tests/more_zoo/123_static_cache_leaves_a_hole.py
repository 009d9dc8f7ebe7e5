"""The write position of a static cache is one too far after the prompt. Ref: microsoft/onnxruntime-genai#2354"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache


class Decode(torch.nn.Module):
    """Feeds given tokens one after the other, with a cache."""

    def __init__(self):
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
        self.lm = LlamaForCausalLM(config).eval()

        self.skips = 0

    def forward(self, ids, prompt):
        cache, logits = StaticCache(config=self.lm.config, max_cache_len=8), []
        for begin, end in ((0, prompt), *((at, at + 1) for at in range(prompt, ids.shape[1]))):
            positions = torch.arange(begin, end)[None]
            out = self.lm(ids[:, begin:end], position_ids=positions, cache=cache, use_cache=True)
            logits.append(out.logits)
            if begin == 0 and self.skips:
                for layer in cache.layers:
                    layer.cumulative_length.add_(self.skips)
        return torch.cat(logits, dim=1)


def reference():
    return Decode()


def target():
    model = Decode()
    model.skips = 1
    return model


def inputs():
    return torch.tensor([[5, 17, 33, 2, 8]]), 3


EXPECT = {
    "where": {"module": "", "op": "aten.add_.Tensor"},
    "accept": ["aten.index_copy_.default"],
    "accept_modules": ["lm.model.layers.0.self_attn"],
    "extra_op": "aten.add_.Tensor",
    "kind": "kv-cache",
    "note": "an integer counter is written in place between two calls; a row of zeros is attended to",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
