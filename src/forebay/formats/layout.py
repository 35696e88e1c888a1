"""The layout of a table, by its columns: a stream of tokens, or rows. One decision, for every container.

`input_ids` (or `tokens`) is a stream of tokens, each row a document, unless another column has numbers or bytes:
labels, masks, images, whatever its name. Such a table is rows; where only tokens can be held it is refused, by the
names of those columns. Text and other values do not make rows; they are left out, and named. A column that the user
names is taken for the tokens, whatever is beside it.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from forebay.errors import DatasetError, UsageError, listed
from forebay.formats import tables
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions
from forebay.formats.external import TOKEN_COLUMNS
from forebay.formats.report import Report, check_external, check_rows

TOKENS = pa.list_(pa.int64())  # The type of a column that may be tokens.
KEY = "__key__"  # The name of a sample of WebDataset, beside its columns.


@dataclass(frozen=True)
class Layout:
    """What the columns of a table are.

    Attributes:
        tokens: The column of tokens; None if there is none.
        more: Columns that only rows hold.
        left_out: All columns but the tokens, by name.
    """

    tokens: str | None
    more: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def is_rows(self) -> bool:
        """Whether it is rows."""
        return self.tokens is None or bool(self.more)


def decide_layout(schema: pa.Schema, column: str | None = None) -> Layout:
    """Return the layout of a table; `column` is that of the tokens if the user names one."""
    names = TOKEN_COLUMNS if column is None else (column,)
    tokens = next((n for n in names if n in schema.names and is_token_list(schema.field(n).type)), None)
    others = sorted((field.name, field.type) for field in schema if field.name not in (tokens, KEY))
    more = tuple(name for name, kind in others if column is None and _is_data(kind))
    return Layout(tokens, more, tuple(name for name, _ in others))


def layout_of_tokens(path: object, schema: pa.Schema, column: str | None, remedy: str) -> tuple[str, tuple[str, ...]]:
    """Return the column of tokens and those that are left out.

    Args:
        path: For messages, as `remedy`: how to name the column that is taken, `{}`.

    Raises:
        UsageError: If there is none, or other columns would be lost.
    """
    layout = decide_layout(schema, column)
    if layout.tokens is None:
        raise UsageError(
            f"{path}: expected a column of tokens, lists of integers ({column or ' or '.join(TOKEN_COLUMNS)}), got "
            f"{listed(schema)}. Name one with {remedy.format('NAME')}; text "
            "becomes tokens with `forebay prepare`."
        )
    if layout.more:
        raise UsageError(
            f"{path}: expected tokens alone, got {listed(layout.more)} beside {layout.tokens}, which a stream "
            f"of tokens does not hold. Keep all as rows: forebay convert SRC OUT --to forebay (--seq-len N pads "
            f"rows of several lengths). Or take the tokens alone: {remedy.format(layout.tokens)}."
        )
    return layout.tokens, layout.left_out


def is_token_list(kind: Any) -> bool:
    """Return whether a type is of vectors of integers."""
    return tables.is_vector(kind) and bool(pa.types.is_integer(kind.value_type))


def _is_data(kind: Any) -> bool:
    leaf = tables.leaf_type(kind)
    return tables.is_number(getattr(leaf, "value_type", leaf)) or tables.contains(kind, tables.is_bytes)


class ColumnDirectory(Format):
    """Directories of samples with columns, which are tokens or rows."""

    @abstractmethod
    def schema(self, folder: Path) -> pa.Schema:
        """Return the columns by the index alone: vectors of integers, text, and bytes for others. DatasetError."""

    def check(self, path: Path, report: Report) -> None:
        """Tokens as `open_tokens` finds them; every value of rows."""
        dtype = report.options.dtype
        try:
            layout = decide_layout(self.schema(path))
        except (DatasetError, UsageError) as error:
            return report.add_finding("index-mismatch", "index", str(error))
        if layout.is_rows:
            options = ConvertOptions(input_dtype=dtype and str(dtype))
            check_rows(report, lambda: self.open_rows([path], options))
        else:
            check_external(report, lambda: self.open_tokens(path, dtype))
