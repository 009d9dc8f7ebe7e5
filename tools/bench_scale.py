#!/usr/bin/env python3
"""What reading and aligning cost as traces grow: time and memory, each in a process of its own.

    python tools/bench_scale.py [--records N ...] [--align N ...] [--kinds KIND ...] [--keep DIR]

The traces are those of a small transformer that is called again and again. One step is recorded; the records
of all further steps go through the writer like the recorder's own: with sites, numbers, storages and
producers of their own, and with values that differ from step to step and by rounding from trace to trace.
Rows:

* open: `dispatch_trace.open`;
* same: a stats-only `align` of two such traces, and whether it imported torch;
* once, later: the same, with a product that is off by 5 % in a step in the middle, or in all from there on;
* decode: the same of a recorded decoder that reads a cache of keys and values, longer with each step;
* single: of a model that calls one block again and again, all in one step;
* plain: of a program without modules, which has no steps;
* train: of recorded steps of a training, forward, backward and optimiser;
* clip: the same of two such layers and AdamW, with clipped gradients: steps are longer, and fewer;
* decode-fault, single-fault, plain-fault, train-fault, clip-fault: with a product that is off by 5 %, in the
  middle;
* read, compare: for two traces with so many MB of tensors each, what it takes to read all bytes of both from
  mapped files, and to compare them, each on all cores; minima of several runs, in turns.

Imports are part of the time of all but the last. `--keep` leaves the traces in a folder, and takes those that
are there.

The JSON is a list of {row, records, seconds, cpu_s, peak_mb, torch, verdict, share}; of read and compare
{row, mb, dtype, seconds, cpu_s}.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from bench_model import Transformer  # noqa: E402

import dispatch_trace as dt  # noqa: E402
from dispatch_trace.align.ahead import compare_ahead  # noqa: E402
from dispatch_trace.align.lineup import pair_traces  # noqa: E402
from dispatch_trace.align.pairs import Pairing  # noqa: E402
from dispatch_trace.schema import Content, RawRecord, RawSlot, StepInfo, StoredRecord  # noqa: E402
from dispatch_trace.store.writer import TraceWriter  # noqa: E402

_PROGRAM = """
import json, sys, time
import dispatch_trace as dt
work = {"open": lambda path: dt.open(path), "align": lambda *paths: dt.align(*paths)}[sys.argv[1]]
start, began = time.perf_counter(), time.process_time()
found = work(*sys.argv[2:])
row = {"seconds": time.perf_counter() - start, "cpu_s": time.process_time() - began}
if sys.argv[1] == "open":
    row["records"] = found.num_records
else:
    row |= {"records": len(found.pairs), "verdict": found.verdict, "share": found.coverage["share"]}
with open("/proc/self/status") as file:
    row["peak_mb"] = next(int(line.split()[1]) / 1024 for line in file if line.startswith("VmHWM"))
print(json.dumps(row | {"torch": "torch" in sys.modules}))
"""

_COMPARE = """
import json, sys
sys.path[:0] = ["tools"]
from bench_scale import compare
print(json.dumps(compare(*sys.argv[1:])))
"""


class Rounded(TorchDispatchMode):
    """Beneath a recorder: products come out off by rounding, and one, by number, by 5 %."""

    def __init__(self, *, noise: float, wrong: int = 0) -> None:
        super().__init__()
        self._noise = noise
        self._wrong = wrong
        self._num_products = 0
        self._generator = torch.Generator().manual_seed(1)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default):
            self._num_products += 1
            out = out * (1.05 if self._num_products == self._wrong else 1.0)
            if self._noise:
                out = out + self._noise * 2**-24 * out * torch.randn(out.shape, generator=self._generator)
        return out


@dataclass(frozen=True, slots=True)
class Step:
    """What one step of a decoder is, with the parameters before it.

    Attributes:
      header: of the trace it was recorded to.
      records: in order.
      values: by content.
    """

    header: dict[str, Any]
    records: list[StoredRecord]
    values: dict[int, torch.Tensor]

    @classmethod
    def recorded(cls, *, wrong: bool = False) -> Step:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as folder, torch.no_grad(), Rounded(noise=0.0, wrong=3 * wrong):
            model, given = Transformer(2, 16, 2).eval(), torch.randint(0, 1000, (1, 4))
            with dt.record(Path(folder) / "step", model, save="tensors"):
                model(given)
            reader = dt.open(Path(folder) / "step").ranks[0]
            values = {content.id: reader.tensor(content.id) for content in reader.contents()}
            header = {key: value for key, value in reader.header.items() if key != "type"}
            header["options"] = {**header["options"], "save": "stats"}
            return cls(header, list(reader.records()), values)

    @property
    def params(self) -> list[StoredRecord]:
        return [record for record in self.records if record.kind == "param"]


def build(path: Path, num_records: int, *, noise: float = 0.0, wrong: str = "") -> None:
    """Writes a stats-only trace of at least so many records, of steps that repeat.

    Args:
      noise: relative size of what is added to each value, in rounding errors.
      wrong: where a product is off by 5 %, and all that comes of it: in no step, "once" or "later", which is
        in the step in the middle or in all from there on.
    """
    right, other = Step.recorded(), Step.recorded(wrong=True)
    params = {record.seq for record in right.params}
    shared = {slot.content for record in right.params for slot in record.slots}
    fixed = {slot.storage for record in right.params for slot in record.slots}
    shift = 1 + max(record.seq for record in right.records)
    storages = 1 + max(slot.storage for record in right.records for slot in record.slots)
    generator = torch.Generator().manual_seed(1)
    writer = TraceWriter(path, right.header)
    written = number = num_wrong = 0
    known: dict[int, Content] = {}
    while written < num_records:
        is_wrong = 2 * written >= num_records and (wrong == "later" or (wrong == "once" and not num_wrong))
        num_wrong += is_wrong
        step, contents = other if is_wrong else right, dict(known)
        for record in step.records:
            if number and record.seq in params:
                continue
            slots = []
            for old in record.slots:
                slot = RawSlot(old.name, old.role)
                for name in RawSlot.__slots__:
                    if name not in ("content", "producers"):
                        setattr(slot, name, getattr(old, name))
                if old.storage >= 0 and old.storage not in fixed:
                    slot.storage = old.storage + number * storages
                slot.producers = tuple(
                    (seq if seq in params else seq + number * shift, index) for seq, index in old.producers
                )
                if old.content >= 0:
                    content = contents.get(old.content)
                    if content is None:
                        value = step.values[old.content]
                        if old.content not in shared and value.is_floating_point():
                            value = value * (1 + 0.01 * number)
                            value += noise * 2**-24 * value * torch.randn(value.shape, generator=generator)
                        num_bytes = value.numel() * value.element_size()
                        content = Content(value, keep_data=False, summarise=True, num_bytes=num_bytes)
                        writer.reserve(num_bytes)
                        contents[old.content] = content
                        if old.content in shared:
                            known[old.content] = content
                    slot.content = content
                slots.append(slot)
            fields: dict[str, Any] = {
                name: copy.copy(getattr(record, name))
                for name in RawRecord.__slots__
                if name not in ("seq", "kind", "slots", "step", "args", "producer", "opened")
            }
            writer.put(
                RawRecord(
                    record.seq + number * shift,
                    record.kind,
                    step=number,
                    args=list(record.args),
                    slots=slots,
                    producer=record.producer + number * shift if record.producer >= 0 else -1,
                    opened=record.opened + number * shift,
                    **fields,
                )
            )
            written += 1
        writer.put_step(StepInfo(step=number, meta={}))
        number += 1
    writer.close()


class Decoder(torch.nn.Module):
    """Reads a token at a time, and all keys and values of those before: shapes grow from step to step."""

    def __init__(self, d: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(100, d), torch.nn.Linear(d, 100)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(d, 3 * d) for _ in range(layers))
        self.up = torch.nn.ModuleList(torch.nn.Linear(d, 4 * d) for _ in range(layers))
        self.down = torch.nn.ModuleList(torch.nn.Linear(4 * d, d) for _ in range(layers))
        self.norm = torch.nn.ModuleList(torch.nn.LayerNorm(d) for _ in range(layers))
        self.cache: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * layers

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer, cached in enumerate(self.cache):
            q, k, v = self.qkv[layer](self.norm[layer](x)).chunk(3, -1)
            if cached is not None:
                k, v = torch.cat([cached[0], k]), torch.cat([cached[1], v])
            self.cache[layer] = k, v
            x = x + torch.softmax(q @ k.t() / 4, -1) @ v
            x = x + self.down[layer](torch.nn.functional.gelu(self.up[layer](x)))
        return self.head(x)


class Looping(torch.nn.Module):
    """Calls a block again and again, on what it returned before."""

    def __init__(self, repeats: int, d: int = 16) -> None:
        super().__init__()
        self.repeats, self.head = repeats, torch.nn.Linear(d, 10)
        self.norm, self.up, self.down = (
            torch.nn.LayerNorm(d),
            torch.nn.Linear(d, 4 * d),
            torch.nn.Linear(4 * d, d),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.repeats):
            x = 0.9 * (x + self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))
        return self.head(x)


# Records and products of a repeat, or of a step, of what follows.
_SINGLE, _PLAIN, _TRAIN, _CLIP, _DECODE = (11, 2), (8, 2), (66, 5), (216, 11), (51, 10)


def _wrong_product(wrong: bool, num_records: int, of_repeat: tuple[int, int]) -> int:
    """The number of the product that is wrong, in the middle of so many records; 0 for none."""
    records, products = of_repeat
    return (num_records // records // 2) * products + 1 if wrong else 0


def build_single(path: Path, num_records: int, *, noise: float = 0.0, wrong: bool = False) -> None:
    """Records one call of a model that consists of so many records.

    Args:
      noise: of each product, in rounding errors.
      wrong: a product in the middle is off by 5 %.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, x = Looping(num_records // _SINGLE[0]).eval(), torch.randn(4, 16)
    beneath = Rounded(noise=noise, wrong=_wrong_product(wrong, num_records, _SINGLE))
    with torch.no_grad(), beneath, dt.record(path, model, save="stats"):
        model(x)


def build_plain(path: Path, num_records: int, *, noise: float = 0.0, wrong: bool = False) -> None:
    """Records a program without modules; arguments as in `build_single`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    up, down, x = torch.randn(16, 64) / 4, torch.randn(64, 16) / 8, torch.randn(4, 16)
    beneath = Rounded(noise=noise, wrong=_wrong_product(wrong, num_records, _PLAIN))
    with torch.no_grad(), beneath, dt.record(path, save="stats"):
        for _ in range(num_records // 7):
            x = 0.9 * x + torch.tanh(x @ up) @ down
            x = x - x.mean(-1, keepdim=True)


def build_training(
    path: Path, num_records: int, *, noise: float = 0.0, wrong: bool = False, clipped: bool = False
) -> None:
    """Records steps of a training until there are so many records; arguments as in `build_single`.

    Args:
      clipped: gradients are clipped, and AdamW moves the weights.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    layers: list[torch.nn.Module] = []
    for _ in range(2 if clipped else 1):
        layers += torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Linear(64, 16)
    model, generator = torch.nn.Sequential(*layers), torch.Generator().manual_seed(1)
    optimiser = (
        torch.optim.AdamW(model.parameters(), lr=1e-3)
        if clipped
        else torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    )
    of_step = _CLIP if clipped else _TRAIN
    beneath = Rounded(noise=noise, wrong=_wrong_product(wrong, num_records, of_step))
    with beneath, dt.record(path, model, save="stats") as recording:
        for _ in range(num_records // of_step[0]):
            with recording.step():
                x = torch.randn(8, 16, generator=generator)
                loss = ((model(x) - x) ** 2).mean()
                optimiser.zero_grad()
                loss.backward()
                if clipped:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimiser.step()


def build_decoding(path: Path, num_records: int, *, noise: float = 0.0, wrong: bool = False) -> None:
    """Records a decoder until there are so many records; arguments as in `build_single`."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Decoder().eval()
    beneath = Rounded(noise=noise, wrong=_wrong_product(wrong, num_records, _DECODE))
    with torch.no_grad(), beneath, dt.record(path, model, save="stats") as recording:
        for token in itertools.count():
            model(torch.tensor([token % 100]))
            if token % 64 == 0:
                recording.flush()
                if recording.num_records >= num_records:
                    return


# How traces are built, by name, and which two are aligned.
TRACES: dict[str, Callable[[Path, int], None]] = {
    "ref": build,
    "target": partial(build, noise=1.0),
    "once": partial(build, noise=1.0, wrong="once"),
    "later": partial(build, noise=1.0, wrong="later"),
    **{
        f"{name}{kind}": partial(function, noise=noise, wrong=wrong)
        for name, function in (
            ("decode", build_decoding),
            ("single", build_single),
            ("plain", build_plain),
            ("train", build_training),
            ("clip", partial(build_training, clipped=True)),
        )
        for kind, noise, wrong in (("", 0.0, False), ("-same", 1.0, False), ("-fault", 1.0, True))
    },
}
KINDS = {
    "same": ("ref", "target"),
    "once": ("ref", "once"),
    "later": ("ref", "later"),
    **{name: (name, f"{name}-same") for name in ("decode", "single", "plain", "train", "clip")},
    **{f"{name}-fault": (name, f"{name}-fault") for name in ("decode", "single", "plain", "train", "clip")},
}


def built(folder: Path, num_records: int, *names: str) -> list[Path]:
    """Traces of so many records, built where they are not there."""
    paths = [folder / f"{name}-{num_records}" for name in names]
    for name, path in zip(names, paths, strict=True):
        if not path.exists():
            TRACES[name](path, num_records)
    return paths


def build_tensors(path: Path, megabytes: int, dtype: str, *, factor: float = 1.0) -> None:
    """Writes a trace that keeps so many MB of tensors, of 32 MB each."""

    class Chain(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(max(megabytes // 32, 1)):
                x = x * 1.01
            return x

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    model = Chain()
    with torch.no_grad(), dt.record(path, model, save="tensors"):
        model((torch.randn((32 << 20) // (4096 * kind.itemsize), 4096) * factor).to(kind))


def compare(ref: str, target: str) -> list[dict[str, Any]]:
    """Rows "read" and "compare", from one process: minima of runs in turns, each on files mapped anew."""
    best: dict[str, tuple[float, float]] = {}
    num_bytes = 0
    for _ in range(5):
        for row in ("read", "compare"):
            pairing = pair_traces(dt.open(ref).ranks[0], dt.open(target).ranks[0])
            data = _mapped_data(pairing)
            num_bytes = sum(each.size for each in data)
            start, began = time.perf_counter(), time.process_time()
            if row == "read":
                _read_all(data)
            else:
                compare_ahead(pairing)
            seconds, cpu_s = time.perf_counter() - start, time.process_time() - began
            known = best.get(row, (seconds, cpu_s))
            best[row] = min(seconds, known[0]), min(cpu_s, known[1])
    return [{"row": row, "mb": num_bytes / 1e6, "seconds": s, "cpu_s": c} for row, (s, c) in best.items()]


def _mapped_data(pairing: Pairing) -> list[Any]:
    """The bytes of all that two traces are compared by, as they lie in files."""
    contents = {(k.ref_content, k.target_content) for links in pairing.links.values() for k in links}
    pairs = [pairing.comparer.mapped(*key) for key in sorted(contents) if min(key) >= 0]
    return [side.data for pair in pairs if pair is not None for side in pair]


def _read_all(data: list[Any]) -> None:
    """Reads bytes once, by the fastest reduction of NumPy, on all cores."""
    cores = os.cpu_count() or 1
    parts = [d[start : start + (1 << 18)].view("<u8") for d in data for start in range(0, d.size, 1 << 18)]

    def read(mine: list[Any]) -> None:
        for part in mine:
            np.bitwise_or.reduce(part)

    threads = [threading.Thread(target=read, args=(parts[i::cores],)) for i in range(cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def run(program: str, *arguments: str | Path) -> Any:
    """What a program prints as JSON in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description="What reading and aligning cost as traces grow.", epilog="See the head of this file."
    )
    parser.add_argument("--records", type=int, nargs="*", default=[10_000, 100_000, 300_000, 1_000_000])
    parser.add_argument("--align", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="what to align")
    parser.add_argument("--compare", type=int, default=512, help="MB of tensors a trace; 0: no such row")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], help="of these tensors")
    parser.add_argument("--keep", type=Path, help="build the traces there and leave them")
    parser.add_argument("--json", type=Path, help="write the rows there")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="dispatch_trace_bench_") as made:
        folder = options.keep or Path(made)
        for count in sorted({*options.records, *options.align}):
            if count in options.records:
                (path,) = built(folder, count, "ref")
                rows.append(
                    {"row": "open", **min((run(_PROGRAM, "open", path) for _ in range(3)), key=_seconds)}
                )
                print(line(rows[-1]), flush=True)
            for kind in options.kinds if count in options.align else ():
                rows.append({"row": kind, **run(_PROGRAM, "align", *built(folder, count, *KINDS[kind]))})
                print(line(rows[-1]), flush=True)
        for dtype in options.dtypes if options.compare else ():
            paths = [folder / f"{name}-{options.compare}-{dtype}" for name in ("ref", "target")]
            for path, factor in zip(paths, (1.0, 1.0 + 2**-7), strict=True):
                if not path.exists():
                    build_tensors(path, options.compare, dtype, factor=factor)
            both = [row | {"dtype": dtype} for row in run(_COMPARE, *paths)]
            rows += both
            print(compared(*both), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def _seconds(row: dict[str, Any]) -> float:
    return float(row["seconds"])


def compared(read: dict[str, Any], compare: dict[str, Any]) -> str:
    rates = [row["mb"] / row["seconds"] / 1e3 for row in (read, compare)]
    return (
        f"compare  {compare['mb']:>9.0f} MB {compare['dtype']:9} {compare['seconds']:>8.3f} s "
        f"({compare['cpu_s']:.3f} s CPU) {rates[1]:.1f} GB/s; reading alone {read['seconds']:.3f} s "
        f"({read['cpu_s']:.3f} s CPU) {rates[0]:.1f} GB/s: {rates[1] / rates[0]:.2f} of it, "
        f"{read['cpu_s'] / compare['cpu_s']:.2f} by CPU"
    )


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['row']:12} {row['records']:>9} records {row['seconds']:>8.3f} s "
        f"({row['cpu_s']:.3f} s CPU) "
        f"{1e6 * row['seconds'] / row['records']:>8.2f} us/record {row['peak_mb']:>7.0f} MB peak "
        f"{'with' if row['torch'] else 'without'} torch"
        + (f"  {row['verdict']} {row['share']:.0%}" if "verdict" in row else "")
    )


if __name__ == "__main__":
    sys.exit(main())
