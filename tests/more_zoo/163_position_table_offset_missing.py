"""OPT's learned positions begin at 2; the port looks them up from 0. Ref: sbryngelson/ANEForge#257 (family)"""

import torch
from transformers import OPTConfig, OPTForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=64,
        hidden_size=32,
        ffn_dim=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        word_embed_proj_dim=32,
        use_cache=False,
        **changes,
    )
    return OPTForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    model.model.decoder.embed_positions.offset = 0
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "model.decoder.embed_positions", "op": "aten.add.Tensor"},
    "accept": ["aten.embedding.default"],
    "kind": "argument",
    "note": "a Python number added to integers; the lookup is right",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
