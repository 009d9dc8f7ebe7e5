"""A prompt is read in chunks of three instead of at once. Ref: huggingface/transformers#40324 (family), vllm-project/vllm-ascend#11021 (family)"""

import torch
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM


class Prefill(torch.nn.Module):
    def __init__(self, chunk):
        super().__init__()
        torch.manual_seed(0)
        config = Gemma2Config(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=64,
            sliding_window=4,
            initializer_range=0.2,
        )
        self.lm, self.chunk = Gemma2ForCausalLM(config).eval(), chunk

    def forward(self, ids):
        cache = DynamicCache(config=self.lm.config)
        made = [
            self.lm(part, past_key_values=cache, use_cache=True).logits for part in ids.split(self.chunk, 1)
        ]
        return torch.cat(made, 1)


def reference():
    return Prefill(9)


def target():
    return Prefill(3)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 9)),)


EXPECT = {
    "where": None,
    "kind": "chunks",
    "tol": 1e-4,
    "note": "three calls of the model for one, and a window that slides over their borders",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
