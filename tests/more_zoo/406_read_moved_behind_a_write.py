"""A compiler evaluates the reader of an input after a later write into it. Ref: pytorch/pytorch#198101"""

import torch
import torch.nn as nn


def late_backend(graph, example_inputs):
    """Moves the first write in front of the op before it."""
    nodes = list(graph.graph.nodes)
    write = next(n for n in nodes if n.op in ("call_method", "call_function") and "mul_" in str(n.target))
    reader = write.prev
    while write.args[0] not in reader.all_input_nodes:
        reader = reader.prev
    reader.prepend(write)
    graph.recompile()
    return graph.forward


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, x):
        h = self.norm(x)
        y = torch.tanh(h)
        h.mul_(0.5)
        return x + self.up(h + y)


class Net(nn.Module):
    def __init__(self, backend):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block, self.head = nn.Linear(5, 8), Block(8), nn.Linear(8, 3)
        if backend is not None:
            self.block.compile(backend=backend)

    def forward(self, x):
        return self.head(self.block(self.embed(x)))


def reference():
    return Net(None).eval()


def target():
    torch._dynamo.reset()
    return Net(late_backend).eval()


def inputs():
    torch.manual_seed(1)
    return (torch.randn(3, 5),)


EXPECT = {
    "where": {"module": "block", "op": None},
    "kind": "compiler-bug",
    "note": "a region inside an eager model, compiled by Module.compile",
}


if __name__ == "__main__":
    with torch.no_grad():
        r, t = reference()(*inputs()), target()(*inputs())
    r, t = (x if isinstance(x, torch.Tensor) else x[0] for x in (r, t))
    print("max_abs_diff", (r.double() - t.double()).abs().max().item())
