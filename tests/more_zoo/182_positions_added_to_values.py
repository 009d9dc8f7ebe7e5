"""Spatial positions go into values too, not only into queries and keys. Ref: facebookresearch/detr#105, ultralytics/ultralytics#13832 (family)"""

import torch
from transformers import DetrConfig
from transformers.models.detr.modeling_detr import DetrEncoder


def _mk():
    torch.manual_seed(0)
    config = DetrConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        decoder_layers=1,
        decoder_attention_heads=4,
        decoder_ffn_dim=64,
    )
    return DetrEncoder(config).eval()


class Encode(torch.nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, x, positions):
        return self.encoder(inputs_embeds=x, spatial_position_embeddings=positions).last_hidden_state


def reference():
    return Encode(_mk())


def target():
    encoder = _mk()
    for layer in encoder.layers:

        def forward(hidden_states, position_embeddings=None, run=layer.self_attn.forward, **kwargs):
            return run(hidden_states + position_embeddings, **kwargs)

        layer.self_attn.forward = forward
    return Encode(encoder)


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 12, 32), torch.randn(2, 12, 32)


EXPECT = {
    "where": {"module": "encoder.layers.0.self_attn", "op": "aten.addmm.default"},
    "accept": ["aten.view.default", None],
    "kind": "wiring",
    "note": "the same ops; one projection reads the sum where the reference reads a summand",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
