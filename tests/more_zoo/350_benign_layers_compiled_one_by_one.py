"""Each layer is compiled by itself. Ref: pytorch/pytorch#117758 (family), pytorch/pytorch#182225 (family)"""

import torch
from transformers import ViTConfig, ViTModel


def _mk():
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
    )
    return ViTModel(config, add_pooling_layer=False).eval()


def reference():
    return _mk()


def target():
    torch._dynamo.reset()
    model = _mk()
    layers = next(m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == 2)
    for at, layer in enumerate(layers):
        layers[at] = torch.compile(layer, backend="aot_eager")
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 16, 16),)


EXPECT = {
    "where": None,
    "kind": "compile",
    "compile": "aot_eager",
    "tol": 1e-5,
    "note": "two regions inside an eager model",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
