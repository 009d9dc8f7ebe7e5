"""A compiler pass removes a copy: what is written afterwards changes what was returned. Ref: pytorch/pytorch#198094 (family)"""

import torch
import torch.nn as nn


def copyless_backend(graph, example_inputs):
    """A compiler pass that reads a copy's source in its place, without asking who writes to it."""
    for node in graph.graph.nodes:
        if node.op == "call_function":
            node.args = tuple(a.args[0] if getattr(a, "target", None) == "clone" else a for a in node.args)
    graph.recompile()
    return graph.forward


class Stage(nn.Module):
    def forward(self, x):
        kept = x.clone()
        x.mul_(0.5)
        return kept - x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.stage, self.fc2 = nn.Linear(8, 8), Stage(), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc2(torch.tanh(self.stage(self.fc1(x))))


def _mk():
    torch.manual_seed(0)
    return Net().eval()


def reference():
    return _mk()


def target():
    torch._dynamo.reset()
    return torch.compile(_mk(), backend=copyless_backend)


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 8),)


EXPECT = {
    "where": {"module": "stage", "op": None},
    "compile": "copyless_backend",
    "kind": "compiler-bug",
    "note": "the program is right; the region returns zeros. (A pass that removes all copies removes the "
    "recorder's, too: the first version of this case did, and hid from it what was written over.)",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
