"""Alignment with other executors: whatever compares the tensors, what is said is the same."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import ROOT
from torch import nn

import dispatch_trace as dt
from dispatch_trace.align.ahead import compare_ahead, compare_batch
from dispatch_trace.align.lineup import pair_traces
from dispatch_trace.store.reader import open_ranks
from dispatch_trace.workers import LocalProcesses


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.norm = nn.LayerNorm(24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(self.norm(x)))
        return x


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("traces")
    paths = folder / "ref.trace", folder / "target.trace"
    for path in paths:
        torch.manual_seed(0)
        model, x = Net(), torch.randn(6, 24)
        if path == paths[1]:
            model.norm.eps = 0.1
        with torch.no_grad(), dt.record(path, model, save="tensors"):
            model(x)
    return paths


def without_paths(alignment: dt.Alignment) -> str:
    return json.dumps(alignment.to_json(), sort_keys=True)


def check(traces: tuple[Path, Path], executor: Executor) -> None:
    """Every difference, and the whole of what is said, is that of comparing one by one."""
    ref, target = (open_ranks(path)[0] for path in traces)
    alone, spread = pair_traces(ref, target), pair_traces(ref, target)
    progress: list[tuple[int, int]] = []
    num_compared = compare_ahead(spread, executor, lambda *state: progress.append(state))
    assert num_compared > 20
    assert progress[-1][0] == progress[-1][1] > 0
    known = dict(spread.comparer._known)
    assert len(known) == num_compared
    for (a, b), found in known.items():
        assert found == alone.comparer.compare(a, b)
    assert without_paths(dt.align(*traces, executor=executor)) == without_paths(dt.align(*traces))


def check_replay(traces: tuple[Path, Path], executor: Executor) -> None:
    alignment = dt.align(*traces)
    alone = alignment.replay()
    assert alignment.replay(executor=executor) == alone
    assert len(alone) > 10
    assert {one.pair.target.op for one in alone if one.pair.target} >= {"aten.addmm", "aten.gelu"}
    for one in alone:
        assert one.why == ""
        assert one.ref_error is not None and one.ref_error < 1e-6, "rounding alone, on its own inputs"
        assert one.target_error is not None and one.target_error < 1e-6
        assert one.ratio is not None


def test_threads(traces: tuple[Path, Path]) -> None:
    with ThreadPoolExecutor(2) as executor:
        check(traces, executor)


def test_local_processes(traces: tuple[Path, Path]) -> None:
    with LocalProcesses(2) as executor:
        check(traces, executor)


@pytest.mark.filterwarnings("ignore")  # of the engine's own: ports in use, slow starts
def test_dask_as_scale_md_has_it(traces: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.chdir(traces[0].parent)
    (block,) = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs" / "scale.md").read_text(), re.M | re.S)
    block += "    pids = client.run(os.getpid)\n    check(traces, executor)\n"
    names = {"traces": traces, "check": check, "os": os}
    exec(compile(block, "scale.md", "exec"), names)
    assert len({*names["pids"].values(), os.getpid()}) == 3
    alignment = dt.align(*traces)
    assert names["alignment"].verdict == alignment.verdict
    # Paths are as they were given; all else is equal.
    assert [replace(row, pair=None) for row in names["rows"]] == [
        replace(row, pair=None) for row in alignment.replay()
    ]


def test_replay_in_local_processes(traces: tuple[Path, Path]) -> None:
    with LocalProcesses(2) as executor:
        check_replay(traces, executor)


def test_replay_says_what_could_not_be_run(traces: tuple[Path, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Net(), torch.randn(6, 24)
    with torch.no_grad(), dt.record(tmp_path / "stats.trace", model):
        model(x)
    found = dt.align(tmp_path / "stats.trace", traces[1]).replay()
    assert found
    assert all(one.ref_error is None and one.why.startswith("reference: ") for one in found)
    assert all(one.target_error is not None and one.ratio is None for one in found)


def test_what_a_worker_does_not_find_is_left_to_the_caller(traces: tuple[Path, Path]) -> None:
    ref, target = ((str(path / "rank0"), 0) for path in traces)
    assert compare_batch(ref, target, [((0, "00" * 16), (0, "00" * 16))]) == [None]
    assert compare_batch((str(traces[0] / "rank7"), 7), target, [((0, "a"), (0, "b"))]) == [None]


def test_workers_answer_and_pass_errors_on(capfd: pytest.CaptureFixture[str]) -> None:
    with LocalProcesses(1) as executor:
        assert executor.submit(divmod, 7, 2).result() == (3, 1)
        with pytest.raises(ZeroDivisionError):
            executor.submit(divmod, 7, 0).result()
        executor.submit(print, "to people").result()
        assert list(executor.map(abs, [-1, 2])) == [1, 2]
        with pytest.raises(RuntimeError, match="a worker process ended with status 3"):
            executor.submit(os._exit, 3).result()
        assert executor.submit(abs, -4).result() == 4
    assert "to people" in capfd.readouterr().err
