"""Bad input, end to end: each gives its message and status, never a traceback, never a match."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import msgpack
import pytest
from command_line import dispatch_trace, record_mlp, run_python

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "ref.trace"
    record_mlp(path)
    return path


@pytest.fixture
def broken(sound: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(sound, tmp_path / "broken.trace"))


def refused(result: subprocess.CompletedProcess[str], error: str) -> str:
    """Checks that the command ended with status 2 and one message of this error, and returns it."""
    assert "Traceback" not in result.stderr
    assert result.returncode == 2, result.stdout + result.stderr
    assert result.stderr.startswith(f"{error}: "), result.stderr
    assert result.stdout == ""
    return result.stderr


def not_a_match(result: subprocess.CompletedProcess[str]) -> None:
    """Checks that the command told a verdict, and that it is not `match`."""
    assert "Traceback" not in result.stderr
    assert result.returncode in (1, 3), result.stdout + result.stderr
    assert result.stdout.split()[0] == {1: "DIVERGED", 3: "INCONCLUSIVE"}[result.returncode]


# --- no trace at all --------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["align", "show", "verify"])
def test_a_path_that_is_no_trace(verb: str, sound: Path, tmp_path: Path) -> None:
    other = [sound] if verb == "align" else []
    missing = tmp_path / "missing.trace"
    assert "does not exist" in refused(dispatch_trace(verb, *other, missing), "NotATraceError")
    file = tmp_path / "file"
    file.write_text("no trace")
    assert "is a file" in refused(dispatch_trace(verb, *other, file), "NotATraceError")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds no rank directory" in refused(dispatch_trace(verb, *other, empty), "NotATraceError")
    (empty / "rank0").mkdir()
    (empty / "rank0" / "notes.txt").write_text("no index")
    assert "holds no rank directory" in refused(dispatch_trace(verb, *other, empty), "NotATraceError")


def test_the_reference_is_checked_as_the_target_is(sound: Path, tmp_path: Path) -> None:
    refused(dispatch_trace("align", tmp_path / "missing.trace", sound), "NotATraceError")


def test_an_index_of_other_bytes(broken: Path, sound: Path) -> None:
    (broken / "rank0" / "index-00000.msgpack").write_bytes(
        b"PK\x03\x04 this is a zip file, not an index" * 40
    )
    message = refused(dispatch_trace("show", broken), "TraceFormatError")
    assert "no readable header" in message
    refused(dispatch_trace("align", sound, broken), "TraceFormatError")


def test_an_empty_index(broken: Path) -> None:
    (broken / "rank0" / "index-00000.msgpack").write_bytes(b"")
    refused(dispatch_trace("show", broken), "TraceFormatError")


def test_a_newer_schema(broken: Path, sound: Path) -> None:
    import zlib

    index = broken / "rank0" / "index-00000.msgpack"
    with index.open("rb") as file:
        frames = list(msgpack.Unpacker(file, max_buffer_size=1 << 30))
    header = msgpack.unpackb(frames[0][1], strict_map_key=False)
    assert header["type"] == "header"
    header["schema_version"] += 1
    payload = msgpack.packb(header)
    frames[0] = [zlib.crc32(payload), payload]
    index.write_bytes(b"".join(msgpack.packb(frame) for frame in frames))
    message = refused(dispatch_trace("align", sound, broken), "SchemaVersionError")
    assert "Upgrade dispatch_trace" in message
    refused(dispatch_trace("show", broken), "SchemaVersionError")
    refused(dispatch_trace("verify", broken), "SchemaVersionError")


# --- a trace that is not whole ----------------------------------------------------------------------


def test_a_truncated_index_is_readable_and_never_a_match(broken: Path, sound: Path) -> None:
    index = broken / "rank0" / "index-00000.msgpack"
    index.write_bytes(index.read_bytes()[:-7])
    shown = dispatch_trace("show", broken)
    assert shown.returncode == 0
    assert "NOT CLOSED" in shown.stdout.splitlines()[0]
    verified = dispatch_trace("verify", broken)
    assert verified.returncode == 2
    assert "NOT SOUND" in verified.stdout and "no end frame" in verified.stdout
    not_a_match(dispatch_trace("align", sound, broken))
    not_a_match(dispatch_trace("align", broken, sound))
    not_a_match(dispatch_trace("align", broken, broken))


def test_an_index_that_ends_after_its_header_is_never_a_match(broken: Path, sound: Path) -> None:
    index = broken / "rank0" / "index-00000.msgpack"
    with index.open("rb") as file:
        header = next(iter(msgpack.Unpacker(file, max_buffer_size=1 << 30)))
    index.write_bytes(msgpack.packb(header))
    assert "0 records" in dispatch_trace("show", broken).stdout
    not_a_match(dispatch_trace("align", sound, broken))
    not_a_match(dispatch_trace("align", broken, broken))


def test_a_missing_shard(broken: Path, sound: Path) -> None:
    for shard in (broken / "rank0").glob("shard-*.safetensors"):
        shard.unlink()
    shown = dispatch_trace("show", broken)
    assert shown.returncode == 0, shown.stderr
    assert "shard-00000.safetensors is missing" in shown.stdout
    verified = dispatch_trace("verify", broken)
    assert verified.returncode == 2
    assert "shard-00000.safetensors is missing" in verified.stdout
    aligned = dispatch_trace("align", sound, broken)
    assert aligned.returncode in (2, 3), aligned.stdout
    assert "shard-00000.safetensors" in aligned.stdout + aligned.stderr


def test_a_shard_whose_bytes_do_not_match(broken: Path) -> None:
    shard = broken / "rank0" / "shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 0x40
    shard.write_bytes(data)
    verified = dispatch_trace("verify", broken)
    assert verified.returncode == 2
    assert "shard-00000.safetensors is corrupt" in verified.stdout
    assert "Traceback" not in verified.stderr


def test_a_frame_whose_bytes_do_not_match(broken: Path, sound: Path) -> None:
    index = broken / "rank0" / "index-00000.msgpack"
    data = bytearray(index.read_bytes())
    data[len(data) * 3 // 4] ^= 0x40
    index.write_bytes(data)
    assert dispatch_trace("verify", broken).returncode == 2
    aligned = dispatch_trace("align", sound, broken)
    assert aligned.returncode in (1, 2, 3), aligned.stdout
    assert "Traceback" not in aligned.stderr


# --- sound traces that do not belong together -------------------------------------------------------


def test_a_trace_compared_with_itself_matches_with_a_notice(sound: Path) -> None:
    result = dispatch_trace("align", sound, sound)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.startswith("MATCH")
    assert "itself" in result.stdout or "same trace" in result.stdout


def test_two_traces_with_nothing_in_common(sound: Path, tmp_path: Path) -> None:
    script = tmp_path / "other.py"
    script.write_text(
        "import sys, torch, dispatch_trace as dt\n"
        "model = torch.nn.Conv1d(3, 5, 2)\n"
        "with torch.no_grad(), dt.record(sys.argv[1], model, save='tensors'):\n"
        "    model(torch.randn(2, 3, 9))\n"
    )
    other = tmp_path / "other.trace"
    assert run_python(str(script), str(other)).returncode == 0
    not_a_match(dispatch_trace("align", sound, other))
    not_a_match(dispatch_trace("align", other, sound))


def test_a_rename_that_matches_nothing(sound: Path) -> None:
    message = refused(dispatch_trace("align", sound, sound, "--rename", "fd0=fc0"), "RenameError")
    assert "fd0" in message


def test_a_step_that_is_not_there(sound: Path) -> None:
    result = dispatch_trace("align", sound, sound, "--step", "7")
    assert result.returncode in (2, 3), result.stdout
    assert "Traceback" not in result.stderr


# --- output -----------------------------------------------------------------------------------------


def test_a_report_that_cannot_be_written(sound: Path, tmp_path: Path) -> None:
    message = refused(dispatch_trace("align", sound, sound, "--json", "/no/such/folder/x"), "ConfigError")
    assert "cannot be written" in message


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_report_on_a_full_disk(sound: Path) -> None:
    result = dispatch_trace("align", sound, sound, "--json", "/dev/full")
    assert result.returncode == 2
    assert "No space left on device" in result.stderr
    assert "Traceback" not in result.stderr


def test_recording_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Also for root, whom permissions do not stop: a path below a file."""
    (tmp_path / "file").write_text("")
    script = _recording_script(tmp_path)
    result = run_python(str(script), str(tmp_path / "file" / "x.trace"))
    assert result.returncode == 7, result.stderr
    assert "CaptureError" in result.stdout and "file" in result.stdout


def test_a_full_disk_leaves_the_program_alone_and_never_a_match(tmp_path: Path) -> None:
    script = _recording_script(tmp_path)
    whole, cut = tmp_path / "whole.trace", tmp_path / "cut.trace"
    first = run_python(str(script), str(whole))
    assert first.returncode == 0, first.stderr
    second = run_python(str(script), str(cut), "200000")
    assert second.returncode == 0, second.stderr
    assert second.stdout.splitlines()[-1] == first.stdout.splitlines()[-1], "the same results"
    assert "incomplete" in second.stdout and "incomplete" not in first.stdout, "warned once"
    assert second.stdout.count("warned") == 1
    assert "NOT C" in dispatch_trace("show", cut).stdout.splitlines()[0]
    not_a_match(dispatch_trace("align", whole, cut))


def _recording_script(folder: Path) -> Path:
    """`script.py PATH [BYTES]` records a model, with files limited to BYTES; status 7 on CaptureError."""
    script = folder / "script.py"
    script.write_text(
        "import hashlib, resource, sys, warnings, torch, dispatch_trace as dt\n"
        "if len(sys.argv) > 2:\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(8)])\n"
        "x = torch.randn(64, 128)\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    try:\n"
        "        with torch.no_grad(), dt.record(sys.argv[1], model, save='tensors'):\n"
        "            y = model(x)\n"
        "    except dt.CaptureError as error:\n"
        "        print('CaptureError', error)\n"
        "        sys.exit(7)\n"
        "for warning in caught:\n"
        "    print('warned', warning.message)\n"
        "print(hashlib.sha256(y.numpy().tobytes()).hexdigest())\n"
    )
    return script
