"""Publishers: their signatures over name, id, version, expiry and origins, and which version a reader takes."""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from forebay.errors import NetworkError, ProtocolError, UsageError
from forebay.network.client import Client
from forebay.network.discovery import Claim
from forebay.network.peer import Scope
from forebay.network.pki.files import read_issuer
from forebay.network.pki.identity import Identity, create_network, create_organisation, join, revoke
from forebay.network.publications import (
    SEEN_NAME,
    SIGNATURE_NAME,
    check_publication,
    read_publication,
    select_published,
    sign_dataset,
)

ID, OWN_ID = "ab" * 32, "cd" * 32
pytestmark = pytest.mark.usefixtures("changes_at_once")


@pytest.fixture
def dataset(tmp_path) -> Path:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "manifest.json").write_text('{"name": "c4"}')
    return tmp_path / "d"


def test_a_publisher_vouches_for_name_and_id(dataset, make_identity):
    anne, bert = make_identity("anne"), make_identity("bert")
    created = sign_dataset(anne, dataset, "c4", OWN_ID, origins=["https://example.org/c4/", "s3://bucket/c4"])
    data = (dataset / SIGNATURE_NAME).read_bytes()
    assert check_publication(data, "c4", created.dataset_id, {anne.peer_id}, bert) == created
    assert created.origins == ("https://example.org/c4/", "s3://bucket/c4")
    assert created.serial == pytest.approx(1e6 * time.time(), abs=6e7)
    assert created.expires_at == pytest.approx(time.time() + 365 * 86400, abs=60)
    for name, dataset_id, publishers, reason in [
        ("c4", created.dataset_id, {bert.peer_id}, "expected a signature of"),
        ("books", created.dataset_id, {anne.peer_id}, "copied from another dataset"),
        ("c4", ID, {anne.peer_id}, "copied from another dataset"),
    ]:
        with pytest.raises(ProtocolError, match=reason):
            check_publication(data, name, dataset_id, publishers, bert)
    revoke(bert.node_dir, anne.peer_id)
    with pytest.raises(ProtocolError, match="revoked"):
        check_publication(data, "c4", created.dataset_id, {anne.peer_id}, bert)


def test_a_publisher_that_its_organisation_revoked_does_not_count(dataset, network_dir, tmp_path, make_identity):
    create_organisation(network_dir, tmp_path / "org", "acme")
    anne, bert = join(tmp_path / "org", tmp_path / "anne", "anne"), make_identity("bert")
    sign_dataset(anne, dataset, "c4", OWN_ID)
    data = (dataset / SIGNATURE_NAME).read_bytes()
    assert read_publication(data, bert).publisher == anne.peer_id
    revoke(tmp_path / "org", anne.peer_id, bert.node_dir)
    with pytest.raises(ProtocolError, match="revoked by its organisation"):
        read_publication(data, bert)
    assert read_issuer(tmp_path / "org").peer_id == anne.org


def test_a_publication_ends_at_its_own_time(dataset, make_identity):
    bert = make_identity("bert")
    sign_dataset(bert, dataset, "c4", OWN_ID, valid_days=-2)
    with pytest.raises(ProtocolError, match=r"expired 2\.0 days ago. Its publisher signs it again"):
        read_publication((dataset / SIGNATURE_NAME).read_bytes(), bert)


def test_forged_publications(dataset, make_identity, tmp_path):
    anne, bert = make_identity("anne"), make_identity("bert")
    sign_dataset(anne, dataset, "c4", OWN_ID, origins=["gs://b/c"])
    body = json.loads((dataset / SIGNATURE_NAME).read_bytes())
    create_network(tmp_path / "other", "test-network")
    stranger = join(tmp_path / "other", tmp_path / "s", "s")
    for change in (
        {"dataset_id": ID},
        {"serial": True},
        {"expires_at": body["expires_at"] + 1},
        {"expires_at": float("inf")},
        {"signed_at": body["signed_at"] + 1},
        {"origins": "gs://b/c"},
        {"certificate": (bert.node_dir / "node-cert.pem").read_text()},
        {"certificate": (stranger.node_dir / "node-cert.pem").read_text()},
        {"certificate": ""},
        {"publisher": bert.peer_id},
        {"signature": os.urandom(64).hex()},
    ):
        with pytest.raises(ProtocolError):
            read_publication(json.dumps({**body, **change}).encode(), anne)
    with pytest.raises(ProtocolError):
        read_publication(b"[" * 100_000, anne)
    with pytest.raises(
        ProtocolError, match=r"expected format 4, got: .*format Input should be 4.*Its publisher signs it again"
    ):
        read_publication(json.dumps({**body, "format": 3}).encode(), anne)
    with pytest.raises(UsageError, match="expected a dataset"):
        sign_dataset(anne, dataset / "none", "c4", OWN_ID)


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/d", "file:///etc", "hf://datasets/x", "https:///d", "https://u:p@example.org/d", "d",
        "s3://bucket/d?endpoint=http://evil", "https://example.org/d#x", "https://[h/", "https://example.org/\x1b",
        "s3://bücket/d", "https://example.org/" + "x" * 3000, "https://evil\\example.org/", "",
    ],
)  # fmt: skip
def test_what_is_no_origin(url, dataset, make_identity):
    anne = make_identity("anne")
    with pytest.raises(UsageError, match="origin: expected a URL"):
        sign_dataset(anne, dataset, "c4", OWN_ID, origins=[url])
    created = sign_dataset(anne, dataset, "c4", OWN_ID)
    invalid = {**json.loads((dataset / SIGNATURE_NAME).read_bytes()), "origins": [url]}
    with pytest.raises(ProtocolError, match="origins"):
        read_publication(json.dumps(invalid).encode(), anne)
    assert created.origins == ()


def test_a_certificate_covers_what_it_publishes(dataset, network_dir, tmp_path):
    narrow = join(network_dir, tmp_path / "n", "n", scope=Scope(datasets=("books",)))
    with pytest.raises(UsageError, match="does not cover dataset 'c4'"):
        sign_dataset(narrow, dataset, "c4", OWN_ID)


def test_signing_again_makes_a_later_version(dataset, make_identity):
    anne = make_identity("anne")
    serials = [sign_dataset(anne, dataset, "c4", OWN_ID).serial for _ in range(3)]
    assert serials[0] < serials[1] < serials[2]
    assert sign_dataset(anne, dataset, "c4", OWN_ID, serial=7).serial == 7


# Which version counts.


class Served(Client):
    """A client whose peers hand out what was signed here."""

    def __init__(self, identity: Identity):
        super().__init__(identity)
        self.signed = {}

    def get_bytes(self, address: str, path: str, *args: Any, **more: Any) -> bytes:
        try:
            return self.signed[path.split("/")[3]]
        except KeyError:
            raise NetworkError(f"{path}: no such file") from None


@pytest.fixture
def served(make_identity) -> Served:
    return Served(make_identity("reader"))


def version(served: Served, publisher: Identity, folder: Path, number: int) -> Claim:
    folder.mkdir(exist_ok=True)
    manifest = json.dumps({"version": number}).encode()
    (folder / "manifest.json").write_bytes(manifest)
    dataset_id = hashlib.sha256(manifest).hexdigest()
    sign_dataset(publisher, folder, "d", dataset_id, serial=number)
    served.signed[dataset_id] = (folder / SIGNATURE_NAME).read_bytes()
    return Claim("d", dataset_id, 1, "p" * 32, "h:1", time.time() + 60)


def ids(published):
    return [claim.dataset_id for claim in published[0]]


def test_the_latest_version_counts_and_is_remembered(served, tmp_path, make_identity):
    anne = make_identity("anne")
    old, new = (version(served, anne, tmp_path / f"v{number}", number) for number in (1, 2))
    only = {anne.peer_id}
    assert ids(select_published(served, [old], only)) == [old.dataset_id]
    both = select_published(served, [old, new], only)
    assert ids(both) == [new.dataset_id] and "name its id" in both[1][0]
    again = Served(served.identity)  # as in another process
    again.signed = served.signed
    alone = select_published(again, [old], only)
    assert ids(alone) == [] and "expected version 2" in alone[1][0]
    assert ids(select_published(again, [old, new], only, old.dataset_id)) == [old.dataset_id]
    assert ids(select_published(again, [old, new], only)) == [new.dataset_id]
    assert ids(select_published(again, [old, new], ())) == [old.dataset_id, new.dataset_id]
    path = served.identity.node_dir / SEEN_NAME
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text("{")
    with pytest.raises(UsageError, match="or remove the file"):
        select_published(again, [new], only)


def test_versions_are_of_one_publisher(served, tmp_path, make_identity):
    anne, bert = make_identity("anne"), make_identity("bert")
    of_anne, of_bert = version(served, anne, tmp_path / "a", 9), version(served, bert, tmp_path / "b", 1)
    result = select_published(served, [of_anne, of_bert], {anne.peer_id, bert.peer_id})
    assert ids(result) == [of_anne.dataset_id, of_bert.dataset_id] and result[1] == []
    assert ids(select_published(served, [of_bert], {bert.peer_id})) == [of_bert.dataset_id]
