"""A forecast is returned in the scale of the normalised series. Ref: yuqinie98/PatchTST#110, yuqinie98/PatchTST#60"""

import torch
from transformers import PatchTSTConfig, PatchTSTForPrediction


class Forecast(torch.nn.Module):
    def __init__(self, restore):
        super().__init__()
        torch.manual_seed(0)
        config = PatchTSTConfig(
            num_input_channels=2,
            context_length=16,
            prediction_length=4,
            patch_length=4,
            patch_stride=4,
            d_model=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            do_mask_input=False,
            loss="mse",
        )
        self.net = PatchTSTForPrediction(config)
        self.restore = restore

    def forward(self, series):
        out = self.net.model(past_values=series)
        forecast = self.net.head(out.last_hidden_state)
        return forecast * out.scale + out.loc if self.restore else forecast


def reference():
    return Forecast(True).eval()


def target():
    return Forecast(False).eval()


def inputs():
    torch.manual_seed(1)
    return (3 + 2 * torch.randn(2, 16, 2),)


EXPECT = {
    "where": {"module": "", "op": "aten.mul.Tensor"},
    "accept": ["aten.add.Tensor", None],
    "missing_op": "aten.mul.Tensor",
    "kind": "missing-op",
    "note": "the last two ops of the program are missing: nothing of the target reads what is wrong",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
