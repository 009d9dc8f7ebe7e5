"""Two ranks' shards computed one after the other and summed. Ref: huggingface/text-generation-inference#1036 (family)"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _mk(**changes):
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
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        mlp = layer.mlp

        def forward(x, mlp=mlp):
            total = None
            for gate, up, down in zip(
                mlp.gate_proj.weight.chunk(2),
                mlp.up_proj.weight.chunk(2),
                mlp.down_proj.weight.chunk(2, 1),
                strict=True,
            ):
                part = torch.nn.functional.linear(mlp.act_fn(x @ gate.t()) * (x @ up.t()), down)
                total = part if total is None else total + part
            return total

        mlp.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-sharded",
    "tol": 5e-6,
    "note": "three children are never called, halves of their weights are read",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
