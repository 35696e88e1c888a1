"""Inspecting and verifying datasets wherever they lie and whoever wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from forebay.cli import main
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.errors import NetworkError
from forebay.storage.base import Timeouts
from forebay.storage.origins import open_remote
from support.origin_server import OriginServer


@pytest.fixture
def served(tmp_path: Path):
    folder = tmp_path / "data"
    folder.mkdir()
    for index in range(5):
        write_token_slice(
            folder / f"{index}.safetensors", np.arange(50_000, dtype=np.uint16), np.array([50_000], np.uint64)
        )
    import_slices(folder, "served")
    with OriginServer(folder) as server:
        yield folder, server


def told(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_a_url_is_verified_as_it_streams_and_bad_slices_are_named(served, capsys) -> None:
    folder, server = served
    server.faults.drop, server.faults.truncate = 0.2, 0.3
    assert main(["verify", server.url, "--json", "--quiet"]) == 0
    assert told(capsys) == {"ok": True, "bad": [], "level": "hash", "checks": ["SHA-256 of every file"]}
    server.faults.drop = server.faults.truncate = 0.0
    server.faults.corrupt["3.safetensors"] = 60_000
    server.faults.missing.add("1.safetensors")
    (folder / "4.safetensors").write_bytes((folder / "4.safetensors").read_bytes()[:-10])
    assert main(["verify", server.url, "--json", "--quiet"]) == 1
    assert told(capsys)["bad"] == ["1.safetensors", "3.safetensors", "4.safetensors"]
    report = open_remote(server.url).verify()
    assert report.missing == ["1.safetensors"] and sorted(report.changed) == ["3.safetensors", "4.safetensors"]


def test_a_bucket_is_verified(served, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    _, server = served
    for name, value in server.s3_environment.items():
        monkeypatch.setenv(name, value)
    assert main(["verify", server.s3_url, "--json", "--quiet"]) == 0
    server.faults.forbidden.add("0.safetensors")
    capsys.readouterr()
    assert main(["verify", server.s3_url, "--json", "--quiet"]) == 1
    assert told(capsys)["bad"] == ["0.safetensors"]


def test_an_origin_that_is_gone_is_no_verdict(served, monkeypatch: pytest.MonkeyPatch) -> None:
    _, server = served
    dataset = open_remote(server.url, timeouts=Timeouts(connect_s=1, stall_s=0.05))
    server.faults.black_hole = True
    monkeypatch.setattr("forebay.storage.origins._MAX_WAIT_S", 0.01)
    with pytest.raises(NetworkError, match="broke off"):
        dataset.verify()


def test_every_kind_is_inspected(served, tmp_path: Path, capsys) -> None:
    folder, server = served
    assert main(["inspect", str(folder), "--json"]) == 0
    local = told(capsys)
    assert main(["inspect", server.url, "--json"]) == 0
    assert told(capsys) == local
    other = tmp_path / "theirs"
    other.mkdir()
    np.save(other / "train_000000.npy", np.arange(1000, dtype=np.uint16))
    assert main(["inspect", str(other), "--json"]) == 0
    assert told(capsys)["tokens"] == 1000
    assert main(["verify", str(other), "--json", "--quiet"]) == 0
    assert told(capsys)["ok"]
    assert main(["verify", str(tmp_path / "nothing"), "--json", "--quiet"]) == 1
