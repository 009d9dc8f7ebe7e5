"""A 2-D mask of ones switches off the detection of packed sequences. Ref: huggingface/transformers#46634"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Packed(torch.nn.Module):
    def __init__(self, masked):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            use_cache=False,
        )
        self.lm = LlamaForCausalLM(config).eval()
        self.masked = masked

    def forward(self, ids, positions):
        mask = torch.ones_like(ids) if self.masked else None
        return self.lm(ids, attention_mask=mask, position_ids=positions).logits


def reference():
    return Packed(False)


def target():
    return Packed(True)


def inputs():
    return torch.tensor([[5, 17, 33, 2, 8, 40, 11]]), torch.tensor([[0, 1, 2, 0, 1, 2, 3]])


EXPECT = {
    "where": {"module": "", "op": "aten.ones_like.default"},
    "accept": [
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        "aten.bitwise_and.Tensor",
        "aten.eq.Tensor",
        "aten.all.default",
        "aten._to_copy.default",
        None,
    ],
    "accept_modules": ["lm.model", "lm.model.layers.0.self_attn"],
    "kind": "mask",
    "note": "the reference builds a mask by documents, the target none: one operand and a flag of the fused op",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
