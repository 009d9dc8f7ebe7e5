#!/usr/bin/env python3
"""What the statistics of a large tensor cost, beside cloning it.

    python tools/bench_stats.py [--elements N ...] [--dtypes DTYPE ...] [--threads N ...] [--repeats N]

Rows, each timed in turns with the others, least times and medians:

* clone: `tensor.clone()`, into memory of its own;
* statistics: `stats.accumulate` without a sketch; one pass, on one core;
* sketched: the same with the sketch, which is what a recorder does;
* plain: as sketched, by torch's functions, where no kernel can be compiled.

The JSON is a list of {row, elements, dtype, threads, least_ms, median_ms, of_clone}.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from dispatch_trace import kernel, stats  # noqa: E402


def tensor_of(num_elements: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        return torch.randn(num_elements, generator=generator).to(dtype)
    return torch.randint(0, 100, (num_elements,), generator=generator).to(dtype)


def measured(num_elements: int, dtype: torch.dtype, repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each row, by repeat."""
    tensor, compiled = tensor_of(num_elements, dtype), kernel.find(wait=True)
    rows: dict[str, Callable[[], Any]] = {"clone": tensor.clone}
    if compiled is not None:
        rows["statistics"] = partial(stats.accumulate, tensor, sketch=False, kernel=compiled)
        rows["sketched"] = partial(stats.accumulate, tensor, kernel=compiled)
    rows["plain"] = partial(stats.accumulate, tensor)
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(repeats):
        for name, work in rows.items():
            begin = time.perf_counter()
            work()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--elements", type=int, nargs="+", default=[1 << 24, 1 << 20])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "float16", "int64"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, torch.get_num_threads()])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    given = parser.parse_args()
    found = []
    for threads in dict.fromkeys(given.threads):
        torch.set_num_threads(threads)
        for num_elements in given.elements:
            for dtype in given.dtypes:
                times = measured(num_elements, getattr(torch, dtype), given.repeats)
                least = {name: min(values) for name, values in times.items()}
                for name, values in times.items():
                    row = {"row": name, "elements": num_elements, "dtype": dtype, "threads": threads}
                    row |= {"least_ms": least[name], "median_ms": statistics.median(values)}
                    row["of_clone"] = least[name] / least["clone"]
                    found.append(row)
                print(
                    f"{num_elements:>10} {dtype:9} {threads} threads  "
                    + "  ".join(
                        f"{name} {ms:8.2f} ms ({ms / least['clone']:.2f})" for name, ms in least.items()
                    ),
                    flush=True,
                )
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
