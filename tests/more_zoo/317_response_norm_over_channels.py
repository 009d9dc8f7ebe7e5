"""Global response normalisation takes the norm over channels, not over space. Ref: facebookresearch/ConvNeXt-V2#86, huggingface/pytorch-image-models#2390 (family)"""

import torch
from transformers import ConvNextV2Config, ConvNextV2ForImageClassification


class Net(torch.nn.Module):
    def __init__(self, model, dtype):
        super().__init__()
        self.net, self.dtype = model.to(dtype), dtype

    def forward(self, x):
        return self.net(x.to(self.dtype)).logits


def _mk(dtype):
    torch.manual_seed(0)
    config = ConvNextV2Config(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2, num_labels=3, initializer_range=0.2
    )
    model = ConvNextV2ForImageClassification(config).eval()
    for name, value in model.named_parameters():
        if "grn" in name:
            value.data.normal_(0, 0.5)
    return Net(model, dtype)


def reference():
    return _mk(torch.float32)


def target():
    model = _mk(torch.bfloat16)
    grn = model.net.convnextv2.encoder.stages[1].layers[0].grn

    def forward(x):
        norms = torch.linalg.vector_norm(x, ord=2, dim=-1, keepdim=True)
        shares = norms / (norms.mean(dim=(1, 2), keepdim=True) + 1e-6)
        return grn.weight * (x * shares) + grn.bias + x

    grn.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(1, 3, 16, 16),)


EXPECT = {
    "where": {
        "module": "net.convnextv2.encoder.stages.1.layers.0.grn",
        "op": "aten.linalg_vector_norm.default",
    },
    "kind": "argument",
    "note": "a float32 reference and a bfloat16 target; other dims, so results of another size",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
