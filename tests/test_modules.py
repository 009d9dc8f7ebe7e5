"""Module calls: every call seen once, under the right name, with all that went in and came out."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import dispatch_trace as dt
from dispatch_trace.nested import flatten
from dispatch_trace.store.reader import RankReader, open_ranks


def record(path: Any, model: nn.Module, *inputs: Any, calls: int = 1, **options: Any) -> RankReader:
    options.setdefault("save", "tensors")
    with torch.no_grad(), dt.record(path, model, **options):
        for _ in range(calls):
            model(*inputs)
    (rank,) = open_ranks(path)
    return rank


def module_keys(rank: RankReader) -> list[tuple[str, int]]:
    return [(r.module, r.call) for r in rank.records() if r.kind == "module"]


def one(rank: RankReader, module: str, call: int = 0, kind: str = "module") -> Any:
    found = [r for r in rank.records() if (r.kind, r.module, r.call) == (kind, module, call)]
    assert len(found) == 1, f"{len(found)} records of {module}#{call}"
    return found[0]


def value(rank: RankReader, record: Any, slot: str) -> torch.Tensor:
    (found,) = [s for s in record.slots if s.name == slot]
    return rank.tensor(found.content)


def test_flatten_names_leaves_of_every_structure() -> None:
    @dataclass
    class Out:
        hidden: int
        extra: dict[str, Any]

    pair = namedtuple("pair", "first second")
    nested = {"a": [1, (2, None)], "b c": Out(3, {"k": 4}), "p": pair(5, 6), 7: 8}
    assert flatten(nested, "out") == [
        ("out.a[0]", 1),
        ("out.a[1][0]", 2),
        ("out.a[1][1]", None),
        ('out["b c"].hidden', 3),
        ('out["b c"].extra.k', 4),
        ("out.p.first", 5),
        ("out.p.second", 6),
        ("out[7]", 8),
    ]


def test_every_call_of_every_module_is_recorded_after_its_ops(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    rank = record(tmp_path / "t", model, x)
    assert module_keys(rank) == [("0", 0), ("1", 0), ("2", 0), ("", 0)]
    for record_ in rank.records():
        if record_.kind == "op":
            owner = one(rank, record_.module)
            assert owner.opened <= record_.seq < owner.seq
    first = one(rank, "0")
    assert torch.equal(value(rank, first, "in[0]"), x)
    with torch.no_grad():
        assert torch.equal(value(rank, first, "out"), model[0](x))
    assert rank.record(first.producer).op == "aten.addmm"


def test_a_module_called_twice_counts_its_calls_and_each_step_starts_again(tmp_path: Any) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.fc(x))

    rank = record(tmp_path / "t", Twice(), torch.randn(2, 4), calls=2)
    keys = [(r.step, r.module, r.call) for r in rank.records() if r.kind == "module"]
    assert keys == [(0, "fc", 0), (0, "fc", 1), (0, "", 0), (1, "fc", 0), (1, "fc", 1), (1, "", 0)]
    assert [s.step for s in rank.steps] == [0, 1]


def test_forward_called_directly_is_a_call(tmp_path: Any) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.fc.forward(x))

    rank = record(tmp_path / "t", Direct(), torch.randn(2, 4))
    assert module_keys(rank) == [("fc", 0), ("", 0)]
    assert {r.module for r in rank.records() if r.op == "aten.addmm"} == {"fc"}
    assert {r.module for r in rank.records() if r.op == "aten.tanh"} == {""}


def test_a_forward_of_the_super_class_is_the_same_call(tmp_path: Any) -> None:
    class Base(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Derived(Base):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 1

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.derived = Base(), Derived()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(self.derived(x))

    rank = record(tmp_path / "t", Both(), torch.randn(2, 4))
    assert module_keys(rank) == [("derived", 0), ("base", 0), ("", 0)]
    assert [r.op for r in rank.records() if r.module == "derived" and r.kind == "op"] == [
        "aten.mul",
        "aten.add",
    ]


def test_a_forward_set_on_the_object_is_recorded(tmp_path: Any) -> None:
    model = nn.Linear(4, 4)
    forward = model.forward
    model.forward = lambda x: forward(x) * 3  # type: ignore[method-assign]
    rank = record(tmp_path / "t", model, torch.randn(2, 4))
    assert module_keys(rank) == [("", 0)]
    assert [r.op for r in rank.records() if r.kind == "op" and not r.light] == ["aten.addmm", "aten.mul"]


def test_a_shared_module_goes_by_the_path_it_was_called_through(tmp_path: Any) -> None:
    class Layer(nn.Module):
        def __init__(self, fc: nn.Module) -> None:
            super().__init__()
            self.fc = fc

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(4, 4)
            self.enc, self.dec = Layer(shared), Layer(shared)
            self.alias = self.enc

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dec(self.alias(x))

    rank = record(tmp_path / "t", Net(), torch.randn(2, 4))
    assert module_keys(rank) == [("enc.fc", 0), ("enc", 0), ("dec.fc", 0), ("dec", 0), ("", 0)]


def test_outputs_keep_their_structure_none_and_scalars_included(tmp_path: Any) -> None:
    class Plain:
        pass

    class Out(OrderedDict[str, Any]):
        pass

    class Net(nn.Module):
        def forward(self, x: torch.Tensor, *, scale: float, cache: dict[str, Any] | None) -> Any:
            return Out(hidden=x * scale, past=(None, x[:1]), note="n", thing=Plain())

    model = Net()
    with dt.record(tmp_path / "t", model, save="tensors"):
        out = model(torch.ones(2, 2), scale=2.0, cache=None)
    assert isinstance(out, Out)
    (rank,) = open_ranks(tmp_path / "t")
    root = one(rank, "")
    slots = {s.name: s for s in root.slots}
    assert slots["in.scale"].value == 2.0 and slots["in.cache"].value is None
    assert not slots["in.cache"].is_tensor
    assert slots["out.past[0]"].value is None and slots["out.note"].value == "n"
    assert "Plain" in slots["out.thing"].value["opaque"]
    assert torch.equal(value(rank, root, "out.hidden"), torch.full((2, 2), 2.0))
    assert torch.equal(value(rank, root, "out.past[1]"), torch.ones(1, 2))


def test_inputs_are_kept_as_they_were_at_entry(tmp_path: Any) -> None:
    class Eats(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(0)

    for level in ("op", "module"):
        x = torch.ones(3)
        rank = record(tmp_path / level, Eats(), x, level=level)
        root = one(rank, "")
        assert torch.equal(value(rank, root, "in[0]"), torch.ones(3)), level
        assert torch.equal(value(rank, root, "out"), torch.zeros(3)), level


def test_a_raising_model_raises_its_own_error_and_keeps_the_trace(tmp_path: Any) -> None:
    class Boom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.fc(x)
            raise KeyError("mine")

    model = Boom()
    with pytest.raises(KeyError, match="mine"), dt.record(tmp_path / "t", model):
        model(torch.ones(1, 2))
    (rank,) = open_ranks(tmp_path / "t")
    assert one(rank, "").note == "raised KeyError"
    assert one(rank, "fc").note == ""
    assert rank.verify() == []
    assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
    assert "forward" in Boom.__dict__ and Boom.forward.__qualname__.endswith("Boom.forward")
    assert not hasattr(Boom.forward, "__wrapped__")


def test_copies_and_pickles_made_while_recording_know_nothing_of_the_recorder(tmp_path: Any) -> None:
    model = nn.Linear(2, 2)
    with torch.no_grad(), dt.record(tmp_path / "t", model):
        twin = copy.deepcopy(model)
        twin.weight.zero_()
        twin.bias.zero_()
        model(torch.ones(1, 2))
        assert torch.equal(twin(torch.ones(1, 2)), torch.zeros(1, 2))
    assert "forward" not in twin.__dict__ and "forward" not in model.__dict__


def test_hooks_of_the_user_belong_to_the_call_and_change_what_is_recorded(tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, out: out * 0)
    rank = record(tmp_path / "t", model, torch.ones(1, 2))
    assert torch.equal(value(rank, one(rank, "0"), "out"), torch.zeros(1, 2))
    assert {r.module for r in rank.records() if r.op == "aten.mul"} == {"0"}


def test_fast_paths_stay_taken(tmp_path: Any) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True).eval()
    rank = record(tmp_path / "t", layer, torch.randn(2, 5, 16))
    assert [r.op for r in rank.records() if r.kind == "op" and not r.light] == [
        "aten._transformer_encoder_layer_fwd"
    ]


def test_level_module_runs_without_a_dispatch_mode(tmp_path: Any) -> None:
    depth: list[int] = []

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            depth.append(torch._C._len_torch_dispatch_stack())
            return x + 1

    rank = record(tmp_path / "t", Net(), torch.ones(2), level="module")
    assert depth == [0]
    assert [r.kind for r in rank.records()] == ["module"]


def test_modules_in_worker_threads_keep_their_owner(tmp_path: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.fc(x))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(Branch() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def run(branch: nn.Module) -> Any:
                with torch.no_grad():
                    return branch(x)

            with ThreadPoolExecutor(4) as pool:
                return torch.stack(list(pool.map(run, self.branches))).sum(0)

    rank = record(tmp_path / "t", Net(), torch.randn(3, 8))
    for i in range(4):
        ops = [r.op for r in rank.records() if r.module == f"branches.{i}" and r.kind == "op"]
        assert ops == ["aten.relu"], ops
        assert one(rank, f"branches.{i}.fc").thread > 0
    assert one(rank, "").thread == 0


def test_lazy_modules_are_recorded_when_they_come_to_life(tmp_path: Any) -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    rank = record(tmp_path / "t", model, torch.randn(2, 5))
    assert module_keys(rank) == [("0", 0), ("", 0)]
    assert rank.complete


def test_tensor_subclasses_without_a_dispatch_of_the_op_pass_through(tmp_path: Any) -> None:
    class Tagged(torch.Tensor):
        pass

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    rank = record(tmp_path / "t", Net(), torch.ones(2).as_subclass(Tagged))
    root = one(rank, "")
    assert [s.note for s in root.slots] == ["type Tagged", "type Tagged"]
    assert "aten.add" in [r.op for r in rank.records()]


def test_fake_runs_are_listed_without_data_and_change_nothing(tmp_path: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = nn.Linear(2, 2)
    with torch.no_grad(), dt.record(tmp_path / "t", model, save="tensors"):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model(mode.from_tensor(torch.ones(1, 2)))
        model(torch.ones(1, 2))
    (rank,) = open_ranks(tmp_path / "t")
    roots = [r for r in rank.records() if r.kind == "module"]
    assert [r.step for r in roots] == [0, 1]
    fake, real = ({s.name: s for s in r.slots} for r in roots)
    assert fake["out"].note == "fake tensor" and fake["out"].content < 0
    with torch.no_grad():
        assert torch.equal(rank.tensor(real["out"].content), model(torch.ones(1, 2)))


def test_threads_that_come_and_go_leave_no_mode_behind(tmp_path: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def run(v: torch.Tensor) -> Any:
                with torch.no_grad():
                    return self.fc(v)

            with ThreadPoolExecutor(1) as pool:
                *_, last = pool.map(run, [x] * 5)
                return last

    with torch.no_grad(), dt.record(tmp_path / "t", model := Net(), save="meta") as recording:
        model(torch.ones(1, 4))
        assert recording._tracer is not None
        assert len(recording._tracer.writer.sources) == 1
    (rank,) = open_ranks(tmp_path / "t")
    assert [r.op for r in rank.records() if r.kind == "op"].count("aten.addmm") == 5
