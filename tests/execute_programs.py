"""Programs to record and run again, and how: shared by the tests of execution."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dispatch_trace as dt
from dispatch_trace import execute
from dispatch_trace.store.reader import RankReader, open_ranks


class Program(nn.Module):
    """A function of itself and its inputs, with a weight and a buffer to use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8).sin())
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def batch() -> torch.Tensor:
    return torch.linspace(-2, 3, 16).reshape(2, 8).cos()


def record(
    path: Path, function: Callable[..., Any], *, save: str = "leaves", inputs: Any = None
) -> RankReader:
    model = Program(function)
    with torch.no_grad(), dt.record(path, model, save=save):
        model(*((batch(),) if inputs is None else inputs))
    (rank,) = open_ranks(path)
    assert rank.complete, rank.end
    return rank


def last_op(rank: RankReader, overload: str) -> Any:
    return list(rank.records(kind="op", overload=overload))[-1]


def wide_values(rank: RankReader, overload: str, slot: str = "out") -> list[torch.Tensor]:
    """What the op gives in float64, each time it runs."""
    steps = execute.iterate(rank, dtype=torch.float64)
    return [values[slot].clone() for step, values in steps if step.overload == overload]


def in_place(m: Any, x: Any) -> Any:
    y = x.clone()
    row = y[0]
    row.add_(1)
    y.t().mul_(2)
    y[:, 1].copy_(y[:, 2])
    y.transpose_(0, 1)
    first, second = y.chunk(2)
    first.add_(second)
    m.seen.add_(y.sum())
    return y, row, m.seen * 2


def outs_and_lists(m: Any, x: Any) -> Any:
    out = torch.empty(0)
    torch.add(x, 1, out=out)
    torch.mul(x, 3, out=out)
    pair = [x.clone(), x * 2]
    torch._foreach_add_(pair, [out, out])
    torch._foreach_mul_(pair, 0.5)
    return pair, torch._foreach_norm(pair), torch.aminmax(x), torch.var_mean(x, 1)


def caches(m: Any, x: Any) -> Any:
    cache = torch.zeros(2, 6, 8)
    sums = []
    for t in range(3):
        cache[:, t] = x + t
        cache.index_copy_(1, torch.tensor([t + 3]), (x * t).unsqueeze(1))
        sums.append(cache[:, : t + 1].sum(1))
        cache.narrow(1, t, 1).mul_(0.5)
    cache.index_put_((torch.tensor([0]), torch.tensor([1])), torch.ones(8), accumulate=True)
    buffer = torch.empty(4, 8)
    buffer[:2] = x
    return torch.stack(sums), cache, buffer[:2] * 2, buffer.sum() * 0


def random_results(m: Any, x: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(2, 8) + torch.rand_like(x) + torch.normal(0.0, 1.0, (2, 8), generator=generator)
    drawn = F.dropout(x, 0.5, True) + torch.bernoulli(torch.sigmoid(x)) + torch.empty(2, 8).normal_()
    return noise + drawn, torch.randperm(5), torch.multinomial(torch.softmax(x, -1), 2) + 1


def strange_views(m: Any, x: Any) -> Any:
    z = torch.complex(x, x + 1)
    windows = x.flatten().as_strided((5, 4), (2, 1))
    bits = x.view(torch.int32)
    x.clone().view(torch.int32).bitwise_and_(0x7FFFFFFF)
    huge = x.new_ones(1).expand(2_000_000, 2_000_000)
    return (
        (z.conj() @ z.t()).abs(),
        z.conj().imag * 2,
        torch.fft.fft(x).real,
        windows * 2,
        x[0, :1].expand(3, 5) + 1,
        (0x5F3759DF - (bits >> 1)).view(torch.float32) + 1,
        huge[:1, :4] + 1,
        huge,
    )


def layouts(m: Any, x: Any) -> Any:
    sparse = (x * (x > 0)).to_sparse()
    nested = torch.nested.nested_tensor([x[:1], x], layout=torch.jagged)
    codes = (x / 8).to(torch.float8_e5m2)
    quantised = torch.quantize_per_tensor(x, 0.1, 3, torch.quint8)
    image = x.view(1, 1, 4, 4).repeat(2, 3, 2, 2).to(memory_format=torch.channels_last)
    return (
        torch.sparse.mm(sparse, m.weight),
        sparse.to_sparse_csr() @ m.weight,
        (nested * 2).values(),
        codes.float() * 2,
        codes.view(torch.uint8) + 1,
        quantised.t().dequantize() * 2,
        F.conv2d(image, torch.ones(4, 3, 3, 3) / 9, padding=1),
        x.to("meta"),
    )


def numbers(m: Any, x: Any) -> Any:
    total = x.sum().item()
    count = int(x.abs().max().item() * 2)
    return (
        x * total,
        x[:, :count] * count,
        x[x > 0] * 2,
        x.nonzero(),
        torch.full((2,), total),
        bool((x > 0).any()),
    )


def attention(m: Any, x: Any) -> Any:
    q = x.view(2, 1, 2, 4).expand(2, 2, 2, 4)
    mask = torch.ones(2, 2, dtype=torch.bool).tril()
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():  # query, key and value as one object take another kernel
        own, _ = layer(x[None], x[None], x[None])
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask), own


def modes(m: Any, x: Any) -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = F.linear(x, m.weight)
    with torch.inference_mode():
        whole = torch.matmul(x.view(2, 1, 8), m.weight).reshape(2, 8).add_(1)
        return low.float() @ m.weight, whole.clone(), F.layer_norm(x, (8,))


def swapped_data(m: Any, x: Any) -> Any:
    before = x @ m.weight
    m.weight.data = torch.eye(8).t()
    after = x @ m.weight
    m.weight.data.mul_(2)
    return before, after, x @ m.weight


def training(m: Any, x: Any) -> Any:
    with torch.enable_grad():
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 4))
        optimizers = [
            torch.optim.AdamW(block[0].parameters(), foreach=True),
            torch.optim.SGD(block[3].parameters(), 0.1, momentum=0.9),
        ]
        for _ in range(2):
            loss = checkpoint(block, x, use_reentrant=False).pow(2).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(block.parameters(), 0.1)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((leaf @ m.weight).tanh().sum(), leaf, create_graph=True)
        gradient.pow(2).sum().backward()
        return leaf.grad * 1, block(x)


PROGRAMS = [
    in_place,
    outs_and_lists,
    caches,
    random_results,
    strange_views,
    layouts,
    numbers,
    attention,
    modes,
    swapped_data,
    training,
]
