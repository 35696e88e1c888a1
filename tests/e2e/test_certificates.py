"""A data node as a process: members read from it, strangers and the revoked are refused and get nothing."""

import contextlib
import json
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("libtorrent")

from forebay.cli import main
from forebay.dataset.reader import open_dataset
from forebay.network.dht import LibtorrentDht
from forebay.network.discovery import read_claims
from forebay.network.pki.identity import Identity, create_network, join
from forebay.storage.hosts import parse_address
from support.handlers import PatientClient
from support.nodes import make_dataset


@pytest.fixture
def members(tmp_path) -> Iterator[dict[str, Identity]]:
    """Three members of a network with a DHT node, and one of another network of the same name."""
    created = {}
    with contextlib.closing(LibtorrentDht("127.0.0.1", 0)) as dht:
        for network, names in (("net", ("data", "reader", "thief")), ("other", ("stranger",))):
            create_network(tmp_path / network, "net", bootstrap=[("127.0.0.1", dht.port)])
            created |= {name: join(tmp_path / network, tmp_path / name, name) for name in names}
        yield created


@pytest.fixture
def address(tmp_path, members) -> Iterator[str]:
    make_dataset(tmp_path / "tiny", 2, 5000)
    command = [sys.executable, *f"-m forebay serve {tmp_path}/tiny --identity {tmp_path}/data".split()]
    command += ["--listen", "127.0.0.1:0", "--timeout", "3600", "--json"]
    command += [f"--limit={name}_s=3600" for name in ("handshake", "head", "idle", "send")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield str(json.loads(process.stdout.readline())["address"])
        finally:
            process.terminate()
    assert process.returncode == 0


def test_members_read_and_strangers_and_the_revoked_are_refused(tmp_path, members, address, capsys):
    def status(name):
        code = main(f"status {address} --identity {tmp_path}/{name} --timeout 3600 --json".split())
        out, error = capsys.readouterr()
        return json.loads(out) if code == 0 else error

    row = open_dataset(tmp_path / "tiny").table.row(0)
    with PatientClient(members["reader"]) as client:
        (claim,) = read_claims(client, address, "tiny", 3600.0)
        data = bytearray(row.bytes)
        client.read_range(address, f"/v1/slices/{row.sha256}", memoryview(data), 0, claim.peer_id)
    assert claim.peer_id == members["data"].peer_id and data == (tmp_path / "tiny" / row.name).read_bytes()

    assert "its certificate is of another network" in status("stranger")

    assert status("thief")["peers"].keys() == {members["reader"].peer_id}
    thief = members["thief"]
    with thief.client_context().wrap_socket(socket.create_connection(parse_address(address))) as live:
        assert main(["network", "revoke", thief.peer_id, str(tmp_path / "net"), str(tmp_path / "data")]) == 0
        assert live.recv(1) == b""  # an open connection is cut, without a restart
    capsys.readouterr()
    assert "refused with 403 revoked" in status("thief")
    report = status("reader")
    assert report["peers"].keys() == {members["reader"].peer_id} and report["refused_connections"] >= 1
