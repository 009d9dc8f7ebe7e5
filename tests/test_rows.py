"""Noted as rows or recorded one by one, ops and module calls say the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import execute_programs
import pytest
import test_observer
import torch
from execute_programs import Program, batch

import dispatch_trace as dt
from dispatch_trace import extension
from dispatch_trace.capture import native
from dispatch_trace.capture.rows import RowRecorder
from dispatch_trace.store.reader import RankReader, open_ranks

FUNCTIONS = {function.__name__: function for function in execute_programs.PROGRAMS}


UNWRITTEN = ("caches", "outs_and_lists", "resize_")  # read memory that nothing was written to
PROGRAMS = (
    *(
        "vmap",
        "func.grad",
        "jvp",
        "masks and indices",
        "resize_",
        "complex",
        "several random streams",
        "LSTM",
    ),
    *("inference mode", "backward", "reentrant checkpoint", "double backward"),
    "training with fused AdamW and batch norm",
)


@pytest.fixture(params=["compiled", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The modes with the way of an op compiled, and without."""
    if request.param == "plain":
        monkeypatch.setattr(native, "compiled", lambda mode: mode)
    elif not extension.find(wait=True):
        pytest.skip(f"nothing compiled: {extension.why_not()}")
    return str(request.param)


def plain(rank: RankReader, unwritten: bool) -> list[dict[str, Any]]:
    """Records without what may differ from run to run: numbers that were skipped, addresses, old memory."""
    records = list(rank.records())
    place = {record.seq: i for i, record in enumerate(records)}
    storages: dict[int, int] = {}
    found = []
    for record in records:
        fields = asdict(record) | {"seq": place[record.seq], "producer": place.get(record.producer, -1)}
        fields["opened"] = sum(seq < record.opened for seq in place)
        for slot in fields["slots"]:
            slot["alignment"] = 0
            slot["producers"] = [(place[seq], index) for seq, index in slot["producers"]]
            if slot["storage"] >= 0:
                slot["storage"] = storages.setdefault(slot["storage"], len(storages))
            if slot["content"] >= 0:
                content = rank.content(slot["content"])
                slot["content"] = ("" if unwritten else content.hash, content.has_data)
        for _, value in fields["args"]:
            if isinstance(value, dict) and "item" in value:
                value["item"] = [value["item"][0], place[value["item"][1]]]
        found.append(fields)
    return found


def compare(
    tmp_path: Path,
    run: Callable[..., Any],
    save: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    unwritten: bool = False,
) -> int:
    """Runs the same with and without rows: a rule for `save` leaves no one kind of values for all.

    Returns: how many rows were noted.
    """
    noted: list[str] = []
    move = RowRecorder.move_rows

    def watched(self: RowRecorder, put: Callable[..., None]) -> None:
        def count(rows: list[Any]) -> None:
            noted.extend(body.kind for body, *_ in rows)
            put(rows)

        move(self, count)

    monkeypatch.setattr(RowRecorder, "move_rows", watched)
    kept = []
    for name, option in (("rows", save), ("records", [(".*", save)])):
        run(tmp_path / name, save=option, params="tensors")
        (rank,) = open_ranks(tmp_path / name)
        assert rank.complete, rank.end
        kept.append(plain(rank, unwritten))
    rows, records = kept
    assert len(rows) == len(records)
    for row, record in zip(rows, records, strict=True):
        for field in ("source", "thread"):
            assert row[field] == record[field] or "test_rows" in str(row[field])
            row.pop(field), record.pop(field)
        assert row == record
    return noted.count("op")


@pytest.mark.usefixtures("way")
@pytest.mark.filterwarnings("ignore")  # torch's own deprecations
@pytest.mark.parametrize(
    ("name", "save"),
    [*((name, "tensors") for name in FUNCTIONS), ("caches", "stats"), ("training", "leaves")],
)
def test_functions_called_again(
    tmp_path: Path, name: str, save: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(path: Path, **options: Any) -> None:
        torch.manual_seed(0)
        model = Program(FUNCTIONS[name])
        with torch.no_grad(), dt.record(path, model, on_error="raise", **options):
            for _ in range(3):
                model(batch())

    with torch.no_grad():
        Program(FUNCTIONS[name])(batch())  # what is set up at the first call
    assert compare(tmp_path, run, save, monkeypatch, unwritten=name in UNWRITTEN) > 2


@pytest.mark.usefixtures("way")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(path: Path, **options: Any) -> None:
        make, runner, grad = test_observer.PROGRAMS[name]
        torch.manual_seed(0)
        model, args = make()
        torch.manual_seed(1)
        with torch.set_grad_enabled(grad), dt.record(path, model, on_error="raise", **options):
            for _ in range(2):
                runner(model, args)

    compare(tmp_path, run, "tensors", monkeypatch, unwritten=name in UNWRITTEN)


class Numbers(torch.nn.Module):
    """Whole numbers where the tensors of another call of the op stood."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ones = torch.ones(8)
        x = x * ones * ones * ones
        for number in range(64):
            x = x * number
        return x


@pytest.mark.parametrize("save", ["meta", "stats"])
def test_a_number_stands_for_no_tensor(tmp_path: Path, way: str, save: str) -> None:
    model = Numbers()
    with torch.no_grad(), dt.record(tmp_path / "t", model, save=save, on_error="raise"):
        model(torch.ones(4, 8))
    products = [r for r in open_ranks(tmp_path / "t")[0].records() if r.op == "aten.mul"]
    assert [dict(r.args)["other"] for r in products[3:]] == list(range(64))
