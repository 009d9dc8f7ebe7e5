"""Compares the data of paired values on all cores, before judges ask one by one.

Where there are the compiled functions and the files lie here, threads of this process do it: what they read
is mapped, and they hold no lock while they read. Else other processes do.

Guarantees: what comes out is what comparing them here, one after the other, would give, bit for bit; what a
worker cannot read, or does not find as it is known here, is left to be compared here. Workers open the traces
by path, so those must lie where all of them can read: on one machine, a shared disk, or at a URL.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import lru_cache

import numpy as np

from dispatch_trace import kernel_build
from dispatch_trace.align.content import Comparer, Difference, mapped_difference, sketch_difference
from dispatch_trace.align.pairs import Pairing
from dispatch_trace.align.summaries import Summaries, summary_differences
from dispatch_trace.errors import DispatchTraceError, TraceFormatError
from dispatch_trace.kernel_build import Library
from dispatch_trace.schema import StoredContent
from dispatch_trace.store.mapped import Mapped
from dispatch_trace.store.reader import RankReader
from dispatch_trace.store.remote import place
from dispatch_trace.store.table import ContentTable, Names, same_hash
from dispatch_trace.workers import LocalProcesses

WORTHWHILE_HERE_BYTES = 16 << 20  # of data, from which on threads are started for it
WORTHWHILE_BYTES = 256 << 20  # and from which on processes are
_TASK_BYTES = 32 << 20
_ITEMSIZE = 8  # at most, nearly

# (number, hash in hexadecimal) of a content of the reference, and of the target.
Task = tuple[tuple[int, str], tuple[int, str]]
Side = tuple[str, int]


def compare_ahead(
    pairing: Pairing,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Fills the comparers of all rounds.

    Args:
      executor: where to compare; None: on this machine, where there is enough to compare.
      progress: called with (bytes done, bytes in all).
    Returns: how many pairs were compared.
    """
    num_compared = 0
    with ExitStack() as stack:
        for one in pairing.rounds:
            _compare_sketches(one)
            tasks = _tasks(one)
            total = sum(size for _, size in tasks)
            if not tasks:
                continue
            if executor is None:
                if total < WORTHWHILE_HERE_BYTES or (os.cpu_count() or 1) < 2:
                    continue
                num, tasks = _run_here(one.comparer, tasks, total, progress)
                num_compared += num
                total = sum(size for _, size in tasks)
                if total < WORTHWHILE_BYTES:
                    continue
                executor = stack.enter_context(LocalProcesses())  # for the rounds that follow as well
            ref, target = one.comparer.ref, one.comparer.target
            sides = (str(ref.path), ref.rank), (str(target.path), target.rank)
            num_compared += _run(executor, one.comparer, sides, tasks, total, progress)
    return num_compared


def _compare_sketches(pairing: Pairing) -> None:
    """Fills a comparer with the differences that only sketches tell: all at once they cost a tenth."""
    comparer = pairing.comparer
    sides = comparer.ref, comparer.target
    if not comparer.is_plain or any(type(side) is not RankReader for side in sides):
        return  # views have contents of their own
    keys = {(k.ref_content, k.target_content) for links in pairing.links.values() for k in links}
    # In order, or each would be looked up in another frame of the index than the one before.
    plain = sorted(key for key in keys if min(key) >= 0 and comparer.layout(key[0]) is None)
    if not plain:
        return
    ids = np.array(plain).T
    try:
        tables = [ContentTable(side, Names()) for side in sides]
        places = [table.places(numbers) for table, numbers in zip(tables, ids, strict=True)]
        sketched = [t.has_sketch[at] & ~t.has_data[at] for t, at in zip(tables, places, strict=True)]
        equal = same_hash(tables[0], places[0], tables[1], places[1])
        chosen = np.flatnonzero(sketched[0] & sketched[1] & ~equal)
        summaries = [Summaries.at(t, at[chosen]) for t, at in zip(tables, places, strict=True)]
        found = summary_differences(summaries[0], summaries[1])
    except (TraceFormatError, KeyError):
        return  # who compares them one by one says what can be said
    for at, why, nonfinite, rho in zip(chosen.tolist(), *(c.tolist() for c in found), strict=True):
        ref_id, target_id = plain[at]
        a, b = sides[0].content(ref_id).shape, sides[1].content(target_id).shape
        if 0 < math.prod(a) == math.prod(b):
            comparer.tell(ref_id, target_id, sketch_difference(why, nonfinite, rho, a == b))


def _tasks(pairing: Pairing) -> list[tuple[Task, int]]:
    """What is to be compared by data, and its size in bytes."""
    comparer = pairing.comparer
    if not comparer.is_plain:
        return []
    found: dict[tuple[int, int], tuple[Task, int]] = {}
    for links in list(pairing.links.values()):
        for link in links:
            key = link.ref_content, link.target_content
            if min(key) < 0 or key in found or comparer.layout(key[0]) is not None:
                continue
            if comparer.ref.together(key[0]) is not None or comparer.target.together(key[1]) is not None:
                continue  # several contents, none of which has data
            a, b = comparer.ref.content(key[0]), comparer.target.content(key[1])
            if comparer.compares_data(a, b):
                size = _ITEMSIZE * math.prod(a.shape)
                found[key] = ((key[0], a.hash), (key[1], b.hash)), size
    return list(found.values())


def _run_here(
    comparer: Comparer,
    tasks: list[tuple[Task, int]],
    total: int,
    progress: Callable[[int, int], None] | None,
) -> tuple[int, list[tuple[Task, int]]]:
    """Compares by threads what lies in files as it is.

    Returns: how many pairs, and the tasks that are left.
    """
    library = kernel_build.find(wait=True)
    if library is None:
        return 0, tasks
    left: list[tuple[Task, int]] = []
    done = num_compared = 0
    with ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="dispatch_trace compare") as threads:
        futures: dict[Future[Difference | None], tuple[Task, int]] = {}
        for task, size in sorted(tasks, key=lambda each: -each[1]):  # no large one at the end, on one core
            sides = _mapped(comparer, task)
            if sides is None:
                left.append((task, size))
            else:
                futures[threads.submit(_difference, library, *sides)] = task, size
        for future in as_completed(futures):
            task, size = futures[future]
            found = future.result()
            if found is not None:
                comparer.tell(task[0][0], task[1][0], found)
                num_compared += 1
            done += size
            if progress is not None:
                progress(done, total)
    return num_compared, left


def _mapped(comparer: Comparer, task: Task) -> tuple[Mapped, Mapped] | None:
    try:
        return comparer.mapped(task[0][0], task[1][0])
    except TraceFormatError:
        return None  # who compares them here says what can be said


def _difference(library: Library, ref: Mapped, target: Mapped) -> Difference | None:
    try:
        return mapped_difference(library, ref, target)
    except TraceFormatError:
        return None


def _run(
    executor: Executor,
    comparer: Comparer,
    sides: tuple[Side, Side],
    tasks: Sequence[tuple[Task, int]],
    total: int,
    progress: Callable[[int, int], None] | None,
) -> int:
    batches: list[tuple[list[Task], int]] = []
    for task, size in tasks:
        if not batches or batches[-1][1] + size > _TASK_BYTES:
            batches.append(([], 0))
        batches[-1] = ([*batches[-1][0], task], batches[-1][1] + size)
    futures = {executor.submit(compare_batch, *sides, batch): (batch, size) for batch, size in batches}
    done = num_compared = 0
    for future in as_completed(futures):
        batch, size = futures[future]
        for ((ref, _), (target, _)), found in zip(batch, future.result(), strict=True):
            if found is not None:
                comparer.tell(ref, target, found)
                num_compared += 1
        done += size
        if progress is not None:
            progress(done, total)
    return num_compared


def compare_batch(ref: Side, target: Side, tasks: Sequence[Task]) -> list[Difference | None]:
    """Runs in a worker: differences of pairs of contents.

    Args:
      ref, target: directory of a rank, and its number.
    Returns: in order; None where the contents are not those that were meant.
    """
    try:
        comparer = Comparer(_reader(*ref), _reader(*target))
    except (DispatchTraceError, OSError):
        return [None] * len(tasks)
    found: list[Difference | None] = []
    for (ref_id, ref_hash), (target_id, target_hash) in tasks:
        try:
            a, b = _content(comparer.ref, ref_id), _content(comparer.target, target_id)
            meant = a is not None and b is not None and (a.hash, b.hash) == (ref_hash, target_hash)
            found.append(comparer.compare(ref_id, target_id) if meant else None)
        except (DispatchTraceError, OSError):
            found.append(None)
    return found


def _content(reader: RankReader, id: int) -> StoredContent | None:
    try:
        return reader.content(id)
    except KeyError:
        return None


@lru_cache(maxsize=4)
def _reader(path: str, rank: int) -> RankReader:
    return RankReader(place(path), rank)
