"""ESM-2 scales embeddings by what masking left in training; the port does not. Ref: facebookresearch/esm#267, escalante-bio/mosaic#76"""

import torch
from transformers import EsmConfig, EsmModel


def _mk(scales):
    torch.manual_seed(0)
    config = EsmConfig(
        vocab_size=33,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        position_embedding_type="rotary",
        token_dropout=scales,
        mask_token_id=32,
        pad_token_id=1,
        emb_layer_norm_before=False,
        initializer_range=0.2,
    )
    return EsmModel(config, add_pooling_layer=False).eval()


def reference():
    return _mk(True)


def target():
    return _mk(False)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(4, 24, (2, 11)),)


EXPECT = {
    "where": {"module": "embeddings", "op": "aten.div.Tensor"},
    "accept": [None, "aten.mul.Tensor", "aten.masked_fill.Scalar"],
    "missing_op": "aten.div.Tensor",
    "kind": "missing-op",
    "note": "a factor of 0.88 at the very start; masks of zeros are made on one side only",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
