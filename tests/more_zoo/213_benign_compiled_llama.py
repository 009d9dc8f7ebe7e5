"""A compiled Llama block fuses and reorders. Ref: pytorch/pytorch#183761 (family), pytorch/pytorch#182225 (family)"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    torch._dynamo.reset()
    return torch.compile(_mk(), backend="aot_eager")


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "compile": "aot_eager",
    "kind": "benign-compiled",
    "tol": 1e-5,
    "note": "decomposed ops under other names; nothing differs by more than rounding",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
