"""Scores of content alone are divided by sqrt(d), those of positions by sqrt(3d). Ref: NVIDIA/FasterTransformer#707"""

import torch
from transformers import DebertaV2Config, DebertaV2Model
from transformers.models.deberta_v2 import modeling_deberta_v2 as home


def _mk():
    torch.manual_seed(0)
    config = DebertaV2Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=32,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        position_biased_input=False,
        type_vocab_size=0,
        initializer_range=0.2,
    )
    return DebertaV2Model(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.encoder.layer:
        attention = layer.attention.self

        def forward(*args, run=attention.forward, **kwargs):
            right, calls = home.scaled_size_sqrt, []

            def first_without_factor(x, factor):
                calls.append(factor)
                return right(x, 1 if len(calls) == 1 else factor)

            home.scaled_size_sqrt = first_without_factor
            try:
                return run(*args, **kwargs)
            finally:
                home.scaled_size_sqrt = right

        attention.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "encoder.layer.0.attention.self", "op": "aten.mul.Tensor"},
    "accept": ["aten.sqrt.default", "aten.div.Tensor"],
    "kind": "scale",
    "note": "a factor on a scalar tensor: 3 under the root in three places, 1 in the first of them",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
