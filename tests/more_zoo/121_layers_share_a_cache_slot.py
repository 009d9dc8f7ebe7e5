"""Every layer was built with layer index 0 and appends to the first layer's cache. Ref: vllm-project/vllm-ascend#11021 (family), pkunlp-icler/FastV#49 (family)"""

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

    def forward(self, ids):
        cache, logits = DynamicCache(), []
        for step in range(ids.shape[1]):
            position = torch.tensor([[step]])
            out = self.lm(ids[:, step : step + 1], position_ids=position, cache=cache, use_cache=True)
            logits.append(out.logits)
        return torch.cat(logits, dim=1)


def reference():
    return Decode()


def target():
    model = Decode()
    for layer in model.lm.model.layers:
        layer.self_attn.layer_idx = 0
    return model


def inputs():
    return (torch.tensor([[5, 17, 33, 2]]),)


EXPECT = {
    "where": {"module": "lm.model.layers.1.self_attn", "op": "aten.cat.default"},
    "accept": ["aten._scaled_dot_product_flash_attention_for_cpu.default"],
    "call": 0,
    "kind": "kv-cache",
    "note": "the second layer's keys are joined to the first layer's: the reference has no keys of that length",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
