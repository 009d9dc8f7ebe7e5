"""Experts as one batched product instead of a loop over those that were hit. Ref: Dao-AILab/sonic-moe#45 (family)"""

import torch
from transformers import MixtralConfig, MixtralForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        num_local_experts=4,
        num_experts_per_tok=2,
        **changes,
    )
    return MixtralForCausalLM(config).eval()


def reference():
    return _mk(experts_implementation="eager")


def target():
    return _mk(experts_implementation="batched_mm")


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-decomposition",
    "tol": 5e-5,
    "note": "gathers of whole weights and a batched product against masks, index_add and small products",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
