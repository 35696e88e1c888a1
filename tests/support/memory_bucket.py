"""A small S3 in memory: one bucket whose keys are any text, listed by pages, with signatures that are checked.

with MemoryBucket({"a//b": b"1"}) as bucket:
    monkeypatch.setenv(...) for bucket.s3_environment.items()
    open_origin("s3://bucket/a")
"""

import hashlib
import html
import re
import urllib.parse
from pathlib import Path
from xml.sax.saxutils import escape

from support import origin_server
from support.origin_server import BUCKET, has_signature


class _Handler(origin_server.Handler):
    def answer(self):
        url, owner = urllib.parse.urlsplit(self.path), self.owner
        query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        key = urllib.parse.unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
        if self.has_fault(key):
            return None
        if not owner.is_public and not has_signature(self):
            return self.reply(403)
        if "delete" in query:
            keys = re.findall("<Key>(.*?)</Key>", self.read_body().decode())
            for key in keys:
                owner.objects.pop(html.unescape(key), None)
            gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
            return self.reply(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
        if self.command in ("PUT", "POST", "DELETE"):
            if self.headers.get("If-None-Match") == "*" and key in owner.objects:
                self.read_body()
                return self.reply(412)
            return self.reply(*self._put(key, url.query))
        if "list-type" in query:
            return self.reply(200, self._listing(query).encode())
        if key not in owner.objects:
            return self.reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        data, requested = owner.objects[key], self.headers.get("Range", "").removeprefix("bytes=")
        headers = {"ETag": f'"{hashlib.md5(data).hexdigest()}"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if requested:
            first, last = requested.split("-")
            start, stop = int(first), min(len(data), int(last) + 1)
            headers["Content-Range"], data = f"bytes {start}-{stop - 1}/{len(data)}", data[start:stop]
        headers |= owner.uploads.metadata.get(key, {})
        self.reply(206 if requested and not owner.sends_200 else 200, data, headers)

    def _commit(self, name, data, meta):
        self.owner.objects[name] = data
        self.owner.uploads.metadata[name] = meta
        self.owner.uploads.completed[name] += 1

    def _listing(self, query):
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        keys = sorted(key for key in self.owner.objects if key.startswith(prefix))
        keys = [key for key in keys if not delimiter or delimiter not in key[len(prefix) :]]
        start = int(query.get("continuation-token", 0))
        encode = urllib.parse.quote if query.get("encoding-type") == "url" else escape
        entries = "".join(
            f"<Contents><Key>{encode(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;"
            f"{hashlib.md5(self.owner.objects[key]).hexdigest()}&quot;</ETag><Size>{len(self.owner.objects[key])}"
            "</Size></Contents>"
            for key in keys[start : start + self.owner.page]
        )
        stop = start + self.owner.page
        more = f"<NextContinuationToken>{stop}</NextContinuationToken>" if stop < len(keys) else ""
        return (
            f"<ListBucketResult><IsTruncated>{str(bool(more)).lower()}</IsTruncated>{more}{entries}</ListBucketResult>"
        )


class MemoryBucket(origin_server.OriginServer):
    """See the base.

    Attributes:
        objects: Bytes by key.
        page: Keys of a page of a listing.
        is_public: Requests need no signature.
        sends_200: Ranges come with the status 200, as rclone sends them.
    """

    handlers = (_Handler,)

    def __init__(self, objects: dict[str, bytes]) -> None:
        super().__init__(Path())
        self.objects, self.page, self.is_public, self.sends_200 = objects, 1000, False, False
