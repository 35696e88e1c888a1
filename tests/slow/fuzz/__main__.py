"""`python -m tests.slow.fuzz --minutes 10 [--target T]… [--seed N]`: exit 1 if something was found.

Each target runs in a process of its own with bounded memory, a core each, for its share of the minutes; what
breaks the law is written to the directory named by --keep.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import resource
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .engine import fuzz
from .targets import TARGETS, make_target

MEMORY_BYTES = 4 << 30  # of addresses; libraries reserve far more than they touch


def _alone(name: str, seconds: float, seed: int, keep: Path) -> int:
    """One target in this process: a line of JSON says what came of it."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)  # servers warn of every stranger
    with tempfile.TemporaryDirectory() as directory:
        target = make_target(name, Path(directory))
        done = fuzz(target, seconds, random.Random(seed), keep / f"{name}.current")
        target.close()
    for location, data in done.faults.items():
        (keep / f"{name}-{hashlib.sha256(location.encode()).hexdigest()[:8]}.bin").write_bytes(data)
    print(json.dumps({**asdict(done), "faults": sorted(done.faults)}))
    return 0


def _run(name: str, seconds: float, seed: int, keep: Path) -> dict[str, Any]:
    words = ["--target", name, "--minutes", str(seconds / 60), "--seed", str(seed), "--keep", str(keep), "--alone"]
    argv = [sys.executable, "-m", "tests.slow.fuzz", *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=seconds + 60.0, check=False)
    except subprocess.TimeoutExpired:
        return {"executions": 0, "faults": [f"the process did not end; see {name}.current"]}
    if done.returncode != 0:
        reported = done.stderr.strip().splitlines()[-1:]
        return {"executions": 0, "faults": [f"the process ended with {done.returncode} {reported}; see {name}.current"]}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.slow.fuzz", description="Bytes from strangers.")
    parser.add_argument("--minutes", type=float, default=10.0, help="in all")
    parser.add_argument("--target", action="append", choices=sorted(TARGETS), help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path(tempfile.gettempdir()) / "forebay-fuzz")
    parser.add_argument("--alone", action="store_true", help="one target, in this process")
    args = parser.parse_args()
    names = args.target or sorted(TARGETS)
    args.keep.mkdir(parents=True, exist_ok=True)
    if args.alone:
        return _alone(names[0], args.minutes * 60, args.seed, args.keep)
    at_once = max(1, min(len(names), os.cpu_count() or 1))
    seconds = args.minutes * 60 * at_once / len(names)
    with ThreadPoolExecutor(at_once) as pool:
        rounds = list(pool.map(lambda name: _run(name, seconds, args.seed, args.keep), names))
    for name, done in zip(names, rounds):
        print(json.dumps({"target": name, **done}), flush=True)
    print(f"{sum(done['executions'] for done in rounds):,} executions; inputs that broke the law: {args.keep}")
    return 1 if any(done["faults"] for done in rounds) else 0


if __name__ == "__main__":
    sys.exit(main())
