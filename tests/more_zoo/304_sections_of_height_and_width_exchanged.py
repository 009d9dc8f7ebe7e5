"""Multimodal rotary sections are taken as (time, width, height). Ref: vllm-project/vllm-gaudi#167 (family), ohdearquant/lattice#1101 (family)"""

import torch
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel


def _mk(sections):
    torch.manual_seed(0)
    config = Qwen2VLTextConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        initializer_range=0.2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections},
    )
    model = Qwen2VLTextModel(config).eval().to(torch.bfloat16)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lm = model

        def forward(self, ids, positions):
            return self.lm(input_ids=ids, position_ids=positions).last_hidden_state

    return Net()


def reference():
    return _mk([2, 5, 1])


def target():
    return _mk([2, 1, 5])


def inputs():
    torch.manual_seed(1)
    grid = torch.stack([torch.full((12,), 3), 3 + torch.arange(12) // 4, 3 + torch.arange(12) % 4])
    text = torch.arange(3).expand(3, 3)
    return torch.randint(0, 64, (1, 15)), torch.cat([text, grid], 1)[:, None]


EXPECT = {
    "where": {"module": "lm.rotary_emb", "op": "aten.cat.default"},
    "accept": ["aten.split_with_sizes.default", "aten.slice.Tensor", "aten.select.int"],
    "kind": "rope-layout",
    "note": "bfloat16 on both sides; text positions agree, those of the picture do not",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
