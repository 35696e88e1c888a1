"""The whole of preparation beside datatrove's: JSON lines → Gopher's filters → MinHash → tokens.

    python -m benchmarks.prepare.whole [--mb 12] [--workers 2]

Processor and wall seconds of the whole tree of processes, from start to exit, on the same corpus in one run, at two
sizes: what the larger takes beyond the smaller is free of fixed costs (imports, kernels, models). Both have compiled
their bytecode before; ours also its kernels. Of ours the better
of two runs counts, of the peer's, a minute long, the only one. The peer runs with the interpreter in FOREBAY_PEERS.

The counts differ by a few documents that lie near a threshold of Gopher's (see filters.py), and near duplicates that
one of the two families of hash functions finds and the other does not.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import Figure, show
from benchmarks.prepare.corpus import data_folder, make_corpus

PEERS = os.environ.get("FOREBAY_PEERS", ".venv-peers/bin/python")
FILES = 4
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Outcome:
    """What one run cost, and what it made: documents that passed the filters, those that are left, their tokens."""

    cpu_s: float
    wall_s: float
    filtered: int
    documents: int
    tokens: int


def clean_environment(**more: str) -> dict[str, str]:
    """As users have it: bytecode is written once; peers are not sent to a hub that may not be there."""
    plain = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**plain, "HF_HUB_OFFLINE": "1", **more}


def timed(command: list[str], **more: str) -> tuple[float, float, str]:
    """Processor seconds of the command and all that it started, wall seconds, and what it printed.

    Raises:
        SystemExit: If it fails.
    """
    # Processes whose parent ended before them (datatrove's workers: the fork server's) come to us, and are counted.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(**more))
    wall = time.perf_counter() - started
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"benchmarks: {command[:4]} failed:\n{done.stderr[-3000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall, done.stdout


def prepare(
    inputs: str, out: str, tokenizer: Path | str, workers: int, **more: str
) -> tuple[float, float, dict[str, Any]]:
    """Processor and wall seconds of one `forebay prepare`, and its report."""
    command = [sys.executable, "-m", "forebay", "prepare", inputs, "--out", out, "--json", "--quiet"]
    command += ["--filter", "gopher", "--dedup", "minhash", "--tokenizer", str(tokenizer), "--workers", str(workers)]
    cpu, wall, printed = timed(command, **more)
    return cpu, wall, json.loads(printed)


def run_ours(corpus: Path, tokenizer: Path | str, workers: int, **more: str) -> Outcome:
    """One `forebay prepare` from nothing."""
    with tempfile.TemporaryDirectory() as out:
        cpu, wall, report = prepare(str(corpus), f"{out}/dataset", tokenizer, workers, **more)
    filtered = report["documents_out"] + report["dropped"].get("near_duplicate", 0)
    return Outcome(cpu, wall, filtered, report["documents_out"], report["tokens"])


def better_ours(corpus: Path, tokenizer: Path | str, workers: int, **more: str) -> Outcome:
    """The better of two runs: seconds long, they are at the mercy of what else the machine does."""
    return min((run_ours(corpus, tokenizer, workers, **more) for _ in range(2)), key=lambda run: run.cpu_s)


def run_datatrove(corpus: Path, tokenizer: Path, workers: int) -> Outcome:
    """Its own pipeline; what it kept is counted in its files, where a token has two bytes and a document eight."""
    with tempfile.TemporaryDirectory() as work:
        script = Path(__file__).with_name("peer_datatrove.py")
        cpu, wall, _ = timed([PEERS, str(script), str(corpus), work, str(tokenizer), str(workers)])
        tokens = sum(path.stat().st_size for path in Path(work, "tokens").glob("*.ds")) // 2
        documents = sum(path.stat().st_size for path in Path(work, "tokens").glob("*.ds.index")) // 8
        filtered = sum(gzip.decompress(path.read_bytes()).count(b"\n") for path in Path(work, "kept").glob("*.gz"))
    return Outcome(cpu, wall, filtered, documents, tokens)


def make_folder(folder: Path, megabytes: float) -> Path:
    """The corpus in several files, so that the peer's tasks have one each."""
    folder.mkdir()
    corpus_path = folder.with_suffix(".jsonl")
    make_corpus(corpus_path, int(megabytes * 1e6))
    lines = corpus_path.read_bytes().splitlines(keepends=True)
    for i in range(FILES):
        (folder / f"{i:02}.jsonl").write_bytes(b"".join(lines[i * len(lines) // FILES : (i + 1) * len(lines) // FILES]))
    corpus_path.unlink()
    return folder


def measure(megabytes: float = 12, workers: int = 2) -> list[Figure]:
    """The table, printed, and the ratios; two to three minutes, nearly all of them the peer's."""
    tokenizer = data_folder() / "tokenizers/gpt-neo-test-tokenizer.json"
    sizes = (megabytes / 4, megabytes)
    results: dict[str, list[Outcome]] = {"forebay": [], "forebay, tokenizers as coder": []}
    with tempfile.TemporaryDirectory() as name:
        folders = [make_folder(Path(name, str(i)), size) for i, size in enumerate(sizes)]
        tiny = make_folder(Path(name, "tiny"), 0.05)
        run_ours(tiny, tokenizer, workers)
        if Path(PEERS).exists():
            run_datatrove(tiny, tokenizer, workers)
            results["datatrove"] = []
        else:
            print(f"No peer: expected an interpreter with datatrove at {PEERS} (FOREBAY_PEERS).")
        for folder in folders:
            results["forebay"].append(better_ours(folder, tokenizer, workers))
            slow = better_ours(folder, tokenizer, workers, FOREBAY_CODER="reference")
            results["forebay, tokenizers as coder"].append(slow)
            if "datatrove" in results:
                results["datatrove"].append(run_datatrove(folder, tokenizer, workers))
    for i, size in enumerate(sizes):
        print(f"\n{size:.0f} MB of JSON lines, --workers {workers}")
        print(f"  {'':30}{'CPU s':>9}{'wall s':>9}{'MB/CPU s':>10}{'filtered':>10}{'documents':>11}{'tokens':>12}")
        for what, runs in results.items():
            run = runs[i]
            counts = f"{run.filtered:10}{run.documents:11}{run.tokens:12}"
            print(f"  {what:30}{run.cpu_s:9.2f}{run.wall_s:9.2f}{size / run.cpu_s:10.2f}{counts}")
    return _figures(results, sizes)


def measure_ours(megabytes: float = 4) -> list[Figure]:
    """One run of ours, without sample data and peers: bytes as tokens."""
    with tempfile.TemporaryDirectory() as name:
        run_ours(make_folder(Path(name, "tiny"), 0.05), "bytes", 1)
        outcome = run_ours(make_folder(Path(name, "corpus"), megabytes), "bytes", 1)
    return [
        Figure(
            "forebay prepare", megabytes / outcome.cpu_s, "MB/CPU s", "Gopher filters, MinHash, bytes; starts included"
        )
    ]


def _figures(results: dict[str, list[Outcome]], sizes: tuple[float, float]) -> list[Figure]:
    per_mb = {what: (runs[1].cpu_s - runs[0].cpu_s) / (sizes[1] - sizes[0]) for what, runs in results.items()}
    figures = [Figure(f"{what}, beyond fixed costs", 1 / cost, "MB/CPU s") for what, cost in per_mb.items()]
    fixed = results["forebay"][0].cpu_s - per_mb["forebay"] * sizes[0]
    figures.append(Figure("forebay, fixed", fixed, "CPU s", "starts, imports, kernels and models of all processes"))
    if "datatrove" in results:
        theirs = results["datatrove"][1]
        for what in ("forebay", "forebay, tokenizers as coder"):
            ours, detail = results[what][1], f"wall {theirs.wall_s / results[what][1].wall_s:.1f}x"
            figures.append(Figure(f"{what} / datatrove", theirs.cpu_s / ours.cpu_s, "x CPU", detail))
            figures.append(Figure(f"{what} / datatrove, beyond fixed", per_mb["datatrove"] / per_mb[what], "x CPU"))
    return figures


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=12, help="the larger of the two corpora")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    show("prepare: the whole", measure(arguments.mb, arguments.workers))


if __name__ == "__main__":
    main()
