"""Experts drop the tokens beyond their capacity. Ref: NVIDIA/Megatron-LM#955 (family)"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        num_local_experts=4,
        num_experts_per_tok=2,
        initializer_range=0.2,
        experts_implementation="eager",
        **changes,
    )
    return MixtralForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.model.layers:
        run = layer.mlp.experts.forward

        def forward(x, index, weights, run=run):
            hit = torch.nn.functional.one_hot(index, 4)
            order = hit.flatten(0, 1).cumsum(0).view_as(hit)
            keep = ((order * hit).sum(-1) <= 7).to(weights.dtype)
            return run(x, index, weights * keep)

        layer.mlp.experts.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "model.layers.0.mlp.experts", "op": "aten.mul.Tensor"},
    "accept": [
        "aten.cumsum.default",
        "aten.le.Scalar",
        "aten.sum.dim_IntList",
        "aten.scatter_.value",
        "aten.zeros.default",
    ],
    "kind": "routing",
    "note": "a few weights become zero; whole rows of the mixture differ, most agree",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
