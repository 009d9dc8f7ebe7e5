"""GPT-NeoX adds attention and feed-forward side by side; the port runs one after the other. Ref: huggingface/transformers#18695"""

import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM


def _mk(dtype, parallel):
    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        use_cache=False,
        use_parallel_residual=parallel,
        initializer_range=0.2,
    )
    return GPTNeoXForCausalLM(config).eval().to(dtype)


def reference():
    return _mk(torch.float32, True)


def target():
    return _mk(torch.bfloat16, False)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": {"module": "gpt_neox.layers.0", "op": "aten.add.Tensor"},
    "accept": [None],
    "accept_modules": ["gpt_neox.layers.0.post_attention_layernorm"],
    "kind": "wiring",
    "note": "a float32 reference and a bfloat16 target; the second norm is given another input",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
