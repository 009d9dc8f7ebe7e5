"""One batch norm was left in training mode and takes the batch's own statistics. Ref: pytorch/pytorch#5406, layumi/Person_reID_baseline_pytorch#218"""

import torch
from transformers import ResNetConfig, ResNetForImageClassification


def _mk():
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_labels=3, layer_type="basic"
    )
    model = ResNetForImageClassification(config).eval()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    return model


def reference():
    return _mk()


def target():
    model = _mk()
    model.resnet.encoder.stages[1].layers[0].layer[0].normalization.train()
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 3, 32, 32),)


EXPECT = {
    "where": {
        "module": "resnet.encoder.stages.1.layers.0.layer.0.normalization",
        "op": "aten.native_batch_norm.default",
    },
    "kind": "mode",
    "note": "the op has the same inputs and another flag, and writes its running statistics besides",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
