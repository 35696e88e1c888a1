"""What is proven is certified: receipts of workers that no network knows, publications by certificates that ended."""

import json
import time
from base64 import b64encode
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.cli import main
from forebay.errors import ProtocolError, UsageError
from forebay.ledger.chain import Used, read_entries, receipt_message
from forebay.ledger.writer import Ledger
from forebay.network.pki.certificates import der_of
from forebay.network.pki.identity import Identity, create_network, create_organisation, join, renew
from forebay.network.publications import SIGNATURE_NAME, check_publication, read_publication, sign_dataset
from support.handlers import Make
from support.nodes import Network, make_dataset

ID = "ab" * 32


def write_ledger(path: Path, scheduler: Identity, worker: Identity, **entry: str) -> None:
    """The ledger of a job of one use, by a scheduler that writes of its worker what it likes."""
    body = {"samples_per_slice": [[8, 1]], "scheduler": scheduler.public_key.hex(), "dataset_id": ID, "seed": 0}
    uses = [Used("l", 0, 0, 0, 8, 1)]
    with Ledger.open(path, scheduler.sign) as ledger:
        job = ledger.append("job", body)
        ledger.append("worker", {"worker": worker.peer_id, "name": worker.name, **entry})
        receipt = worker.sign(receipt_message(job.hash, uses)).hex()
        ledger.append("uses", {"worker": worker.peer_id, "uses": [uses[0].to_row()], "receipt": receipt})


def verify(capsys: pytest.CaptureFixture[str], path: Path, *words: object) -> dict:
    code = main(["ledger", "verify", str(path), "--json", *map(str, words)])
    report = json.loads(capsys.readouterr().out)
    assert (code == 0) == report["ok"]
    return report


def test_a_ledger_counts_for_workers_of_the_network_that_is_named(
    network_dir: Path, tmp_path: Path, make_identity: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    create_organisation(network_dir, tmp_path / "org", "acme")
    create_network(tmp_path / "other", "test-network")
    scheduler, member = make_identity("s"), join(tmp_path / "org", tmp_path / "m", "m")
    ghost = join(tmp_path / "other", tmp_path / "g", "g")
    path, root = tmp_path / "ledger.jsonl", network_dir / "root-cert.pem"
    by_network = (("--root", root), ("--identity", scheduler.node_dir))
    own, made = ({"certificate": b64encode(der_of(each.certificate)).decode()} for each in (member, ghost))
    for worker, entry, is_ours, is_any in (
        (member, own, True, True),
        (member, {**own, "name": "honest-university"}, False, False),
        (ghost, {}, False, False),
        (ghost, own, False, False),
        (ghost, made, False, True),
    ):
        path.unlink(missing_ok=True)
        write_ledger(path, scheduler, worker, **entry)
        reports = [verify(capsys, path, *words) for words in by_network]
        assert [(report["ok"], report["certified"]) for report in reports] == [(is_ours, True)] * 2
        report = verify(capsys, path)
        assert (report["ok"], report["certified"], report["scheduler"]) == (is_any, False, scheduler.peer_id)
    write_ledger(tmp_path / "good", scheduler, member, **own)
    assert main(["ledger", "verify", str(tmp_path / "good")]) == 0
    assert "keys were not checked against a network" in (shown := capsys.readouterr().out)
    assert f"scheduler {scheduler.peer_id} (its key is the file's own" in shown
    assert not verify(capsys, tmp_path / "good", "--key", "11" * 32)["ok"]


def test_a_job_records_the_certificate_of_a_worker_again_once_the_last_one_ended(tmp_path: Path) -> None:
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "w")
        network.serve(make_dataset(tmp_path / "d", 4, 40))
        service = network.schedule(seq_len=8, epochs=2)
        ends = service._open_journal().enlisted
        network.work("w", service, on_batch=lambda batch: ends.update(dict.fromkeys(ends, float(batch.epoch == 0))))
        network.assert_used_once(15, epochs=2)
        workers = [entry.body for entry in read_entries(service.ledger_path) if entry.kind == "worker"]
        peer = network.identity("w").as_peer
        assert len(workers) > 1 and {body["certificate"] for body in workers} == {peer.certificate}
        assert list(ends) == [peer.peer_id]
        service.stop()


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "d", 2, 20)
    return tmp_path / "d"


def test_a_publication_ends_with_the_certificate_that_signed_it(
    dataset: Path, network_dir: Path, tmp_path: Path, make_identity: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what was signed before counts then, nor what the thief of the key dates back."""
    brief, reader = join(network_dir, tmp_path / "b", "b", valid_days=1), make_identity("r")
    signed = sign_dataset(brief, dataset, "c4", ID)
    assert signed.signed_at <= time.time() and signed.expires_at > brief.expires_at
    data = (dataset / SIGNATURE_NAME).read_bytes()
    assert read_publication(data, reader) == signed
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86401)
    with pytest.raises(ProtocolError, match="certificate has expired"):
        check_publication(data, "c4", ID, {brief.peer_id}, reader)
    with pytest.raises(UsageError, match=r"has expired\. Renew the certificate: forebay network renew"):
        sign_dataset(brief, dataset, "c4", ID)


@pytest.mark.parametrize("after_s, is_valid", [(-5400, False), (-10, True), (10, True), (5400, False)])
def test_a_signature_is_made_while_its_certificate_is_valid(
    dataset: Path, make_identity: Make, after_s: float, is_valid: bool
) -> None:
    anne = make_identity("anne")
    signed = sign_dataset(anne, dataset, "c4", ID)
    moved = replace(signed, signed_at=signed.signed_at + after_s)
    moved = replace(moved, signature=anne.sign(moved.signed_bytes()).hex())
    data = json.dumps({**vars(moved)}).encode()
    if is_valid:
        assert read_publication(data, anne) == moved
    else:
        with pytest.raises(ProtocolError, match="dated"):
            read_publication(data, anne)


def test_a_data_node_signs_what_it_publishes_again_with_its_renewed_certificate(tmp_path: Path) -> None:
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "other")
        datasets = [make_dataset(tmp_path / name, 2, tokens) for name, tokens in (("a", 20), ("b", 30), ("c", 40))]
        own, other = network.identity("data"), network.identity("other")
        signed = sign_dataset(own, datasets[0].path, "tiny", datasets[0].id, valid_days=9, origins=["s3://b/c"])
        sign_dataset(other, datasets[1].path, "tiny", datasets[1].id)
        forged = {**vars(signed), "dataset_id": datasets[2].id}
        (datasets[2].path / SIGNATURE_NAME).write_text(json.dumps(forged))
        files = [dataset.path / SIGNATURE_NAME for dataset in datasets]
        node = network.serve(*datasets)
        before = [file.read_bytes() for file in files]
        assert read_publication(before[0], other) == signed
        renew(tmp_path / "network", own.node_dir, valid_days=99)
        node.identity.refresh()
        node._announce()
        again = read_publication(files[0].read_bytes(), other)
        assert again.certificate != signed.certificate and again.signed_at > signed.signed_at
        same = ("dataset_id", "name", "publisher", "serial", "origins")
        assert all(getattr(again, name) == getattr(signed, name) for name in same)
        assert again.expires_at == pytest.approx(signed.expires_at)
        assert [file.read_bytes() for file in files[1:]] == before[1:]
