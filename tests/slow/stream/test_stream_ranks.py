"""Ranks of a stream: what they fetch together, as workers of a coordinator too."""

import gzip
import json
import subprocess
import sys

import numpy as np
import pytest

from forebay.coordinator.messages import Rules
from forebay.coordinator.server import Coordinator
from forebay.storage import remote_file
from support.hub_repos import write_repo
from support.hub_server import HubServer
from support.origin_server import OriginServer
from support.streams import Rows, jsonl, parquet, stream

FORMS = {
    "jsonl": jsonl,
    "parquet": lambda rows: parquet(rows, 100),
    "jsonl.gz": lambda rows: gzip.compress(jsonl(rows), 1),
}


def long_rows(count: int) -> Rows:
    chance = np.random.default_rng(1)
    return [{"id": str(i), "text": chance.bytes(3000).hex()} for i in range(count)]


@pytest.mark.parametrize(
    "server, kind, files, steps",
    [("web", "jsonl", 1, 2800), ("web", "parquet", 1, 2800), ("web", "jsonl.gz", 4, 5600), ("hub", "parquet", 2, 2800)],
)
def test_four_ranks_fetch_what_one_fetches(tmp_path, monkeypatch, server, kind, files, steps):
    """96 % of the samples of 24 or 48 MB of text."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    rows, repo = long_rows(steps * 10 // 7), write_repo(tmp_path / "datasets/a/b")
    names = [f"train-{i}.{kind}" for i in range(files)]
    for i, name in enumerate(names):
        (repo / name).write_bytes(FORMS[kind](rows[i::files]))

    def fetch(world_size):
        """Return the bytes that all ranks fetch."""
        running.bytes_sent.clear()
        for rank in range(world_size):
            monkeypatch.setattr(remote_file, "_blocks", remote_file.BlockCache())  # as in a process of its own
            created = stream(
                inputs, rank=rank, world_size=world_size, seq_len=4096, steps=steps // world_size, epochs=None
            )
            assert [batch.epoch for batch in created] == [0] * (steps // world_size)
            created.close()
            assert created.stats()["text_bytes"] < 1.05 * steps * 8192 / world_size + 1e6
        return running.bytes_sent.total()

    with OriginServer(repo) if server == "web" else HubServer(tmp_path) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        inputs = "hf:a/b" if server == "hub" else [f"{running.url}/{name}" for name in names]
        assert fetch(4) <= 1.05 * fetch(1)


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_four_workers_of_a_coordinator_fetch_what_one_fetches(tmp_path, monkeypatch, kind):
    """93 % of the samples of 24 MB, by default settings."""
    repo = write_repo(tmp_path / "datasets/a/b")
    (repo / f"train.{kind}").write_bytes(FORMS[kind](long_rows(4000)))
    common = "--dataset-name=a/b --tokenizer-name=bytes --seq-len=4096 --batch-size=2 --streaming --quiet --json"
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def fetch(world_size):
        """Return the bytes that all workers fetch, and the samples that they learn."""
        hub.bytes_sent.clear()
        with Coordinator("127.0.0.1", 0, rules=Rules(min_workers=4, lost_s=600.0, stale_s=600.0)) as coordinator:
            together = [f"--coordinator={coordinator.address}", "--distributed"] if world_size > 1 else []
            command = [sys.executable, "-m", "forebay.worker", *common.split(), f"--num-steps={2720 // world_size}"]
            workers = [
                subprocess.Popen([*command, *together], stdout=subprocess.PIPE, text=True) for _ in range(world_size)
            ]
            reports = [json.loads(worker.communicate()[0]) for worker in workers]
        return hub.bytes_sent.total(), sum(report["samples"] for report in reports)

    with HubServer(tmp_path) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        (alone, samples), (together, shared) = fetch(1), fetch(4)
    assert samples == shared == 5440 and together <= 1.1 * alone
