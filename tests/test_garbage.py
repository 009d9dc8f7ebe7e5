"""The search for garbage keeps its intervals, whatever aligns."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import dispatch_trace as dt
from dispatch_trace.garbage import searched_seldom


@pytest.fixture(autouse=True)
def _restored():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_restores_what_was_set_once_the_last_one_leaves():
    gc.set_threshold(500, 7, 8)
    first, second = searched_seldom(), searched_seldom()
    first.__enter__()
    within = gc.get_threshold()
    second.__enter__()
    first.__exit__(None, None, None)
    assert gc.get_threshold() == within != (500, 7, 8)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (500, 7, 8)


@pytest.mark.parametrize("given", [(0, 10, 10), (50_000, 5, 5)])
def test_leaves_intervals_that_are_as_long(given: tuple[int, int, int]):
    gc.set_threshold(*given)
    with searched_seldom():
        assert gc.get_threshold() == given
    assert gc.get_threshold() == given


def test_an_alignment_that_fails_restores_them_too(tmp_path: Path):
    gc.set_threshold(600, 9, 9)
    with pytest.raises(dt.NotATraceError):
        dt.align(tmp_path / "none", tmp_path / "none")
    assert gc.get_threshold() == (600, 9, 9)
