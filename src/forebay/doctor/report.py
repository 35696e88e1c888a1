"""What an examination is asked and what it says: options, findings, reports.

Hides nothing: plain frozen values, which print as JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
MOST_BYTES = 256 << 20
"""Read of one file or dataset unless all of it is asked for."""


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        fault: Its name, such as `header-as-tokens`; docs/doctor.md lists them.
        confidence: `certain` (by arithmetic), `likely` (by statistics with a wide margin) or `possible`.
        path: The file.
        place: Where in it: `byte 128`, `token 4096`, `sample 7`, `row group 2` …
        evidence: What was expected and what was found.
        mend: The command that mends it, or that makes the data anew.
    """

    fault: str
    confidence: str
    path: str
    place: str
    evidence: str
    mend: str

    @property
    def is_wrong(self) -> bool:
        """Whether it fails the examination; a possible fault is told and does not."""
        return self.confidence != POSSIBLE


@dataclass(frozen=True)
class Options:
    """What the caller knows of the data, and how much of it to read.

    Attributes:
        dtype: Type of tokens that no header tells; None to guess.
        vocab_size: Ids are below it; 0 if unknown.
        eos_id: Ends each document; None if unknown.
        seq_len: Tokens of a sample; 0 if unknown.
        tokenizer: Decodes the first tokens; None if unknown.
        spec: How the tokenizer was named, for commands that name it again.
        full: Read every byte.
        most_bytes: Read of one file or dataset where `full` is False.
    """

    dtype: np.dtype[Any] | None = None
    vocab_size: int = 0
    eos_id: int | None = None
    seq_len: int = 0
    tokenizer: Tokenizer | None = None
    spec: str = ""
    full: bool = False
    most_bytes: int = MOST_BYTES


@dataclass(frozen=True)
class Report:
    """One file or dataset, examined.

    Attributes:
        path: What it is called.
        kind: What it is: `npy`, `raw tokens`, `megatron`, `parquet` … or `unknown`.
        facts: What is known of it: dtype, counts, first tokens …
        findings: What is wrong; empty if nothing.
        depth: How much was checked: `all`, `part`, `structure` (sizes, counts and offsets; the contents are of no type
            that can be checked), or `none` where nothing here knows the format.
        read_bytes, total_bytes: Read, and there.
        seconds: Taken.
    """

    path: Path
    kind: str
    facts: dict[str, Any]
    findings: list[Finding] = field(default_factory=list)
    depth: str = "all"
    read_bytes: int = 0
    total_bytes: int = 0
    seconds: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """Whether something certain or likely was found."""
        return any(one.is_wrong for one in self.findings)

    @property
    def ok(self) -> bool:
        """Whether it was checked, at least in part, and nothing certain or likely was found."""
        return self.depth != "none" and not self.is_wrong

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "ok": self.ok,
            "depth": self.depth,
            "facts": self.facts,
            "findings": [asdict(one) for one in self.findings],
            "read_bytes": self.read_bytes,
            "total_bytes": self.total_bytes,
            "seconds": round(self.seconds, 3),
        }


def unique(findings: list[Finding]) -> list[Finding]:
    """The first of each fault at each place of each file, in order."""
    seen: dict[tuple[str, str, str], Finding] = {}
    for one in findings:
        seen.setdefault((one.fault, one.path, one.place), one)
    return list(seen.values())
