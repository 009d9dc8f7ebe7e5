"""The relative shift drops the last row where it should drop the first. Ref: labmlai/annotated_deep_learning_paper_implementations#185"""

import torch
from transformers import XLNetConfig, XLNetModel


def _mk():
    torch.manual_seed(0)
    config = XLNetConfig(
        vocab_size=64,
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=64,
        initializer_range=0.2,
        use_mems_eval=False,
    )
    return XLNetModel(config).eval()


def reference():
    return _mk()


def target():
    model = _mk()
    for layer in model.layer:

        def shift(x, klen=-1):
            b, n, i, j = x.shape
            x = x.reshape(b, n, j, i)[:, :, :-1, :].reshape(b, n, i, j - 1)
            return torch.index_select(x, 3, torch.arange(klen))

        layer.rel_attn.rel_shift_bnij = shift
    return model


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": {"module": "layer.0.rel_attn", "op": "aten.index_select.default"},
    "accept": ["aten.slice.Tensor", "aten.view.default", "aten.clone.default", "aten._unsafe_view.default"],
    "kind": "view",
    "note": "views of views: other elements of the right tensor, of the same shape",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
