"""The rules for source code, at their thresholds and against a plain count."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import UsageError
from forebay.prepare.documents import SCHEMA
from forebay.prepare.filters.counts import Code


def batch_of(texts: list[str]) -> pa.RecordBatch:
    columns = [list(range(len(texts))), [""] * len(texts), [""] * len(texts), [False] * len(texts), texts]
    return pa.record_batch([pa.array(c, f.type) for c, f in zip(columns, SCHEMA)], schema=SCHEMA)


def reasons(texts: list[str], stage: Code | None = None) -> list[str]:
    stage = stage or Code()
    return ["" if i < 0 else stage.reasons[i] for i in stage.apply(batch_of(texts)).drop]


def test_thresholds() -> None:
    longest = "a" * 1000 + "\n" * 20
    assert reasons([longest, "a" + longest]) == ["", "code_long_line"]
    assert reasons(["a" * 100, "a" * 101, "a" * 101 + "\n" + "b" * 99]) == ["", "code_long_lines", ""]
    assert reasons(["a;;;", "a;;;;", "é;;;"]) == ["", "code_few_alphanumeric", ""]
    assert reasons(["", "\n\n"], Code(min_alphanumeric=0)) == ["", ""]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("ab\n;é世", max_size=30), max_size=8), st.integers(0, 9))
def test_the_longest_line_is_found(texts: list[str], limit: int) -> None:
    stage = Code(max_mean_line_chars=99, max_line_chars=limit, min_alphanumeric=0)
    wanted = ["code_long_line" if max(map(len, t.split("\n"))) > limit else "" for t in texts]
    assert reasons(texts, stage) == wanted


def test_wrong_settings() -> None:
    with pytest.raises(UsageError, match="min_alphanumeric: expected at most 1, got 2"):
        Code(min_alphanumeric=2)
