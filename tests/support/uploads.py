"""Objects put into the bucket of `origin_server`: whole, or in parts that nobody sees before the last."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import urllib.parse
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Uploads:
    """What was put.

    Attributes:
        metadata: `x-amz-meta-*` of objects, by name.
        parts: Of uploads under way: by id, the name and each part's bytes.
        refuse: Part of requests answered with 503.
        completed: How often each object was put.
    """

    metadata: dict[str, dict[str, str]] = field(default_factory=dict)
    parts: dict[str, tuple[str, dict[str, str], dict[int, bytes]]] = field(default_factory=dict)
    refuse: float = 0.0
    completed: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)


def answer(handler: Any, signed: bool) -> None:
    """A PUT, POST or DELETE below /bucket/."""
    owner, uploads = handler.owner, handler.owner.uploads
    body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    url = urllib.parse.urlsplit(handler.path)
    query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
    name = urllib.parse.unquote(url.path).removeprefix("/bucket/")
    reported = handler.headers.get("x-amz-content-sha256", "")
    if not url.path.startswith("/bucket/") or ".." in name:
        return _reply(handler, 404)
    if not signed or (reported != "UNSIGNED-PAYLOAD" and reported != hashlib.sha256(body).hexdigest()):
        return _reply(handler, 403)
    if owner.happens(uploads.refuse):
        return _reply(handler, 503)
    meta = {key.lower(): value for key, value in handler.headers.items() if key.lower().startswith("x-amz-meta-")}
    match handler.command, sorted(query.keys() & {"uploads", "uploadId", "partNumber"}):
        case "PUT", []:
            _commit(owner, name, body, meta)
            return _reply(handler, 200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        case "POST", ["uploads"]:
            upload = os.urandom(8).hex()
            with uploads.lock:
                uploads.parts[upload] = (name, meta, {})
            return _reply(
                handler, 200, f"<InitiateMultipartUploadResult><Bucket>bucket</Bucket><Key>{name}</Key>"
                f"<UploadId>{upload}</UploadId></InitiateMultipartUploadResult>",
            )  # fmt: skip
        case "PUT", ["partNumber", "uploadId"] if query["uploadId"] in uploads.parts:
            uploads.parts[query["uploadId"]][2][int(query["partNumber"])] = body
            return _reply(handler, 200, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        case "POST", ["uploadId"] if query["uploadId"] in uploads.parts:
            name, meta, parts = uploads.parts[query["uploadId"]]
            asked = [int(number) for number in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
            if asked != sorted(parts) or any(len(parts[n]) < 5 << 20 for n in asked[:-1]):
                return _reply(handler, 400)
            _commit(owner, name, b"".join(parts[number] for number in asked), meta)
            del uploads.parts[query["uploadId"]]
            return _reply(
                handler, 200, f"<CompleteMultipartUploadResult><Bucket>bucket</Bucket><Key>{name}</Key>"
                '<ETag>"done"</ETag></CompleteMultipartUploadResult>',
            )  # fmt: skip
        case "DELETE", ["uploadId"]:
            uploads.parts.pop(query["uploadId"], None)
            return _reply(handler, 204)
    return _reply(handler, 400)


def _commit(owner: Any, name: str, data: bytes, meta: dict[str, str]) -> None:
    path: Path = owner.directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f"{path.name}.{os.urandom(4).hex()}.put")
    fresh.write_bytes(data)
    fresh.replace(path)
    with owner.uploads.lock:
        owner.uploads.metadata[name] = meta
        owner.uploads.completed[name] += 1


def _reply(handler: Any, status: int, text: str = "", headers: dict[str, str] | None = None) -> None:
    handler.owner.uploads.statuses[status] += 1
    body = text.encode()
    handler.send_response(status)
    for key, value in (headers or {}).items():
        handler.send_header(key, value)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
