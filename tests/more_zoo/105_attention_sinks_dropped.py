"""The kernel has no input for attention sinks: the softmax lacks its extra column. Ref: vllm-project/vllm-metal#550, unslothai/unsloth#3142"""

import torch
from transformers import GptOssConfig, GptOssForCausalLM


def _mk():
    torch.manual_seed(0)
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=4,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.3,
        attn_implementation="eager",
        experts_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return GptOssForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.llama.modeling_llama import eager_attention_forward

    model = _mk()
    for layer in model.model.layers:
        attend = layer.self_attn.forward

        def forward(*args, attend=attend, **kwargs):
            kept, modeling_gpt_oss.eager_attention_forward = (
                modeling_gpt_oss.eager_attention_forward,
                eager_attention_forward,
            )
            try:
                return attend(*args, **kwargs)
            finally:
                modeling_gpt_oss.eager_attention_forward = kept

        layer.self_attn.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 9)),)


EXPECT = {
    "where": {"module": "model.layers.0.self_attn", "op": "aten._softmax.default"},
    "accept": ["aten.cat.default", "aten.sub.Tensor", "aten.max.dim", "aten.amax.default"],
    "missing_op": "aten.cat.default",
    "kind": "attention-sinks",
    "note": "a parameter is never read, four ops are absent, the softmax runs over one column less",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
