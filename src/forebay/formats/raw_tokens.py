"""Files of tokens without NumPy's header: none at all (nanoGPT's `bin`, Psyche's `ds`), or llm.c's."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TokenSource, Written
from forebay.formats.detect import RAW_TOKENS
from forebay.formats.external import ExternalDataset
from forebay.formats.report import Report
from forebay.formats.token_stream import build_stream
from forebay.formats.vector_check import check_vector
from forebay.formats.vectors import LLMC_TYPES, RAW_SUFFIXES, VectorDataset


class RawTokens(Format):
    """Tokens without a header."""

    name = RAW_TOKENS
    suffixes: ClassVar[tuple[str, ...]] = RAW_SUFFIXES

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        return VectorDataset(path, [path], dtype)

    def check(self, path: Path, report: Report) -> None:
        check_vector(path, report)


class LlmC(RawTokens):
    """Tokens after llm.c's header."""

    name = "llm.c"
    suffixes: ClassVar[tuple[str, ...]] = ()

    def sniff(self, head: bytes) -> bool:
        first, second = (int.from_bytes(head[i : i + 4], "little") for i in (0, 4))
        return len(head) >= 12 and first in LLMC_TYPES and LLMC_TYPES[first][0] == second


class Bin(Format):
    """Tokens as written without a header; they are read as `raw tokens`."""

    name = "bin"

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """Little-endian tokens: one file where `out` ends in the suffix, else `<name>.bin` in a directory."""
        suffix = f".{self.name}"
        stream = build_stream(source, options, "none")
        is_file = out.suffix == suffix
        path = out if is_file else out / f"{options.name or 'train'}{suffix}"
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            for part in stream.parts():
                file.write(np.ascontiguousarray(part.tokens).view(np.uint8).data)
        return stream.written([Path() if is_file else Path(path.name)])


class Ds(Bin):
    """As `bin`, under Psyche's suffix."""

    name = "ds"
