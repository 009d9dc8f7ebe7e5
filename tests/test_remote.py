"""Traces at URLs: in memory, and on a server that speaks S3."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import dispatch_trace as dt
from dispatch_trace.errors import CaptureError, NotATraceError, TraceExistsError, TraceFormatError
from dispatch_trace.store.remote import RemotePath, place

SERVER_KEYS = {
    "AWS_ACCESS_KEY_ID": "key",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    """A bucket on a server of our own."""
    pytest.importorskip("s3fs", exc_type=ImportError)
    server_module = pytest.importorskip("moto.server", exc_type=ImportError)
    server = server_module.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ.update(SERVER_KEYS, AWS_ENDPOINT_URL=f"http://{host}:{port}")
    try:
        bucket = place("s3://traces")
        bucket.mkdir()
        yield "s3://traces"
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(params=["memory", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    base = "memory://traces" if request.param == "memory" else request.getfixturevalue("s3_url")
    return f"{base}/{uuid.uuid4().hex}.trace"


def model(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    with torch.no_grad():
        made[2].weight.mul_(scale)
    return made


def record(path: str | Path, scale: float = 1.0, **options: object) -> None:
    torch.manual_seed(1)
    x = torch.randn(5, 8)
    with torch.no_grad(), dt.record(path, model(scale), save="tensors", **options) as recording:
        recorded = recording._models[""]
        recorded(x)
        recording.flush()
        recorded(x + 1)


def test_a_trace_is_what_it_would_be_on_this_machine(url: str, tmp_path: Path) -> None:
    record(url)
    record(tmp_path / "here.trace")
    there, here = dt.open(url), dt.open(tmp_path / "here.trace")
    assert there.complete
    assert there.verify() == []
    assert there.num_records == here.num_records
    for a, b in zip(there.records, here.records, strict=True):
        assert (a.module, a.op, a.n, a.step) == (b.module, b.op, b.n, b.step)
        for slot in a.slots:
            if slot.is_tensor and slot.content >= 0:
                assert a.hash(slot.name) == b.hash(slot.name)
                assert torch.equal(a.tensor(slot.name), b.tensor(slot.name))
                assert a.sketch(slot.name).tobytes() == b.sketch(slot.name).tobytes()
    assert str(there.path) == url


def test_alignment_reads_from_where_they_lie(url: str, tmp_path: Path) -> None:
    record(tmp_path / "here.trace")
    record(url, scale=1.05)
    found = dt.align(tmp_path / "here.trace", url)
    assert found.verdict == "diverged"
    assert (found.first.label, found.first.module) == ("parameter", "2")
    assert dt.align(url, url).verdict == "match"


def test_a_taken_url_is_left_alone_unless_told_otherwise(url: str) -> None:
    record(url)
    before = dt.open(url).header["start_time_s"]
    with pytest.raises(TraceExistsError, match="is not empty"):
        record(url)
    assert dt.open(url).header["start_time_s"] == before
    record(url, overwrite=True)
    assert dt.open(url).header["start_time_s"] > before
    assert dt.open(url).verify() == []


def test_damage_is_found(url: str) -> None:
    record(url)
    shard = next(file for file in place(f"{url}/rank0").iterdir() if file.name.startswith("shard"))
    with shard.open("rb") as file:
        data = bytearray(file.read())
    data[-5] ^= 255
    shard.write_whole(bytes(data))
    assert any("corrupt" in problem for problem in dt.open(url).verify())
    shard.unlink()
    trace = dt.open(url)
    assert not trace.complete
    with pytest.raises(TraceFormatError, match="missing"):
        next(trace.find(op="aten.addmm")).tensor()


def test_what_is_not_there_is_said(url: str) -> None:
    with pytest.raises(NotATraceError, match="does not exist"):
        dt.open(url)


def test_unknown_schemes_are_said() -> None:
    with pytest.raises(NotATraceError, match="cannot be reached: nowhere:// cannot be used"):
        dt.open("nowhere://a/b")
    with pytest.raises(CaptureError, match="cannot be used"):
        record("nowhere://a/b")


def test_paths_below_urls() -> None:
    path = place("s3://bucket/a/b.trace")
    assert isinstance(path, RemotePath)
    assert str(path / "rank0") == "s3://bucket/a/b.trace/rank0"
    assert str(path.parent) == os.fspath(path.parent) == "s3://bucket/a"
    assert (path.name, path.resolve()) == ("b.trace", path)
    assert len({path, place(str(path))}) == 1
    assert place("file:///tmp/x") == Path("/tmp/x")
    assert place("a/b") == Path("a/b")
