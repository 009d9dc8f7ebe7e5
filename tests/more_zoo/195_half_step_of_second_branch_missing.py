"""A Conformer layer's second feed-forward part is added whole, not by half. Ref: lucidrains/conformer#5 (family), flashlight/flashlight#582 (family)"""

import torch
from transformers import Wav2Vec2ConformerConfig
from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import Wav2Vec2ConformerEncoderLayer


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        config = Wav2Vec2ConformerConfig(
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            position_embeddings_type=None,
            conv_depthwise_kernel_size=5,
        )
        self.layers = torch.nn.ModuleList(Wav2Vec2ConformerEncoderLayer(config) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def reference():
    return Encoder().eval()


def target():
    model = Encoder().eval()
    for layer in model.layers:

        def forward(x, layer=layer):
            x = layer.ffn1(layer.ffn1_layer_norm(x)) * 0.5 + x
            x = layer.self_attn_dropout(layer.self_attn(layer.self_attn_layer_norm(x))[0]) + x
            x = x + layer.conv_module(x)
            x = layer.ffn2(layer.ffn2_layer_norm(x)) + x
            return layer.final_layer_norm(x)

        layer.forward = forward
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randn(2, 11, 32),)


EXPECT = {
    "where": {"module": "layers.0", "op": "aten.add.Tensor"},
    "accept": ["aten.mul.Tensor"],
    "missing_op": "aten.mul.Tensor",
    "kind": "missing-op",
    "note": "the same factor stands in the layer twice; the second is missing",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
