"""Words of servers, peers, certificates and file names have no escape sequence in any error, log line or name."""

import datetime as dt
import json
import logging
import traceback

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import TypeAdapter, ValidationError

from forebay.coordinator.messages import WorkerId
from forebay.errors import ForebayError, ProtocolError
from forebay.formats.inputs import ReadOptions
from forebay.lease.messages import Reason
from forebay.network.client import Client
from forebay.network.messages import Name
from forebay.network.pki.files import peer_in
from forebay.prepare.inputs import find_inputs
from forebay.storage.base import PinnedOrigin, read_whole
from forebay.storage.origins import open_origin
from support.rude_peer import RudePeer

RUDE = "\x1b]0;owned\x07\x1b[2J\u202egnp.exe\x9b"
HEADS = {
    "reason": "HTTP/1.1 404 {}",
    "long reason": f"HTTP/1.1 404 {'x' * 30_000}",
    "status line": "{}",
    "length": "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: {}",
    "coding": "HTTP/1.1 200 OK\r\nTransfer-Encoding: {}",
    "redirect": "HTTP/1.1 302 Found\r\nLocation: http://{}/",
    "scheme": "HTTP/1.1 302 Found\r\nLocation: x{}:/",
    "code": "HTTP/1.1 403 Forbidden\r\nX-Error-Code: {}",
    "range": "HTTP/1.1 206 OK\r\nContent-Range: bytes {}",
    "version": "HTTP/1.1 206 OK\r\nContent-Range: bytes 0-0/9\r\nContent-Length: 1\r\nETag: {}",
}


def check(text):
    assert not {char for char in text if not char.isprintable()} - {"\n"}


@pytest.mark.parametrize("head", HEADS)
def test_words_of_a_server_are_printable_and_short(head, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    body = json.dumps({"error": RUDE, "message": RUDE * 100})
    answer = f"{HEADS[head].format(RUDE)}\r\n\r\n{body}".encode()
    with RudePeer(None, lambda asked: answer, lambda asked: True) as peer:
        for name, value in (
            ("ENDPOINT_URL", f"http://{peer.address}"),
            ("ACCESS_KEY_ID", "i"),
            ("SECRET_ACCESS_KEY", "k"),
        ):
            monkeypatch.setenv(f"AWS_{name}", value)
        web, bucket = open_origin(f"http://{peer.address}/d"), open_origin("s3://bucket/d")
        for request in (
            lambda: web.get("x", 0),
            lambda: read_whole(PinnedOrigin(web, "another"), "x", 1 << 16, 1 << 17),
            lambda: bucket.get("x", 0),
            lambda: Client(None).get_bytes(peer.address, "/x", 0),
        ):
            with pytest.raises(Exception) as raised:
                request()
            check("".join(traceback.format_exception(raised.value)) + caplog.text)
            assert len(str(raised.value)) < 3000


def test_names_of_files_are_printable(tmp_path):
    damaged = tmp_path / f"{RUDE}.bin"
    damaged.write_bytes(b"\0\1 no text")
    for inputs in (damaged, tmp_path, tmp_path / RUDE, f"ftp://host/{RUDE}"):
        with pytest.raises(ForebayError) as raised:
            find_inputs(inputs, ReadOptions())
        check("".join(traceback.format_exception(raised.value)))


def test_names_of_members_are_printable():
    for char in "\x1b\n\x7f\x9b\u202e\u2028":
        for kind in (Name, WorkerId):
            with pytest.raises(ValidationError):
                TypeAdapter(kind).validate_python(f"a{char}")
    check(TypeAdapter(Reason).validate_python(RUDE))
    key, now = Ed25519PrivateKey.generate(), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, RUDE)])
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + dt.timedelta(1))
    with pytest.raises(ProtocolError, match="expected a common name") as raised:
        peer_in(builder.sign(key, None))
    check(str(raised.value))
