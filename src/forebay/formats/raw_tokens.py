"""Files of tokens without NumPy's header: none at all (nanoGPT's `bin`, Psyche's `ds`), or llm.c's."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from forebay.errors import UsageError
from forebay.formats.base import Format
from forebay.formats.conversion import ConvertOptions, TokenSource, Written
from forebay.formats.detect import RAW_TOKENS
from forebay.formats.external import ExternalDataset
from forebay.formats.report import Report
from forebay.formats.token_stream import build_stream
from forebay.formats.vector_check import check_vector
from forebay.formats.vectors import LLMC_TYPES, RAW_SUFFIXES, VectorDataset

_LLMC_CODES = {"U16": (20240520, 1), "U32": (20240801, 7)}  # The first two int32 of the header: magic and version.
_MAX_LENGTH = (1 << 31) - 1


class RawTokens(Format):
    """Tokens without a header."""

    name = RAW_TOKENS
    suffixes: ClassVar[tuple[str, ...]] = RAW_SUFFIXES

    def open_tokens(self, path: Path, dtype: Any = None, column: str | None = None) -> ExternalDataset:
        return VectorDataset(path, [path], dtype)

    def check(self, path: Path, report: Report) -> None:
        check_vector(path, report)


class LlmC(RawTokens):
    """Tokens after llm.c's header; they are written as `bin` with `more["header"]`."""

    name = "llm.c"
    suffixes: ClassVar[tuple[str, ...]] = ()

    def sniff(self, head: bytes) -> bool:
        first, second = (int.from_bytes(head[i : i + 4], "little") for i in (0, 4))
        return len(head) >= 12 and first in LLMC_TYPES and LLMC_TYPES[first][0] == second


class Bin(Format):
    """Tokens as written without a header, or with llm.c's; they are read as `raw tokens` or `llm.c`."""

    name = "bin"

    def write_tokens(self, source: TokenSource, out: Path, options: ConvertOptions) -> Written:
        """Little-endian tokens; with `more["header"]`, llm.c's header before them.

        One file where `out` ends so; else a directory with `<name>.bin`, or `<name>_000000.bin` … of `shard_tokens`.
        """
        suffix = f".{self.name}"
        stream = build_stream(source, options, "none")
        per_file, remaining, free = options.shard_tokens or max(1, stream.num_tokens), stream.num_tokens, 0
        has_header = bool(options.more.get("header")) and self.name == "bin"
        if has_header and min(per_file, remaining) > _MAX_LENGTH:
            raise UsageError(
                f"bin: expected at most {_MAX_LENGTH} tokens in a file with llm.c's header, got {remaining}. "
                "Give --shard-tokens 100000000."
            )
        is_file = out.suffix == suffix
        if is_file and per_file < remaining:
            raise UsageError(f"{out.name}: expected a directory for files of --shard-tokens {per_file}, got one file.")
        if not is_file:
            out.mkdir()
        name, files = options.name or "train", list[Path]()
        with ExitStack() as opened:
            for part in stream.parts():
                tokens = part.tokens
                while len(tokens):
                    if not free:
                        opened.close()
                        free = min(per_file, remaining)
                        number = f"_{len(files):06d}" if options.shard_tokens else ""
                        files.append(Path(f"{name}{number}{suffix}"))
                        file = opened.enter_context((out if is_file else out / files[-1]).open("wb"))
                        if has_header:
                            file.write(np.array([*_LLMC_CODES[stream.dtype], free] + [0] * 253, "<i4").tobytes())
                    run, tokens = tokens[:free], tokens[free:]
                    free, remaining = free - len(run), remaining - len(run)
                    file.write(np.ascontiguousarray(run).view(np.uint8).data)
        return stream.written([Path()] if is_file else files)


class Ds(Bin):
    """As headerless `bin`, under Psyche's suffix."""

    name = "ds"
