"""A head that nobody reads is newly initialised. Ref: huggingface/transformers#43429 (family)"""

import torch
from transformers import BertConfig, BertModel


class Net(torch.nn.Module):
    def __init__(self, fresh):
        super().__init__()
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=64,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=64,
            max_position_embeddings=32,
        )
        self.bert, self.head = BertModel(config).eval(), torch.nn.Linear(32, 5)
        if fresh:
            self.bert.pooler.dense.reset_parameters()

    def forward(self, ids):
        return self.head(self.bert(ids).last_hidden_state.mean(1))


def reference():
    return Net(False)


def target():
    return Net(True)


def inputs():
    torch.manual_seed(1)
    return (torch.randint(1, 64, (2, 9)),)


EXPECT = {
    "where": None,
    "kind": "benign-unused",
    "tol": 0,
    "note": "a weight and two modules' outputs differ, and reach nothing",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
