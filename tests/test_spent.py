"""Snapshots are given up in the thread whose tensors they share memory with."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import dispatch_trace as dt
from dispatch_trace.schema import Content
from dispatch_trace.store.batch import ContentTaker
from dispatch_trace.store.spent import Spent


class Told:
    """Says which thread gave it up."""

    def __init__(self, threads: list[int]) -> None:
        weakref.finalize(self, lambda: threads.append(threading.get_ident()))


def test_what_is_held_still_is_not_dropped() -> None:
    spent, threads = Spent(), list[int]()
    spent.add([Told(threads), Told(threads)])
    spent.drop()
    assert threads == []  # the worker has not said that it holds none of it
    spent.free()
    spent.add([Told(threads)])
    spent.drop()
    assert len(threads) == 2
    spent.free()
    spent.drop()
    assert len(threads) == 3


def test_the_worker_gives_nothing_up() -> None:
    spent, threads = Spent(), list[int]()

    def work() -> None:
        for _ in range(100):
            spent.add([Told(threads)])
            spent.free()

    worker = threading.Thread(target=work)
    worker.start()
    while worker.is_alive():
        spent.drop()
    spent.drop()
    assert threads == [threading.get_ident()] * 100


@pytest.mark.parametrize("save", ["stats", "tensors", [(".*", "stats")]])
def test_snapshots_of_a_recording_go_in_the_programs_thread(
    tmp_path: Path, save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    taken: list[int] = []
    take = ContentTaker.take

    def watched(self: ContentTaker, content: Content, *args: Any) -> bool:
        if isinstance(content.tensor, torch.Tensor):
            weakref.finalize(content.tensor, lambda: threads.append(threading.get_ident()))
            taken.append(threading.get_ident())
        return take(self, content, *args)

    monkeypatch.setattr(ContentTaker, "take", watched)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    with torch.no_grad(), dt.record(tmp_path / "t", model, save=save):
        for i in range(20):
            model(torch.full((4, 8), float(i)))
    assert len(threads) == len(taken) > 50
    assert set(threads) == {threading.get_ident()}
    assert threading.get_ident() not in taken


def test_other_threads_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[bool] = []
    take = ContentTaker.take

    def watched(self: ContentTaker, content: Content, *args: Any) -> bool:
        if isinstance(content.tensor, torch.Tensor):
            shared.append(torch._C._is_cow_tensor(content.tensor))  # type: ignore[attr-defined]
        return take(self, content, *args)

    monkeypatch.setattr(ContentTaker, "take", watched)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())

    def run() -> None:
        with torch.no_grad():
            for i in range(5):
                model(torch.full((4, 8), float(i)))

    with dt.record(tmp_path / "t", model, save="stats") as recording:
        run()
        recording.flush()
        assert any(shared)
        shared.clear()
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert shared and not any(shared)
