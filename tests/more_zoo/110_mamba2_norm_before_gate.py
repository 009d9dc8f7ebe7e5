"""The gate multiplies after the norm instead of before it. Ref: huggingface/transformers#32686, fla-org/flash-linear-attention#63"""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM


def _mk():
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=4,
        use_cache=False,
        initializer_range=0.2,
    )
    return Mamba2ForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.backbone.layers:
        norm = layer.mixer.norm

        def forward(hidden_states, gate=None, norm=norm):
            x = hidden_states.float()
            parts = x.view(*x.shape[:-1], -1, norm.group_size)
            parts = parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
            return norm.weight * parts.view(x.shape) * torch.nn.functional.silu(gate.float())

        norm.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": {"module": "backbone.layers.0.mixer.norm", "op": "aten.pow.Tensor_Scalar"},
    "accept": ["aten.mul.Tensor"],
    "kind": "order",
    "note": "the same ops in another order: the square reads what was not gated yet",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
