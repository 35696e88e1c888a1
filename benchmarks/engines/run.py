"""Run every engine in sequence, interleaved and repeated, and print one table.

    python run.py --python libp2p_=/path/to/its/own/environment/bin/python

Needs psutil and cryptography; an engine that is not installed says how to install it.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
GB, MB = 1_000_000_000, 1_000_000
# Script, variant, bytes: engines too slow for a gigabyte move less of it.
BULK = [
    ("https", "threaded", GB),
    ("https", "asyncio", GB),
    ("https", "uvicorn", GB),
    ("libtorrent_", "plain", GB),
    ("libtorrent_", "ssl", GB),
    ("iroh_", None, 64 * MB),
    ("libp2p_", None, 64 * MB),
]
OTHERS = [
    ("https", "threaded", "fanout", 256 * MB),
    ("https", "threaded", "kill", 256 * MB),
    ("https", "threaded", "strangers", 16 * MB),
    ("https", "uvicorn", "strangers", 16 * MB),
    ("libtorrent_", "plain", "fanout", 256 * MB),
    ("libtorrent_", "ssl", "kill", 256 * MB),
    ("libtorrent_", "ssl", "strangers", 16 * MB),
    ("libtorrent_", None, "dht", None),
    ("iroh_", None, "kill", 64 * MB),
    ("iroh_", None, "strangers", 16 * MB),
    ("libp2p_", None, "kill", 64 * MB),
    ("libp2p_", None, "strangers", 16 * MB),
    ("libp2p_", None, "dht", None),
]


def measure(python: dict, folder: str, script: str, variant: str | None, what: str, size: int | None) -> dict:
    command = [python.get(script, sys.executable), "-W", "ignore", f"{script}.py", what, "--dir", folder]
    command += ["--variant", variant] if variant else []
    command += ["--size", str(size)] if size else []
    try:
        result = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        return {"failed": "no answer in 180 s"}
    lines = result.stdout.splitlines()
    return json.loads(lines[-1]) if lines else {"failed": (result.stderr.splitlines() or ["no output"])[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", default=[], metavar="SCRIPT=PYTHON")
    parser.add_argument("--dir", default="/dev/shm/engines")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    python = dict(record.split("=", 1) for record in args.python)
    runs: dict[tuple, list[dict]] = {engine: [] for engine in BULK}
    for _ in range(args.repeats):
        base = None
        for script, variant, size in BULK:
            record = measure(python, args.dir, script, variant, "bulk", size)
            if "mb_s" in record:
                cpu = record["cpu_send"] + record["cpu_recv"]
                base = base or (record["mb_s"], cpu)
                record |= {"cpu": cpu, "speed_ratio": record["mb_s"] / base[0], "cpu_ratio": cpu / base[1]}
            print("#", script, variant, json.dumps(record), file=sys.stderr, flush=True)
            runs[script, variant, size].append(record)
    print("| engine | MB | MB/s | CPU-s/GB sender | receiver | speed ratio | CPU ratio | intact |")
    print("|---|---|---|---|---|---|---|---|")
    for (script, variant, size), records in runs.items():
        good = [record for record in records if "mb_s" in record]
        name = f"{script.rstrip('_')} {variant or ''}".strip()
        if not good:
            print(f"| {name} | {size // MB} | {records[-1]} | | | | | |")
            continue
        keys = ("mb_s", "cpu_send", "cpu_recv", "speed_ratio", "cpu_ratio")
        cells = [f"{statistics.median(record[key] for record in good):.2f}" for key in keys]
        speeds = [record["mb_s"] for record in good]
        cells[0] = f"{float(cells[0]):.0f} ({min(speeds):.0f} to {max(speeds):.0f})"
        intact = f"{sum(record['intact'] for record in good)}/{len(records)}"
        print(f"| {name} | {size // MB} | {' | '.join(cells)} | {intact} |")
    for script, variant, what, size in OTHERS:
        record = measure(python, args.dir, script, variant, what, size)
        print(f"\n{script.rstrip('_')} {variant or ''} {what}: {json.dumps(record)}", flush=True)


if __name__ == "__main__":
    main()
