"""GPT-2's (in, out) projections become linears with transposed weights. Ref: AutoGPTQ/AutoGPTQ#139 (family)"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D


def _mk(dtype):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32, use_cache=False, initializer_range=0.2
    )
    return GPT2LMHeadModel(config).eval().to(dtype)


def reference():
    return _mk(torch.float32)


def target():
    model = _mk(torch.bfloat16)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                linear = torch.nn.Linear(*child.weight.shape).to(torch.bfloat16)
                linear.weight.data, linear.bias.data = child.weight.data.t().contiguous(), child.bias.data
                setattr(module, name, linear.eval())
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": None,
    "kind": "layout",
    "tol": None,
    "note": "a float32 reference and a bfloat16 target with other weights of the same content",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
