"""Commands on a ledger: what it proves, and who used what."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def _ledger_verify(args: argparse.Namespace) -> int:
    from millrace.ledger import verify_ledger
    from millrace.network.identity import verify

    report = verify_ledger(args.file, verify=verify)
    if args.json:
        print(json.dumps(report.to_json()))
    else:
        for e in report.epochs:
            print("epoch {epoch}: {samples:,} samples used, {missing:,} missing, {repeated:,} repeated".format(**e))
        for problem in report.problems:
            print(f"problem: {problem}")
        print("ok: chain, signatures and coverage hold" if report.ok else "NOT ok")
    return 0 if report.ok else 1


def add_verbs(verb: Callable[..., argparse.ArgumentParser], group: Callable[[str, str], Any]) -> None:
    """Adds the verbs of this module."""
    p = verb(
        "verify",
        _ledger_verify,
        "prove that each sample of an epoch was used exactly once",
        group("ledger", "who used which samples"),
    )
    p.add_argument("file", type=Path)
    p.add_argument("--json", action="store_true")
