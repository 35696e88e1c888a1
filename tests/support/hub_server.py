"""A server shaped as the Hugging Face hub, over a directory, on real sockets, with faults that are set from outside.

    repos = make_hub(tmp_path / "hub")                # writes small real repositories
    with HubServer(repos) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)    # HF_HUB_DISABLE_XET=1 for huggingface_hub
        hub.faults.drop = 0.2
        forebay.TextStream("hf:winglian/tiny-shakespeare", tokenizer="gpt2", ...)

The directory holds `datasets/OWNER/NAME/...` and `models/[OWNER/]NAME/...`; the card is the YAML at the head of a
repository's README.md; `.hub.json` beside it may say `{"gated": "manual", "private": true}`. A large or binary file is
"LFS": `resolve` sends it on (302) to another port, the CDN, with an address that runs out; the CDN refuses a client
that shows it a token. `huggingface_hub` and `datasets` read it too: api/{datasets,models}/NAME[/revision/REV], tree
(with Link pages), paths-info, refs, resolve with HEAD and ranges. One commit, that of the content; any other revision
than `main`, that commit or one of `revisions` is 404 RevisionNotFound.
"""

from dataclasses import dataclass
from pathlib import Path

from support import faulty_server
from support.hub_handlers import CdnHandler, HubHandler
from support.hub_repos import make_hub
from support.hub_tree import repo_commit

__all__ = ["TOKEN", "Faults", "HubServer", "make_hub"]
TOKEN = "hf_test_token"


@dataclass
class Faults(faulty_server.Faults):
    """See the base; `corrupt` is by path in a repository.

    Attributes:
        black_hole_files: Requests to the CDN and for plain files are read and never answered.
        throttle: So many of the next requests get 429 with `RateLimit: "api";r=0;t=0`.
        broken: So many of the next requests get 500.
        expired: So many of the next requests to the CDN get 403: their address has run out.
    """

    black_hole_files: bool = False
    throttle: int = 0
    broken: int = 0
    expired: int = 0


class HubServer(faulty_server.FaultyServer):
    """See the base; `requests` are "info", "tree", "paths-info", "resolve", "cdn", "other"; names are paths.

    Attributes:
        url: The value for HF_ENDPOINT. `cdn_url`: where LFS files come from.
        tokens: Those that are let into gated and private repositories.
        page_size: Entries on a page of a tree.
        revisions: Further names of the one commit.
        renamed: Old names, which are sent on to the new.
        commits: By repository, in place of the content's hash: a push, seen from outside.
    """

    handlers = (HubHandler, CdnHandler)

    def __init__(self, directory: Path, *, seed: int = 1) -> None:
        super().__init__(directory, seed=seed)
        self.faults, self.tokens, self.page_size = Faults(), {TOKEN}, 1000
        self.revisions = set()
        self.renamed = {}
        self.commits = {}
        self.cdn_url = f"http://127.0.0.1:{self.ports[1]}"

    def spend(self, name: str) -> bool:
        """Return True if a fault that happens so many times happens now."""
        with self.lock:
            remaining = getattr(self.faults, name)
            setattr(self.faults, name, max(0, remaining - 1))
            return bool(remaining > 0)

    def commit(self, repo: Path) -> str:
        """The commit that `main` of a repository is at."""
        return self.commits.get(str(repo.relative_to(self.directory)), "") or repo_commit(repo)
