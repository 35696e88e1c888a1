"""Converting tokens, beside each format's own library: `python -m benchmarks.convert [FORMAT…]`.

200 M tokens U16 in documents: CPU seconds for a GB of tokens, ours with and without reading again what was written;
then documents read one after another and at random, from the files that `forebay convert` wrote.

scripts/peers.sh interop makes the libraries' environments in .venv-peers-loaders, or where FOREBAY_LOADER_PEERS says.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.convert import corpus
from benchmarks.convert.peers import PEERS
from benchmarks.loading.fleet import ROOT, NotMeasuredError, clean_environment, folder_of_peers
from benchmarks.measure import Figure, median, show, working_folder

TIMEOUT_S = 300.0


def ask(name: str, who: str, folder: Path, **what: Any) -> dict[str, Any]:
    """One task, in the interpreter that has its library.

    Raises:
        NotMeasuredError: If it gives no figure.
    """
    group = PEERS[name].group if who == "peer" else ""
    python = folder_of_peers() / group / "bin/python" if group else Path(sys.executable)
    if not python.exists():
        raise NotMeasuredError(f"no {python}; run scripts/peers.sh interop")
    request_json = json.dumps({"format": name, "who": who, **what})
    with (folder / f"{name}-{who}.log").open("ab") as log:
        try:
            done = subprocess.run(
                [str(python), "-m", "benchmarks.convert.child", request_json], cwd=ROOT, env=clean_environment(),
                stdout=subprocess.PIPE, stderr=log, timeout=TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise NotMeasuredError(f"no answer in {TIMEOUT_S:.0f} s") from error
    if not done.stdout:
        raise NotMeasuredError(f"its process ended with {done.returncode}; see {name}-{who}.log")
    answer: dict[str, Any] = json.loads(done.stdout)
    if "error" in answer:
        raise NotMeasuredError(answer["error"])
    return answer


def written(name: str, data: Path, folder: Path, rounds: int, num_bytes: int) -> list[Figure]:
    """The two ways to write a format, in turns."""
    ways: dict[str, dict[str, Any]] = {
        "forebay convert": {"who": "ours", "out": str(folder / f"{name}-ours")},
        PEERS[name].label: {"who": "peer", "out": str(folder / f"{name}-peer")},
    }
    runs_by_way: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    errors: dict[str, str] = {}
    for _ in range(rounds):
        for way, request in ways.items():
            if way in errors:
                continue
            try:
                runs_by_way[way].append(ask(name, folder=folder, do="write", corpus=str(data), **request))
            except NotMeasuredError as error:
                errors[way] = str(error)
    figures = []
    for way, runs in runs_by_way.items():
        if way in errors:
            figures.append(Figure.missing(f"{name}: {way}", errors[way]))
            continue
        cpu, wall = (median([run[key] for run in runs]) / num_bytes * 1e9 for key in ("cpu_s", "wall_s"))
        figures.append(
            Figure(f"{name}: {way}", cpu, "CPU s/GB", f"{wall:.3g} s/GB of the clock, {runs[0]['versions']}")
        )
    theirs = runs_by_way[PEERS[name].label]
    for way in list(ways)[:2]:
        if theirs and runs_by_way[way] and way not in errors:
            ratio = median([a["cpu_s"] / b["cpu_s"] for a, b in zip(runs_by_way[way], theirs)])
            figures.append(Figure(f"{name}: {way}, of the library's CPU", ratio, "x"))
    return figures


def looked_up(name: str, data: Path, folder: Path, rounds: int) -> list[Figure]:
    """Reading by number, from what ours wrote."""
    if PEERS[name].read is None:
        return []
    figures = []
    for who, label in (("ours", "forebay"), ("peer", PEERS[name].label.partition(",")[0])):
        try:
            out = str(folder / f"{name}-ours")
            runs = [ask(name, who, folder, do="read", corpus=str(data), out=out, seconds=1.5) for _ in range(rounds)]
        except NotMeasuredError as error:
            figures.append(Figure.missing(f"{name}, read by {label}", error))
            continue
        speed = median([r["tokens"] / r["wall_s"] for r in runs])
        figures += [
            Figure(f"{name}, read by {label}: tokens", speed / 1e6, "M/s", "documents"),
            Figure(f"{name}, read by {label}: open", median([r["open_s"] for r in runs]), "s"),
            Figure(f"{name}, read by {label}: p50", median([r["p50_us"] for r in runs]), "us", "a document at random"),
            Figure(f"{name}, read by {label}: p99", median([r["p99_us"] for r in runs]), "us"),
        ]
    return figures


def main(argv: Sequence[str]) -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", metavar="FORMAT", choices=[[], *PEERS], help=", ".join(PEERS))
    parser.add_argument("--tokens", type=float, default=200e6, help="of the corpus (200e6)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns (3)")
    parser.add_argument("--folder", type=Path, help="keep the corpus and the formats here (a temporary folder)")
    args = parser.parse_args(argv)
    with working_folder(args.folder) as folder:
        data = corpus.make(folder, int(args.tokens))
        own = folder / f"{data.name}-forebay"
        if not own.exists():
            from benchmarks.convert.peers import write_safetensors
            from forebay.dataset.import_slices import import_slices

            write_safetensors(data, own)
            import_slices(own, "benchmark")
        for name in args.formats or PEERS:
            began = time.perf_counter()
            figures = written(name, data, folder, args.rounds, 2 * int(args.tokens))
            figures += looked_up(name, data, folder, args.rounds)
            show(f"{name}: {args.tokens / 1e6:.0f} M tokens U16", figures)
            print(f"({name}: {time.perf_counter() - began:.0f} s, {time.strftime('%Y-%m-%d')})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
