"""Image features are taken from the last layer instead of the one before. Ref: zjysteven/lmms-finetune#4, ggml-org/llama.cpp#25817 (family)"""

import torch
from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration


class Answer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(0)
        vision = CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            image_size=16,
            patch_size=8,
            initializer_factor=8.0,
        )
        text = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
            initializer_range=0.2,
        )
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=5, image_token_index=5)
        config.vision_feature_layer = layer
        self.llava = LlavaForConditionalGeneration(config)

    def forward(self, ids, pixels):
        return self.llava(input_ids=ids, pixel_values=pixels, use_cache=False).logits


def reference():
    return Answer(-2).eval()


def target():
    return Answer(-1).eval()


def inputs():
    torch.manual_seed(1)
    return torch.tensor([[7, 5, 5, 5, 5, 9, 11, 13]]), torch.randn(1, 3, 16, 16)


EXPECT = {
    "where": {"module": "llava.model", "op": "aten.addmm.default"},
    "accept": ["aten.slice.Tensor", "aten.view.default", "aten.clone.default", None],
    "kind": "wiring",
    "note": "both runs compute all layers; another one's output goes on, between two modules of the caller",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
