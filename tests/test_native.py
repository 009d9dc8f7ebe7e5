"""The compiled way of an op: the same records, nothing leaked, no error swallowed; none of it needed."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import execute_programs
import pytest
import test_observer
import torch
from execute_programs import Program, batch
from test_rows import plain

import dispatch_trace as dt
from dispatch_trace import builds, extension
from dispatch_trace.capture import native
from dispatch_trace.capture.meta import MetaRecorder
from dispatch_trace.capture.ops import OpRecorder
from dispatch_trace.capture.snapshot import Storages
from dispatch_trace.capture.values import ValueRecorder
from dispatch_trace.store.reader import open_ranks

FUNCTIONS = {function.__name__: function for function in execute_programs.PROGRAMS}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if not extension.find(wait=True):
        pytest.skip(f"nothing compiled: {extension.why_not()}")


def build_of(plan: Callable[[], builds.Plan]) -> builds.Build[Any]:
    return builds.Build(plan, extension.load)


def records(path: Path) -> list[dict[str, Any]]:
    (rank,) = open_ranks(path)
    assert rank.complete, rank.end
    found = plain(rank, unwritten=True)
    for record in found:
        record.pop("thread")
        assert record.pop("source") is None or record["kind"] == "op"
    return found


def check_meta(tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Records without values by both ways."""
    run(tmp_path / "compiled")
    with monkeypatch.context() as patched:
        patched.setattr(native, "compiled", lambda mode: mode)
        run(tmp_path / "plain")
    assert records(tmp_path / "compiled") == records(tmp_path / "plain")


@pytest.mark.filterwarnings("ignore")  # torch's own deprecations
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_without_values(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(path: Path) -> None:
        torch.manual_seed(0)
        model = Program(FUNCTIONS[name])
        with torch.no_grad(), dt.record(path, model, save="meta", on_error="raise"):
            for _ in range(3):
                model(batch())

    with torch.no_grad():
        Program(FUNCTIONS[name])(batch())  # what is set up at the first call
    check_meta(tmp_path, run, monkeypatch)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["vmap", "complex", "LSTM", "backward", "double backward"])
def test_programs_without_values(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(path: Path) -> None:
        make, runner, grad = test_observer.PROGRAMS[name]
        torch.manual_seed(0)
        model, args = make()
        torch.manual_seed(1)
        with torch.set_grad_enabled(grad), dt.record(path, model, save="meta", on_error="raise"):
            for _ in range(2):
                runner(model, args)

    check_meta(tmp_path, run, monkeypatch)


class Doubling(torch.nn.Module):
    """Fails where it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        y = self.inner(x) * 2
        return y.view(3, -1) if fail else y.add(x, alpha=2)


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_the_compiled_mode_is_the_one_that_runs(tmp_path: Path, save: str) -> None:
    model = Doubling()
    with dt.record(tmp_path / "t", model, save=save):
        model(torch.ones(4, 8))
        mode = torch.utils._python_dispatch._get_current_dispatch_mode()
    wanted = {"meta": "NativeMetaRecorder", "stats": "NativeValueRecorder"}[save]
    assert type(mode).__name__ == wanted


@pytest.fixture
def through_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops come to `__torch_dispatch__`, as with another torch."""
    for mode in native._modes(extension.find()).values():  # type: ignore[arg-type]
        monkeypatch.setattr(mode, "started", lambda self: None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("save", ["meta", "stats"])
@pytest.mark.parametrize("name", ["caches", "outs_and_lists", "numbers", "attention", "modes", "layouts"])
def test_through_python_the_records_are_the_same(
    tmp_path: Path, name: str, save: str, monkeypatch: pytest.MonkeyPatch, through_python: None
) -> None:
    def run(path: Path) -> None:
        torch.manual_seed(0)
        model = Program(FUNCTIONS[name])
        with torch.no_grad(), dt.record(path, model, save=save, on_error="raise"):
            for _ in range(3):
                model(batch())

    with torch.no_grad():
        Program(FUNCTIONS[name])(batch())
    check_meta(tmp_path, run, monkeypatch)


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_through_python_an_exception_is_the_programs_own(
    tmp_path: Path, save: str, through_python: None
) -> None:
    test_an_exception_is_the_programs_own(tmp_path, save)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="other versions go through Python")
@pytest.mark.parametrize("save", ["meta", "stats"])
def test_plain_ops_do_not_go_through_python(
    tmp_path: Path, save: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, seen = Doubling(), torch.ones(4, 8), []
    with torch.no_grad(), dt.record(tmp_path / "t", model, save=save, on_error="raise") as recording:
        mode = type(torch.utils._python_dispatch._get_current_dispatch_mode())
        plain_way = mode.__torch_dispatch__
        model(x)  # overloads are met

        def spy(self: Any, func: Any, *rest: Any) -> Any:
            seen.append(str(func))
            return plain_way(self, func, *rest)

        monkeypatch.setattr(mode, "__torch_dispatch__", spy)
        model(x)
        assert seen == []
        with torch.utils._python_dispatch._pop_mode_temporarily() as popped:  # put back by Python
            assert type(popped) is mode
        model(x)
        assert seen == []
        if save == "stats":  # a write is not the plain case there
            with recording.step():
                torch.ones(4).add_(1)
            assert "aten.add_.Tensor" in seen


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_recordings_within_one_another(tmp_path: Path, save: str) -> None:
    outer, inner, x = Doubling(), Doubling(), torch.ones(4, 8)
    with torch.no_grad(), dt.record(tmp_path / "outer", outer, save=save, on_error="raise"):
        wanted = outer(x)
        with dt.record(tmp_path / "inner", inner, save=save, on_error="raise"):
            assert torch.equal(outer(x), wanted)
            inner(x)
        assert torch.equal(outer(x), wanted)
    for name, steps in (("outer", 3), ("inner", 1)):
        (rank,) = open_ranks(tmp_path / name)
        found = [record.op for record in rank.records() if record.kind == "op" and record.module == ""]
        assert found == ["aten.mul", "aten.add"] * steps, name


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_an_exception_is_the_programs_own(tmp_path: Path, save: str) -> None:
    model, x = Doubling(), torch.ones(4, 8)
    with pytest.raises(RuntimeError) as bare:
        model(x, fail=True)
    with dt.record(tmp_path / "t", model, save=save, on_error="raise"):
        for _ in range(3):
            model(x)
            with pytest.raises(RuntimeError) as found:
                model(x, fail=True)
            assert found.value.args == bare.value.args
            assert found.value.__context__ is None and found.value.__cause__ is None
    (rank,) = open_ranks(tmp_path / "t")
    notes = [record.note for record in rank.records() if record.kind == "module"]
    assert sum(note.startswith("raised RuntimeError") for note in notes) == 3


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_nothing_is_left_behind(tmp_path: Path, save: str) -> None:
    model, x = Doubling(), torch.ones(4, 8)

    def blocks() -> int:
        recording.flush()
        if recording._tracer is not None and recording._tracer.storages is not None:
            recording._tracer.storages.purge()
        gc.collect()
        return sys.getallocatedblocks()

    with torch.no_grad(), dt.record(tmp_path / "t", model, save=save) as recording:
        counts = []
        for _ in range(5):
            for _ in range(500):
                model(x)
            counts.append(blocks())
    # What others do in the process comes and goes; one object left by each op would be 2,000 every time.
    assert min(after - before for before, after in pairwise(counts)) < 1000, counts


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_little_is_left_for_the_garbage_collector(tmp_path: Path, save: str) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(20)))
    x = torch.ones(4, 8)
    with torch.no_grad(), dt.record(tmp_path / "t", model, save=save) as recording:
        model(x)
        recording.flush()
        gc.collect()
        gc.disable()
        try:
            before = len(gc.get_objects())
            for _ in range(20):
                model(x)
            added = len(gc.get_objects()) - before
        finally:
            gc.enable()
    # Of 41 records a call. A step has a few objects, and so has what the writer is at.
    assert added < 20 * {"meta": 40, "stats": 80}[save], added


def test_what_fails_in_it_is_told_and_the_program_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = Doubling(), torch.ones(4, 8)
    wanted = model(x)

    def name(self: Storages, g: Any) -> object:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(Storages, "name_geometry", name)
    with (
        pytest.warns(RuntimeWarning, match="planted"),
        torch.no_grad(),
        dt.record(tmp_path / "t", model, save="stats"),
    ):
        for _ in range(3):
            assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_threads_of_the_program(tmp_path: Path, save: str) -> None:
    model = Doubling()
    xs = [torch.full((4, 8), float(i)) for i in range(4)]
    wanted = [model(x).detach() for x in xs]
    found: dict[int, bool] = {}

    def work(i: int) -> None:
        with torch.no_grad():
            found[i] = all(torch.equal(model(xs[i]), wanted[i]) for _ in range(50))

    with dt.record(tmp_path / "t", model, save=save, on_error="raise"):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == dict.fromkeys(range(4), True)
    (rank,) = open_ranks(tmp_path / "t")
    names = [(record.thread, record.op) for record in rank.records() if record.kind == "op"]
    per_call = len({op for _, op in names})
    assert len(names) == 4 * 50 * per_call


def test_without_headers_of_python_the_modes_run_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(extension.sysconfig, "get_path", lambda name: str(tmp_path))
    build = build_of(extension.plan)
    assert build.find(wait=True) is None
    assert build.why_not == f"OSError: no headers of Python in {tmp_path}"
    monkeypatch.setattr(extension, "_THE_BUILD", build)
    assert native.compiled(MetaRecorder) is MetaRecorder
    assert extension.find() is None


def test_a_build_that_is_none_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int other() { return 0; }\n", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build = build_of(lambda: builds.Plan("extension", broken, ("-shared", "-fPIC")))
    assert build.find(wait=True) is None
    assert "PyInit_dispatch_trace_extension" in build.why_not


def test_modes_that_note_no_rows_have_no_compiled_way() -> None:
    assert native.compiled(OpRecorder) is OpRecorder
    assert issubclass(native.compiled(ValueRecorder), ValueRecorder)
