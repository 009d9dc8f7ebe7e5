"""Ops inside compiled graphs: eager's keys, the values that compiled code computed, nothing else changed."""

from __future__ import annotations

import copy
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters

import dispatch_trace as dt
from dispatch_trace.session import Record, Trace

# torch's inductor imports what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")

Key = tuple[int, str, str, int | None, str | None, int]
ZOO = Path(__file__).parent / "zoo"


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def ops(trace: Trace) -> dict[Key, Record]:
    """The op records by site, gradients that the engine accumulates into leaves left out."""
    return {
        (r.step, r.grad_phase, r.module, r.call, r.op, r.n): r
        for r in trace.records
        if r.kind == "op" and not (r.grad_phase == "bwd" and r.call is None)
    }


def recorded(path: Path, model: nn.Module, run: Callable[[nn.Module], Any], **options: Any) -> Trace:
    with dt.record(
        path, model, save=options.pop("save", "tensors"), on_error="raise", check_outputs=False, **options
    ):
        run(model)
    trace = dt.open(path)
    assert trace.verify() == []
    return trace


def both(
    folder: Path, model: nn.Module, backend: Any, run: Callable[[nn.Module], Any], **options: Any
) -> tuple[Trace, Trace]:
    """Traces of the eager model and of a compiled copy."""
    ref = recorded(folder / "eager", copy.deepcopy(model), run)
    return ref, recorded(
        folder / "compiled", torch.compile(copy.deepcopy(model), backend=backend, **options), run
    )


def assert_same_values(ref: dict[Key, Record], target: dict[Key, Record], tolerance: float = 1e-5) -> None:
    for key, record in target.items():
        for slot in (s for s in record.slots if s.role == "out" and s.is_tensor):
            theirs = next(s for s in ref[key].slots if s.name == slot.name)
            assert slot.shape == theirs.shape, key
            torch.testing.assert_close(
                record.tensor(slot.name),
                ref[key].tensor(slot.name),
                rtol=tolerance,
                atol=tolerance,
                msg=str(key),
            )


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(2, 5, 2, 12).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(2, 5, 8)
        return x + F.gelu(self.out(mixed))


class Net(nn.Module):
    """One block called twice, and ops of its own between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.end = Block(), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.end(self.block(self.block(x) * 1.5)).softmax(-1)


def train(model: nn.Module) -> None:
    torch.manual_seed(1)
    model(torch.randn(2, 5, 8)).pow(2).sum().backward()


@torch.no_grad()
def infer(model: nn.Module) -> Any:
    torch.manual_seed(1)
    return model(torch.randn(2, 5, 8))


# Keys and values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_forward_and_backward_have_the_keys_and_values_of_eager_recording(
    backend: str, tmp_path: Path
) -> None:
    ref, target = both(tmp_path, Net(), dt.tap(backend), train, fullgraph=True)
    expected, found = ops(ref), ops(target)
    assert found.keys() == expected.keys()
    assert num_graphs() == 1
    phases = [key[1] for key in found]
    assert phases.count("fwd") > 30 and phases.count("bwd") > 40
    assert {key[3] for key in found if key[2] == "block.qkv"} == {0, 1}
    assert_same_values(expected, found)
    linear = found[(0, "fwd", "block.qkv", 1, "aten.addmm", 0)]
    assert linear.note == f"compiled: {backend}"
    twin = expected[(0, "fwd", "block.qkv", 1, "aten.addmm", 0)]
    assert [(s.name, s.role, s.shape) for s in linear.slots] == [
        (s.name, s.role, s.shape) for s in twin.slots
    ]
    assert linear.args == twin.args
    assert found[(0, "fwd", "block.norm", 0, "aten.native_layer_norm", 0)].args["eps"] == 1e-5
    assert (
        found[(0, "fwd", "block", 0, "aten.gelu", 0)].source
        == expected[(0, "fwd", "block", 0, "aten.gelu", 0)].source
    )


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_every_op_pairs_with_its_own_twin(backend: str, tmp_path: Path) -> None:
    ref, target = both(tmp_path, Net(), dt.tap(backend), infer)
    alignment = dt.align(ref.path, target.path)
    assert alignment.verdict == "match"
    pairs = [p for p in alignment.pairs if (p.ref or p.target).kind == "op"]
    assert len(pairs) == len(ops(ref))
    assert {p.method for p in pairs} <= {"same op", "edge"}
    assert all((p.ref and p.ref.key) == (p.target and p.target.key) for p in pairs)


def test_gradients_that_reach_their_leaves_in_another_order_are_a_match(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)))

    def run(module: nn.Module) -> None:
        for size in (3, 5):
            module(torch.linspace(-1, 1, 8 * size).view(size, 8)).pow(2).sum().backward()

    ref, target = both(tmp_path, model, dt.tap("aot_eager"), run)

    def arrivals(trace: Trace) -> list[tuple[int, ...]]:
        return [
            r.slot().shape
            for r in trace.records
            if r.kind == "op" and r.grad_phase == "bwd" and r.call is None
        ]

    assert len(arrivals(ref)) == len(arrivals(target))
    assert arrivals(ref) != arrivals(target)
    alignment = dt.align(ref.path, target.path)
    assert alignment.verdict == "match", alignment.first
    assert alignment.findings == []


def test_operands_lead_to_the_ops_and_parameters_that_made_them(tmp_path: Path) -> None:
    _, target = both(tmp_path, Net(), dt.tap("aot_eager"), infer)
    records = {record.seq: record for record in target.records}
    found = ops(target)
    product = found[(0, "fwd", "end", 0, "aten.addmm", 0)]
    bias = next(s for s in product.slots if s.name == "in.self")
    assert [(records[seq].kind, records[seq].module, records[seq].name) for seq, _ in bias.producers] == [
        ("param", "end", "bias")
    ]
    view = found[(0, "fwd", "end", 0, "aten.view", 0)]
    operand = next(s for s in product.slots if s.name == "in.mat1")
    assert operand.producers[-1][0] == view.seq
    assert view.light and not product.light


class Scratch(nn.Module):
    """inductor hands back a wrong clone of `y` here (pytorch/pytorch#198094)."""

    def __init__(self) -> None:
        super().__init__()
        self.pre, self.post = nn.Linear(3, 6), nn.Linear(6, 2)
        self.register_buffer("scratch", torch.arange(24.0).view(4, 6))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        y = torch.slice_scatter(self.scratch, self.pre(row), dim=0, start=1, end=2)
        self.scratch.zero_()
        return self.post(y)


def test_a_tap_records_what_the_compiled_code_computed_where_a_clone_does_not(tmp_path: Path) -> None:
    def run(model: nn.Module) -> None:
        with torch.no_grad():
            model(torch.ones(1, 3))

    ref, target = both(tmp_path, Scratch(), dt.tap("inductor"), run)
    key = (0, "fwd", "", 0, "aten.slice_scatter", 0)
    assert_same_values({key: ops(ref)[key]}, {key: ops(target)[key]})
    # What the graph overwrites is recorded as it was read.
    assert torch.equal(ops(target)[key].tensor("in.self"), torch.arange(24.0).view(4, 6))


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x).relu()
        torch._dynamo.graph_break()
        return self.fc(x).relu() + 1


class Pieces(nn.Module):
    """Two modules of one class, each in two pieces; Dynamo runs the same code for both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Broken(), Broken()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.first(x))).relu()


@pytest.mark.filterwarnings("ignore:.*ran eagerly")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_graph_breaks_and_shared_code_keep_counters_and_paths(backend: str, tmp_path: Path) -> None:
    def run(model: nn.Module) -> None:
        with torch.no_grad():
            model(torch.linspace(-1, 1, 12).view(3, 4))

    ref, target = both(tmp_path, Pieces(), dt.tap(backend), run)
    expected, found = ops(ref), ops(target)
    assert found.keys() == expected.keys()
    assert {key[3] for key in found if key[2] == "first.fc"} == {0, 1, 2, 3}
    assert_same_values(expected, found)
    assert num_graphs() > 1


class Decorated(nn.Module):
    @staticmethod
    def _passing(forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return forward(*args, **kwargs)

        return wrapper

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.enc, self.dec = nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared)

    @_passing
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dec(self.enc(x)) * 2


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.pre, self.inner, self.post = nn.Linear(4, 4), inner, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.post(self.inner(self.pre(x)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_part_of_a_model_has_paths_below_the_whole(backend: str, tmp_path: Path) -> None:
    def run(model: nn.Module) -> None:
        with torch.no_grad():
            model(torch.linspace(-1, 1, 8).view(2, 4))

    model = Around(Decorated())
    ref = recorded(tmp_path / "eager", copy.deepcopy(model), run)
    model.inner = torch.compile(model.inner, backend=dt.tap(backend))
    target = recorded(tmp_path / "compiled", model, run)
    expected, found = ops(ref), ops(target)
    assert found.keys() == expected.keys()
    assert {"inner", "inner.enc.0", "inner.dec.0"} <= {key[2] for key in found}
    assert_same_values(expected, found)


def test_eager_code_behind_compiled_code_knows_which_op_made_its_operand(tmp_path: Path) -> None:
    def passing(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return module.forward

    model = Around(Decorated())
    model.inner = torch.compile(model.inner, backend=dt.tap(passing))
    with torch.no_grad():
        target = recorded(tmp_path / "compiled", model, lambda m: m(torch.linspace(-1, 1, 8).view(2, 4)))
    found = ops(target)
    operand = found[(0, "fwd", "post", 0, "aten.addmm", 0)].slot("in.mat1")
    maker = found[(0, "fwd", "inner", 0, "aten.mul", 0)]
    assert [seq for seq, _ in operand.producers] == [maker.seq]
    assert not operand.leaf and operand.content >= 0


def test_dynamic_shapes_take_one_graph_and_record_real_sizes(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x).reshape(x.shape[0] * 2, -1).expand(3, -1, -1).sum(0)

    def run(model: nn.Module) -> None:
        with torch.no_grad():
            for size in (3, 5, 7):
                model(torch.ones(size, 4))

    ref, target = both(tmp_path, Flat(), dt.tap("aot_eager"), run, dynamic=True)
    expected, found = ops(ref), ops(target)
    assert found.keys() == expected.keys()
    assert num_graphs() == 1
    assert_same_values(expected, found)
    for key, record in found.items():
        assert record.args == expected[key].args, key


def test_random_ops_say_so_and_keep_their_result(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))

    def run(module: nn.Module) -> None:
        torch.manual_seed(3)
        with torch.no_grad():
            module(torch.ones(2, 4))

    _, target = both(tmp_path, model, dt.tap("aot_eager"), run)
    draws = [record for record in ops(target).values() if record.random]
    assert draws and {record.module for record in draws} == {"1"}
    assert draws[0].tensor().numel() == 128


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_recordings_without_data_have_the_same_sites(save: str, tmp_path: Path) -> None:
    compiled = torch.compile(Net(), backend=dt.tap("aot_eager"))
    target = recorded(tmp_path / "compiled", compiled, infer, save=save)
    ref = recorded(tmp_path / "eager", Net(), infer, save=save)
    found = ops(target)
    assert found.keys() == ops(ref).keys()
    softmax = found[(0, "fwd", "", 0, "aten._softmax", 0)]
    assert next(s for s in softmax.slots if s.name == "out").shape == (2, 5, 8)
    assert bool(softmax.stats("out")) == (save == "stats")


# Nothing else changes ---------------------------------------------------------------------------------


def test_switching_a_recording_on_and_off_compiles_nothing(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)

    @functools.partial(torch.compile, backend=dt.tap("aot_eager"), fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, weight).relu()

    class Caller(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x)

    caller = Caller()
    x = torch.randn(2, 4)
    with torch.no_grad():
        plain = [caller(x) for _ in range(10)]
        with dt.record(tmp_path / "a.trace", caller, save="tensors"):
            watched = [caller(x) for _ in range(5)]
        plain += [caller(x) for _ in range(5)]
    assert num_graphs() == 1
    assert all(torch.equal(plain[0], out) for out in plain + watched)
    found = ops(dt.open(tmp_path / "a.trace"))
    assert list(found) == [(s, "fwd", "", 0, op, 0) for s in range(5) for op in ("aten.mm", "aten.relu")]


def test_a_recorded_model_compiles_once_in_twenty_calls(tmp_path: Path) -> None:
    compiled = torch.compile(Net(), backend=dt.tap("aot_eager"), fullgraph=True)
    with dt.record(tmp_path / "a.trace", compiled, check_outputs=False, save="stats"):
        for _ in range(20):
            infer(compiled)
    assert num_graphs() == 1
    per_step = [sum(1 for key in ops(dt.open(tmp_path / "a.trace")) if key[0] == step) for step in range(20)]
    assert len(set(per_step)) == 1 and per_step[0] > 30


def test_taps_leave_float32_results_of_inductor_as_they_are() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1))
    plain = infer(torch.compile(copy.deepcopy(model)))
    tapped = torch.compile(copy.deepcopy(model), backend=dt.tap("inductor"))
    assert torch.equal(infer(tapped), plain)


def test_gradients_of_inputs_with_more_dims_come_through_the_taps_of_inductor() -> None:
    """AOTAutograd takes the strides of a graph's outputs in order: those of taps are no gradients'."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    x = torch.randn(2, 3, 8)
    tapped = copy.deepcopy(model)
    for one in (model, torch.compile(tapped, backend=dt.tap("inductor"))):
        one(x).square().sum().backward()
    for ours, theirs in zip(tapped.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class RmsMix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 1.7 + 0.3
        y = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return (F.gelu(y * 2) + h).softmax(-1) * x


def test_tapping_only_kept_buffers_leaves_bfloat16_results_as_they_are(tmp_path: Path) -> None:
    model = nn.Sequential(RmsMix()).eval().bfloat16()
    x = torch.randn(16, 64).bfloat16()
    with torch.no_grad():
        plain = torch.compile(copy.deepcopy(model))(x)
        kept = torch.compile(copy.deepcopy(model), backend=dt.tap("inductor", only_materialised=True))
        with dt.record(tmp_path / "kept.trace", kept, save="tensors", check_outputs=False):
            assert torch.equal(kept(x), plain)
        everything = torch.compile(copy.deepcopy(model), backend=dt.tap("inductor"))
        with dt.record(tmp_path / "all.trace", everything, save="tensors"):
            changed = not torch.equal(everything(x), plain)
    few, many = ops(dt.open(tmp_path / "kept.trace")), ops(dt.open(tmp_path / "all.trace"))
    assert 0 < len(few) < len(many)
    assert few.keys() <= many.keys()
    observer = dt.open(tmp_path / "all.trace").header["observer"]
    assert ("differ" in observer[""]["outputs"]) == changed


# Which ops, which backend -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_select_taps_modules_and_all_beneath_them(backend: str, tmp_path: Path) -> None:
    compiled = torch.compile(Net(), backend=dt.tap(backend, select=["block.norm", "end"]))
    found = ops(recorded(tmp_path / "compiled", compiled, infer))
    assert {key[2] for key in found} == {"block.norm", "end"}
    assert {key[3] for key in found if key[2] == "block.norm"} == {0, 1}


def test_a_selection_that_matches_no_module_says_so_and_names_the_closest() -> None:
    compiled = torch.compile(Net(), backend=dt.tap("aot_eager", select="blok.norm"))
    with pytest.raises(
        dt.NoMatchError, match=r"select='blok\.norm' matched 0 of \d+ modules.\nClosest: 'block\.norm'"
    ):
        infer(compiled)


def test_an_unknown_backend_is_refused_with_the_closest_names() -> None:
    with pytest.raises(
        dt.ConfigError, match=r"backend='indutcor': torch\.compile knows no .*Closest: 'inductor'"
    ):
        dt.tap("indutcor")
    with pytest.raises(dt.ConfigError, match=r"expected a name or a callable .* got int"):
        dt.tap(3)  # type: ignore[arg-type]
    with pytest.raises(dt.ConfigError, match=r"not another dt\.tap"):
        dt.tap(dt.tap("eager"))


def test_a_backend_that_rejects_the_graph_is_an_error_that_says_what_to_do() -> None:
    def picky(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        raise NotImplementedError("no lowering for softmax")

    compiled = torch.compile(Net(), backend=dt.tap(picky))
    with pytest.raises(
        dt.CaptureError, match=r"'picky' rejected the tapped graph: .*softmax\n.*without dt\.tap"
    ):
        infer(compiled)


def test_a_backend_of_ones_own_gets_aten_graphs_and_its_values_are_recorded(tmp_path: Path) -> None:
    seen: list[set[str]] = []

    def halving(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        """Computes every softmax wrong, as a faulty lowering would."""
        seen.append({str(node.target) for node in module.graph.nodes if node.op == "call_function"})
        for node in list(module.graph.nodes):
            if node.target is torch.ops.aten._softmax.default:
                with module.graph.inserting_after(node):
                    half = module.graph.call_function(torch.ops.aten.mul.Tensor, (node, 0.5))
                node.replace_all_uses_with(half)
                half.args = (node, 0.5)
        module.recompile()
        return module.forward

    ref, target = both(tmp_path, Net(), dt.tap(halving), infer)
    expected, found = ops(ref), ops(target)
    assert found.keys() == expected.keys()
    assert "aten._softmax.default" in seen[0] and "dispatch_trace.tap.default" not in seen[0]
    key = (0, "fwd", "", 0, "aten._softmax", 0)
    torch.testing.assert_close(found[key].tensor("out"), expected[key].tensor("out") / 2)
    first = dt.align(ref.path, target.path).first
    assert first is not None and (first.module, first.op) == ("", "aten._softmax")


# Cases of others --------------------------------------------------------------------------------------


def load_case(number: str) -> ModuleType:
    (file,) = ZOO.glob(f"{number}_*.py")
    spec = importlib.util.spec_from_file_location(f"graph_case_{number}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def align_case(number: str, folder: Path) -> Any:
    case = load_case(number)
    with torch.no_grad():
        recorded(folder / "eager", case.reference(), lambda model: model(*case.inputs()))
        compiled = torch.compile(case.target()._orig_mod, backend=dt.tap("inductor"))
        recorded(folder / "compiled", compiled, lambda model: model(*case.inputs()))
    return dt.align(folder / "eager", folder / "compiled")


def test_a_buffer_that_inductor_overwrites_too_early_is_found_with_taps(tmp_path: Path) -> None:
    alignment = align_case("40", tmp_path)
    assert alignment.verdict == "diverged"
    assert (alignment.first.module, alignment.first.op) == ("stage", "aten.slice_scatter")


def test_higher_precision_inside_a_fused_kernel_is_a_match_with_taps(tmp_path: Path) -> None:
    assert align_case("59", tmp_path).verdict == "match"


def explained(key: Key) -> str:
    """Why a real model runs an op in compiled code that it does not run eagerly; "" if unknown."""
    _, _, module, _, op, _ = key
    name = module.rpartition(".")[2]
    if op == "aten.clone" and ("drop" in name or "dropout" in module):
        return "dropout in eval: eager returns its input, a functional graph copies it"
    if module == "":
        return "mask creation takes another branch when traced"
    if name in ("self_attn", "attn") and op in ("aten.scalar_tensor", "aten.where"):
        return "that mask is given to attention, which turns it into numbers"
    if name == "self_attn" and op in ("aten.unsqueeze", "aten.expand", "aten.clone", "aten._unsafe_view"):
        return "heads are repeated where a mask is given"
    return ""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "at_least"), [("llama", 160), ("bert", 90), ("gpt2", 85)])
def test_every_op_of_a_real_architecture_is_matched_or_explained(
    name: str, at_least: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 101,
        "max_position_embeddings": 64,
    }
    if name == "llama":
        config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, use_cache=False)
        model = transformers.LlamaModel(config)
    elif name == "bert":
        model = transformers.BertModel(transformers.BertConfig(**sizes))
    else:
        small = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 64}
        special = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
        model = transformers.GPT2Model(transformers.GPT2Config(**small, **special))

    def run(module: nn.Module) -> None:
        with torch.no_grad():
            module(input_ids=torch.arange(1, 13).view(2, 6))

    ref, target = both(tmp_path, model.eval(), dt.tap("aot_eager"), run)
    expected, found = ops(ref), ops(target)
    lone = [key for key in found if key not in expected]
    assert [key for key in lone if not explained(key)] == []
    matched = {key: found[key] for key in found if key in expected and key[2] != ""}
    assert len(found) - len(lone) >= at_least
    assert_same_values(expected, matched)
    assert dt.align(ref.path, target.path).verdict == "match"
