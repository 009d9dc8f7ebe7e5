"""Tied T5 checkpoints scale the decoder's output before the head; the port does not. Ref: ml-explore/mlx-examples#591"""

import torch
from transformers import T5Config, T5ForConditionalGeneration


def _mk(**changes):
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
        **changes,
    )
    return T5ForConditionalGeneration(config).eval()


def reference():
    return _mk(scale_decoder_outputs=True)


def target():
    return _mk(scale_decoder_outputs=False)


def inputs():
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (2, 9))
    return ids, torch.ones_like(ids), torch.randint(1, 64, (2, 5))


EXPECT = {
    "where": {"module": "", "op": "aten.mul.Tensor"},
    "accept_modules": ["lm_head"],
    "accept": ["aten.mm.default", "aten.t.default", "aten.view.default"],
    "missing_op": "aten.mul.Tensor",
    "cos_blind": True,
    "kind": "logit-scale",
    "note": "one op is absent between two children; the head is right, what it is handed is not",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
