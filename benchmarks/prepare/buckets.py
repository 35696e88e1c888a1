"""Preparation from and to a bucket beside that of a disk: `PYTHONPATH=tests python -m benchmarks.prepare.buckets`.

CPU seconds of the command and its processes, at two sizes: what the larger takes beyond the smaller is free of fixed
costs. The server is `rclone serve s3` on this machine; its seconds do not count. The ids must be the same.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import Figure, show
from benchmarks.prepare.corpus import data_folder
from benchmarks.prepare.whole import clean_environment, make_folder
from support.s3_server import ACCESS_KEY, SECRET_KEY, S3Server


def run(inputs: str, out: str, workers: int, **more: str) -> tuple[float, float, str]:
    """CPU seconds of one preparation, the peak of memory of its largest process in bytes, and the dataset's id."""
    tokenizer = data_folder() / "tokenizers/gpt-neo-test-tokenizer.json"
    command = [sys.executable, "-m", "forebay", "prepare", inputs, "--out", out, "--json", "--quiet"]
    command += ["--filter", "gopher", "--dedup", "minhash", "--tokenizer", str(tokenizer), "--workers", str(workers)]
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, stdout=printed, env=clean_environment(**more))
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"benchmarks: {' '.join(command)} failed with {process.returncode}.")
        printed.seek(0)
        return usage.ru_utime + usage.ru_stime, 1024.0 * usage.ru_maxrss, json.loads(printed.read())["id"]


def measure(megabytes: float = 80, workers: int = 1) -> list[Figure]:
    """The ratio of disk to bucket, and the peaks of memory."""
    seconds: dict[str, list[float]] = {"disk": [], "bucket": []}
    peaks: dict[str, list[float]] = {"disk": [], "bucket": []}
    with tempfile.TemporaryDirectory() as name, S3Server(Path(name, "served")) as server:
        more = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY, "AWS_ALLOW_HTTP": "true"}
        more |= {"AWS_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1"}
        run(str(make_folder(Path(name, "tiny"), 0.05)), f"{name}/tiny-set", workers)  # kernels are compiled
        for number, size in enumerate((megabytes / 4, megabytes)):
            folder = make_folder(Path(name, f"texts{number}"), size)
            shutil.copytree(folder, Path(name, "served/bucket", f"texts{number}"))
            for kind, inputs, out in (
                ("disk", str(folder), f"{name}/set{number}"),
                ("bucket", f"s3://bucket/texts{number}", f"s3://bucket/set{number}"),
            ):
                cpu_s, peak, dataset = run(inputs, out, workers, **more)
                print(f"{size:6.0f} MB  {kind:8}{cpu_s:8.2f} CPU s  {peak / 1e6:6.0f} MB  {dataset[:12]}", flush=True)
                seconds[kind].append(cpu_s)
                peaks[kind].append(peak)
    disk, bucket = (larger - smaller for smaller, larger in seconds.values())
    return [
        Figure("throughput per core, bucket / disk", disk / bucket, "x", "beyond fixed costs"),
        Figure("bucket", megabytes * 0.75 / bucket, "MB/CPU s"),
        Figure("peak memory, bucket, 4x the text", peaks["bucket"][1] / peaks["bucket"][0], "x"),
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=80, help="the larger of the two corpora")
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    show("prepare: from and to a bucket", measure(arguments.mb, arguments.workers))


if __name__ == "__main__":
    main()
