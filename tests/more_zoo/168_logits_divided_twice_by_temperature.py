"""The head divides by a scale that the caller applies too. Ref: dphnAI/sonar#1054"""

import torch
from transformers import CohereConfig, CohereForCausalLM


def _mk(**changes):
    torch.manual_seed(0)
    config = CohereConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        use_cache=False,
        logit_scale=0.25,
        **changes,
    )
    return CohereForCausalLM(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    run = model.forward

    def forward(*args, **kwargs):
        out = run(*args, **kwargs)
        out.logits = out.logits * model.logit_scale
        return out

    model.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "", "op": "aten.mul.Tensor"},
    "extra_op": "aten.mul.Tensor",
    "cos_blind": True,
    "kind": "logit-scale",
    "note": "a second product by one number at the very end; the direction of all logits agrees",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
