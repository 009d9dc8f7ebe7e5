"""The upper limit of the discretisation step is not passed to the scan. Ref: state-spaces/mamba#845 (family), state-spaces/mamba#281 (family)"""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM


def _mk(limit):
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        expand=2,
        conv_kernel=4,
        chunk_size=4,
        use_cache=False,
        time_step_limit=limit,
        initializer_range=0.2,
    )
    model = Mamba2ForCausalLM(config).eval()
    for layer in model.backbone.layers:
        layer.mixer.dt_bias.data.uniform_(-1.0, 1.0)
    return model.to(torch.bfloat16)


def reference():
    return _mk((0.0, 0.6))


def target():
    return _mk((0.0, float("inf")))


def inputs():
    torch.manual_seed(1)
    return (torch.randint(0, 64, (1, 10)),)


EXPECT = {
    "where": {"module": "backbone.layers.0.mixer", "op": "aten.clamp.default"},
    "kind": "argument",
    "note": "bfloat16 on both sides; one bound of a clamp",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
