"""What `hub_server` answers: the hub's API and `resolve`, and the CDN's bytes."""

from __future__ import annotations

import hashlib
import http.server
import json
import time
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from support.cuttable import counted
from support.hub_tree import File, card_of, entries_at, files, files_at, settings_of

if TYPE_CHECKING:
    from support.hub_server import HubServer

_STEP = 64 << 10


class _Base(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    owner: HubServer

    def log_message(self, *args: Any) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        self.do_GET()

    def _begins(self, kind: str) -> bool:
        """Count the request and let faults happen; whether it shall be answered."""
        owner, faults = self.owner, self.owner.faults
        with owner.lock:
            owner.requests[kind] += 1
            owner.paths.append(self.path)
            owner.authorizations.append(self.headers.get("Authorization", ""))
        if faults.black_hole or (faults.black_hole_files and kind in ("resolve", "cdn")):
            owner.stopping.wait()
            self.close_connection = True
            return False
        owner.stopping.wait(faults.delay_s)
        if owner.happens(faults.drop):
            self.close_connection = True
            return False
        if owner.spend("throttle"):
            self._refuse(429, "", "Too many requests", {"RateLimit": '"api";r=0;t=0'})
            return False
        if owner.spend("broken"):
            self._refuse(500, "", "Internal error")
            return False
        return True

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        reported = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._answer(status, json.dumps({"error": message}).encode(), reported | (headers or {}))

    def _json(self, value: Any, headers: dict[str, str] | None = None) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def _answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send(self, repo: Path, file: File, headers: dict[str, str]) -> None:
        owner = self.owner
        asked = self.headers.get("Range", "")
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start = int(first) if asked and first else max(0, file.size - int(last)) if asked else 0
        stop = min(file.size, int(last) + 1 if asked and first and last else file.size)
        if asked and start >= stop:
            return self._answer(416, b"", {"Content-Range": f"bytes */{file.size}"})
        self.send_response(206 if asked else 200)
        reported = {"ETag": f'"{file.etag}"', "Accept-Ranges": "bytes", "Content-Length": str(stop - start)}
        reported |= {"Content-Range": f"bytes {start}-{stop - 1}/{file.size}"} if asked else {}
        for key, value in (reported | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        with owner.lock:
            owner.ranges.append((file.path, start, stop))
        cut = start + int(owner.chance.random() * (stop - start)) if owner.happens(owner.faults.truncate) else stop
        self._send_body(repo / file.path, file.path, start, cut)
        self.close_connection = self.close_connection or cut < stop

    def _send_body(self, path: Path, name: str, start: int, stop: int) -> None:
        owner, faults, sent, began = self.owner, self.owner.faults, 0, time.monotonic()
        with path.open("rb") as source:
            source.seek(start)
            while sent < stop - start and not owner.stopping.is_set():
                data = bytearray(source.read(min(_STEP, stop - start - sent)))
                index = faults.corrupt.get(name, -1) - start - sent
                if 0 <= index < len(data):
                    data[index] ^= 1
                if faults.bytes_per_s:
                    prefetch = (sent + len(data)) / faults.bytes_per_s - (time.monotonic() - began)
                    owner.stopping.wait(max(0.0, prefetch))
                if (wait_s := owner.booked_s(len(data))) > 0:
                    owner.stopping.wait(wait_s)
                with counted(owner, name, len(data)):
                    self.wfile.write(data)
                sent += len(data)


class CdnHandler(_Base):
    """`/REPO-DIRECTORY/SHA256?path=...`: bytes for whoever has the address, for 60 s."""

    def do_GET(self) -> None:
        if not self._begins("cdn"):
            return
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        repo = self.owner.directory / urllib.parse.unquote(url.path.rpartition("/")[0].lstrip("/"))
        if self.headers.get("Authorization"):
            return self._refuse(400, "", "Only one auth mechanism allowed")
        if float(query["until"]) < time.time() or self.owner.spend("expired"):
            return self._refuse(403, "", "Request has expired")
        file = next(file for file in files_at(repo, query["path"]) if file.sha256 == url.path.rpartition("/")[2])
        self._send(repo, file, {})


class HubHandler(_Base):
    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        size = int(self.headers.get("Content-Length") or 0)
        self._body = self.rfile.read(size) if size else b""
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        self._query = dict(urllib.parse.parse_qsl(url.query))
        if parts[0] == "api" and len(parts) > 2 and parts[1] in ("datasets", "models"):
            self._api(parts[1], parts[2:])
        elif "resolve" in parts:
            kind = "datasets" if parts[0] == "datasets" else "models"
            self._resolve(kind, parts[1:] if kind == "datasets" else parts)
        elif self._begins("other"):
            self._refuse(404, "", "Not Found")

    def _api(self, kind: str, parts: list[str]) -> None:
        verbs = ("revision", "tree", "paths-info", "refs")
        index = next((i for i, part in enumerate(parts) if part in verbs and i), len(parts))
        name, verb, rest = "/".join(parts[:index]), "".join(parts[index : index + 1]) or "info", parts[index + 1 :]
        if not self._begins("info" if verb == "revision" else verb):
            return
        repo = self._repo(kind, name)
        if repo is None or (verb != "refs" and not self._known(repo, rest[0] if rest else "main")):
            return
        if verb == "tree":
            self._tree(repo, "/".join(rest[1:]))
        elif verb == "paths-info":
            asked = self._body.decode()
            form = urllib.parse.parse_qs(asked)
            paths = json.loads(asked)["paths"] if asked.startswith("{") else form.get("paths", [])
            self._json([entry for path in paths for entry in entries_at(repo, path)])
        elif verb == "refs":
            self._json(
                {"branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": self._sha(repo)}]}
                | {"tags": [], "converts": []}
            )
        else:
            self._info(kind, name, repo)

    def _sha(self, repo: Path) -> str:
        return self.owner.commit(repo)

    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _repo(self, kind: str, name: str) -> Path | None:
        if name in self.owner.renamed:
            self._answer(307, b"", {"Location": self.path.replace(name, self.owner.renamed[name], 1)})
            return None
        repo = self.owner.directory / kind / name
        hidden = settings_of(repo).get("private") and self._token() not in self.owner.tokens
        if ".." in name or not repo.is_dir() or hidden or not any(repo.glob("*.*")):
            status = 404 if self._token() in self.owner.tokens else 401
            # The hub tells a stranger the same of what is hidden and of what is not there.
            self._refuse(status, "RepoNotFound", "Repository not found")
            return None
        return repo

    def _known(self, repo: Path, revision: str) -> bool:
        if revision in {"main", "refs/heads/main", self._sha(repo), *self.owner.revisions}:
            return True
        self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return False

    def _info(self, kind: str, name: str, repo: Path) -> None:
        card, settings = card_of(repo), settings_of(repo)
        plain: dict[str, Any] = {
            "_id": hashlib.sha1(name.encode()).hexdigest()[:24],
            "id": name,
            "author": name.partition("/")[0],
            "sha": self._sha(repo),
            "lastModified": "2026-01-01T00:00:00.000Z",
            "createdAt": "2026-01-01T00:00:00.000Z",
            "private": bool(settings.get("private")),
            "gated": settings.get("gated", False),
            "disabled": False,
            "tags": [],
            "downloads": 1,
            "likes": 1,
            "cardData": card,
            "siblings": [{"rfilename": file.path} for file in files(repo)],
        }
        if self._query.get("expand") or "expand[]" in self._query:
            asked = {
                value
                for key, value in urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query)
                if key.startswith("expand")
            }
            plain = {key: value for key, value in plain.items() if key in asked | {"_id", "id"}}
        self._json(plain | ({"modelId": name} if kind == "models" else {}))

    def _tree(self, repo: Path, path: str) -> None:
        below = repo / path
        if ".." in path or not below.is_dir():
            return self._refuse(404, "EntryNotFound", f"{path} does not exist on main")
        deep = self._query.get("recursive", "").lower() in ("true", "1")
        result = [one for one in (below.rglob("*") if deep else below.iterdir()) if one.name != ".hub.json"]
        result.sort(key=lambda one: (len(one.parts), one.is_file(), str(one)))  # level by level, folders first
        start = int(self._query.get("cursor") or 0)
        size = min(self.owner.page_size, int(self._query.get("limit") or self.owner.page_size))
        headers = {}
        if start + size < len(result):
            query = urllib.parse.urlencode(self._query | {"cursor": str(start + size)})
            address = f"{self.owner.url}{urllib.parse.urlsplit(self.path).path}?{query}"
            headers["Link"] = f'<{address}>; rel="next"'
        page = result[start : start + size]
        self._json([entry for one in page for entry in entries_at(repo, one.relative_to(repo).as_posix())], headers)

    def _resolve(self, kind: str, parts: list[str]) -> None:
        if not self._begins("resolve"):
            return
        index = parts.index("resolve")
        name, revision, path = "/".join(parts[:index]), parts[index + 1], "/".join(parts[index + 2 :])
        repo = self._repo(kind, name)
        if repo is None or not self._known(repo, revision):
            return
        if settings_of(repo).get("gated") and self._token() not in self.owner.tokens:
            return self._refuse(
                401,
                "GatedRepo",
                f"Access to dataset {name} is restricted. You must have access to it "
                "and be authenticated to access it. Please log in.",
            )
        result = files_at(repo, path)
        reported = {"X-Repo-Commit": self._sha(repo)}
        if not result:
            return self._refuse(404, "EntryNotFound", "Entry not found", reported)
        if not result[0].is_lfs:
            return self._send(repo, result[0], reported)
        file = result[0]
        position = urllib.parse.quote(str(repo.relative_to(self.owner.directory)))
        query = urllib.parse.urlencode({"path": path, "until": f"{time.time() + 60:.3f}"})
        self._answer(
            302,
            b"",
            reported
            | {
                "Location": f"{self.owner.cdn_url}/{position}/{file.sha256}?{query}",
                "X-Linked-Size": str(file.size),
                "X-Linked-ETag": f'"{file.sha256}"',
                "ETag": f'"{file.sha256}"',
                "Accept-Ranges": "bytes",
            },
        )
