"""What is proven is certified by what was valid then: workers in a ledger, publishers."""

import json
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace

import pytest

from forebay.errors import NetworkError, ProtocolError
from forebay.ledger.chain import read_entries
from forebay.network.pki.identity import join, renew
from forebay.network.publications import SIGNATURE_NAME, read_publication, sign_dataset
from support.nodes import Network, make_dataset


def test_a_job_records_the_certificate_of_a_worker_again_once_the_last_one_ended(tmp_path):
    with ExitStack() as stack:
        network = Network(tmp_path, stack, "w")
        network.serve(make_dataset(tmp_path / "d", 4, 40))
        service = network.schedule(seq_len=8)
        recorded = service._journal.enlisted
        network.work("w", service, on_batch=lambda batch: recorded.update(dict.fromkeys(recorded, 0.0)))
        network.assert_used_once(15)
        certificates = [e.body["certificate"] for e in read_entries(service.ledger_path) if e.kind == "worker"]
        assert len(certificates) > 1 and {*certificates} == {network.identity("w").as_peer.certificate}
        service.stop()


def test_a_publication_ends_with_the_certificate_that_signed_it(network_dir, tmp_path, make_identity, monkeypatch):
    dataset, reader = make_dataset(tmp_path / "d", 2, 20), make_identity("r")
    brief = join(network_dir, tmp_path / "b", "b", valid_days=1)
    signed = sign_dataset(brief, dataset.path, "c4", dataset.id)
    for hours in (-1.1, -0.9, 23.9, 24.1):  # of a certificate that was issued now, with an hour for other clocks
        moved = replace(signed, signed_at=signed.signed_at + 3600 * hours)
        data = json.dumps({**vars(moved), "signature": brief.sign(moved.signed_bytes()).hex()}).encode()
        with pytest.raises(ProtocolError, match="dated") if hours in (-1.1, 24.1) else nullcontext():
            read_publication(data, reader)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 86401)
    with pytest.raises(ProtocolError, match="certificate has expired"):
        read_publication((dataset.path / SIGNATURE_NAME).read_bytes(), reader)
    with pytest.raises(NetworkError, match=r"expired .* ago.*network renew"):
        sign_dataset(brief, dataset.path, "c4", dataset.id)


def test_a_data_node_signs_what_it_publishes_again_with_its_renewed_certificate(tmp_path):
    """Not what only claims to be its own."""
    with ExitStack() as stack:
        network = Network(tmp_path, stack)
        datasets = [make_dataset(tmp_path / str(tokens), 2, tokens) for tokens in (20, 30)]
        own, reader = network.identity("data"), network.identity("scheduler")
        for dataset in datasets:
            signed = sign_dataset(own, dataset.path, "tiny", dataset.id, valid_days=9)
        files = [dataset.path / SIGNATURE_NAME for dataset in datasets]
        files[1].write_text(json.dumps({**vars(signed), "name": "forged"}))
        node, before = network.serve(*datasets), [file.read_bytes() for file in files]
        renew(tmp_path / "network", own.node_dir, valid_days=99)
        node.identity.refresh()
        node._announce()
        old, new = (read_publication(data, reader) for data in (before[0], files[0].read_bytes()))
        assert new.certificate != old.certificate and abs(new.expires_at - old.expires_at) < 1
        assert (new.serial, new.dataset_id, new.name) == (old.serial, old.dataset_id, old.name)
        assert files[1].read_bytes() == before[1]
