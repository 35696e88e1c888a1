"""The ledger's commands on a dataset that was prepared and a ledger that a real job wrote: nodes, leases, receipts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libtorrent")

from forebay import prepare_dataset
from forebay.cli import main
from forebay.data_node import DataNode
from forebay.dataset.reader import open_dataset
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.pki.identity import Identity
from forebay.scheduler.server import SchedulerService
from support.leases import work
from support.nodes import HOST, Bootstrap, make_network

SEQ_LEN = 16


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A dataset of 40 documents, trained on once by one worker: what it saw, step by step."""
    directory = tmp_path_factory.mktemp("job")
    lines = [
        {"id": f"doc-{i}", "text": f"Document {i} tells of {i} things. " + "More of it. " * (i % 5 + 2)}
        for i in range(40)
    ]
    (directory / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare_dataset(
        [directory / "in.jsonl"], directory / "tiny", tokenizer="bytes", slice_bytes=4096, document_ids=True, workers=1
    )
    dataset = open_dataset(directory / "tiny")
    bootstrap = Bootstrap()
    homes = make_network(directory, ["data", "scheduler", "w1"], bootstrap.at)
    dht = LibtorrentDht(HOST, 0, bootstrap.at)
    client = Client(Identity.load(homes["scheduler"]))
    node = DataNode(Identity.load(homes["data"]), [dataset], HOST, 0, dht, ttl_s=30)
    scheduler = SchedulerService(
        Identity.load(homes["scheduler"]), "tiny", dht, client, directory / "state", HOST, 0, seq_len=SEQ_LEN
    )
    seen: list[list[int]] = []
    try:
        node.start()
        scheduler.start()
        work(
            Identity.load(homes["w1"]), "tiny", scheduler.address, directory / "cache",
            on_batch=lambda batch: seen.append(batch.sample_ids.tolist()),
        )  # fmt: skip
    finally:
        for closing in (scheduler.stop, node.stop, client.close, dht.close, bootstrap.close):
            closing()
    return {"ledger": directory / "state" / "ledger.jsonl", "dataset": dataset, "seen": seen, "directory": directory}


def run(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> str:
    capsys.readouterr()
    assert main([str(argument) for argument in ("ledger", *arguments)]) == code
    return capsys.readouterr().out


def test_verify(job: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(run(capsys, "verify", job["ledger"], "--samples", "--json"))
    samples = sum(map(len, job["seen"]))
    assert report["ok"] and report["epochs"] == [{"epoch": 0, "samples": samples, "missing": 0, "repeated": 0}]
    assert "ok:" in run(capsys, "verify", job["ledger"])


def test_from_a_step_to_a_document_and_back(job: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    dataset = job["dataset"]
    for step in (1, len(job["seen"])):
        reported = json.loads(
            run(capsys, "blame", job["ledger"], "--step", step, "--worker", "w1", "--dataset", dataset.path, "--json")
        )
        (part,) = reported["parts"]
        assert part["samples"] == job["seen"][step - 1] and part["exact"]
        piece = part["documents"][0]
        assert piece["id"].startswith("doc-") and piece["source"] == "in.jsonl" and piece["text"]
        back = json.loads(
            run(capsys, "blame", job["ledger"], "--document", piece["id"], "--dataset", dataset.path, "--json")
        )
        assert any(use["first_step"] == step and use["name"] == "w1" for use in back["uses"])
    shown = run(capsys, "blame", job["ledger"], "--step", 1, "--dataset", dataset.path)
    assert "doc-" in shown and "w1" in shown


def test_a_table(job: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run(capsys, "blame", job["ledger"], code=2)
    run(capsys, "export", job["ledger"], "--out", tmp_path / "uses.jsonl", "--sample-ids")
    assert (tmp_path / "uses.jsonl").read_text().startswith('{"entry": ')
