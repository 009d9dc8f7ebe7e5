"""The writer of a recording that is judged as it is made: asks first, and keeps data around what differs."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

from dispatch_trace.against import LiveJudge
from dispatch_trace.compat import open_ranks
from dispatch_trace.config import RecordOptions
from dispatch_trace.errors import ConfigError
from dispatch_trace.live_stop import action_of
from dispatch_trace.schema import RawRecord
from dispatch_trace.store.writer import TraceWriter

# Records before and after a wrong one whose data is kept as well.
AROUND = 3


def live_judge(
    against: str | os.PathLike[str], on_divergence: Any, rename: Any, options: RecordOptions, *, rank: int
) -> LiveJudge:
    """A judge with the reference's part of this rank.

    Raises:
      ConfigError: the recording takes no values, or the reference has no such rank.
      RenameError: rules that contradict each other.
      NotATraceError, TraceFormatError, SchemaVersionError: of the reference.
    """
    action_of(on_divergence)
    if not options.wants_values or not options.sketch or options.stats is not None:
        raise ConfigError(
            "against: values are compared, which takes save='stats' or more, all of them, and sketches."
        )
    ranks = {reader.rank: reader for reader in open_ranks(against)}
    if rank not in ranks:
        raise ConfigError(f"against: {os.fspath(against)} has no rank {rank}.")
    return LiveJudge(ranks[rank], on_divergence, rename)


class WatchedWriter(TraceWriter):
    """Has each record judged first, and holds a few back to keep the data of those around a wrong one.

    Args:
      judge: what to ask.
    """

    def __init__(self, *args: Any, judge: LiveJudge, **kwargs: Any) -> None:
        self._judge = judge
        self._held: deque[RawRecord] = deque()
        self._to_keep = 0
        super().__init__(*args, **kwargs)

    def put(self, record: Any) -> None:
        if not isinstance(record, RawRecord):
            super().put(record)
            return
        wrong, found = self._judge.look(record)
        self._held.append(record)
        if wrong:
            for each in self._held:
                _keep(each)
            self._to_keep = AROUND
        elif self._to_keep:
            self._to_keep -= 1
            _keep(record)
        while len(self._held) > AROUND:
            super().put(self._held.popleft())
        if found is not None:
            self._judge.act(found)

    def release_held(self) -> None:
        """Hands over what was held back."""
        while self._held:
            super().put(self._held.popleft())

    def flush(self) -> None:
        self.release_held()
        super().flush()

    def close(self, *, aborted: bool = False) -> None:
        self.release_held()
        self.amend_header({"against": self._judge.summary()})
        super().close(aborted=aborted)


def _keep(record: RawRecord) -> None:
    for slot in record.slots:
        if slot.content is not None and slot.content.tensor is not None:
            slot.content.keep_data = True


__all__ = ["AROUND", "WatchedWriter", "live_judge"]
