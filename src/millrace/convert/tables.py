"""Tables in files of others: `open_table` reads them, `TABLE_SINKS` writes them, `verify_table` compares.

Hides: how a table is known (by what its files begin with; a suffix decides only what no content tells: CSV), which
files of a directory belong together, and which columns are images.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from millrace.convert.content import Options, TableSource, Written
from millrace.convert.table_digest import table_digest
from millrace.convert.table_sinks.columns import write_parquet
from millrace.convert.table_sources.columns import open_arrow, open_parquet
from millrace.errors import DatasetError

Sink: TypeAlias = Callable[[TableSource, Path, Options], Written]
_NO_OPTIONS = Options()

TABLE_SINKS: Mapping[str, Sink] = {
    "parquet": write_parquet,
}


def open_table(path: str | Path, options: Options = _NO_OPTIONS) -> TableSource | None:
    """The table in a file, a directory, or the files of a pattern (`train-*.parquet`).

    Returns:
        None if nothing there is a table.

    Raises:
        DatasetError: If it is damaged, or its files have different columns.
        UsageError: If a directory holds tables of several formats, or a package is missing: says which.
    """
    path = Path(path)
    if re.search(r"[*?\[]", path.name) and not path.exists():
        files = sorted(p for p in path.parent.glob(path.name) if p.is_file())
    else:
        files = sorted(path.iterdir()) if path.is_dir() else [path]
    if files and files[0].suffix == ".parquet":
        return open_parquet(files)
    return open_arrow(files) if files and files[0].suffix == ".arrow" else None


def verify_table(source: TableSource, out: Path, written: Written, options: Options = _NO_OPTIONS) -> None:
    """Read again what a sink wrote: rows, and every value of every column.

    Raises:
        DatasetError: If it is not what was written.
    """
    found = open_table(out, options)
    if found is None:
        raise DatasetError(f"{out}: expected a table, got none. The disk may be failing; convert again.")
    digest = table_digest(found)
    told = dict(pair.rsplit("=", 1) for pair in written.digest.split())
    got = digest.columns()
    bad = sorted(name for name in told if got.get(name) != told[name])
    if digest.num_rows != written.num_rows or bad:
        raise DatasetError(
            f"{out}: expected {written.num_rows} rows as they were written, got {digest.num_rows}, with other values "
            f"in {', '.join(bad)[:300] or 'no column'}. Convert again to another format, or to another disk."
        )


__all__ = ["TABLE_SINKS", "open_table", "verify_table"]
