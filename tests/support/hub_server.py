"""A server shaped as the Hugging Face hub, over a directory, on real sockets, with faults that are set from outside.

    repos = make_hub(tmp_path / "hub")                # writes small real repositories
    with HubServer(repos) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)    # HF_HUB_DISABLE_XET=1 for huggingface_hub
        hub.faults.drop = 0.2
        forebay.TextStream("hf:winglian/tiny-shakespeare", tokenizer="gpt2", ...)

The directory holds `datasets/OWNER/NAME/...` and `models/[OWNER/]NAME/...`; the card is the YAML at the head of a
repository's README.md; `.hub.json` beside it may say `{"gated": "manual", "private": true}`. A large or binary file is
"LFS": `resolve` sends it on (302) to another port, the CDN, with an address that runs out; the CDN refuses whoever
shows it a token. `huggingface_hub` and `datasets` read it too: api/{datasets,models}/NAME[/revision/REV], tree (with
Link pages), paths-info, refs, resolve with HEAD and ranges. One commit, that of the content; any other revision than
`main`, that commit or one of `revisions` is 404 RevisionNotFound.

`python tests/support/hub_server.py DIRECTORY [PORT]` serves by hand (and fills DIRECTORY if it is not there).
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from support.cuttable import CuttableServer
from support.hub_handlers import CdnHandler, HubHandler
from support.hub_repos import make_hub
from support.hub_tree import commit_of

__all__ = ["TOKEN", "Faults", "HubServer", "make_hub"]
TOKEN = "hf_test_token"


@dataclass
class Faults:
    """What goes wrong; change it while the server runs.

    Attributes:
        drop: Part of the requests whose connection is closed before an answer.
        truncate: Part of the file bodies that are cut at a random place.
        black_hole: Requests are read and never answered. `black_hole_files`: those to the CDN and for plain files.
        bytes_per_s: Of each connection. 0: no limit. `all_bytes_per_s`: of all together.
        delay_s: Before each answer.
        throttle: So many of the next requests get 429 with `RateLimit: "api";r=0;t=0`.
        broken: So many of the next requests get 500.
        corrupt: Paths in a repository whose bytes have the byte at `corrupt[path]` flipped.
        expired: So many of the next requests to the CDN get 403: their address has run out.
    """

    drop: float = 0.0
    truncate: float = 0.0
    black_hole: bool = False
    black_hole_files: bool = False
    bytes_per_s: float = 0.0
    all_bytes_per_s: float = 0.0
    delay_s: float = 0.0
    throttle: int = 0
    broken: int = 0
    corrupt: dict[str, int] = field(default_factory=dict)
    expired: int = 0


class HubServer:
    """Serves from `with` to its end.

    Attributes:
        url: What HF_ENDPOINT should be. `cdn_url`: where LFS files come from.
        requests: Counter of what was asked: "info", "tree", "paths-info", "resolve", "cdn", "other".
        paths: Of each request, with its query, in order; `authorizations` likewise.
        bytes_sent: Counter of body bytes of files by path in their repository.
        ranges: (path in repository, start, stop) of each answered request for a file's bytes.
        tokens: Those that are let into gated and private repositories.
        page_size: Entries on a page of a tree.
        revisions: Further names of the one commit.
        renamed: Old names, which are sent on to the new.
        commits: By repository, in place of the content's hash: a push, seen from outside.
    """

    def __init__(self, directory: Path, *, seed: int = 1, port: int = 0) -> None:
        self.directory = directory
        self.faults = Faults()
        self.tokens = {TOKEN}
        self.page_size = 1000
        self.revisions: set[str] = set()
        self.renamed: dict[str, str] = {}
        self.commits: dict[str, str] = {}
        self.requests: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()
        self.paths: list[str] = []
        self.authorizations: list[str] = []
        self.ranges: list[tuple[str, int, int]] = []
        self.lock = threading.Lock()
        self.free_at = 0.0  # when what was sent of all files fits `all_bytes_per_s`
        self.stopping = threading.Event()
        self.chance = random.Random(seed)
        outer = self

        class Hub(HubHandler):
            owner = outer

        class Cdn(CdnHandler):
            owner = outer

        self._servers = [CuttableServer(("127.0.0.1", port), Hub), CuttableServer(("127.0.0.1", 0), Cdn)]
        self.url, self.cdn_url = (f"http://127.0.0.1:{server.server_address[1]}" for server in self._servers)
        self._threads = [
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True) for server in self._servers
        ]

    def __enter__(self) -> HubServer:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop; connections are cut. May be called twice."""
        if not self.stopping.is_set():
            self.stopping.set()
            for server, thread in zip(self._servers, self._threads):
                server.shutdown()
                server.cut()
                server.server_close()
                thread.join()

    def reset(self) -> None:
        """Forget the counters."""
        with self.lock:
            self.requests.clear()
            self.bytes_sent.clear()
            self.paths.clear()
            self.authorizations.clear()
            self.ranges.clear()

    def happens(self, part: float) -> bool:
        with self.lock:
            return part > 0 and self.chance.random() < part

    def booked_s(self, size: int) -> float:
        """How long so many bytes have to wait for their turn among all that are sent."""
        limit, now = self.faults.all_bytes_per_s, time.monotonic()
        with self.lock:
            self.free_at = max(self.free_at, now) + (size / limit if limit else 0.0)
            return self.free_at - now if limit else 0.0

    def spend(self, name: str) -> bool:
        """Whether a fault that happens so many times happens now."""
        with self.lock:
            remaining = getattr(self.faults, name)
            setattr(self.faults, name, max(0, remaining - 1))
            return bool(remaining > 0)

    def commit(self, repo: Path) -> str:
        """The commit that `main` of a repository is at."""
        return self.commits.get(str(repo.relative_to(self.directory)), "") or commit_of(repo)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    with HubServer(where if where.is_dir() else make_hub(where), port=int([*sys.argv, "0"][2])) as hub:
        print(f"export HF_ENDPOINT={hub.url} HF_HUB_DISABLE_XET=1", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
