"""Patches are flattened column by column. Ref: lucidrains/vit-pytorch#352 (family), kekzl/imp#1167 (family)"""

import torch
from transformers import ViTConfig, ViTModel


def _mk():
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    return ViTModel(config, add_pooling_layer=False).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    patches = model.embeddings.patch_embeddings
    patches.forward = lambda x: patches.projection(x).transpose(2, 3).flatten(2).transpose(1, 2)
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 32, 32),)


EXPECT = {
    "where": {"module": "embeddings.patch_embeddings", "op": "aten.clone.default"},
    "accept": ["aten.transpose.int", "aten.view.default", "aten._unsafe_view.default", None],
    "kind": "order",
    "note": "the same rows in another order, before positions are added",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
