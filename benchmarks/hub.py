"""Streaming a hub's dataset, beside Hugging Face `datasets`: `python -m benchmarks.hub [PART…]`.

    stream  the first batch from process start, text MB/s after it, what was fetched, CPU s for a GB of text;
            at full speed, with 30 ms before each answer, and at 50 MB/s for all connections together
    resume  a state saved in mid-epoch: how soon a fresh process goes on, and whether with the same batches
    ranks   four files for 2 and for 6 ranks: what each rank is given, and what it fetches

The hub is the tests' server, on this machine; the repository is written from a seed. scripts/peers.sh loaders makes
the environment of `datasets` in .venv-peers-loaders/hf, or where FOREBAY_LOADER_PEERS says. About ten minutes.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.loading.fleet import ROOT, Process, Turns
from benchmarks.loading.peers import HUB_NAME, TEXT_PEERS, TEXT_SEQ_LEN
from benchmarks.measure import Figure, show, working_folder
from benchmarks.prepare.corpus import data_folder, prose
from benchmarks.server_process import ServerProcess
from forebay.prepare.tokenize.encoders import make_encoder
from forebay.prepare.tokenize.tokenizers import load_tokenizer

NETWORKS = {
    "full speed": {},
    "30 ms before each answer": {"delay_s": 0.030},
    "50 MB/s for all connections": {"bytes_per_s": 50e6},
}
SUBJECTS = (("stream", 0), ("datasets", 0), ("guide", 10_000), ("datasets", 10_000))
"""Names and buffers of documents that are shuffled."""
WARM = 150
"""Batches before the clock starts: the 1000 documents that `datasets` tokenizes for its first."""
MARK, COMPARED = 1001, 40
BATCH = 8
Table = tuple[str, list[Figure]]


def make_hub(folder: Path, files: int, file_bytes: int) -> Path:
    """A hub with that many Parquet files of so many bytes of prose, and the model `gpt2`; an old one is kept.

    They have the larger columns of FineWeb-Edu, row groups of 1000 rows and snappy, as the hub's large text sets.
    """
    hub = folder / f"hub-{files}x{file_bytes}"
    if (hub / ".done").exists():
        return hub
    sys.path.insert(0, str(ROOT / "tests"))
    repos = importlib.import_module("support.hub_repos")
    repo = repos.write_repo(hub / "datasets" / HUB_NAME)
    repos._models(hub / "models")
    (repo / "data").mkdir(exist_ok=True)
    pool, chance = prose(), random.Random(0)
    for number in range(files):
        texts: list[str] = []
        written = 0
        while written < file_bytes:
            parts, size = [], int(chance.expovariate(1 / 4000)) + 200
            while size > 0:
                parts.append(chance.choice(pool)[:size])
                size -= len(parts[-1]) + 2
            texts.append("\n\n".join(parts))
            written += len(texts[-1].encode())
        rows = len(texts)
        columns = {
            "text": texts,
            "id": [f"<urn:uuid:{number:08x}-0000-4000-8000-{row:012x}>" for row in range(rows)],
            "url": [f"https://example.org/{number}/{chance.getrandbits(64):x}" for _ in range(rows)],
            "file_path": [f"s3://commoncrawl/crawl-data/CC-MAIN-2024-10/{row % 90}.warc.gz" for row in range(rows)],
            "language_score": [chance.random() for _ in range(rows)],
            "score": [chance.uniform(2.5, 5) for _ in range(rows)],
        }
        path = repo / f"data/train-{number:05d}-of-{files:05d}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=1000, compression="snappy")
    (hub / ".done").touch()
    return hub


class Subjects:
    """Feeds of text from a hub, each opened in a process of its own."""

    def __init__(self, hub: ServerProcess, folder: Path) -> None:
        self.hub, self.folder = hub, folder
        (folder / "gpt2").mkdir(exist_ok=True)
        try:
            source = data_folder() / "tokenizers/gpt2"
        except SystemExit:  # The hub's own, of 1000 tokens.
            source = hub.folder / "models/gpt2"
        (folder / "gpt2/tokenizer.json").write_bytes(load_tokenizer(str(source)).data)
        self.tokenizer = str(folder / "gpt2")

    def open(self, name: str, buffer: int = 0, state: Path | None = None, **ask: Any) -> Process:
        """A process whose feed is being opened; `receive` waits for it."""
        process = Process(
            name, self.folder, HF_ENDPOINT=self.hub.url, HF_HUB_OFFLINE="0", HF_HUB_DISABLE_XET="1",
            HF_HUB_DISABLE_TELEMETRY="1", HF_HOME=str(self.folder / "hf-home"),
        )  # fmt: skip
        saved = str(state) if state else None
        process.send("restore", state=saved, buffer=buffer, tokenizer=self.tokenizer, batch=BATCH, **ask)
        return process

    def text_bytes(self, batches: float) -> float:
        """Bytes of text that batches stand for, by the ratio of the first file."""
        texts = pq.ParquetFile(min(self.hub.folder.rglob("*.parquet"))).read_row_group(0, ["text"])["text"].to_pylist()
        tokenizer = load_tokenizer(self.tokenizer)
        tokens = sum(len(ids) + 1 for ids in make_encoder(tokenizer.data, tokenizer.kind).encode(texts))
        return batches * BATCH * TEXT_SEQ_LEN * sum(len(text.encode()) for text in texts) / tokens


def title(name: str, buffer: int = 0) -> str:
    return TEXT_PEERS[name].label + (f", buffer of {buffer}" if buffer else "")


def measure_stream(subjects: Subjects, args: argparse.Namespace) -> Iterator[Table]:
    """Each network in turn; in it all subjects by rounds."""
    hub, bytes_a_batch = subjects.hub, subjects.text_bytes(1)

    def run(name: str, buffer: int, faults: dict[str, float]) -> dict[str, float]:
        hub.limit(delay_s=0.0, all_bytes_per_s=0.0)
        hub.limit(**faults)
        with subjects.open(name, buffer, endless=True) as process:
            process.receive()
            first = process.ask("first")
            first_s, sent_first = time.perf_counter() - process.began, hub.sent()
            streamed = process.ask("run", seconds=args.seconds, warm=WARM)
            sent, text = hub.sent(), streamed["batches"] * bytes_a_batch
            all_text = text + (WARM + 1) * bytes_a_batch
        return {
            "first batch [s]": first_s,
            "CPU to the first batch [s]": first["cpu_s"],
            "fetched for it [MB]": sent_first["bytes"] / 1e6,
            "requests for it": sent_first["requests"],
            "text [MB/s]": text / streamed["wall_s"] / 1e6,
            "CPU [s/GB of text]": streamed["cpu_s"] / text * 1e9,
            "fetched a byte of text": sent["bytes"] / all_text,
            "requests a MB of text": sent["requests"] / all_text * 1e6,
        }

    for network, faults in list(NETWORKS.items())[: args.networks]:
        turns = Turns()
        for _ in range(args.rounds):
            for name, buffer in SUBJECTS:
                turns.run(title(name, buffer), "", run, name, buffer, faults)
        yield f"stream, {network}; batches of {BATCH} x {TEXT_SEQ_LEN}", figures(turns)


def figures(turns: Turns) -> list[Figure]:
    """The medians of every subject, and the reasons of those that failed."""
    rows = [
        Figure(f"{name}: {key}", turns.median(name, kind, key), "")
        for name, kind in turns.answers
        if name not in turns.failed
        for key in turns.answers[name, kind][0]
    ]
    return rows + [Figure.missing(name, reason) for name, reason in turns.failed.items()]


def measure_resume(subjects: Subjects, args: argparse.Namespace) -> Iterator[Table]:
    """After MARK batches, a state; what followed then beside what follows in a fresh process."""
    out = subjects.folder / "walk"
    mark = args.mark
    saved = Path(f"{out}.{mark}")

    def walk(name: str, buffer: int, state: Path | None, stop: int) -> tuple[dict[str, float], np.ndarray]:
        subjects.hub.limit(delay_s=0.0, all_bytes_per_s=0.0)
        with subjects.open(name, buffer, state) as process:
            opened = process.receive()
            first = process.ask("first") if state else {"first_s": 0.0}
            answer = {
                "to the next batch, from process start [s]": time.perf_counter() - process.began,
                "after opening [s]": opened["load_s"] + first["first_s"],
                "fetched for it [MB]": subjects.hub.sent()["bytes"] / 1e6,
                "state [kB]": opened["state_bytes"] / 1e3,
            }
            process.ask("walk", marks=[] if state else [mark], out=str(out), stop=stop)
        return answer, np.load(f"{out}.npz")["ids"][-(COMPARED - 1) * BATCH :]

    def resume(name: str, buffer: int) -> dict[str, float]:
        _, expected = walk(name, buffer, None, mark + COMPARED)
        answer, ids = walk(name, buffer, saved, COMPARED - 1)
        same = (expected == ids).reshape(-1, BATCH).all(1).sum() if expected.shape == ids.shape else 0
        return answer | {f"batches as they followed then, of {COMPARED - 1}": float(same)}

    turns = Turns()
    for name, buffer in (("stream", 0), ("datasets", 0), ("stream", 2000), ("guide", 2000), ("datasets", 2000)):
        for _ in range(args.rounds):
            turns.run(title(name, buffer), "", resume, name, buffer)
    yield f"resume after {mark} batches of {BATCH} x {TEXT_SEQ_LEN}", figures(turns)


def measure_ranks(subjects: Subjects, args: argparse.Namespace) -> Iterator[Table]:
    """An epoch of each rank, one after the other."""
    hub = subjects.hub

    def run(name: str, rank: int, world: int) -> dict[str, float]:
        hub.limit(delay_s=0.0, all_bytes_per_s=0.0)
        with subjects.open(name, rank=rank, world=world) as process:
            process.receive()
            walked = process.ask("walk", out=str(subjects.folder / "walk"))
            return {"samples": walked["rows"], "MB": hub.sent()["bytes"] / 1e6, "CPU s": walked["cpu_s"]}

    for world in (2, 6):
        turns, rows = Turns(), []
        for name in ("stream", "one_lane", "datasets"):
            for rank in range(world):
                turns.run(name, "", run, name, rank, world)
            if name in turns.failed:
                rows.append(Figure.missing(title(name), turns.failed[name]))
                continue
            samples = [answer["samples"] for answer in turns.answers[name, ""]]
            detail = f"{sum(samples)} in all: {samples}"
            rows.append(Figure(f"{title(name)}: samples of a rank, least", min(samples), "", detail))
            rows.append(Figure(f"{title(name)}: fetched by a rank", turns.median(name, "", "MB"), "MB"))
            rows.append(Figure(f"{title(name)}: CPU of a rank", turns.median(name, "", "CPU s"), "s"))
        yield f"ranks: four files for {world} ranks", rows


PARTS: dict[str, Callable[[Subjects, argparse.Namespace], Iterator[Table]]] = {
    "stream": measure_stream,
    "resume": measure_resume,
    "ranks": measure_ranks,
}


def main(argv: Sequence[str]) -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS], help=", ".join(PARTS))
    parser.add_argument("--files", type=int, default=8, help="of the repository (8)")
    parser.add_argument("--mb", type=int, default=60, help="of text in each file (60); about 0.6 of it as Parquet")
    parser.add_argument("--rounds", type=int, default=3, help="how often each is measured, in turns (3)")
    parser.add_argument("--seconds", type=float, default=6.0, help="of streaming after the first batch (6)")
    parser.add_argument("--networks", type=int, default=len(NETWORKS), help="how many of them, for stream")
    parser.add_argument("--mark", type=int, default=MARK, help="batches before the state, for resume")
    args = parser.parse_args(argv)
    with working_folder(None) as folder:
        for part in args.parts or PARTS:
            began = time.perf_counter()
            size = (4, 4_000_000) if part == "ranks" else (args.files, args.mb * 1_000_000)
            with ServerProcess(make_hub(folder, *size), "hub") as hub:
                for heading, rows in PARTS[part](Subjects(hub, folder), args):
                    show(heading, rows)
            print(f"({part}: {time.perf_counter() - began:.0f} s, {time.strftime('%Y-%m-%d')})", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
