"""What every engine script shares: a dataset, certificates, child processes and their CPU time."""

import contextlib
import datetime
import hashlib
import json
import os
import resource
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

MIB = 1 << 20
CHUNK = MIB


def need(module: str, install: str):
    """Import an engine, or say how to install it and stop without failing."""
    try:
        return __import__(module)
    except ImportError:
        emit({"skipped": f"{module} is not installed: pip install {install}"})
        sys.exit(0)


def emit(record: dict) -> None:
    print(json.dumps(record), flush=True)


def dataset(folder: Path, size: int) -> Path:
    """A file of random bytes, made once."""
    path = folder / f"data-{size}" / "data.bin"
    if not path.exists() or path.stat().st_size != size:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as out:
            for start in range(0, size, 16 * MIB):
                out.write(os.urandom(min(16 * MIB, size - start)))
    return path


def same(left: Path, right: Path) -> bool:
    """Were the bytes delivered? Compared after the clock has stopped."""

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    return digest(left) == digest(right)


def own_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Child:
    """This script again, in another process; it prints one JSON line when ready and one when done."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, sys.argv[0], *map(str, arguments)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> dict:
        text = self.process.stdout.readline()
        if not text:
            raise RuntimeError(f"child ended with {self.process.wait()}: {self.process.args[2:]}")
        return json.loads(text)

    def send(self, record: dict) -> None:
        self.process.stdin.write(json.dumps(record) + "\n")
        self.process.stdin.flush()

    def cpu(self) -> float:
        import psutil

        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def children(*argument_lists: tuple):
    """Start several children; none outlives the block."""
    started: list[Child] = []
    try:
        for arguments in argument_lists:
            started.append(Child(*arguments))
        yield started
    finally:
        for child in started:
            child.kill()


def bulk_record(size: int, seconds: float, sender: float, receiver: float, intact: bool, **more) -> dict:
    gigabytes = size / 1e9
    return {
        "mb": round(size / 1e6),
        "mb_s": round(size / 1e6 / seconds, 1),
        "cpu_send": round(sender / gigabytes, 2),
        "cpu_recv": round(receiver / gigabytes, 2),
        "intact": intact,
    } | more


def wait_for_size(path: Path, size: int, limit: float = 120) -> int:
    """Wait until a growing file has so many bytes on disk."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        current = path.stat().st_size if path.exists() else 0
        if current >= size:
            return current
        time.sleep(0.002)
    raise TimeoutError(f"{path} never reached {size} bytes")


def certificates(folder: Path) -> Path:
    """Ed25519 certificates: nodes a, b, c, d and unlisted under one root; stranger under another."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    home = folder / "certs"
    if (home / "done").exists():
        return home
    home.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.UTC)

    def issue(name: str, root: tuple | None):
        key = Ed25519PrivateKey.generate()
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "*" if root else name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(root[1].subject if root else subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=root is None, path_length=None), critical=True)
        )
        if root:
            # An SSL torrent asks for its own name here; the star stands for any.
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("*")]), critical=False)
        certificate = builder.sign(root[0] if root else key, None)
        pem = serialization.Encoding.PEM
        (home / f"{name}.crt").write_bytes(certificate.public_bytes(pem))
        plain = serialization.NoEncryption()
        (home / f"{name}.key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
        (home / f"{name}.id").write_text(peer_id(certificate.public_bytes(serialization.Encoding.DER)))
        return key, certificate

    root = issue("root", None)
    for name in ("a", "b", "c", "d", "unlisted"):
        issue(name, root)
    issue("stranger", issue("other-root", None))
    (home / "done").touch()
    return home


def peer_id(der: bytes) -> str:
    """The identity a certificate speaks for: a hash of its public key, so renewal keeps it."""
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = x509.load_der_x509_certificate(der).public_key()
    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def tls(home: Path, who: str | None, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    # A stranger must still reach the server to be refused by it, so the roots trusted are the network's own.
    context.load_verify_locations(home / "root.crt")
    if who:
        context.load_cert_chain(home / f"{who}.crt", home / f"{who}.key")
    return context
