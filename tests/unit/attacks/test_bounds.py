"""Work that a member asks for is bounded: hashes of chunks, and the bytes of its organisation's quota."""

from contextlib import ExitStack

import pytest

from forebay.dataset.chunks import HASH_BYTES
from forebay.network.access import AccessPolicy
from forebay.network.client import RemoteError
from forebay.swarm import share
from support.nodes import Network, make_dataset
from support.wire import connect, request_bytes


def test_hashes_of_chunks_of_another_size_cost_nothing(tmp_path, monkeypatch):
    """Those of the dataset's size are stored."""
    monkeypatch.setattr(share, "hash_once", None)
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "member")
        dataset = make_dataset(tmp_path / "data", 2, 100_000)
        node, client, row = network.serve(dataset), network.client("member"), dataset.table.row(0)
        path = f"/v1/slices/{row.sha256}/chunks?chunk_bytes="
        for size in (row.chunk_bytes - 1, row.chunk_bytes + 1, row.chunk_bytes * 2, 65_535, 0, -1):
            with pytest.raises(RemoteError, match="404 unknown_slice"):
                client.get_bytes(node.address, f"{path}{size}", 1 << 20)
        leaves = client.get_bytes(node.address, f"{path}{row.chunk_bytes}", 1 << 20)
        assert leaves == dataset.leaves(0) and len(leaves) > HASH_BYTES


def test_slices_that_are_asked_for_and_not_read_use_no_quota(tmp_path):
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "thief", "reader")
        dataset = make_dataset(tmp_path / "data", 1, 10_000_000)
        row, path = dataset.table.row(0), tmp_path / "access.toml"
        path.write_text(f'[[dataset]]\nname = "*"\nbytes_per_day = {4 * row.bytes}\n')
        node = network.serve(dataset, access=(access := AccessPolicy(path)))
        for _ in range(16):
            with connect(network.identity("thief"), node.address) as sock:
                sock.sendall(request_bytes("GET", f"/v1/slices/{row.sha256}"))
        client = network.client("thief")
        assert client.get_bytes(node.address, f"/v1/slices/{row.sha256}", row.bytes)
        node.stop()
        ((used,),) = access._usage.database.execute("SELECT bytes FROM used")
        assert row.bytes <= used < 4 * row.bytes
