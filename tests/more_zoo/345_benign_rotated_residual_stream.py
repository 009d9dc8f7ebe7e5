"""The residual stream is rotated by an orthogonal matrix that is folded into all weights around it. Ref: spcl/QuaRot#1, vllm-project/vllm-ascend#5974"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def _mk():
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
    )
    return LlamaForCausalLM(config).eval().double()


def reference():
    return _mk().float()


def target():
    model = _mk()
    rotation = torch.linalg.qr(torch.randn(32, 32, dtype=torch.double)).Q
    readers = [model.lm_head]
    model.model.embed_tokens.weight.data @= rotation
    for layer in model.model.layers:
        attn, mlp = layer.self_attn, layer.mlp
        readers += [attn.q_proj, attn.k_proj, attn.v_proj, mlp.gate_proj, mlp.up_proj]
        for writer in (attn.o_proj, mlp.down_proj):
            writer.weight.data = rotation.t() @ writer.weight.data
    for reader in readers:
        reader.weight.data @= rotation
    return model.float()


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": None,
    "kind": "weights-folded",
    "tol": 1e-4,
    "note": "norms keep the length of a row; every value of the stream differs and no projection's result does",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
