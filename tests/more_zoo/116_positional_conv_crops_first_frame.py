"""An even kernel makes one frame too many; the first is dropped, not the last. Ref: huggingface/transformers#9659 (family)"""

import torch
from transformers import Wav2Vec2Config, Wav2Vec2Model


def _mk():
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        conv_dim=(16, 16),
        conv_stride=(4, 4),
        conv_kernel=(8, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
    )
    return Wav2Vec2Model(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    model.encoder.pos_conv_embed.padding.forward = lambda x: x[:, :, 1:]
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 320),)


EXPECT = {
    "where": {"module": "encoder.pos_conv_embed.padding", "op": "aten.slice.Tensor"},
    "kind": "shift",
    "note": "a module that only makes a view; who reads it sits in a sibling",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
