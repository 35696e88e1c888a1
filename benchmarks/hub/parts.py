"""The parts of `python -m benchmarks.hub`: runs in turns, and their medians as figures."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.hub.runs import Run, run
from benchmarks.hub.subjects import BATCH, SEQ_LEN, SUBJECTS
from benchmarks.loading.fleet import NotMeasuredError
from benchmarks.measure import Figure, median
from benchmarks.server_process import ServerProcess

NETWORKS = {"full": (0.0, 0.0), "30ms": (0.030, 0.0), "50MB/s": (0.0, 50e6)}
"""Wait before each answer [s], and bytes a second of all connections together (0: no limit)."""
_TITLES = {"full": "full speed", "30ms": "30 ms before each answer", "50MB/s": "50 MB/s for all connections"}
GUIDE_BUFFER = 10_000
WARM = 150
"""Batches before the clock starts: the 1000 documents that `datasets` tokenizes for its first."""
Table = tuple[str, list[Figure]]


def _label(subject: str, shuffle: int) -> str:
    return SUBJECTS[subject].label + (f", buffer of {shuffle}" if shuffle else "")


def text_bytes_a_token(folder: Path, hub: ServerProcess) -> float:
    """Of the corpus's first megabytes: what one token stands for."""
    import pyarrow.parquet as pq

    from forebay.prepare.tokenize.encoders import make_encoder
    from forebay.prepare.tokenize.tokenizers import load_tokenizer

    path = sorted(hub.folder.rglob("*.parquet"))[0]
    texts = pq.ParquetFile(path).read_row_group(0, ["text"]).column("text").to_pylist()
    tokenizer = load_tokenizer(str(hub.folder / "models/gpt2"))
    tokens = sum(len(ids) + 1 for ids in make_encoder(tokenizer.data, tokenizer.kind).encode(texts))
    return sum(len(text.encode()) for text in texts) / tokens


def stream(hub: ServerProcess, folder: Path, ask: argparse.Namespace) -> Iterator[Table]:
    """Each network in turn; in it all subjects by rounds."""
    ratio = text_bytes_a_token(folder, hub)
    subjects = [
        (name.rstrip("+"), 0 if name in ("stream", "datasets") else GUIDE_BUFFER) for name in ask.subjects.split(",")
    ]
    yield "corpus", [Figure("text bytes a token", ratio, "")]
    for network in ask.networks.split(","):
        delay_s, limit = NETWORKS[network]
        runs: dict[tuple[str, int], list[Run]] = {subject: [] for subject in subjects}
        failed: dict[tuple[str, int], str] = {}
        for _ in range(ask.rounds):
            for subject in subjects:
                if subject in failed:
                    continue
                try:
                    result = run(
                        subject[0],
                        hub,
                        folder,
                        delay_s=delay_s,
                        bytes_per_s=limit,
                        shuffle=subject[1],
                        seconds=ask.seconds,
                        warm=WARM * (subject[0] != "collected"),
                    )
                    runs[subject].append(result)
                except NotMeasuredError as error:
                    failed[subject] = str(error)
        figures = []
        for subject in subjects:
            name = _label(*subject)
            if subject in failed:
                figures.append(Figure.missing(name, failed[subject]))
                continue
            figures += _streamed(name, runs[subject], ratio, speeds=subject[0] != "collected")
        yield f"stream, {_TITLES[network]}; batches of {BATCH} x {SEQ_LEN}, {ask.rounds} rounds", figures


def _streamed(name: str, runs: list[Run], ratio: float, speeds: bool) -> list[Figure]:
    def median_of(value: Any) -> float:
        return median([value(item) for item in runs])

    figures = [
        Figure(f"{name}: first batch", median_of(lambda r: r.first_s), "s"),
        Figure(f"{name}: CPU to the first batch", median_of(lambda r: r.first_line["cpu_s"]), "s"),
        Figure(f"{name}: fetched for it", median_of(lambda r: r.sent_first["bytes"]) / 1e6, "MB"),
        Figure(f"{name}: requests for it", median_of(lambda r: r.sent_first["requests"]), ""),
    ]
    if not speeds:
        return figures

    def text(item: Run) -> float:
        return float(item.last_line["tokens"] * ratio)

    return [
        *figures,
        Figure(f"{name}: text", median_of(lambda r: text(r) / r.last_line["wall_s"]) / 1e6, "MB/s"),
        Figure(f"{name}: CPU", median_of(lambda r: r.last_line["cpu_s"] / text(r)) * 1e9, "s/GB"),
        Figure(
            f"{name}: fetched a byte of text",
            median_of(lambda r: r.sent["bytes"] / r.last_line["all_tokens"] / ratio),
            "",
            "first batch included",
        ),
        Figure(
            f"{name}: requests a MB of text",
            median_of(lambda r: r.sent["requests"] / r.last_line["all_tokens"] / ratio) * 1e6,
            "",
        ),
    ]


def resume(hub: ServerProcess, folder: Path, ask: argparse.Namespace) -> Iterator[Table]:
    """After MARK batches, a state; what followed then beside what follows in a fresh process."""
    mark, num_compared = 1001, 40
    figures: list[Figure] = []
    for subject, shuffle in (("stream", 0), ("datasets", 0), ("stream", 2000), ("guide", 2000), ("datasets", 2000)):
        name, save = _label(subject, shuffle), str(folder / f"state-{subject}-{shuffle}")
        try:
            before = run(
                subject, hub, folder, shuffle=shuffle, mark=mark, save=save, names=True, stop=mark + num_compared
            )
            expected = before.last_line["names"]
            resumed = [
                run(subject, hub, folder, shuffle=shuffle, load=save, names=True, stop=num_compared)
                for _ in range(ask.rounds)
            ]
        except NotMeasuredError as error:
            figures.append(Figure.missing(name, error))
            continue
        num_equal = [sum(a == b for a, b in zip(expected, result.last_line["names"])) for result in resumed]
        figures += [
            Figure(
                f"{name}: to the next batch, from process start", median([result.first_s for result in resumed]), "s"
            ),
            Figure(f"{name}: after opening", median([result.first_line["first_s"] for result in resumed]), "s"),
            Figure(f"{name}: fetched for it", median([result.sent_first["bytes"] for result in resumed]) / 1e6, "MB"),
            Figure(f"{name}: state", Path(save).stat().st_size / 1e3, "kB"),
            Figure(f"{name}: batches as they followed then", min(num_equal), f"of {num_compared}"),
        ]
    yield f"resume after {mark} batches of {BATCH} x {SEQ_LEN}", figures


def ranks(hub: ServerProcess, folder: Path, ask: argparse.Namespace) -> Iterator[Table]:
    """An epoch of each rank: samples and bytes."""
    files = len(list(hub.folder.rglob("*.parquet")))
    for world in (2, 6):
        figures: list[Figure] = []
        for subject in ("stream", "one lane", "datasets"):
            name = SUBJECTS[subject].label
            try:
                results = [run(subject, hub, folder, rank=rank, world=world) for rank in range(world)]
            except NotMeasuredError as error:
                figures.append(Figure.missing(name, error))
                continue
            samples = [int(result.last_line["rows"]) for result in results]
            figures += [
                Figure(f"{name}: samples of a rank, least", min(samples), "", f"all: {samples}"),
                Figure(f"{name}: samples of a rank, most", max(samples), ""),
                Figure(f"{name}: samples in all", sum(samples), ""),
                Figure(f"{name}: fetched by a rank", median([result.sent["bytes"] for result in results]) / 1e6, "MB"),
                Figure(
                    f"{name}: CPU of a rank after its first batch",
                    median([result.last_line["cpu_s"] for result in results]),
                    "s",
                ),
            ]
        yield f"ranks: {files} files for {world} ranks", figures
