"""A ban is noted once, where a swarm's steerer makes it."""

import json
from contextlib import closing
from pathlib import Path

import numpy as np

from forebay.network.audit import AuditLog
from forebay.network.client import Client
from forebay.network.messages import FailedFetch, SwarmRequest
from forebay.network.peer import Provider
from forebay.scheduler.catalog import ManifestStore, parse
from forebay.swarm.tracker import Tracker
from support.handlers import Make
from support.nodes import make_dataset


def test_a_tracker_notes_whom_two_nodes_accuse(make_identity: Make, tmp_path: Path) -> None:
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


def test_a_schedulers_copy_of_a_manifest_is_checked(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "d", 3, 40)
    manifest, table = ((tmp_path / "d" / name).read_bytes() for name in ("manifest.json", "slices.parquet"))
    retained = ManifestStore(tmp_path / "state")
    assert retained.get(dataset.id) is None
    retained.put(dataset.id, manifest, table)
    result = retained.get(dataset.id)
    assert result[0] == parse(dataset.id, manifest, table, "here")[0]
    assert np.array_equal(result[1].count, dataset.table.count)
    for suffix in (".parquet", ".json"):
        path = tmp_path / "state" / "datasets" / f"{dataset.id}{suffix}"
        full = path.read_bytes()
        path.write_bytes(full[:-1] + bytes([full[-1] ^ 1]))
        assert retained.get(dataset.id) is None
        path.write_bytes(full)
    assert retained.get(dataset.id) is not None
