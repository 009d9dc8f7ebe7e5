"""Processes of this machine that run functions of this package, as a `concurrent.futures.Executor`.

Guarantees: the program's own script is not run again in them (as `multiprocessing` does, which a script
without `if __name__ == "__main__"` does not survive), nor is the program forked; they end with the executor,
or with the program. What goes to and from them is pickled, between processes of one user only.
"""

from __future__ import annotations

import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, BinaryIO

_SERVE = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from dispatch_trace import workers; workers.serve()"
)


class LocalProcesses(Executor):
    """As many processes as there are cores, started when first needed."""

    def __init__(self, num_workers: int | None = None) -> None:
        self.num_workers = num_workers or os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix="dispatch_trace worker")
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._all: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Runs a function that can be imported in one of the processes."""
        return self._threads.submit(self._run, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures)
        for process in self._all:
            if process.stdin is not None:
                process.stdin.close()  # it then ends
            if wait:
                process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _run(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        process = self._take()
        assert process.stdin is not None and process.stdout is not None
        pickle.dump((fn, args, kwargs), process.stdin)
        process.stdin.flush()
        try:
            done, result = pickle.load(process.stdout)
        except EOFError:
            raise RuntimeError(f"a worker process ended with status {process.wait()}") from None
        self._idle.put(process)
        if not done:
            raise result
        return result

    def _take(self) -> subprocess.Popen[bytes]:
        try:
            return self._idle.get_nowait()
        except queue.Empty:
            process = subprocess.Popen(
                [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            assert process.stdin is not None
            pickle.dump(sys.path, process.stdin)
            with self._lock:
                self._all.append(process)
            return process


def serve() -> None:
    """Runs in a worker: answers calls until there are no more."""
    calls, answers = sys.stdin.buffer, _own_stdout()
    while True:
        try:
            fn, args, kwargs = pickle.load(calls)
        except EOFError:
            return
        try:
            answer = True, fn(*args, **kwargs)
        except Exception as error:  # goes to whoever called
            answer = False, error
        sys.stdout.flush()  # what was printed shows before the answer, also where the process is ended hard
        pickle.dump(answer, answers)
        answers.flush()


def _own_stdout() -> BinaryIO:
    """Where answers go; what functions print goes to stderr instead."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers
