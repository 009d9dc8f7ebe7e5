"""Programs of all sorts give the same bits with the recorder on, and leave a sound and complete trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import dispatch_trace as dt
from dispatch_trace.nested import flatten
from dispatch_trace.store.reader import open_ranks

Made = tuple[nn.Module, tuple[Any, ...]]
PROGRAMS: dict[str, tuple[Callable[[], Made], Callable[[nn.Module, tuple[Any, ...]], Any], bool]] = {}


class Fn(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def call(model: nn.Module, args: tuple[Any, ...]) -> Any:
    return model(*args)


def grads(model: nn.Module, args: tuple[Any, ...]) -> Any:
    model(*args).sum().backward()
    return [p.grad for p in model.parameters()]


def program(name: str, run: Any = call, *, grad: bool = False) -> Callable[[Any], Any]:
    def add(make: Callable[[], Made]) -> Callable[[], Made]:
        PROGRAMS[name] = (make, run, grad)
        return make

    return add


def x() -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def function(name: str, body: Callable[[torch.Tensor], Any]) -> None:
    PROGRAMS[name] = (lambda: (Fn(body), (x(),)), call, False)


function("vmap", lambda v: torch.vmap(lambda row: (row * 2).sum())(v))
function("func.grad", torch.func.grad(lambda v: (v * v).sum()))
function("jvp", lambda v: torch.func.jvp(torch.sin, (v,), (v,)))
function("masks and indices", lambda v: (v.index_put_((torch.tensor([0, 1]),), torch.tensor(3.0)), v[v > 0]))
function("resize_", lambda v: torch.empty(0).resize_(3).fill_(2.0) + v[0, :3])
function("set_", lambda v: torch.empty(0).set_(v.untyped_storage(), 0, (3,)) + 1)
function("numpy views", lambda v: torch.from_numpy(v.numpy() * 2) + v)
function("foreign memory", lambda v: torch.frombuffer(bytearray(128), dtype=torch.float32)[:8] + v)
function("shared memory", lambda v: v.share_memory_() + 1)
function("cond", lambda v: torch.cond(v.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (v,)))
function("complex", lambda v: torch.view_as_real(torch.fft.rfft(v).conj() * 2))
function(
    "several random streams",
    lambda v: (torch.dropout(v, 0.5, True), torch.randperm(9), v.sigmoid().bernoulli()),
)


@program("torch.export")
def _export() -> Made:
    return torch.export.export(mlp(), (x(),)).module(), (x(),)


@program("scripted submodule")
def _script() -> Made:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return nn.Sequential(torch.jit.script(mlp()), nn.Tanh()), (x(),)


@program("LSTM")
def _lstm() -> Made:
    return nn.LSTM(8, 5, 2, batch_first=True, bidirectional=True), (x()[None],)


@program("compiled submodule")
def _compiled() -> Made:
    torch._dynamo.reset()
    return nn.Sequential(torch.compile(mlp(), backend="eager", fullgraph=True), nn.Tanh()), (x(),)  # type: ignore[arg-type]


@program("compiled root")
def _compiled_root() -> Made:
    torch._dynamo.reset()
    return torch.compile(mlp(), backend="aot_eager", fullgraph=True), (x(),)  # type: ignore[return-value]


@program("inference mode", lambda m, a: torch.inference_mode()(lambda: m(*a))())
def _inference() -> Made:
    return mlp(), (x(),)


@program("backward", grads, grad=True)
def _backward() -> Made:
    return mlp(), (x(),)


@program("reentrant checkpoint", grads, grad=True)
def _reentrant() -> Made:
    inner = nn.Linear(8, 8)
    model = Fn(lambda v: checkpoint(inner, v, use_reentrant=True).sin())
    model.inner = inner
    return model, (x().requires_grad_(),)


def double_backward(model: nn.Module, args: tuple[Any, ...]) -> Any:
    (first,) = torch.autograd.grad(model(*args).pow(2).sum(), args[0], create_graph=True)
    return torch.autograd.grad(first.sum(), list(model.parameters()), allow_unused=True)


@program("double backward", double_backward, grad=True)
def _double() -> Made:
    return mlp(), (x().requires_grad_(),)


def train(model: nn.Module, args: tuple[Any, ...]) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(*args).sum().backward()
        optimizer.step()
    return list(model.parameters())


@program("training with fused AdamW and batch norm", train, grad=True)
def _train() -> Made:
    return nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)), (x(),)


def generate(model: nn.Module, args: tuple[Any, ...]) -> Any:
    return model.generate(*args, max_new_tokens=4, do_sample=True, pad_token_id=0)  # type: ignore[operator]


@program("sampling from a Llama with its cache", generate)
def _llama() -> Made:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    return transformers.LlamaForCausalLM(config).eval(), (torch.arange(6)[None],)


def run(name: str, path: Any = None, **options: Any) -> list[torch.Tensor]:
    make, runner, grad = PROGRAMS[name]
    torch.manual_seed(0)
    model, args = make()
    with torch.set_grad_enabled(grad):
        torch.manual_seed(1)
        if path is None:
            out = runner(model, args)
        else:
            with dt.record(path, model, on_error="raise", **options):
                out = runner(model, args)
        after = torch.rand(1)
    return [t.detach().clone() for _, t in flatten(out, "out") if isinstance(t, torch.Tensor)] + [after]


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


class Counted(torch.Tensor):
    """Plain data; counts the functions that it goes through."""

    calls: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("save", ["tensors", "leaves", "stats"])
def test_a_subclass_that_sees_functions_sees_none_of_ours(tmp_path: Any, save: str) -> None:
    torch.manual_seed(0)
    model, plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).eval(), torch.randn(2, 4)
    x = plain.as_subclass(Counted)
    Counted.calls.clear()
    with torch.no_grad():
        expected = model(plain)
        model(x)
        alone = list(Counted.calls)
        Counted.calls.clear()
        with dt.record(tmp_path / "t", model, save=save):
            model(x)
    assert Counted.calls == alone == ["linear", "tanh"]
    (record,) = dt.open(tmp_path / "t").find(kind="module", module="")
    if save == "stats":
        assert record.stats()["n"] == 8
    else:
        assert torch.equal(record.tensor(), expected) and torch.equal(record.tensor("in[0]"), plain)


@pytest.mark.filterwarnings("ignore")  # torch's own deprecations, of scripting and compiling
@pytest.mark.parametrize("name", PROGRAMS)
def test_results_and_random_state_are_bit_identical(tmp_path: Any, name: str) -> None:
    want = run(name)
    for save in ("tensors", "meta"):
        got = run(name, tmp_path / save, save=save)
        assert [bits(t) for t in got] == [bits(t) for t in want], save
        (rank,) = open_ranks(tmp_path / save)
        assert rank.complete, rank.end
        assert rank.verify() == []
