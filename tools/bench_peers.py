#!/usr/bin/env python3
"""The table of tools/bench.py with other tools beside it, interleaved in the same repetitions.

    python tools/bench_peers.py [options of tools/bench.py] [--envs DIR] [--peer msprobe|torchlens]

Each tool gets an environment of its own below `--envs` (made on the first run, 380 MB for both) that shares
the torch of this one, so that what is compared runs the same kernels. Tools patch torch for
the whole process, so each of their rows is a process that waits for its turn; its ratios are to `none` of
this process, in the same repetitions. Rows:

* `msprobe_stat_L0`, `_L1`, `_mix`: statistics of modules, of API calls, of both; `msprobe_tensor_mix`: every
  tensor of both to disk.
* `torchlens_selected`, `torchlens_all`: the linear layers, or everything, kept in memory; forward only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench_model import PASSES, SIZES, Job, build

PACKAGES = {"msprobe": "mindstudio-probe", "torchlens": "torchlens"}
MSPROBE = {
    "msprobe_stat_L0": ("statistics", "L0"),
    "msprobe_stat_L1": ("statistics", "L1"),
    "msprobe_stat_mix": ("statistics", "mix"),
    "msprobe_tensor_mix": ("tensor", "mix"),
}
TORCHLENS = ("torchlens_selected", "torchlens_all")
ROWS = (*MSPROBE, *TORCHLENS)


def make_environment(folder: Path, package: str) -> Path:
    """Python of an environment with the package, made where it is not there yet; torch comes from ours."""
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    if not stamp.exists():
        venv.create(folder, clear=True)
        own = next((folder / "lib").glob("python*/site-packages"))
        (own / "shared.pth").write_text(str(Path(torch.__file__).parents[1]) + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
        subprocess.run([*pip, f"torch=={torch.__version__}", package], check=True, stdout=sys.stderr)
        stamp.touch()
    return python


class Peer:
    """One row of another tool: a process that makes its calls when asked."""

    def __init__(self, python: Path, row: str, size: str, threads: int, passes: str) -> None:
        self.row = row
        self.seconds: list[float] = []
        self.failure = ""
        self._process = subprocess.Popen(
            [python, __file__, "--worker", row, "--size", size, "--threads", str(threads), "--pass", passes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def turn(self, counted: bool) -> None:
        """Has it make its calls once."""
        if self.failure:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("turn\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            self.failure = ((self._process.communicate()[1] or "").strip().splitlines() or ["no answer"])[-1]
        elif counted:
            self.seconds += json.loads(answer)

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.communicate()


def work(row: str, job: Job, calls: int) -> None:
    """The process of one row: makes its calls for every line on stdin, answers with the seconds of each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # tools print
    folder = Path(tempfile.mkdtemp(prefix="peer_"))
    try:
        once = msprobe(folder, job, *MSPROBE[row]) if row in MSPROBE else torchlens(job, row)
        for _ in sys.stdin:
            seconds = []
            for _ in range(calls):
                before = time.perf_counter()
                once()
                seconds.append(time.perf_counter() - before)
            print(json.dumps(seconds), file=answers, flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def msprobe(folder: Path, job: Job, task: str, level: str) -> Callable[[], Any]:
    from msprobe.pytorch import PrecisionDebugger

    config = {"task": task, "dump_path": str(folder / "dump"), "rank": [], "step": [], "level": level}
    config |= {"async_dump": False, task: {"scope": [], "list": [], "data_mode": ["all"]}}
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    file.chmod(0o640)
    debugger = PrecisionDebugger(config_path=str(file))

    def once() -> None:
        debugger.start(model=job.model)
        job.run()
        debugger.stop()
        debugger.step()

    return once


def torchlens(job: Job, row: str) -> Callable[[], Any]:
    import torchlens as tl

    options = {} if row == "torchlens_all" else {"save": tl.func("linear")}

    def once() -> None:
        with torch.no_grad():
            tl.trace(job.model, job.ids, **options)

    return once


@contextlib.contextmanager
def peers(environments: dict[str, Path], size: str, threads: int, passes: str) -> Iterator[list[Peer]]:
    """The processes of every row that makes sense for the pass."""
    found = []
    for row in ROWS:
        python = environments.get(row.split("_")[0])
        if python is not None and not (row in TORCHLENS and passes != "fwd"):
            found.append(Peer(python, row, size, threads, passes))
    try:
        yield found
    finally:
        for peer in found:
            peer.close()


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    import bench

    environments = {
        name: make_environment(options.envs / name, package)
        for name, package in PACKAGES.items()
        if name in (options.peer or PACKAGES)
    }
    bench.wait_for_builds()
    rows: list[dict[str, Any]] = []
    for size in options.size or [size for size in SIZES if size != "deep"]:
        for passes in options.passes or PASSES:
            for threads in options.threads or sorted({1, torch.get_num_threads()}):
                with peers(environments, size, threads, passes) as running:

                    def beside(counted: bool, running: list[Peer] = running) -> None:
                        for peer in running:
                            peer.turn(counted)

                    wanted = bench.rows_of(size, options.row)
                    ours = bench.bench(size, threads, passes, options.repeats, wanted, beside)
                rows += ours + [theirs(peer, ours) for peer in running if peer.seconds]
                for peer in running:
                    if not peer.seconds:
                        print(f"{size} {passes} {threads} {peer.row}: {peer.failure}", file=sys.stderr)
    return rows


def theirs(peer: Peer, ours: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of another tool, relative to the first of ours, which is `none`."""
    none = ours[0]
    seconds = sorted(peer.seconds)
    least, median = 1e3 * seconds[0], 1e3 * seconds[len(seconds) // 2]
    return none | {
        "row": peer.row,
        "ms_min": least,
        "ms_median": median,
        "ratio_min": least / none["ms_min"],
        "ratio_median": median / none["ms_median"],
        "us_per_op": 1e3 * (least - none["ms_min"]) / none["num_ops"],
        "drained_ratio_min": None,
        "cpu_ratio": None,
    }


def main() -> int:
    if "--worker" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--worker")
        parser.add_argument("--size")
        parser.add_argument("--threads", type=int)
        parser.add_argument("--pass", dest="passes")
        options = parser.parse_args()
        calls = max(1, SIZES[options.size].calls // 8)  # they take their time
        work(options.worker, build(options.size, options.threads, options.passes), calls)
        return 0
    import bench

    parser = bench.parser("Slow-down of recording beside other tools, as ratios in one run.")
    parser.add_argument("--envs", type=Path, default=Path(".bench-envs"), help="where environments lie")
    parser.add_argument("--peer", choices=PACKAGES, action="append", help="may be given again (default: all)")
    options = parser.parse_args()
    rows = compare(options)
    print(bench.table(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
