"""A graph rewrite fuses x / sqrt(v + eps) into x * rsqrt(v) and loses eps. Ref: ggml-org/llama.cpp#14545 (family)"""

import torch
import torch.nn as nn


def losing_backend(graph, example_inputs):
    """A compiler pass of the kind: rsqrt(v + eps) becomes rsqrt(v)."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target is torch.rsqrt:
            node.args = (node.args[0].args[0],)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph.forward


class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.01)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.norm, self.fc2 = nn.Linear(16, 16), Norm(), nn.Linear(16, 4)

    def forward(self, x):
        return self.fc2(self.norm(self.fc1(x)))


def _mk():
    torch.manual_seed(0)
    return Net().eval()


def reference():
    return _mk()


def target():
    torch._dynamo.reset()
    return torch.compile(_mk(), backend=losing_backend)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(5, 16) * 0.3,)


EXPECT = {
    "where": {"module": "norm", "op": None},
    "compile": "losing_backend",
    "kind": "compiler-bug",
    "note": "the program is right, what the backend made of it is not",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
