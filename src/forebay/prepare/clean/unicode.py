"""Repairs and normalises Unicode: mojibake, NFC, controls, zero-width characters, line ends, blank lines.

A compiled pass finds the rows that may hold mojibake (a pair of characters that one of ftfy's encodings makes of a
UTF-8 sequence) or may not be normalised (a character from U+0300 on); `ftfy` and `unicodedata` see these alone. A
second compiled pass does the rest. Figures: `benchmarks/prepare/clean.py`.
"""

import functools
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import ftfy
import numpy as np
import pyarrow as pa
from ftfy.badness import is_bad

from forebay.arrays import BOOL, I64, U16
from forebay.prepare.clean.spans import replace_rows
from forebay.prepare.compiled import compiling, jit
from forebay.prepare.documents import Stage, StageResult, keep_all, replace_column, text_buffers, text_column
from forebay.prepare.filters.points import next_point

ROUNDS = 8
MAX_MARKS = 30
"""Combining marks that may follow each other. Source: Unicode Standard Annex 15, section 13 (Stream-Safe Text Format).
No language needs more; sorting a longer run, as normalisation must, takes time that grows with its square."""
_CODE_PAGES = (1252, 1251, 1250, 1253, 1254, 1257)
ENCODINGS = ("latin-1", *(f"sloppy-windows-{page}" for page in _CODE_PAGES), "iso-8859-2", "macroman", "cp437")
"""Those that ftfy repairs."""
COMMON_LEADS = bytes((0xC2, 0xC3, 0xC4, 0xC5, 0xCE, 0xCF, 0xD0, 0xD1, 0xE2, 0xF0))
"""First bytes of UTF-8 for Latin, Greek, Cyrillic, punctuation and emoji: what mojibake is usually made of."""
NATIONAL = frozenset("ЁёІіЇїЄєҐґЎўЈј")
"""Letters at places of windows-1251 where UTF-8 has continuation bytes; they follow other letters in honest text."""
KINDS = ("controls", "zero_width", "newlines", "marks", "trailing_spaces", "blank_lines")
SUSPECT, MAYBE_DENORMAL, NOT_ASCII = 1, 2, 4
LEAD, COMMON_LEAD, TABLE = 0, 1, 0x2800
C1 = re.compile("[\x80-\x9f]")


@functools.cache
def _pairs() -> U16:
    """uint16 [4, TABLE]: a bit for each encoding in which a character is a lead, a common lead, a continuation that is
    no letter, and one that is."""
    table = np.zeros((4, TABLE), np.uint16)
    for bit, encoding in enumerate(ENCODINGS):
        for byte in range(0x80, 0xF5):
            char = bytes((byte,)).decode(encoding, "replace")
            code = ord(char)
            if code >= TABLE:
                continue
            if byte >= 0xC2:
                table[LEAD, code] |= 1 << bit
                if byte in COMMON_LEADS and not char.islower():
                    table[COMMON_LEAD, code] |= 1 << bit
            elif byte < 0xC0 and char not in NATIONAL:
                table[3 if char.isalpha() else 2, code] |= 1 << bit
    return table


@functools.cache
@compiling()
def _marks() -> BOOL:
    """bool [0x20000]: whether a character is a combining mark that normalisation moves."""
    return np.array([unicodedata.combining(chr(code)) != 0 for code in range(0x20000)])


@jit()
def _gate(offsets, data, pairs, flags):  # type: ignore[no-untyped-def]
    for row in range(len(offsets) - 1):
        start, stop = offsets[row], offsets[row + 1]
        top = np.uint8(0)
        for i in range(start, stop):
            top = max(top, data[i])
        if top < 0x80:
            continue
        # All characters below U+0300, whose UTF-8 begins CC 80, are as NFC wants them.
        flags[row] = NOT_ASCII | (MAYBE_DENORMAL if top >= 0xCC else 0)
        i, before = start, 0
        while i < stop:
            if data[i] < 0x80:
                before = 0
                i += 1
                continue
            code, i = next_point(data, i)
            if code >= TABLE:
                before = 0
                continue
            follows = pairs[0, before] & pairs[2, code] | pairs[1, before] & pairs[3, code]
            if follows or 0x80 <= code < 0xA0:
                flags[row] |= SUSPECT
                break
            before = code


@jit()
def _end_line(data, line, written, count):  # type: ignore[no-untyped-def]
    """Takes spaces and tabs off the end of the line `[line, at)`; where it ends now."""
    while written > line and (data[written - 1] == 32 or data[written - 1] == 9):
        written -= 1
        count[4] += 1
    return written


@jit()
def _invisible(code):  # type: ignore[no-untyped-def]
    """Into which of KINDS a character falls that is to be removed; -1 if it stays."""
    if code < 32 or 0x7F <= code < 0xA0:
        return 0
    if code == 0xAD or code == 0x200B or code == 0x2060 or code == 0xFEFF:
        return 1
    return -1


@jit()
def _tidy(offsets, data, max_blank, marks, out, out_offsets, counts):  # type: ignore[no-untyped-def]
    written = 0
    for row in range(len(offsets) - 1):
        i, stop, count = offsets[row], offsets[row + 1], counts[row]
        line, blanks, run = written, 0, 0
        while i < stop:
            byte = data[i]
            if 32 <= byte < 0x7F or byte == 9:  # copied; the rest of the loop is for the rare
                out[written] = byte
                written += 1
                i += 1
                run = 0
                continue
            code, after = next_point(data, i)
            if code == 13 or code == 11 or code == 12 or 28 <= code <= 31:
                if code == 13 and after < stop and data[after] == 10:
                    after += 1
                code = 10
                count[2] += 1
            if code == 10:
                written = _end_line(out, line, written, count)
                blanks = blanks + 1 if written == line else 0
                if max_blank >= 0 and blanks > max_blank:
                    count[5] += 1
                else:
                    out[written] = 10
                    written += 1
                line, run, i = written, 0, after
                continue
            kind = _invisible(code)
            if kind < 0 and code < len(marks):
                run = run + 1 if marks[code] else 0
                kind = 3 if run > MAX_MARKS else -1
            elif kind < 0:
                run = 0
            if kind >= 0:
                count[kind] += 1
            else:
                for j in range(i, after):
                    out[written] = data[j]
                    written += 1
            i = after
        written = _end_line(out, line, written, count)
        out_offsets[row + 1] = written


@dataclass(frozen=True)
class Unicode(Stage):
    """Repairs and normalises text, without dropping a document. Applying it again changes nothing.

    Removes control characters (C0, DEL, C1) but newline and tab, U+200B, U+2060, U+FEFF (also the byte order mark),
    soft hyphens, and spaces and tabs at the ends of lines. Line ends CRLF and CR, and what separates pages, lines and
    records (vertical tab, form feed, U+001C to U+001F) become LF: no words grow together. The joiners U+200C and
    U+200D stay: Persian, Indic scripts and emoji need them.

    Args:
        mojibake: Repair text that was read in the wrong encoding (`schÃ¶n`), line by line, with ftfy.
        form: `NFC`, `NFKC` (which also folds ligatures, full-width letters and superscripts) or `none`.

    Of more than two blank lines in a row two stay.

    Source: UAX 15 (forms; runs of more than 30 combining marks are cut at 30); Speer 2019 (ftfy).
    Cost: linear; about 200 MB per CPU second for clean ASCII.
    """

    name = "unicode"
    version = 3
    mojibake: bool = True
    form: Literal["NFC", "NFKC", "none"] = "NFC"
    max_blank_lines: int = field(default=2, init=False)

    def apply(self, batch: pa.RecordBatch) -> StageResult:
        """The batch with its texts repaired; counts `mojibake`, `normalised` (documents) and those of KINDS."""
        counts: Counter[str] = Counter()
        column, _, rows = self._round(batch.column("text"), counts)
        for _ in range(ROUNDS):  # what one step uncovers, an earlier one may have to clean: few rows, seldom twice
            if not len(rows):
                break
            some, changed, again = self._round(column.take(pa.array(rows)), counts)
            texts = {int(rows[i]): some[int(i)].as_py() for i in changed}
            column, rows = replace_rows(column, texts), rows[again]
        return StageResult(replace_column(batch, "text", column), keep_all(len(batch)), counts)

    def _round(self, column: pa.LargeStringArray, counts: Counter[str]) -> tuple[pa.LargeStringArray, I64, I64]:
        """Every step once; the rows that were changed; and those of them that need another round.

        Those were not ASCII before, and are not empty now.
        """
        offsets, data = text_buffers(column)
        flags = np.zeros(len(column), np.uint8)
        _gate(offsets, data, _pairs(), flags)
        changed = np.zeros(len(column), bool)
        if self.mojibake:
            column = self._edit(column, np.flatnonzero(flags & SUSPECT), _repair, "mojibake", changed, counts)
        column = self._tidied(column, changed, counts)
        if self.form != "none":
            ask = MAYBE_DENORMAL if self.form == "NFC" else NOT_ASCII
            # Repair can bring up anything: what it touched is asked again.
            rows = np.flatnonzero((flags & ask != 0) | (changed & (flags != 0)))
            normalise = functools.partial(unicodedata.normalize, self.form)
            column = self._edit(column, rows, normalise, "normalised", changed, counts)
        sizes = np.diff(text_buffers(column)[0])
        return column, np.flatnonzero(changed), np.flatnonzero(changed & (flags != 0) & (sizes > 0))

    def _edit(
        self, column: pa.LargeStringArray, rows: I64, repair: Any, kind: str, changed: BOOL, counts: Counter[str]
    ) -> pa.LargeStringArray:
        texts = {}
        for row in rows.tolist():
            text = column[row].as_py()
            if (repaired := repair(text)) != text:
                texts[row] = repaired
                changed[row] = True
        counts[kind] += len(texts)
        return replace_rows(column, texts)

    def _tidied(self, column: pa.LargeStringArray, changed: BOOL, counts: Counter[str]) -> pa.LargeStringArray:
        offsets, data = text_buffers(column)
        out = np.empty(int(offsets[-1] - offsets[0]), np.uint8)
        out_offsets = np.zeros(len(offsets), np.int64)
        by_row = np.zeros((len(column), len(KINDS)), np.int64)
        _tidy(offsets, data, self.max_blank_lines, _marks(), out, out_offsets, by_row)
        sums = by_row.sum(axis=0)
        if not sums.any():
            return column
        counts.update(dict(zip(KINDS, sums.tolist())))
        changed |= by_row.any(axis=1)
        return text_column(out_offsets, out[: out_offsets[-1]])


def _repair(text: str) -> str:
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if not line.isascii() and (is_bad(line) or C1.search(line)):
            lines[i] = ftfy.fix_encoding(line)
    return "\n".join(lines)
