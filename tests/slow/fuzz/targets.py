"""What reads bytes from strangers: name, how to feed it, and honest inputs to begin from.

Seeds are made by the code under test, with keys of a network of their own in a directory that the caller removes.
"""

import base64
import contextlib
import gzip
import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import libtorrent as lt
import numpy as np
import pytest
import zstandard
from pydantic import TypeAdapter, ValidationError
from starlette.responses import Response

from contract.test_formats import OF_ROWS, PLAIN, TEXTS
from forebay.convert import convert, written_formats
from forebay.dataset.manifest import Manifest, SliceInfo, SliceTable
from forebay.dataset.slices import open_slice, write_token_slice
from forebay.doctor import examine
from forebay.errors import ForebayError
from forebay.formats.base import get_format, names_with
from forebay.formats.conversion import ConvertOptions, TokenSource
from forebay.formats.html import HtmlError
from forebay.formats.inputs import ReadOptions
from forebay.formats.report import CheckOptions as DoctorOptions
from forebay.formats.sources import open_source
from forebay.lease.messages import ExchangeReply, ExchangeRequest
from forebay.ledger.chain import Used, receipt_message
from forebay.ledger.verify import verify_ledger
from forebay.ledger.writer import Ledger
from forebay.network.app import file_response
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.discovery import Claim, parse_claim
from forebay.network.join import read_token
from forebay.network.messages import SwarmRequest
from forebay.network.peer import Peer, Provider
from forebay.network.pki.certificates import Issuer, der_of, peer_of, verify_certificate
from forebay.network.pki.files import read_certs, read_key
from forebay.network.pki.identity import Identity, create_network, join, verify
from forebay.network.pki.revocation import parse_crl, read_revoked, sign_crl
from forebay.network.publications import read_publication
from forebay.prepare.extract import extract_html
from forebay.prepare.inputs import find_inputs, read_split, split_files
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.leases import JobSpec
from forebay.swarm.members import MAX_RANGES, parse_ranges
from forebay.swarm.tracker import Tracker
from support.foreign_datasets import made_table
from support.handlers import serve
from support.nodes import make_dataset
from support.preparing import prepare, stay_in_process, write_jsonl
from support.rude_peer import RudePeer

from .engine import Target

Make = Callable[[Path, Identity], Target]
TARGETS = {}


def target(make: Make) -> Make:
    TARGETS[make.__name__] = make
    return make


def make_target(name: str, directory: Path) -> Target:
    """A target by its name, on a fresh network in `directory`."""
    create_network(directory / "network", "fuzz")
    return TARGETS[name](directory, join(directory / "network", directory / "node", "node"))


def _json(parse, *seeds):
    def run(data):
        try:
            obj = json.loads(data)
        except (ValueError, RecursionError):  # the server and the client say so before any parser of ours
            return
        parse(obj)

    return Target(run, [json.dumps(seed).encode() for seed in seeds])


def _message(model, use, *seeds):
    """A message as a server takes it: what the model refuses is a 400 there."""
    data = [json.dumps(seed).encode() for seed in seeds]
    return Target(lambda value: use(TypeAdapter(model).validate_json(value)), data, (ForebayError, ValidationError))


@target
def server(directory: Path, identity: Identity) -> Target:
    """The whole server over a socket: what is answered is HTTP, and no failure of its own (500)."""

    file = directory / "file"
    file.write_bytes(bytes(200))

    def handle(request):
        if request.path.startswith("/v1/slices"):
            return file_response(request.http, file, 200)
        return Response(json.dumps(request.json()), media_type="application/json")

    created = serve(None, handle)
    created.start()

    def run(data):
        with socket.create_connection(("127.0.0.1", created.port)) as door:
            try:
                door.sendall(data)
                door.shutdown(socket.SHUT_WR)
                answer = b""
                while piece := door.recv(65536):
                    answer += piece
            except (ConnectionResetError, BrokenPipeError):  # it was told enough to refuse
                return
        assert not answer or answer.startswith(b"HTTP/1.1 "), answer[:80]
        assert not answer.startswith(b"HTTP/1.1 500"), answer[:200]

    seeds = [
        b"GET /v1/claims HTTP/1.1\r\nHost: a:1\r\n\r\n",
        b"POST /v1/exchange?job=a%20b HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
        b"POST /a HTTP/1.1\r\nIdempotency-Key: k\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"GET /v1/slices/00 HTTP/1.1\r\nRange: bytes=0-99\r\nConnection: close\r\n\r\n",
    ]
    return Target(run, seeds, close=created.close)


@target
def client(directory: Path, identity: Identity) -> Target:
    """The client's parser of answers, over a socket."""
    message = [b""]
    peer = RudePeer(None, lambda asked: message[0], lambda asked: True).__enter__()

    def run(data):
        message[0] = data
        with Client(None) as asking:
            if len(data) % 2:
                asking.request_json(peer.address, "GET", "/", timeout_s=2.0)
            else:
                into = bytearray(12)
                try:
                    asking.read_range(peer.address, "/", memoryview(into)[:8], 3, timeout_s=2.0)
                finally:
                    assert into[8:] == bytes(4)

    seeds = [
        b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 8\r\n\r\n{"a": 1}',
        b"HTTP/1.1 206 Partial\r\nContent-Range: bytes 3-10/99\r\nContent-Length: 8\r\n\r\n12345678",
        b'HTTP/1.1 403 No\r\nConnection: close\r\nContent-Length: 26\r\n\r\n{"error":"x","message":"y"}',
    ]
    return Target(run, seeds, close=peer.__exit__)


@target
def claims(directory: Path, identity: Identity) -> Target:
    claim = Claim("tiny", "0" * 64, 3, identity.peer_id, "127.0.0.1:7000", time.time() + 60)
    peer = Peer(identity.peer_id, identity.public_key, "node")
    return _json(lambda obj: parse_claim(obj, peer), claim.to_json(identity))


@target
def exchange(directory: Path, identity: Identity) -> Target:
    seed = {
        "job": "j", "session": "ab", "attempt": 1, "address": "127.0.0.1:7000", "known_leases": ["l1"],
        "job_id": "0" * 64,
        "uses": [{"lease_id": "l1", "epoch": 0, "slice": 3, "start": 0, "stop": 8, "step": 2}], "signature": "0" * 128,
        "declared_until": {"l1": 16}, "release": ["l2"], "failed": [{"lease_id": "l3", "reason": "r"}], "want": 2,
        "cached": {"0" * 64: "0-15,17"}, "reports": [{"peer_id": "a" * 32, "sha256": "0" * 64, "reason": "r"}],
    }  # fmt: skip
    spec = JobSpec("j", "0" * 64, np.full(18, 8, np.int64))
    return _message(ExchangeRequest, lambda message: SchedulerCore(spec).exchange("w", message, 0.0), seed, {})


@target
def ranges(directory: Path, identity: Identity) -> Target:
    return Target(
        lambda data: parse_ranges(data.decode("latin-1"), 1 << 22),
        [b"0-15,17", b"3", b"", b"0-3999999", b",".join(b"%d" % i for i in range(0, 2 * MAX_RANGES + 4, 2))],
    )


@target
def answers(directory: Path, identity: Identity) -> Target:
    """What a scheduler answers a worker."""
    lease = {
        "lease_id": "l1", "job": "j", "job_id": "0" * 64, "epoch": 0, "slice": 3, "first": 1,
        "dataset_id": "0" * 64,
        "name": "slices/000003.safetensors", "sha256": "0" * 64, "bytes": 99, "count": 16, "start": 0, "stop": 16,
        "sample_base": 48, "seed": 1, "seq_len": 8, "layout": "tokens", "dtype": "U16", "vocab_size": 60,
        "providers": [
            {"peer_id": "a" * 32, "address": "127.0.0.1:1", "is_origin": True},
            {"peer_id": "", "address": "https://x/y", "is_origin": True},
        ],
        "expires_in_s": 30.0,
    }  # fmt: skip
    seed = {
        "uses": [{"lease_id": "l1", "offset": 8, "stop": 16}], "lost": ["l2"], "leases": [lease], "wait_s": 0.5,
        "refused": [{"lease_id": "l2", "code": "lost", "message": "m", "offset": 0}], "done": False, "paused": False,
        "active": {"l1": {"stop": 16, "expires_in_s": 30.0}}, "report_cached": False,
    }  # fmt: skip
    return _json(ExchangeReply.from_json, seed, {**seed, "wait_s": 10**400})


@target
def swarm(directory: Path, identity: Identity) -> Target:
    seed = {
        "address": "127.0.0.1:7000", "have": "0-15,17", "want": "1-3", "num": 2,
        "finished": [4], "failed": [{"index": 5, "member": "a" * 32, "wrong": True}], "dropped": [6], "leave": False,
    }  # fmt: skip
    tracker, client = Tracker(asking := Client(None)), itertools.count()
    tracker.add("0" * 64, 1000, Provider("o", "127.0.0.1:1", True))

    def answer(message):
        peer_id = base64.b32encode(next(client).to_bytes(20, "big")).decode().lower()
        return json.dumps(tracker.handle(Peer(peer_id, b"", "m"), "0" * 64, message.model_copy(update={"address": ""})))

    created = _message(SwarmRequest, answer, seed, {})
    return replace(created, close=lambda: (tracker.close(), asking.close()))


@target
def ledger(directory: Path, identity: Identity) -> Target:
    """Lines of a ledger whose hashes are right: what lies behind the first gate."""
    path, other = directory / "seed.jsonl", directory / "ledger.jsonl"
    uses = [Used("l1", 0, 0, 0, 8, 1)]
    created = Ledger.open(path, identity.sign)
    job = {"epochs": 1, "samples_per_slice": [[2, 8]], "dataset_id": "0" * 64, "seed": 1, "lease_s": 30.0}
    created.append("job", {"scheduler": identity.public_key.hex(), **job})
    created.append(
        "worker", {"worker": identity.peer_id, "certificate": identity.as_peer.certificate, "name": identity.name}
    )
    receipt = identity.sign(receipt_message("0" * 64, uses)).hex()
    created.append("uses", {"worker": identity.peer_id, "uses": [["l1", 0, 0, 0, 8, 1]], "receipt": receipt})
    created.append("set_aside", {"epoch": 0, "slice": 1, "start": 0, "stop": 8, "reason": "r"})
    created.close()

    def run(data):
        lines, before = [], b"0" * 64
        for line in data.split(b"\n")[:-1]:
            rest = line[75:]
            index = rest.rfind(b',"prev":"')
            if index >= 0:
                rest = rest[: index + 9] + before + rest[index + 73 :]
            before = hashlib.sha256(b"{" + rest).hexdigest().encode()
            lines.append(b'{"hash":"' + before + b'",' + rest)
        other.write_bytes(b"\n".join([*lines, b""]))
        verify_ledger(other, verify=verify, certify=peer_of)

    return Target(run, [path.read_bytes()])


@target
def certificates(directory: Path, identity: Identity) -> Target:
    node, root = (der_of(read_certs(identity.node_dir / f"{name}-cert.pem")[0]) for name in ("node", "root"))
    version = root.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x7f")
    return Target(lambda data: verify_certificate(data, root), [node, root, version])


@target
def files(directory: Path, identity: Identity) -> Target:
    """A node's own files, damaged: the first byte of an input says which."""
    names = sorted(path.name for path in identity.node_dir.iterdir() if path.is_file())
    full = {name: (identity.node_dir / name).read_bytes() for name in names}

    def run(data):
        name = names[data[0] % len(names)] if data else names[0]
        path = identity.node_dir / name
        path.write_bytes(data[1:])
        try:
            Identity.load(identity.node_dir)
        finally:
            path.write_bytes(full[name])

    odd = [
        bytes([names.index(f"{name}.pem")]) + _again(full[f"{name}.pem"], bytes.fromhex(old), bytes.fromhex(new))
        for name, old, new in [
            ("node-cert", "a003020102", "a003020122"),
            ("node-key", "06032b6570", "06033b6570"),
            ("node-key", "06032b6570", "06032b656f"),  # X448
            ("root-cert", "0603551d0e", "0603551d7e"),  # without a key id
        ]
    ]
    return Target(run, [*(bytes([index]) + full[name] for index, name in enumerate(names)), *odd])


def _again(pem, old, new):
    """A PEM with other bytes inside."""
    first, *lines, last = pem.strip().splitlines()
    body = base64.b64encode(base64.b64decode(b"".join(lines)).replace(old, new))
    return b"\n".join([first, *(body[index : index + 64] for index in range(0, len(body), 64)), last, b""])


@target
def revocations(directory: Path, identity: Identity) -> Target:
    root = read_certs(identity.node_dir / "root-cert.pem")[0]
    issuer = Issuer(read_key(identity.node_dir / "node-key.pem"), root, True)
    seed = sign_crl(issuer, [7, 1 << 150], 3)
    der = base64.b64decode(b"".join(seed.splitlines()[1:-1]))

    def run(data):
        with contextlib.suppress(ForebayError):
            parse_crl(data, identity.root)
        pem = b"-----BEGIN X509 CRL-----\n%b\n-----END X509 CRL-----\n"
        parse_crl(pem % base64.b64encode(data), identity.root)

    return Target(run, [seed, der])


@target
def revoked_file(directory: Path, identity: Identity) -> Target:
    path = directory / "revoked.txt"

    def run(data):
        path.write_bytes(data)
        read_revoked(path)

    return Target(run, [b"# a comment\n" + b"a" * 32 + b"\n", b"\x80\n"])


@target
def tokens(directory: Path, identity: Identity) -> Target:
    body = {
        "id": "i", "network_id": "n", "issuer": "a" * 32, "address": "h:1", "roles": ["worker"], "datasets": ["*"],
        "uses": 1, "expires_at": 1e9, "valid_days": 30.0,
    }  # fmt: skip

    def run(data):
        with contextlib.suppress(ForebayError):
            read_token(data.decode("latin-1"))
        wrapped = base64.urlsafe_b64encode(data).decode().rstrip("=")
        read_token(f"forebay1.{wrapped}.AAAA")

    return Target(run, [json.dumps(body).encode(), b"forebay1.AAAA.AAAA"])


@target
def publications(directory: Path, identity: Identity) -> Target:
    seed = {
        "format": 4, "dataset_id": "0" * 64, "name": "tiny", "publisher": identity.peer_id, "serial": 1, "origins": [],
        "certificate": (identity.node_dir / "node-cert.pem").read_text(), "expires_at": 1e10, "signature": "0" * 128,
        "signed_at": 1e9,
    }  # fmt: skip
    seeds = [seed, {**seed, "expires_at": 10**400}, {**seed, "origins": ["https://[h/"]}]
    return Target(lambda data: read_publication(data, identity), [json.dumps(item).encode() for item in seeds])


@target
def manifest(directory: Path, identity: Identity) -> Target:
    make_dataset(directory / "data", 2, 9)
    return Target(Manifest.from_json, [(directory / "data" / "manifest.json").read_bytes()])


@target
def table(directory: Path, identity: Identity) -> Target:
    rows = [SliceInfo(i, f"slices/{i:06d}.safetensors", 99, f"{i:064x}", 8, 1) for i in range(5)]
    return Target(SliceTable.from_parquet, [SliceTable.from_rows(rows).to_parquet()])


@target
def slices(directory: Path, identity: Identity) -> Target:
    path = directory / "a.safetensors"
    write_token_slice(path, np.arange(40, dtype=np.uint16), np.array([10, 40], np.uint64))
    seed = path.read_bytes()

    def run(data):
        path.write_bytes(data)
        opened = open_slice(path)
        for tensor in opened.tensors.values():
            np.asarray(tensor).sum()

    return Target(run, [seed])


@target
def dht(directory: Path, identity: Identity) -> Target:
    """Packets to the real UDP port, and answers to the node's own inquiries; it must go on to answer."""
    node = LibtorrentDht("127.0.0.1", 0)
    door = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    door.connect(("127.0.0.1", node.port))
    sent = [0]

    def is_answered():
        node.announce(b"k" * 20, 7000)
        return bool(node.find(b"k" * 20, 3.0))

    def run(data):
        with contextlib.suppress(ConnectionRefusedError):
            door.send(data[:1400])
        sent[0] += 1
        if sent[0] % 200 == 0:
            time.sleep(0.05)
            if not any(is_answered() for _ in range(10)):  # What a busy machine drops is sent again.
                raise AssertionError("the node answers no more")

    def close():
        door.close()
        node.close()

    body = {b"id": b"i" * 20, b"info_hash": b"k" * 20, b"target": b"t" * 20}
    asked = [
        lt.bencode({b"t": b"aa", b"y": b"q", b"q": name, b"a": {**body, **more}})
        for name, more in [
            (b"ping", {}), (b"find_node", {}), (b"get_peers", {}), (b"get", {}), (b"sample_infohashes", {}),
            (b"announce_peer", {b"port": 1, b"token": b"x" * 4}), (b"put", {b"v": b"v", b"token": b"x" * 4}),
        ]
    ]  # fmt: skip
    reported = lt.bencode({b"t": b"aa", b"y": b"r", b"r": {b"id": b"j" * 20, b"values": [b"\x7f\0\0\1\1\1"]}})
    return Target(run, [*asked, reported], close=close)


@target
def preparation(directory: Path, identity: Identity) -> Target:
    """A whole preparation: good documents beside an input are kept, whatever the input is."""
    patch, out, ids = pytest.MonkeyPatch(), directory / "out", directory / "ids"
    stay_in_process(patch)
    (directory / "in").mkdir()
    good = [f"good-{i}" for i in range(5)]
    write_jsonl(directory / "in/good.jsonl", ({"id": name, "text": name} for name in good))
    settings = {"max_error_rate": 1.0, "unicode": {}, "pii": {}, "dedup": {"exact": True}}

    def run(data):
        (directory / "in/x").write_bytes(data)
        shutil.rmtree(out, ignore_errors=True)
        prepare(directory / "in", out, settings=settings, write_ids=ids)
        assert set(good) <= set(ids.read_text().splitlines())

    seeds = []
    for name in ("jsonl", "warc", "parquet"):
        (data,) = PLAIN[name].files.values()
        middle = len(data) // 2
        seeds += [data, data[:middle], data[:middle] + bytes(40) + data[middle + 40 :]]
    return Target(run, [*seeds, *map(gzip.compress, seeds)], close=patch.undo)


def _reader(format, name, seed):
    """A target that reads bytes as `prepare` does: damage is a record with a problem, never an exception.

    No document is mostly what no text has, and of what is not blank something is read, or a reason is given.
    """

    def make(directory, identity):
        path = directory / name
        if not seed:
            convert(made_table({"text": TEXTS}), path, format, ConvertOptions())
        first = seed or path.read_bytes()

        def run(data):
            path.write_bytes(data)
            for options in (ReadOptions(), ReadOptions(format=format)):
                listed = find_inputs([directory], options)
                records = [
                    record for split in split_files(listed.files, options) for record in read_split(split, options)
                ]
                for record in records:
                    noise = len(_NOISE.findall(record.text))
                    assert record.problem or noise < max(32, 0.3 * len(record.text)), record
                    if record.html:
                        with contextlib.suppress(HtmlError):
                            extract_html(record.text)
                is_told = bool(records or listed.skipped) or format in _WITH_OTHERS
                assert is_told or not data.strip(), "nothing was read, and nothing said why"

        return Target(
            _in_a_child(run) if format == "pdf" else run, [first, gzip.compress(first), zstandard.compress(first)]
        )

    TARGETS[f"read_{format}"] = make


def _in_a_child(run):
    """The same in a child, as an engine runs it: a library may end its process at damaged input, and the engine names
    the input whose worker died. Any other error than ours is a fault still.
    """

    def forked(data):
        child = os.fork()
        if child == 0:
            with Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), 2)
            try:
                run(data)
            except ForebayError:
                pass
            except BaseException:  # noqa: BLE001 - the parent raises in its place
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGABRT)

    return forked


_NOISE = re.compile("[\0-\x08\x0e-\x1f\x7f-\x9f\ufffd]")
_WITH_OTHERS = ("warc", "wet", "wikipedia", "stackexchange", "webdataset")  # Members of other kinds are no documents.
for _format in names_with("read_text"):
    if _format in PLAIN and _format != "api":
        ((_name, _data),) = PLAIN[_format].files.items()
        _reader(_format, _name, _data)
    elif _format in OF_ROWS:
        _reader(_format, OF_ROWS[_format][0], b"")


def _file_format(format):
    """A target that opens, converts from and examines files of a format that `convert` writes.

    The first byte of an input says which file of the output directory the rest replaces.
    """

    def make(directory, identity):
        out = directory / "whole"
        if get_format(format).supports("write_tokens"):
            source = directory / "tokens.npy"
            np.save(source, np.arange(3000, dtype=np.uint16) % 500)
            options = ConvertOptions(seq_len=64, eos_id=0, name="fuzz")
        else:
            options = ConvertOptions(name="fuzz")
            source = directory / "rows.jsonl"
            line = b'{"text": "words %d", "x": %d}\n' if format == "csv" else b'{"text": "words %d", "x": [%d, 0.5]}\n'
            source.write_bytes(b"".join(line % (i, i) for i in range(40)))
        convert(source, out, format, options)
        names = sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file()) if out.is_dir() else [Path()]
        copied = directory / "place" / out.name

        def run(data):
            shutil.rmtree(copied.parent, ignore_errors=True)
            copied.parent.mkdir()
            shutil.copytree(out, copied) if out.is_dir() else shutil.copyfile(out, copied)
            path = copied / names[data[0] % len(names) if data else 0]
            path.write_bytes(data[1:])
            examine([copied], DoctorOptions(full=True))
            opened = open_source(copied, ConvertOptions())
            if isinstance(opened, TokenSource):
                for part in opened.parts():
                    np.asarray(part.tokens).sum()
            else:
                for batch in opened.batches():
                    batch.validate()

        return Target(run, [bytes([i]) + (out / name).read_bytes() for i, name in enumerate(names)])

    TARGETS[f"file_{format}"] = make


for _name in written_formats():
    _file_format(_name)
