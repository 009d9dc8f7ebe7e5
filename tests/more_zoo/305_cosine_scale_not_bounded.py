"""The learned scale of cosine attention is bounded by 100; the port takes the exponential as it is. Ref: microsoft/Swin-Transformer#238 (family), microsoft/Swin-Transformer#237 (family)"""

import torch
from transformers import Swinv2Config, Swinv2ForImageClassification
from transformers.models.swinv2 import modeling_swinv2 as home


class Net(torch.nn.Module):
    def __init__(self, model, dtype):
        super().__init__()
        self.net, self.dtype = model.to(dtype), dtype

    def forward(self, x):
        return self.net(x.to(self.dtype)).logits


def _mk(dtype):
    torch.manual_seed(0)
    config = Swinv2Config(
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=4,
        num_labels=3,
        initializer_range=0.2,
    )
    model = Swinv2ForImageClassification(config).eval()
    for module in model.modules():
        if isinstance(module, home.Swinv2SelfAttention):
            module.logit_scale.data = torch.tensor([[[5.5]], [[2.0]]])
    return Net(model, dtype)


def reference():
    return _mk(torch.float32)


def target():
    model = _mk(torch.bfloat16)
    attn = model.net.swinv2.encoder.layers[1].blocks[0].attention.self
    plain, forward = torch.clamp, attn.forward

    def unbounded(*args, **kwargs):
        torch.clamp = lambda x, max=None: x
        try:
            return forward(*args, **kwargs)
        finally:
            torch.clamp = plain

    attn.forward = unbounded
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 16, 16),)


EXPECT = {
    "where": {"module": "net.swinv2.encoder.layers.1.blocks.0.attention.self", "op": "aten.exp.default"},
    "accept": ["aten.clamp.default", "aten.mul.Tensor"],
    "missing_op": "aten.clamp.default",
    "kind": "missing-op",
    "note": "a float32 reference and a bfloat16 target; one of two heads is above the bound",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
