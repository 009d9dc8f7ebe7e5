"""CLIP's learned scale is stored as a logarithm and used as it is. Ref: BAAI-DCAI/M3D#52"""

import torch
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
)

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 16,
}


class Match(torch.nn.Module):
    def __init__(self, exponentiate):
        super().__init__()
        torch.manual_seed(0)
        self.text = CLIPTextModelWithProjection(
            CLIPTextConfig(vocab_size=64, max_position_embeddings=32, eos_token_id=63, **SIZES)
        )
        self.vision = CLIPVisionModelWithProjection(CLIPVisionConfig(image_size=16, patch_size=8, **SIZES))
        self.scale = torch.nn.Parameter(torch.tensor(2.6592))
        self.exponentiate = exponentiate

    def forward(self, ids, pixels):
        text, image = self.text(ids).text_embeds, self.vision(pixels).image_embeds
        text, image = (x / x.norm(dim=-1, keepdim=True) for x in (text, image))
        return (text @ image.T) * (self.scale.exp() if self.exponentiate else self.scale)


def reference():
    return Match(True).eval()


def target():
    return Match(False).eval()


def inputs():
    torch.manual_seed(1)
    ids = torch.randint(1, 62, (3, 7))
    ids[:, -1] = 63
    return ids, torch.randn(2, 3, 16, 16)


EXPECT = {
    "where": {"module": "", "op": "aten.exp.default"},
    "accept": ["aten.mul.Tensor"],
    "missing_op": "aten.exp.default",
    "kind": "missing-op",
    "note": "an op on a scalar parameter beside the path",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
