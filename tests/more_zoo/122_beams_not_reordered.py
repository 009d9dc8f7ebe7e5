"""The cache keeps the old order of beams after a beam was copied. Ref: huggingface/transformers#46612"""

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM


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

        self.reorders = True

    def forward(self, ids, parents):
        cache, logits = DynamicCache(), []
        for step in range(ids.shape[1]):
            out = self.lm(ids[:, step : step + 1], cache=cache, use_cache=True)
            logits.append(out.logits)
            if self.reorders:
                cache.reorder_cache(parents[step])
        return torch.cat(logits, dim=1)


def reference():
    return Decode()


def target():
    model = Decode()
    model.reorders = False
    return model


def inputs():
    ids = torch.tensor([[5, 17, 33], [5, 40, 12], [5, 9, 61]])
    return ids, torch.tensor([[0, 0, 0], [1, 1, 2], [0, 1, 2]])


EXPECT = {
    "where": {"module": "", "op": "aten.index_select.default"},
    "accept": ["aten.cat.default", "aten.index.Tensor"],
    "accept_modules": ["lm.model.layers.0.self_attn"],
    "missing_op": "aten.index_select.default",
    "kind": "kv-cache",
    "note": "the first reorder changes nothing, since all beams began alike; gathers between two calls are absent",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
