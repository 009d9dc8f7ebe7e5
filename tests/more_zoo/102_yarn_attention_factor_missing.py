"""YaRN's factor on cosines and sines (mscale) is not applied. Ref: turboderp-org/exllamav3#259"""

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
        max_position_embeddings=128,
        use_cache=False,
        **changes,
    )
    return LlamaForCausalLM(config).eval()


def _yarn():
    return _mk(
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    )


def reference():
    return _yarn()


def target():
    model = _yarn()
    model.model.rotary_emb.attention_scaling = 1.0
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "model.rotary_emb", "op": "aten.mul.Tensor"},
    "kind": "rope-scale",
    "cos_blind": True,
    "note": "a Python number that multiplies both tables; logits differ by the scores' scale only",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
