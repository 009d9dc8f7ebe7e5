"""Lines of a program as records: what they assign, where they stand, and that nothing else changes."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import dispatch_trace as dt
from dispatch_trace.line_code import compile_with_hooks

SOURCE = '''\
"""A model in plain Python."""
from __future__ import annotations

import torch
from torch import nn


class Model(nn.Module):
    """Assigns in every way that Python has."""

    width: int = 4

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        h = self.proj(
            x,
        )
        low, (high, *rest) = h[0], h.clone().unbind()
        h += 1
        self.last = h * 2
        self.seen += h.sum(0)
        outs = [part * 2 for part in (low, high) if (mean := part.mean()) is not None]
        total: torch.Tensor = sum(outs)
        for part in outs:
            total = total + part
        buffer = torch.zeros(2, 4)
        buffer[0] = total
        with torch.no_grad() as nothing:
            size = h.shape[0]
        if fail:
            broken = total.view(
                3, 5
            )
        return total + power(buffer[0], 2)


def power(x: torch.Tensor, n: int) -> torch.Tensor:
    y = x if n == 0 else power(x, n - 1) * 0.5
    return y


@torch.no_grad()
def wrapped(x: torch.Tensor) -> torch.Tensor:
    z = x + 1
    return z
'''
NAMES = [
    ("h", 0), ("low", 0), ("high", 0), ("rest[0]", 0), ("rest[1]", 0), ("h", 1), ("self.last", 0),
    ("self.seen", 0), ("part", 0), ("mean", 0), ("part", 1), ("mean", 1), ("outs[0]", 0),
    ("outs[1]", 0), ("total", 0),
    ("part", 2), ("total", 1), ("part", 3), ("total", 2), ("buffer", 0), ("buffer", 1),
]  # fmt: skip


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of a module that can be imported, and has not been."""
    name = f"lines_model_{abs(hash(tmp_path)) % 10**8}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def make(module: ModuleType) -> Any:
    torch.manual_seed(0)
    return module.Model()


X = torch.arange(12.0).reshape(3, 4)


@pytest.mark.parametrize("imported", ["before", "after"])
def test_every_assignment_is_recorded_where_it_happened(source: str, imported: str, tmp_path: Path) -> None:
    module = importlib.import_module(source) if imported == "before" else None
    with dt.trace_lines(source) as lines:
        module = module or importlib.import_module(source)
        model = make(module)
        with torch.no_grad(), dt.record(tmp_path / "t", model, save="tensors"):
            out = model(X)
    # Code with hooks must not be found by the next import.
    cached = list(tmp_path.glob("__pycache__/*.pyc"))
    assert imported == "before" or cached == []
    assert list(lines.modules) == [source] and lines.skipped == []
    trace = dt.open(tmp_path / "t")
    assert trace.verify() == []
    found = [r for r in trace.records if r.kind == "inline"]
    forward = [r for r in found if r.name.startswith("Model.forward.")]
    assert [(r.name.removeprefix("Model.forward."), r.n) for r in forward] == NAMES
    assert {(r.module, r.call, r.step) for r in found} == {("", 0, 0)}
    text = SOURCE.splitlines()
    for record in forward:
        assert record.source is not None
        file, _, line = record.source.rpartition(":")
        assert Path(file).name == f"{source}.py"
        name = record.name.split(".")[-1].split("[")[0]
        assert name in text[int(line) - 1], record
    # Innermost first: what a recursion assigns is recorded as its calls return.
    assert [(r.name, r.n) for r in found if r not in forward] == [("power.y", n) for n in range(3)]
    value = {(r.name, r.n): r.tensor() for r in found}
    assert torch.equal(value["Model.forward.total", 2] + value["power.y", 2], out)
    assert torch.equal(value["Model.forward.h", 1], value["Model.forward.h", 0] + 1)
    # They sit among the ops: the product is recorded before the name that it is given.
    by_seq = sorted(trace.records, key=lambda r: r.seq)
    place = next(i for i, r in enumerate(by_seq) if r.name == "Model.forward.self.last")
    assert by_seq[place - 1].op == "aten.mul"


def test_functions_get_their_code_back_and_decorated_ones_are_reached(source: str, tmp_path: Path) -> None:
    module = importlib.import_module(source)
    codes = [module.Model.forward.__code__, module.power.__code__, module.wrapped.__wrapped__.__code__]
    with dt.trace_lines(rf"{source}(\..*)?") as lines:
        assert module.Model.forward.__code__ is not codes[0]
        model = torch.nn.Identity()
        with dt.record(tmp_path / "t", model) as rec, rec.step():
            model(module.wrapped(X))
    assert lines.modules[source] == 4
    assert [module.Model.forward.__code__, module.power.__code__] == codes[:2]
    assert module.wrapped.__wrapped__.__code__ is codes[2]
    assert [r.name for r in dt.open(tmp_path / "t").records if r.kind == "inline"] == ["wrapped.z"]


def events(code: Any, name: str) -> list[tuple[str, str, int]]:
    """What a debugger or a coverage tool is told while the model runs: (event, function, line)."""
    seen: list[tuple[str, str, int]] = []

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != name:
            return None
        seen.append((event, frame.f_code.co_name, frame.f_lineno))
        return trace

    namespace: dict[str, Any] = {"__name__": name}
    exec(code, namespace)
    model = namespace["Model"]()
    sys.settrace(trace)
    try:
        model(X)
    finally:
        sys.settrace(None)
    return seen


def test_line_events_and_tracebacks_are_those_of_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    import builtins

    import dispatch_trace.lines as lines
    from dispatch_trace.line_code import HOOK

    monkeypatch.setattr(builtins, HOOK, lines._assigned, raising=False)
    plain, hooked = compile(SOURCE, "model.py", "exec"), compile_with_hooks(SOURCE, "model.py")
    expected = events(plain, "model.py")
    assert len(expected) > 30 and events(hooked, "model.py") == expected

    stacks = []
    for code in (plain, hooked):
        namespace: dict[str, Any] = {"__name__": "model"}
        exec(code, namespace)
        with pytest.raises(RuntimeError) as caught:
            namespace["Model"]()(X, fail=True)
        frames = traceback.extract_tb(caught.value.__traceback__)
        stacks.append([(f.name, f.lineno, f.end_lineno, f.colno, f.end_colno) for f in frames][-1])
    assert stacks[0] == stacks[1]
    assert (stacks[0][0], stacks[0][1], stacks[0][2]) == ("forward", 35, 37)


def test_results_are_the_same_and_compiled_code_stays_whole(source: str, tmp_path: Path) -> None:
    module = importlib.import_module(source)
    plain = make(module)(X)
    with dt.trace_lines(source) as lines:
        compiled = torch.compile(module.wrapped.__wrapped__, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), X + 1)
        assert list(lines.silent) == ["wrapped"]
        said = "lines of wrapped are not recorded where torch.compile compiled them"
        with pytest.warns(RuntimeWarning, match=said), dt.record(tmp_path / "t", model := make(module)):
            assert torch.equal(model(X), plain)
    assert dt.open(tmp_path / "t").header["notices"][0].startswith(said)
    found = dt.align(tmp_path / "t", tmp_path / "t")
    assert any(said in notice for notice in found.notices)


def test_two_traces_with_lines_pair_by_name(source: str, tmp_path: Path) -> None:
    module = importlib.import_module(source)
    with dt.trace_lines(source), torch.no_grad():
        for name in ("a", "b"):
            model = make(module)
            with dt.record(tmp_path / name, model, save="tensors"):
                model(X)
    found = dt.align(tmp_path / "a", tmp_path / "b")
    inline = [pair for pair in found.pairs if pair.target is not None and pair.target.kind == "inline"]
    assert found.verdict == "match" and len(inline) == len(NAMES) + 3
    assert all(pair.ref is not None and pair.ref.name == pair.target.name for pair in inline if pair.target)


def test_pattern_that_matches_nothing_and_source_that_changed_are_said(source: str, tmp_path: Path) -> None:
    with (
        pytest.raises(dt.NoMatchError, match="lines='lines_modell' matched no module with functions"),
        dt.trace_lines("lines_modell"),
    ):
        pass
    module = importlib.import_module(source)
    assert module.__file__ is not None
    Path(module.__file__).write_text(SOURCE.replace("h += 1", "h += 1 + 1 * x.sum()"))
    with dt.trace_lines(source) as lines:
        assert f"{source}.Model.forward" in lines.skipped  # the line would be another one
        assert module.power.__code__.co_names != ("power",)
    with pytest.raises(dt.PatternError, match="lines='\\('"):
        dt.trace_lines("(")
