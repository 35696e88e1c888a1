"""A web server and a small S3 over a directory, on real sockets, with faults that are set from outside.

    with OriginServer(directory) as server:
        server.faults.drop = 0.2
        open_remote(server.url)            # http://127.0.0.1:PORT
        open_remote(server.s3_url)         # s3://bucket/...; see `s3_environment`

GET and HEAD with one range. Under `/bucket/` a request must carry a valid AWS signature (version 4), and objects may
be put there, whole or in parts that no reader sees before the last.
"""

import hashlib
import hmac
import os
import re
import threading
import time
import urllib.parse
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from support import faulty_server

ACCESS_KEY = "test-key"
SECRET_KEY = "test-secret"
BUCKET = "bucket"


@dataclass
class Faults(faulty_server.Faults):
    """See the base.

    Attributes:
        missing, forbidden: Names answered with 404, 403.
        requests_per_s: Above so many, 503 with `Retry-After: retry_after` (if not None).
        ignore_ranges: Answers 200 with the whole object.
    """

    missing: set[str] = field(default_factory=set)
    forbidden: set[str] = field(default_factory=set)
    requests_per_s: float = 0.0
    retry_after: str | None = None
    ignore_ranges: bool = False


@dataclass
class Uploads:
    """Objects that were put.

    Attributes:
        metadata: `x-amz-meta-*` of objects, by name.
        parts: Of uploads under way: by id, the name, metadata and each part's bytes.
        refuse: Part of requests answered with 503.
        completed: How often each object was put.
    """

    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    parts: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = field(default_factory=dict)
    refuse: float = 0.0
    completed: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(faulty_server.Handler):
    def answer(self) -> None:
        owner, faults, url = self.owner, self.owner.faults, urllib.parse.urlsplit(self.path)
        signed = url.path.startswith(f"/{BUCKET}/")
        name = urllib.parse.unquote(url.path).removeprefix(f"/{BUCKET}" if signed else "").lstrip("/")
        if self.command not in ("GET", "HEAD"):
            status, body, headers = self._put(name, url.query) if signed and ".." not in name else (404, b"", {})
            return self.reply(status, body, headers)
        if self.has_fault(name):
            return
        if owner.too_many():
            return self._refuse(503, {"Retry-After": faults.retry_after} if faults.retry_after is not None else {})
        if not signed and owner.redirect is not None:
            return self._refuse(302, {"Location": owner.redirect + self.path})
        if not signed and owner.auth is not None and self.headers.get("Authorization") != owner.auth:
            return self._refuse(401)
        if name in faults.forbidden or (signed and not has_signature(self)):
            return self._refuse(403)
        file = owner.directory / name
        if name in faults.missing or ".." in name or not file.is_file():
            return self._refuse(404)
        if faults.ignore_ranges:
            del self.headers["Range"]
        more = owner.uploads.metadata.get(name, {}) | {"Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        self.send_range(file, name, f"{file.stat().st_size:x}", more, owner.shift_ranges)

    def _refuse(self, status, headers=None):
        self.reply(status, b"<Error><Code>Refused</Code></Error>", headers)

    def _put(self, name, query_text):
        """Answer a PUT, POST or DELETE with status, body and headers."""
        uploads, body = self.owner.uploads, self.read_body()
        query = dict(urllib.parse.parse_qsl(query_text, keep_blank_values=True))
        digest = self.headers.get("x-amz-content-sha256", "")
        if not has_signature(self) or digest not in ("UNSIGNED-PAYLOAD", hashlib.sha256(body).hexdigest()):
            return 403, b"", {}
        if self.owner.happens(uploads.refuse):
            return 503, b"", {}
        meta = {key.lower(): value for key, value in self.headers.items() if key.lower().startswith("x-amz-meta-")}
        etag = {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}
        head = f"<Bucket>bucket</Bucket><Key>{escape(name)}</Key>"
        upload = query.get("uploadId", "")
        pending, part = uploads.parts.get(upload), query.get("partNumber")
        match self.command:
            case "PUT" if not upload:
                self._commit(name, body, meta)
                return 200, b"", etag
            case "POST" if "uploads" in query:
                upload = os.urandom(8).hex()
                uploads.parts[upload] = (name, meta, {})
                text = f"{head}<UploadId>{upload}</UploadId>"
                return 200, f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>".encode(), {}
            case "PUT" if pending and part:
                pending[2][int(part)] = body
                return 200, b"", etag
            case "POST" if pending:
                name, meta, parts = pending
                numbers = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
                if numbers != sorted(parts) or any(len(parts[n]) < 5 << 20 for n in numbers[:-1]):
                    return 400, b"", {}
                self._commit(name, b"".join(parts[number] for number in numbers), meta)
                del uploads.parts[upload]
                text = f'{head}<ETag>"done"</ETag>'
                return 200, f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>".encode(), {}
            case "DELETE" if upload:
                uploads.parts.pop(upload, None)
                return 204, b"", {}
        return 400, b"", {}

    def _commit(self, name, data, meta):
        path = self.owner.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{os.urandom(4).hex()}.put")
        fresh.write_bytes(data)
        fresh.replace(path)
        with self.owner.uploads.lock:
            self.owner.uploads.metadata[name] = meta
            self.owner.uploads.completed[name] += 1


class OriginServer(faulty_server.FaultyServer):
    """See the base; `requests` are by name.

    Attributes:
        uploads: Objects that were put, or are being put in parts.
        auth: If set, the Authorization header that plain requests must carry (else 401).
        redirect: A base URL to which plain requests are sent on with 302.
        shift_ranges: Ranges begin so much later than the request says.
    """

    handlers = (Handler,)

    def __init__(self, directory: Path, *, seed: int = 1) -> None:
        super().__init__(directory, seed=seed)
        self.faults, self.uploads, self.shift_ranges = Faults(), Uploads(), 0
        self.auth = None
        self.redirect = None
        self._arrivals = deque()
        self.port = self.ports[0]
        self.s3_url = f"s3://{BUCKET}"
        self.s3_environment = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
        }

    def too_many(self) -> bool:
        """Return True if this request is above the limit of the last second."""
        if not self.faults.requests_per_s:
            return False
        now = time.monotonic()
        with self.lock:
            while self._arrivals and self._arrivals[0] < now - 1:
                self._arrivals.popleft()
            if len(self._arrivals) + 1 > self.faults.requests_per_s:
                return True
            self._arrivals.append(now)
            return False


def has_signature(request: Any) -> bool:
    """Return True for a request with AWS's signature, version 4, of our secret."""
    url = urllib.parse.urlsplit(request.path)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    reported = request.headers.get("Authorization", "").removeprefix("AWS4-HMAC-SHA256 ")
    parts = dict(part.strip().split("=", 1) for part in reported.split(",") if part)
    parts |= {name.removeprefix("X-Amz-"): value for name, value in query.items() if name.startswith("X-Amz-")}
    signature = query.pop("X-Amz-Signature", "") or parts.get("Signature", "")
    if not signature:
        return False
    key_id, *scope = parts["Credential"].split("/")
    names = parts["SignedHeaders"].split(";")
    if key_id != ACCESS_KEY or "host" not in names:
        return False
    canonical = "\n".join(
        [
            request.command,
            url.path,
            "&".join(
                f"{urllib.parse.quote(k, safe='')}={urllib.parse.quote(v, safe='')}" for k, v in sorted(query.items())
            ),
            *(f"{name}:{' '.join((request.headers.get(name) or '').split())}" for name in names),
            "",
            parts["SignedHeaders"],
            request.headers.get("x-amz-content-sha256", "UNSIGNED-PAYLOAD"),
        ]
    )
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", request.headers.get("x-amz-date") or parts["Date"], "/".join(scope), digest])
    key = f"AWS4{SECRET_KEY}".encode()
    for part in scope:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.compare_digest(hmac.new(key, text.encode(), hashlib.sha256).hexdigest(), signature)
