"""The decoder attends to the encoder's padding. Ref: huggingface/optimum-executorch#230, NVIDIA/Megatron-LM#486"""

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
    return _mk()


def target():
    model = _mk()
    decode = model.decoder.forward

    def forward(*args, encoder_attention_mask=None, **kwargs):
        return decode(*args, encoder_attention_mask=torch.ones_like(encoder_attention_mask), **kwargs)

    model.decoder.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    ids = torch.randint(1, 64, (2, 9))
    mask = torch.ones_like(ids)
    ids[1, 6:] = 0
    mask[1, 6:] = 0
    return ids, mask, torch.randint(1, 64, (2, 5))


EXPECT = {
    "where": {"module": "decoder", "op": "aten.ones_like.default"},
    "accept": [
        "aten.bitwise_and.Tensor",
        "aten.index.Tensor",
        "aten.where.self",
        "aten.where.ScalarOther",
        "aten.all.default",
        "aten.add.Tensor",
        "aten._to_copy.default",
        "aten.expand.default",
        None,
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
    ],
    "accept_modules": ["decoder.block.0.layer.1.EncDecAttention"],
    "kind": "mask",
    "note": "a mask of ones: the library may then build none at all, and the attention has one operand less",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
