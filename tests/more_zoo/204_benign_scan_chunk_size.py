"""The chunked scan cuts the sequence elsewhere. Ref: vllm-project/vllm#56244 (family), state-spaces/mamba#910 (family)"""

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM


def _mk(chunk):
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=64,
        hidden_size=32,
        state_size=8,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=chunk,
        use_cache=False,
        initializer_range=0.2,
    )
    return Mamba2ForCausalLM(config).eval()


def reference():
    return _mk(4)


def target():
    return _mk(3)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-blocking",
    "tol": 2e-5,
    "note": "the same names, other shapes in all of the scan, and padding of another length",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
