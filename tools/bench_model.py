"""The models that the benchmarks run, of torch alone: other tools run them in environments of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Size(NamedTuple):
    """A transformer, and how many calls of it are timed together."""

    layers: int
    d: int
    heads: int
    seq: int
    batch: int
    calls: int


SIZES = {  # tiny, mid and big are those that the published figures of other tools are for
    "tiny": Size(2, 64, 4, 16, 2, calls=40),
    "mid": Size(4, 256, 4, 128, 2, calls=4),
    "big": Size(6, 512, 8, 256, 2, calls=2),
    "deep": Size(42, 64, 4, 16, 2, calls=4),  # 299 modules, to select one of
}
SELECTED = r"blocks\.0\.up"
PASSES = ("fwd", "fwd+bwd")


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) * (d // self.heads) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class Transformer(nn.Module):
    def __init__(self, layers: int, d: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, 1000, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Job(NamedTuple):
    """A model, its input, and one call of it: the forward alone, without gradients, or both passes."""

    model: nn.Module
    ids: torch.Tensor
    run: Callable[[], Any]


def build(size: str, threads: int, passes: str) -> Job:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers, d, heads, seq, batch, _ = SIZES[size]
    model = Transformer(layers, d, heads)
    ids = torch.randint(0, 1000, (batch, seq))

    def run() -> None:
        if passes == "fwd":
            with torch.no_grad():
                model(ids)
        else:
            model.zero_grad()
            model(ids).float().logsumexp(-1).sum().backward()

    return Job(model, ids, run)


class CountMode(TorchDispatchMode):
    """Counts ops that reach the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_ops(run: Callable[[], Any]) -> int:
    counter = CountMode()
    with counter:
        run()
    return counter.count
