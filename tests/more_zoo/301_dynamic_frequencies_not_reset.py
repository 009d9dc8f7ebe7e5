"""After a long prompt the stretched rotary frequencies stay for the short one behind it. Ref: huggingface/transformers#46624, huggingface/transformers#25306"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


class Serve(torch.nn.Module):
    """Two requests one after the other."""

    def __init__(self, forgets):
        super().__init__()
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=16,
            use_cache=False,
            initializer_range=0.2,
            rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        )
        self.lm, self.forgets = LlamaForCausalLM(config).eval(), forgets

    def forward(self, long, short):
        first = self.lm(long).logits
        if self.forgets:  # the length is noted under another name
            self.lm.model.rotary_emb.max_seq_len_cached = 16
        return torch.cat([first, self.lm(short).logits], 1)


def reference():
    return Serve(False)


def target():
    return Serve(True)


def inputs():
    torch.manual_seed(1)
    return torch.randint(0, 64, (1, 40)), torch.randint(0, 64, (1, 12))


EXPECT = {
    "where": {"module": "lm.model.rotary_emb", "op": "aten.mul.Tensor"},
    "call": 1,
    "accept": ["aten._to_copy.default", "aten.unsqueeze.default"],
    "kind": "rope-frequencies",
    "note": "the first request agrees; for the second a buffer should have been put back",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
