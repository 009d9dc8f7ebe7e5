"""Labels images with a vision transformer, after transformers' image-classification example."""

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

torch.manual_seed(0)
preprocess = nn.Sequential(nn.Upsample(size=(16, 16), mode="bilinear"), nn.Hardtanh(-1.0, 1.0))
model = ViTForImageClassification(
    ViTConfig(
        hidden_size=24,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
        num_labels=5,
    )
).eval()
images = torch.rand(2, 3, 20, 20)
with torch.inference_mode():
    logits = model(pixel_values=preprocess(images)).logits
print(logits.argmax(-1).tolist())
