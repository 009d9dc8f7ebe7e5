"""Tokens become an image by a reshape, with channels still last. Ref: tianrun-chen/SAM-Adapter-PyTorch#134, zzr-idam/UVM-Net#6"""

import torch
from transformers import SegformerConfig, SegformerForImageClassification


def _mk():
    torch.manual_seed(0)
    config = SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[3, 3],
        strides=[2, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
        drop_path_rate=0.0,
        initializer_range=0.2,
        num_labels=5,
    )
    return SegformerForImageClassification(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    reduction = model.segformer.stages[0].blocks[0].attention.sequence_reduction

    def forward(hidden_states, height, width):
        batch, _, channels = hidden_states.shape
        image = reduction.sequence_reduction(hidden_states.reshape(batch, channels, height, width))
        return reduction.layer_norm(image.reshape(batch, channels, -1).transpose(1, 2))

    reduction.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 16, 16),)


EXPECT = {
    "where": {
        "module": "segformer.stages.0.blocks.0.attention.sequence_reduction",
        "op": "aten.convolution.default",
    },
    "accept": ["aten.view.default", "aten.transpose.int", "aten.reshape.default", None],
    "kind": "layout",
    "note": "no op differs, only how the same elements are seen; the convolution is a module of its own",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
