"""Decoding does not store the last token for the next token shift. Ref: ggml-org/llama.cpp#11445"""

import torch
import torch.nn as nn
from transformers import RwkvConfig, RwkvModel


class Decode(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = RwkvConfig(
            vocab_size=64,
            context_length=64,
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=64,
            rescale_every=0,
        )
        self.rwkv = RwkvModel(config)
        for weight in self.rwkv.parameters():
            weight.data += 0.2 * torch.randn_like(weight)

    def forward(self, ids):
        out = self.rwkv(ids[:, :5], use_cache=True)
        for t in range(5, ids.shape[1]):
            out = self.rwkv(ids[:, t : t + 1], state=out.state, use_cache=True)
        return out.last_hidden_state


def reference():
    return Decode().eval()


def target():
    model = Decode().eval()
    for block in model.rwkv.blocks:
        attention = block.attention

        def extract(hidden, state=None, attention=attention):
            if hidden.size(1) > 1 or state is None:
                return type(attention).extract_key_value(attention, hidden, state)
            shifted = state[1][:, :, attention.layer_id]
            mixed = [
                hidden * mix + shifted * (1 - mix)
                for mix in (attention.time_mix_key, attention.time_mix_value, attention.time_mix_receptance)
            ]
            key, value = attention.key(mixed[0]), attention.value(mixed[1])
            return torch.sigmoid(attention.receptance(mixed[2])), key, value, state

        attention.extract_key_value = extract
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (1, 8)),)


EXPECT = {
    "where": {"module": "rwkv.blocks.0.attention", "op": "aten.mul.Tensor"},
    "accept": ["aten.copy_.default", "aten.select.int", None],
    "kind": "cache-state",
    "note": "one write into the state is missing; the second decoded token is the first to read it",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
