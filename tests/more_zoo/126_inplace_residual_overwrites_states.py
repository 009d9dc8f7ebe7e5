"""An in-place residual sum overwrites the hidden state that the caller had kept. Ref: johnmarktaylor91/torchlens#167 (family), sgl-project/sglang#34466 (family)"""

import torch
from transformers import LlamaConfig, LlamaModel


class States(torch.nn.Module):
    """Returns what enters each layer, stacked after the run."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
        self.lm = LlamaModel(config).eval()

    def forward(self, ids):
        x, kept = self.lm.embed_tokens(ids), []
        tables = self.lm.rotary_emb(x, position_ids=torch.arange(ids.shape[1])[None])
        for layer in self.lm.layers:
            kept.append(x)
            x = layer(x, position_embeddings=tables)
        return torch.stack([*kept, self.lm.norm(x)])


def reference():
    return States()


def target():
    model = States()
    layer = model.lm.layers[1]

    def forward(x, position_embeddings):
        attended, _ = layer.self_attn(layer.input_layernorm(x), position_embeddings=position_embeddings)
        x.add_(attended)
        return x + layer.mlp(layer.post_attention_layernorm(x))

    layer.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 6)),)


EXPECT = {
    "where": {"module": "lm.layers.1", "op": "aten.add_.Tensor"},
    "kind": "aliasing",
    "note": "every module's output is right; a tensor that the caller holds changes before it is read",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
