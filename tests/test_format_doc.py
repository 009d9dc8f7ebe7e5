"""docs/format.md is true: its example is what the writer writes, its program reads what the writer writes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from raw_records import content, op_record, open_rank, reserve_and_put

from dispatch_trace.schema import SCHEMA_VERSION, STATISTICS, Content, RawRecord, RawSlot, StepInfo
from dispatch_trace.store import files
from dispatch_trace.store.writer import TraceWriter

DOCUMENT = Path(__file__).parent.parent / "docs" / "format.md"


def block(name: str) -> str:
    """The fenced block after `<!-- example: name -->`."""
    match = re.search(
        rf"<!-- example: {re.escape(name)} -->\n```\w*\n(.*?)```", DOCUMENT.read_text(), re.DOTALL
    )
    assert match is not None, f"docs/format.md has no example {name}"
    return match[1]


def write_example(path: Path) -> None:
    """The trace that the document shows, with a clock that stands still."""
    with mock.patch.object(files, "time") as clock:
        clock.time.return_value = 1.0
        writer = TraceWriter(path, {"torch": "2.13.0"}, stats=("n", "min", "max"), sketch=False)
        writer.put_step(StepInfo(step=0, meta={"phase": "prefill"}))
        before = torch.tensor([[1.0, -2.0], [3.0, -4.0]])
        leaf = Content(before, keep_data=True, summarise=True, num_bytes=16)
        result = Content(before.relu(), keep_data=False, summarise=True, num_bytes=16)
        geometry: dict[str, Any] = {"dtype": "float32", "shape": (2, 2), "strides": (2, 1), "offset": 0}
        slots = [
            RawSlot("in.self", "in", storage=0, storage_bytes=16, content=leaf, leaf=True, **geometry),
            RawSlot("out", "out", storage=1, storage_bytes=16, content=result, **geometry),
        ]
        writer.put(
            RawRecord(
                0,
                "op",
                step=0,
                module="act",
                call=0,
                op="aten.relu",
                overload="aten.relu.default",
                args=[("self", {"ref": 0})],
                slots=slots,
                source=("model.py", 7),
            )
        )
        writer.close()


def run_documented_program(directory: Path, cwd: Path) -> list[str]:
    """Runs the document's program where nothing but msgpack, safetensors and the standard library is used."""
    watch = "\nassert not {'torch', 'dispatch_trace', 'numpy'} & set(sys.modules), 'more than promised'\n"
    (cwd / "program.py").write_text(block("program") + watch)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "program.py", str(directory)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


@pytest.mark.parametrize("name", ["index-00000.msgpack", "shard-00000.safetensors"])
def test_example_is_what_the_writer_writes(name: str, tmp_path: Path) -> None:
    write_example(tmp_path / "t")
    assert (tmp_path / "t" / "rank0" / name).read_bytes() == bytes.fromhex(block(name))


def test_documented_program_reads_the_documented_bytes(tmp_path: Path) -> None:
    rank = tmp_path / "rank0"
    rank.mkdir()
    for name in ("index-00000.msgpack", "shard-00000.safetensors"):
        (rank / name).write_bytes(bytes.fromhex(block(name)))
    printed = run_documented_program(rank, tmp_path)
    assert printed == block("output").splitlines()
    record = json.loads(printed[2])
    assert record["op"] == "aten.relu.default"
    assert bytes.fromhex(record["slots"][0]["data"]) == torch.tensor([1.0, -2.0, 3.0, -4.0]).numpy().tobytes()


def test_documented_program_reads_any_trace(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "t", {"torch": torch.__version__})
    for seq in range(50):
        tensor = torch.arange(seq, dtype=[torch.float32, torch.int64, torch.bfloat16][seq % 3])
        record = op_record(seq, content(tensor, keep_data=seq % 2 == 0), module=f"m.{seq % 7}")
        record.args = [("dim", seq), ("dims", (1, 2)), ("eps", 1e-5), ("none", None)]
        reserve_and_put(writer, record)
        if seq % 20 == 0:
            writer.flush()
    writer.close()
    reader = open_rank(tmp_path / "t")
    printed = [json.loads(line) for line in run_documented_program(reader.path, tmp_path)]
    assert printed[0] == {"header": {"torch": torch.__version__}}
    assert printed[-1] == {"records": 50, "dropped": {}}
    for shown, record in zip(printed[1:-1], reader.records(), strict=True):
        slot = shown["slots"][0]
        stored = reader.content(record.slots[0].content)
        assert (shown["seq"], shown["module"], shown["op"]) == (record.seq, record.module, record.overload)
        assert shown["args"] == [list(arg) for arg in record.args]
        assert slot["hash"] == stored.hash
        assert {k: v for k, v in stored.stats.items() if v is not None} == {
            k: v for k, v in slot.items() if k in STATISTICS
        }
        assert ("data" in slot) == stored.has_data
        if stored.has_data:
            tensor = reader.tensor(stored.id)
            assert bytes.fromhex(slot["data"]) == bytes(
                tensor.view(torch.uint8).tolist() if len(tensor) else []
            )


def test_document_names_every_column_and_frame() -> None:
    text = DOCUMENT.read_text()
    assert text.startswith(f"# The trace format, schema version {SCHEMA_VERSION}\n")
    source = (DOCUMENT.parent.parent / "dispatch_trace" / "store").glob("*.py")
    code = "\n".join(path.read_text() for path in source)
    for form in re.findall(r'"form": "(\w+)"', code):
        assert f"`{form}`" in text, f"encoding {form} is not documented"
    for kind in re.findall(r'"type": "(\w+)"', code):
        assert f"`{kind}`" in text, f"frame {kind} is not documented"
    for name in RawRecord.__slots__:
        if name not in ("slots", "source", "light", "random"):
            assert f"`{name}`" in text, f"record column {name} is not documented"


if __name__ == "__main__":  # writes the generated blocks of the document anew
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_example(root / "t")
        rank = root / "t" / "rank0"
        blocks = {}
        for name in ("index-00000.msgpack", "shard-00000.safetensors"):
            text = (rank / name).read_bytes().hex()
            blocks[name] = "".join(text[start : start + 100] + "\n" for start in range(0, len(text), 100))
        blocks["output"] = "\n".join(run_documented_program(rank, root)) + "\n"
        document = DOCUMENT.read_text()
        for name, content_of_block in blocks.items():
            pattern = rf"(<!-- example: {re.escape(name)} -->\n```\w*\n).*?```"
            document = re.sub(
                pattern, lambda m, c=content_of_block: m[1] + c + "```", document, flags=re.DOTALL
            )
        DOCUMENT.write_text(document)
