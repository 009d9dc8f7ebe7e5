"""Whether a trace holds enough to be run again. Imports no torch."""

from __future__ import annotations

from dispatch_trace.errors import NotExecutableError
from dispatch_trace.store.reader import RankReader


def check_executable(reader: RankReader) -> None:
    """Raises NotExecutableError unless the trace was recorded with the data of its leaves."""
    options = reader.header.get("options", {})
    saves = {options.get("save", "tensors"), *(save for _, save in options.get("save_rules", ()))}
    if options.get("level") == "module":
        raise NotExecutableError(f'{reader.path} holds modules only: record with level="op" to run it again.')
    if options.get("inputs") is False:
        raise NotExecutableError(f"{reader.path} was recorded with inputs=False: the ops have no operands.")
    if not saves & {"leaves", "tensors"}:
        raise NotExecutableError(
            f"{reader.path} was recorded with save={'/'.join(sorted(saves))!r}: it holds no data to start "
            'from. Record with save="leaves" or save="tensors".'
        )
