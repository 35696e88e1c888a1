"""Answers of `hub_server`: the hub's API and `resolve`, and the CDN's bytes."""

import hashlib
import json
import time
import urllib.parse

from support import faulty_server
from support.hub_tree import files, find_entries, find_files, read_card, read_settings


class _Base(faulty_server.Handler):
    def is_served(self, kind):
        """Count the request and let faults happen; return True if it is to be answered."""
        owner, faults = self.owner, self.owner.faults
        if self.has_fault(kind):
            return False
        if faults.black_hole_files and kind in ("resolve", "cdn"):
            owner.stopping.wait()
            self.close_connection = True
            return False
        if owner.spend("throttle"):
            self.refuse(429, "", "Too many requests", {"RateLimit": '"api";r=0;t=0'})
            return False
        if owner.spend("broken"):
            self.refuse(500, "", "Internal error")
            return False
        return True

    def refuse(self, status, code, message, headers=None):
        reported = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply(status, json.dumps({"error": message}).encode(), reported | (headers or {}))

    def reply_json(self, value, headers=None):
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"} | (headers or {}))

    def send_file(self, repo, file, headers):
        self.send_range(repo / file.path, file.path, file.etag, headers)


class CdnHandler(_Base):
    """`/REPO-DIRECTORY/SHA256?path=...`: bytes for a client that has the address, for 60 s."""

    def answer(self) -> None:
        if not self.is_served("cdn"):
            return
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        repo = self.owner.directory / urllib.parse.unquote(url.path.rpartition("/")[0].lstrip("/"))
        if self.headers.get("Authorization"):
            return self.refuse(400, "", "Only one auth mechanism allowed")
        if float(query["until"]) < time.time() or self.owner.spend("expired"):
            return self.refuse(403, "", "Request has expired")
        file = next(file for file in find_files(repo, query["path"]) if file.sha256 == url.path.rpartition("/")[2])
        self.send_file(repo, file, {})


class HubHandler(_Base):
    def answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        self._body = self.read_body()
        parts = [urllib.parse.unquote(part) for part in url.path.strip("/").split("/")]
        self._query = dict(urllib.parse.parse_qsl(url.query))
        if parts[0] == "api" and len(parts) > 2 and parts[1] in ("datasets", "models"):
            self._api(parts[1], parts[2:])
        elif "resolve" in parts:
            kind = "datasets" if parts[0] == "datasets" else "models"
            self._resolve(kind, parts[1:] if kind == "datasets" else parts)
        elif self.is_served("other"):
            self.refuse(404, "", "Not Found")

    def _api(self, kind, parts):
        verbs = ("revision", "tree", "paths-info", "refs")
        index = next((i for i, part in enumerate(parts) if part in verbs and i), len(parts))
        name, verb, rest = "/".join(parts[:index]), "".join(parts[index : index + 1]) or "info", parts[index + 1 :]
        if not self.is_served("info" if verb == "revision" else verb):
            return
        repo = self._repo(kind, name)
        if repo is None or (verb != "refs" and not self._has_revision(repo, rest[0] if rest else "main")):
            return
        if verb == "tree":
            self._tree(repo, "/".join(rest[1:]))
        elif verb == "paths-info":
            requested = self._body.decode()
            form = urllib.parse.parse_qs(requested)
            paths = json.loads(requested)["paths"] if requested.startswith("{") else form.get("paths", [])
            self.reply_json([entry for path in paths for entry in find_entries(repo, path)])
        elif verb == "refs":
            self.reply_json(
                {"branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": self.owner.commit(repo)}]}
                | {"tags": [], "converts": []}
            )
        else:
            self._info(kind, name, repo)

    def _token(self):
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _repo(self, kind, name):
        if name in self.owner.renamed:
            self.reply(307, b"", {"Location": self.path.replace(name, self.owner.renamed[name], 1)})
            return None
        repo = self.owner.directory / kind / name
        hidden = read_settings(repo).get("private") and self._token() not in self.owner.tokens
        if ".." in name or not repo.is_dir() or hidden or not any(repo.glob("*.*")):
            status = 404 if self._token() in self.owner.tokens else 401
            # The hub tells a stranger the same of what is hidden and of what is not there.
            self.refuse(status, "RepoNotFound", "Repository not found")
            return None
        return repo

    def _has_revision(self, repo, revision):
        if revision in {"main", "refs/heads/main", self.owner.commit(repo), *self.owner.revisions}:
            return True
        self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return False

    def _info(self, kind, name, repo):
        card, settings = read_card(repo), read_settings(repo)
        plain = {
            "_id": hashlib.sha1(name.encode()).hexdigest()[:24],
            "id": name,
            "author": name.partition("/")[0],
            "sha": self.owner.commit(repo),
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
            requested = {
                value
                for key, value in urllib.parse.parse_qsl(urllib.parse.urlsplit(self.path).query)
                if key.startswith("expand")
            }
            plain = {key: value for key, value in plain.items() if key in requested | {"_id", "id"}}
        self.reply_json(plain | ({"modelId": name} if kind == "models" else {}))

    def _tree(self, repo, path):
        below = repo / path
        if ".." in path or not below.is_dir():
            return self.refuse(404, "EntryNotFound", f"{path} does not exist on main")
        deep = self._query.get("recursive", "").lower() in ("true", "1")
        result = [child for child in (below.rglob("*") if deep else below.iterdir()) if child.name != ".hub.json"]
        result.sort(key=lambda child: (len(child.parts), child.is_file(), str(child)))  # level by level, folders first
        start = int(self._query.get("cursor") or 0)
        size = min(self.owner.page_size, int(self._query.get("limit") or self.owner.page_size))
        headers = {}
        if start + size < len(result):
            query = urllib.parse.urlencode(self._query | {"cursor": str(start + size)})
            address = f"{self.owner.url}{urllib.parse.urlsplit(self.path).path}?{query}"
            headers["Link"] = f'<{address}>; rel="next"'
        page = result[start : start + size]
        self.reply_json(
            [entry for child in page for entry in find_entries(repo, child.relative_to(repo).as_posix())], headers
        )

    def _resolve(self, kind, parts):
        if not self.is_served("resolve"):
            return
        index = parts.index("resolve")
        name, revision, path = "/".join(parts[:index]), parts[index + 1], "/".join(parts[index + 2 :])
        repo = self._repo(kind, name)
        if repo is None or not self._has_revision(repo, revision):
            return
        if read_settings(repo).get("gated") and self._token() not in self.owner.tokens:
            return self.refuse(
                401,
                "GatedRepo",
                f"Access to dataset {name} is restricted. You must have access to it "
                "and be authenticated to access it. Please log in.",
            )
        result = find_files(repo, path)
        reported = {"X-Repo-Commit": self.owner.commit(repo)}
        if not result:
            return self.refuse(404, "EntryNotFound", "Entry not found", reported)
        if not result[0].is_lfs:
            return self.send_file(repo, result[0], reported)
        file = result[0]
        position = urllib.parse.quote(str(repo.relative_to(self.owner.directory)))
        query = urllib.parse.urlencode({"path": path, "until": f"{time.time() + 60:.3f}"})
        self.reply(
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
