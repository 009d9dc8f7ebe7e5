"""Embedding and head are padded to a multiple and the logits cut. Ref: sgl-project/sglang#26996 (family)"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Net(torch.nn.Module):
    def __init__(self, padded):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=50,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
        self.lm = LlamaForCausalLM(config).eval()
        if padded:
            self.lm.resize_token_embeddings(64, mean_resizing=False)

    def forward(self, ids):
        return self.lm(ids).logits[..., :50]


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 50, (2, 7)),)


EXPECT = {
    "where": None,
    "kind": "benign-padding",
    "tol": 2e-6,
    "note": "two parameters have more rows, and so do the logits until they are cut",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
