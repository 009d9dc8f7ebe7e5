"""What a recording costs in memory, and what is left of it when its process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dispatch_trace.store.reader import open_ranks

KILLED = """
import sys, time, torch
from torch import nn
import dispatch_trace as dt

class Net(nn.Module):
    def forward(self, x):
        return x * 2 + 1

model = Net()
with torch.no_grad(), dt.record(sys.argv[1], model, save="tensors"):
    for step in range(10_000):
        model(torch.full((64,), float(step)))
        print(step, flush=True)
        time.sleep(0.05)
"""

MEMORY = """
import sys, threading, time, torch
from torch import nn
import dispatch_trace as dt

BOUND, SIZE, TOTAL = 256 << 20, 64 << 20, 4 << 30

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

class Net(nn.Module):
    def forward(self, x):
        for _ in range(TOTAL // SIZE):
            x = x + 1.0
        return x

peak = 0
def watch():
    global peak
    while running:
        peak = max(peak, resident())
        time.sleep(0.002)

def run(context):
    global peak, running
    peak, running = 0, True
    thread = threading.Thread(target=watch)
    thread.start()
    with torch.no_grad(), context:
        model(x)
    running = False
    thread.join()
    return peak

model, x = Net(), torch.arange(SIZE // 4, dtype=torch.float32)
with torch.no_grad(), dt.record(sys.argv[1] + ".warm", nn.Linear(2, 2)) as rec:
    rec._models[""](torch.ones(1, 2))  # everything that a recording imports
plain = run(torch.no_grad())
recorded = run(dt.record(sys.argv[1], model, save="tensors", max_pending_bytes=BOUND))
print((recorded - plain - BOUND) / 2**20)
"""


def test_a_killed_process_leaves_everything_older_than_two_seconds(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []
    command = [sys.executable, "-c", KILLED, str(tmp_path / "t")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            while not seen or seen[-1][0] - seen[0][0] < 4:
                step = int(process.stdout.readline())
                seen.append((time.monotonic(), step))
        finally:
            process.send_signal(signal.SIGKILL)
            killed = time.monotonic()
    must_be_there = [step for at, step in seen if killed - at > 2.2]
    (rank,) = open_ranks(tmp_path / "t")
    assert not rank.closed and not rank.complete
    steps = {record.step for record in rank.records() if record.kind == "module"}
    assert set(must_be_there) <= steps and len(must_be_there) > 10
    for record in rank.records():
        if record.kind == "module":
            assert rank.tensor(record.slots[-1].content)[0] == record.step * 2 + 1
    assert all("end" in problem for problem in rank.verify())


@pytest.mark.slow
def test_recording_4_gb_stays_within_the_bound(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "t")],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    beyond_mib = float(done.stdout)
    assert beyond_mib <= 128, f"{beyond_mib:.0f} MiB beyond max_pending_bytes"
