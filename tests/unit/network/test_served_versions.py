"""A data node that serves a dataset has those that it extends, too; a slice of two datasets obeys the rules of each."""

import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from forebay.dataset.import_slices import import_slices
from forebay.dataset.manifest import MANIFEST_FILE
from forebay.dataset.reader import Dataset, open_dataset
from forebay.dataset.slices import write_token_slice
from forebay.network import peer_dataset
from forebay.network.access import AccessPolicy
from forebay.network.client import RemoteError
from forebay.storage.origins import open_remote
from support.nodes import NAME, Network, make_dataset
from support.waiting import until


def extend(parent: Dataset, directory: Path, name: str) -> Dataset:
    """A dataset of the slices of another one and one more, as `forebay prepare --extend` makes it."""
    shutil.copytree(parent.path / "slices", directory / "slices")
    tokens = np.arange(50, dtype=np.uint16) + len(name)
    path = directory / "slices" / f"{parent.num_slices:06d}.safetensors"
    write_token_slice(path, tokens, np.array([50], np.uint64))
    manifest = import_slices(directory, name).manifest
    own, older = {"id": parent.id, "slices": parent.num_slices}, parent.manifest.lineage.get("parent")
    lineage = {**own, "ancestors": [older]} if older else own
    (directory / MANIFEST_FILE).write_bytes(
        replace(manifest, lineage={**manifest.lineage, "parent": lineage}).to_json()
    )
    return open_dataset(directory)


@pytest.mark.parametrize("names", [(NAME,), ("other",), (NAME, "other"), ("other", "third")])
def test_a_job_a_reader_and_a_new_worker_go_on_with_an_extended_dataset(tmp_path, monkeypatch, names):
    monkeypatch.setattr(peer_dataset, "_MAX_AGE_S", 0.0)
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "worker")
        first = served = make_dataset(tmp_path / "monday", 4, 40)
        for number, name in enumerate(names):
            served = extend(served, tmp_path / f"{number}", name)
        node = network.serve(first)
        service = network.schedule(seq_len=8, rediscover_s=0.02)
        url = f"forebay://test/{NAME}"
        remote = open_remote(url, identity=network.identity("worker"), discovery=network.discovery)
        node.stop()
        until(lambda: service.status()["unserved"])
        assert not service.status()["providers"]
        other = network.serve(served)
        until(lambda: not service.status()["unserved"])
        assert [provider["address"] for provider in service.status()["providers"]] == [other.address]
        assert np.array_equal(*(dataset.tensors["tokens"] for dataset in (remote.read_slice(1), first.open_slice(1))))
        assert network.work("worker", service)["done"]
        network.assert_used_once(15)
        service.stop()


@pytest.mark.parametrize(
    "rules, refused",
    [([], ""), ([("tiny", "deny")], ""), ([("other", "deny")], ""), ([("tiny", "deny"), ("other", "deny")], "list"),
     ([("tiny", "lost")], ""), ([("tiny", "lost"), ("other", "deny")], "list"), ([("other", "lost")], ""),
     ([("tiny", "lost"), ("other", "lost")], "unknown_slice")],
)  # fmt: skip
def test_a_slice_of_two_datasets_is_sent_if_the_rules_of_one_allow_it(tmp_path, rules, refused):
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "reader")
        first = make_dataset(tmp_path / "tiny", 3, 40)
        second = extend(first, tmp_path / "other", "other")
        row, path = first.table.row(1), tmp_path / "access.toml"
        denied = [name for name, rule in rules if rule == "deny"]
        text = "".join(f'[[dataset]]\nname = "{name}"\ndeny = ["role:worker"]\n' for name in denied)
        path.write_text(text.replace("role:worker", f"peer:{network.identity('reader').peer_id}"))
        node = network.serve(first, second, access=AccessPolicy(path))
        for name in [name for name, rule in rules if rule == "lost"]:
            (tmp_path / name / row.name).unlink()
        client = network.client("reader")
        try:
            got = client.get_bytes(node.address, f"/v1/slices/{row.sha256}", 1 << 20)
        except RemoteError as error:
            assert refused and refused in str(error)
        else:
            assert len(got) == row.bytes and not refused


def test_the_bytes_of_a_slice_of_two_datasets_count_for_the_one_that_allows_it(tmp_path):
    """The first one, until its quota is used."""
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "reader")
        first = make_dataset(tmp_path / "tiny", 3, 40)
        second = extend(first, tmp_path / "other", "other")
        row, path = first.table.row(1), tmp_path / "access.toml"
        rules = (f'[[dataset]]\nid = "{each.id}"\nbytes_per_day = {row.bytes}\n' for each in (first, second))
        path.write_text("".join(rules))
        node, client = network.serve(first, second, access=(access := AccessPolicy(path))), network.client("reader")
        for _ in range(2):
            client.get_bytes(node.address, f"/v1/slices/{row.sha256}", 1 << 20)
        used = dict(access._usage.database.execute("SELECT dataset, bytes FROM used"))
        assert used == {first.id: row.bytes, second.id: row.bytes}
