"""Rows as a CSV or a Parquet file. CSV needs the standard library only, Parquet the extra `query`."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from dispatch_trace.errors import ConfigError
from dispatch_trace.export.rows import Exported

_PART = ".part"


def write_table(
    rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], path: Path, *, to: str
) -> Exported:
    """Writes rows; a column that a row lacks is empty (CSV) or null (Parquet).

    Args:
      columns: names and SQL types, in order.
      to: "csv" or "parquet".
    Raises:
      ConfigError: Parquet without duckdb.
      OSError: the file cannot be written.
    """
    if to == "parquet":
        return _write_parquet(rows, columns, path)
    return _write_csv(rows, columns, path)


@contextmanager
def whole_file(path: Path) -> Iterator[TextIO]:
    """A text file that appears under its name when the block has ended well."""
    part = path.with_name(path.name + _PART)
    try:
        with part.open("w", encoding="utf-8", newline="") as file:
            yield file
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write_csv(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], path: Path) -> Exported:
    done = Exported()
    with whole_file(path) as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row in rows:
            writer.writerow({name: _text(value) for name, value in row.items()})
            done.num_rows += 1
    return done


def _text(value: Any) -> Any:
    """Numbers so that reading them gives the same ones; booleans as SQL has them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else value


def _write_parquet(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], path: Path) -> Exported:
    try:
        import duckdb
    except ImportError:
        raise ConfigError("to='parquet' needs duckdb: pip install 'dispatch-trace[query]'.") from None
    # By way of a CSV file: duckdb reads one faster than it takes rows, and with the types given nothing is
    # guessed. NULL has a mark of its own, since an empty name is a name.
    null = "\\N"
    table = path.with_name(path.name + ".csv" + _PART)
    part = path.with_name(path.name + _PART)
    done = Exported()
    try:
        with table.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, quoting=csv.QUOTE_MINIMAL)
            writer.writerow(columns)
            for row in rows:
                values = [row.get(name) for name in columns]
                writer.writerow([null if value is None else _text(value) for value in values])
                done.num_rows += 1
        with duckdb.connect() as connection:
            read = connection.read_csv(
                str(table), header=True, dtype=dict(columns), na_values=null, quotechar='"', escapechar='"'
            )
            read.write_parquet(str(part))
        os.replace(part, path)
    finally:
        table.unlink(missing_ok=True)
        part.unlink(missing_ok=True)
    return done
