"""Inspecting and verifying datasets in any location and by any writer."""

import json

import pytest

from forebay.cli import main
from forebay.errors import NetworkError
from forebay.storage.base import Patience, Timeouts
from forebay.storage.origins import open_remote
from support.origin_server import OriginServer
from support.token_slices import write_tokens


@pytest.fixture
def served(tmp_path):
    folder = write_tokens(tmp_path / "data", [50_000] * 5).path
    with OriginServer(folder) as server:
        yield folder, server


def printed(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_a_url_is_verified_as_it_streams_and_bad_slices_are_named(served, capsys, monkeypatch):
    folder, server = served
    for source in (str(folder), server.url):
        assert main(["inspect", source, "--json"]) == 0
    local, remote = capsys.readouterr().out.splitlines()
    assert json.loads(local) == json.loads(remote)
    server.faults.drop, server.faults.truncate = 0.2, 0.3
    assert main(["verify", server.url, "--json", "--quiet"]) == 0
    assert printed(capsys)["level"] == "hash"
    server.faults.drop = server.faults.truncate = 0.0
    server.faults.corrupt["3.safetensors"] = 60_000
    server.faults.missing.add("1.safetensors")
    (folder / "4.safetensors").write_bytes((folder / "4.safetensors").read_bytes()[:-10])
    assert main(["verify", server.url, "--quiet"]) == 1
    assert capsys.readouterr().out == "missing: 1.safetensors\nchanged: 3.safetensors\ncut: 4.safetensors\n"
    report = open_remote(server.url).verify()
    assert report.missing == ["1.safetensors"] and sorted(report.changed) == ["3.safetensors", "4.safetensors"]
    for name, value in server.s3_environment.items():
        monkeypatch.setenv(name, value)
    server.faults.forbidden.add("0.safetensors")
    assert main(["verify", server.s3_url, "--json", "--quiet"]) == 1
    assert printed(capsys)["bad"] == [f"{index}.safetensors" for index in (0, 1, 3, 4)]


def test_an_origin_that_is_gone_is_no_verdict(served, monkeypatch):
    _, server = served
    dataset = open_remote(server.url)
    monkeypatch.setattr(dataset.origin, "_timeouts", Timeouts(connect_s=60, stall_s=0.05))
    server.faults.black_hole = True
    monkeypatch.setattr("forebay.storage.origins._PATIENCE", Patience(tries=5, max_wait_s=0.01))
    with pytest.raises(NetworkError, match="broke off"):
        dataset.verify()
