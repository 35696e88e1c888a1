"""Tokens like those of text, and the doctor asked in one line."""

from pathlib import Path
from typing import Any

import numpy as np

from forebay.doctor import examine
from forebay.formats.report import CheckOptions, Finding, Report

EOS = 50256


def text_tokens(
    num: int, seed: int = 0, vocab: int = 50257, dtype: Any = np.uint16, eos: int | None = EOS
) -> np.ndarray:
    """Ids whose frequency falls with their number, with an EOS about every 300th: [num]."""
    rng = np.random.default_rng(seed)
    ids = np.exp(rng.random(num) * np.log(vocab - 1)).astype(np.int64)
    if eos is not None:
        ids[rng.integers(0, num, max(1, num // 300))] = eos
    return ids.astype(dtype)


def reports(*paths: Path, **options: Any) -> list[Report]:
    return examine(list(paths), CheckOptions(**options))


def findings(*paths: Path, **options: Any) -> list[Finding]:
    return [item for report in reports(*paths, **options) for item in report.findings]


def faults(*paths: Path, **options: Any) -> set[str]:
    return {item.fault for item in findings(*paths, **options)}


def only(fault: str, *paths: Path, **options: Any) -> Finding:
    """The one finding, which is of this fault."""
    result = findings(*paths, **options)
    assert {item.fault for item in result} == {fault}, result
    return result[0]
