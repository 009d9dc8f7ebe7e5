"""clip_qkv is in the config and never read. Ref: vllm-project/vllm#35523"""

import torch
from transformers import MptConfig, MptForCausalLM


def _mk():
    torch.manual_seed(0)
    config = MptConfig(
        vocab_size=64,
        d_model=32,
        n_layers=2,
        n_heads=4,
        max_seq_len=64,
        expansion_ratio=2,
        use_cache=False,
        initializer_range=0.3,
        attn_config={"clip_qkv": 1.0, "alibi": True},
    )
    return MptForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for block in model.transformer.blocks:
        block.attn.clip_qkv = None
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (1, 9)),)


EXPECT = {
    "where": {"module": "transformer.blocks.0.attn", "op": "aten.clamp.default"},
    "accept": [
        "aten.bmm.default",
        "aten.split.Tensor",
        "aten.mul.Tensor",
        "aten.clone.default",
        "aten.view.default",
    ],
    "missing_op": "aten.clamp.default",
    "kind": "missing-op",
    "note": "a clamp between a projection and the chunks of it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
