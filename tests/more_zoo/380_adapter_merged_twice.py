"""merge() was called twice: the update was added again. Ref: huggingface/peft#1355"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def _mk(flag):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
    )
    model = Qwen2ForCausalLM(config).eval()
    update = torch.randn(64, 4) @ torch.randn(4, 32) * 0.03
    model.model.layers[1].mlp.up_proj.weight.data += 2 * update if flag else update
    return model.to(torch.bfloat16)


def reference():
    return _mk(False)


def target():
    return _mk(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "model.layers.1.mlp.up_proj", "op": "aten.t.default"},
    "accept": ["aten.linear.default", "aten.mm.default", "aten.addmm.default"],
    "kind": "parameter",
    "note": "bfloat16 on both sides; a change of low rank in one weight",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
