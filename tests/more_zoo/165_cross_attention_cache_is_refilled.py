"""The cross-attention cache is computed again from the decoder's states at each step. Ref: rexrex9/nlp_torchtext#2 (family), huggingface/transformers#46612 (family)"""

import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache, EncoderDecoderCache


class Decode(torch.nn.Module):
    def __init__(self, forgets):
        super().__init__()
        torch.manual_seed(0)
        config = BartConfig(
            vocab_size=64,
            d_model=32,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=64,
            decoder_ffn_dim=64,
            max_position_embeddings=32,
            init_std=0.2,
            dropout=0.0,
        )
        self.lm, self.forgets = BartForConditionalGeneration(config).eval(), forgets

    def forward(self, source, ids):
        states = self.lm.model.encoder(source).last_hidden_state
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        logits = []
        for at in range(ids.shape[1]):
            seen = states[:, :3] if self.forgets and at else states
            x = self.lm.model.decoder(
                input_ids=ids[:, at : at + 1], encoder_hidden_states=seen, cache=cache, use_cache=True
            ).last_hidden_state
            if self.forgets:
                cache.is_updated = dict.fromkeys(cache.is_updated, False)
                cache.cross_attention_cache = DynamicCache()
            logits.append(self.lm.lm_head(x))
        return torch.cat(logits, 1)


def reference():
    return Decode(False)


def target():
    return Decode(True)


def inputs():
    torch.manual_seed(1)
    return torch.randint(3, 64, (1, 6)), torch.tensor([[2, 8, 30]])


EXPECT = {
    "where": {"module": "", "op": "aten.slice.Tensor"},
    "accept": ["aten.addmm.default", "aten.view.default"],
    "accept_modules": [
        "lm.model.decoder",
        "lm.model.decoder.layers.0.encoder_attn",
        "lm.model.decoder.layers.0.encoder_attn.k_proj",
    ],
    "kind": "kv-cache",
    "note": "the first step agrees; in the second keys of a cut encoder output are made once more",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
