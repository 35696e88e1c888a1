"""A ban is noted once, where a swarm's steerer makes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.network.audit import AuditLog
from forebay.network.client import Client
from forebay.network.messages import FailedFetch, SwarmRequest
from forebay.network.peer import Provider
from forebay.network.pki.identity import Identity
from forebay.scheduler.catalog import ManifestStore, parse
from forebay.swarm.tracker import Tracker


def test_a_tracker_notes_whom_two_nodes_accuse(make_identity: Callable[[str], Identity], tmp_path: Path) -> None:
    identity = make_identity("node")
    identity.audit = AuditLog(tmp_path / "audit.jsonl")
    with closing(identity.audit), Client(identity) as client:
        tracker = Tracker(client)
        tracker.add("d", 8, [Provider("origin", "h:1", True)])
        peers = {name: make_identity(name) for name in ("a", "b", "c", "liar")}
        tracker.handle(peers["liar"].as_peer, "d", SwarmRequest(session="01"))
        member = f"{peers['liar'].peer_id}#01"
        message = SwarmRequest(failed=tuple(FailedFetch(index=i, member=member, wrong=True) for i in (1, 2)))
        for name in "aabc":
            tracker.handle(peers[name].as_peer, "d", message)
        tracker.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl.decisions").read_text().splitlines()]
    (ban,) = [line for line in lines if "ban" in line.values()]
    assert peers["liar"].peer_id in json.dumps(ban) and peers["b"].peer_id in json.dumps(ban)


def make_dataset(directory: Path) -> Dataset:
    (directory / "slices").mkdir(parents=True)
    for i in range(3):
        ids = np.full(40, i, np.uint16)
        write_token_slice(directory / "slices" / f"{i}.safetensors", ids, np.array([40], np.uint64))
    return import_slices(directory, "tiny")


def test_what_a_scheduler_keeps_of_a_dataset_is_checked(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "d")
    manifest, table = ((tmp_path / "d" / name).read_bytes() for name in ("manifest.json", "slices.parquet"))
    retained = ManifestStore(tmp_path / "state")
    assert retained.get(dataset.id) is None
    retained.put(dataset.id, manifest, table)
    result = retained.get(dataset.id)
    assert result is not None and result[0] == parse(dataset.id, manifest, table, "here")[0]
    assert np.array_equal(result[1].count, dataset.table.count)
    for suffix in (".parquet", ".json"):
        path = tmp_path / "state" / "datasets" / f"{dataset.id}{suffix}"
        full = path.read_bytes()
        path.write_bytes(full[:-1] + bytes([full[-1] ^ 1]))
        assert retained.get(dataset.id) is None
        path.write_bytes(full)
    assert retained.get(dataset.id) is not None
