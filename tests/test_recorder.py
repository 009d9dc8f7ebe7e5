"""`dt.record`: its options, its errors, and that it puts everything back."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import dispatch_trace as dt
from dispatch_trace.errors import (
    CaptureError,
    ConfigError,
    NoMatchError,
    PatternError,
    TraceExistsError,
)
from dispatch_trace.store.reader import open_ranks


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


X = torch.ones(1, 4)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"level": "ops"}, ConfigError, "level='ops': expected one of 'op', 'module'"),
        ({"save": "all"}, ConfigError, "save='all'"),
        ({"level": "module", "ops": "aten.mm"}, ConfigError, "no op is recorded there"),
        ({"level": "module", "save": "leaves"}, ConfigError, "leaves are found by the ops"),
        ({"ops": "("}, PatternError, "is no regular expression"),
        ({"select": "layers.3-1"}, PatternError, "3-1"),
        ({"stats": ["median"]}, ConfigError, "'median'"),
        ({"steps": "all"}, ConfigError, "steps='all'"),
        ({"steps": -1}, ConfigError, "numbered from 0"),
        ({"params": "some"}, ConfigError, "params='some'"),
        ({"max_pending_bytes": 0}, ConfigError, "max_pending_bytes=0"),
        ({"meta": {"a": object()}}, ConfigError, "is no plain value"),
        ({"on_error": "ignore"}, ConfigError, "on_error='ignore'"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(
    tmp_path: Any, model: nn.Module, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=None) as raised, dt.record(tmp_path / "t", model, **options):
        model(X)
    assert says in str(raised.value)
    assert not (tmp_path / "t").exists()


def test_a_pattern_that_matches_nothing_names_the_closest(tmp_path: Any, model: nn.Module) -> None:
    with pytest.raises(NoMatchError, match="matched 0 of"), dt.record(tmp_path / "t", model, select="9"):
        model(X)
    assert not (tmp_path / "t").exists()


def test_a_model_that_is_none_says_what_came(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="got function"):
        dt.record(tmp_path / "t", lambda x: x)  # type: ignore[arg-type]


def test_an_existing_trace_is_not_overwritten_unasked(tmp_path: Any, model: nn.Module) -> None:
    for overwrite in (False, True):
        with dt.record(tmp_path / "t", model, overwrite=overwrite):
            model(X)
    with pytest.raises(TraceExistsError, match="overwrite"), dt.record(tmp_path / "t", model):
        model(X)
    assert open_ranks(tmp_path / "t")[0].verify() == []


def test_overwrite_leaves_other_ranks_alone(
    tmp_path: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in ("0", "1", "0"):
        monkeypatch.setenv("RANK", rank)
        with dt.record(tmp_path / "t", model, overwrite=True):
            model(X)
    assert [r.rank for r in open_ranks(tmp_path / "t")] == [0, 1]


@pytest.mark.parametrize(
    ("call", "options", "says"),
    [
        (False, {}, "the model was never called"),
        (True, {"steps": 7}, "no step matched steps=7"),
    ],
)
def test_an_empty_recording_is_an_error(
    tmp_path: Any, model: nn.Module, call: bool, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(CaptureError, match=says), dt.record(tmp_path / "t", model, **options):
        if call:
            model(X)


def test_the_programs_error_wins_over_an_empty_recording(tmp_path: Any, model: nn.Module) -> None:
    with pytest.raises(ZeroDivisionError), dt.record(tmp_path / "t", model):
        _ = 1 / 0


def test_everything_is_put_back(tmp_path: Any, model: nn.Module) -> None:
    before = (nn.Module.__call__, nn.Linear.forward, sys.getrecursionlimit())
    with dt.record(tmp_path / "t", model):
        assert nn.Module.__call__ is not before[0]
        model(X)
    assert (nn.Module.__call__, nn.Linear.forward, sys.getrecursionlimit()) == before
    assert torch._C._len_torch_dispatch_stack() == 0


def test_recordings_nest(tmp_path: Any, model: nn.Module) -> None:
    with torch.no_grad(), dt.record(tmp_path / "a", model), dt.record(tmp_path / "b", model, level="module"):
        want = model(X)
    assert torch.equal(want, model(X))
    kinds = [[r.kind for r in open_ranks(tmp_path / n)[0].records()] for n in "ab"]
    assert kinds[0].count("module") == kinds[1].count("module") == 4
    assert "op" in kinds[0] and "op" not in kinds[1]


def test_a_dict_of_models_keeps_them_apart(tmp_path: Any) -> None:
    models = {"text": nn.Linear(4, 4), "vision": nn.Linear(4, 4)}
    with torch.no_grad(), dt.record(tmp_path / "t", models):
        models["text"](X)
        models["vision"](X)
        models["text"](X)
    (rank,) = open_ranks(tmp_path / "t")
    assert [(r.model, r.step) for r in rank.records() if r.kind == "module"] == [
        ("text", 0),
        ("vision", 0),
        ("text", 1),
    ]


def test_save_rules_let_the_last_match_win(tmp_path: Any, model: nn.Module) -> None:
    with (
        torch.no_grad(),
        dt.record(tmp_path / "t", model, save=[(".*", "stats"), ("2", "tensors")], params="none"),
    ):
        model(X)
    (rank,) = open_ranks(tmp_path / "t")
    for record in rank.records():
        for slot in record.slots:
            if slot.role == "out" and slot.content >= 0 and record.kind == "op":
                assert rank.content(slot.content).has_data == (record.module == "2"), record.module


def test_parameters_are_recorded_once_and_again_when_changed(tmp_path: Any, model: nn.Module) -> None:
    with torch.no_grad(), dt.record(tmp_path / "t", model, save="tensors"):
        model(X)
        model(X)
        model[0].weight.mul_(2)
        model(X)
    (rank,) = open_ranks(tmp_path / "t")
    records = [(r.step, r.module, r.name) for r in rank.records() if r.kind == "param"]
    assert records == [
        (0, "0", "weight"),
        (0, "0", "bias"),
        (0, "2", "weight"),
        (0, "2", "bias"),
        (2, "0", "weight"),
    ]


def test_the_header_says_how_the_run_was_made(tmp_path: Any, model: nn.Module) -> None:
    with torch.no_grad(), dt.record(tmp_path / "t", model, meta={"commit": "abc"}):
        model(X)
    header = open_ranks(tmp_path / "t")[0].header
    assert header["torch_version"] == torch.__version__
    assert header["grad_enabled"] is False and header["num_threads"] == torch.get_num_threads()
    assert header["meta"] == {"commit": "abc"}
    row = next(m for m in header["modules"] if m["path"] == "0")
    assert row["class"].endswith("Linear")
    assert row["parameters"][0] == {"name": "weight", "shape": [4, 4], "dtype": "float32", "buffer": False}


def test_a_fault_of_the_recorder_leaves_the_model_alone(
    tmp_path: Any, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dispatch_trace.capture.snapshot import Storages

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("planted")

    want = model(X)
    monkeypatch.setattr(Storages, "produced", broken)
    with pytest.warns(RuntimeWarning, match="planted") as warned, dt.record(tmp_path / "warn", model):
        got = model(X)
    assert torch.equal(want, got)
    assert len([w for w in warned if "planted" in str(w.message)]) == 1
    assert not open_ranks(tmp_path / "warn")[0].complete
    with (
        pytest.raises(CaptureError, match="planted"),
        dt.record(tmp_path / "raise", model, on_error="raise"),
    ):
        assert torch.equal(model(X), want)


def test_check_observer_compares_bits() -> None:
    class Rude(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch._C._len_torch_dispatch_stack()

    assert dt.check_observer(nn.Linear(4, 4), X)
    assert not dt.check_observer(Rude(), X), "a model that looks for the recorder is caught"


def test_inline_captures_are_named_and_counted(tmp_path: Any) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = dt.capture_tensor("half", x * 0.5)
            return x

    assert dt.capture_tensor("nothing", X) is X
    with dt.record(tmp_path / "t", Net(), save="tensors") as rec:
        dt.capture_tensor("outside", X)
        Net.__call__(rec._models[""], X)
    (rank,) = open_ranks(tmp_path / "t")
    inline = [(r.name, r.n, r.module) for r in rank.records() if r.kind == "inline"]
    assert inline == [("half", 0, ""), ("half", 1, "")]


def test_recording_off_imports_and_installs_nothing() -> None:
    code = (
        "import sys, torch, dispatch_trace as dt\n"
        "dt.capture_tensor('a', torch.ones(1))\n"
        "assert torch.nn.Module.__call__.__name__ == '_wrapped_call_impl'\n"
        "assert not torch.nn.modules.module._global_forward_hooks\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
