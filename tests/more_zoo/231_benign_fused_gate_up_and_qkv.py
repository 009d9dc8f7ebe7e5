"""Projections of the same input fused into one, as serving engines have them. Ref: sgl-project/sglang#26996 (family)"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        **changes,
    )
    return Qwen2ForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        mlp = layer.mlp
        fused = torch.nn.Linear(32, 128, bias=False)
        fused.weight.data = torch.cat((mlp.gate_proj.weight.data, mlp.up_proj.weight.data))
        mlp.gate_up_proj = fused
        del mlp.gate_proj, mlp.up_proj

        def forward(x, mlp=mlp):
            gate, up = mlp.gate_up_proj(x).chunk(2, -1)
            return mlp.down_proj(mlp.act_fn(gate) * up)

        mlp.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-fusion",
    "tol": 5e-6,
    "note": "two children are gone, one is new; its output holds both of theirs",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
