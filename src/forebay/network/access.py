"""Access lists and daily quotas of datasets, from a TOML file that is read again when it changes.

    [[dataset]]
    name = "c4-*"                    # a glob; or id = "…"; the first entry that matches applies
    allow = ["org:<peer id>", "peer:<peer id>", "role:worker"]     # default: all members
    deny = ["peer:<peer id>"]        # takes precedence over allow
    bytes_per_day = "100GB"          # per peer, UTC days
    org_bytes_per_day = "1TB"        # per organisation

Used quotas are stored in a SQLite file beside it before the bytes are sent, so a restart does not reset them; requested
bytes count. A certificate's own scope is checked first. While the file is unreadable all reads are denied.

Cost: one stat per request, and with a quota one write of some 30 us.
"""

import sqlite3
import threading
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, ValidationError, model_validator

from forebay.errors import StateError, UsageError
from forebay.network import log
from forebay.network.peer import ROLES, Peer
from forebay.network.pki.revocation import FileStamp, file_stamp
from forebay.toml import read_toml
from forebay.units import parse_size

DAY_S = 86400


def _quota(value: Any) -> int:
    try:
        return parse_size(str(value))
    except UsageError as error:
        raise ValueError(str(error).rstrip(".")) from error


Subject = Annotated[str, StringConstraints(pattern=rf"^(?:peer:.+|org:.+|role:(?:{'|'.join(sorted(ROLES))}))$")]
Quota = Annotated[int, BeforeValidator(_quota)]


class AccessRule(BaseModel):
    """One entry: either a glob `name` or a dataset `id`; `allow` None admits all members; quotas in bytes."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    name: str = ""
    id: str = ""
    allow: list[Subject] | None = None
    deny: list[Subject] = []
    bytes_per_day: Quota | None = None
    org_bytes_per_day: Quota | None = None

    @model_validator(mode="after")
    def _has_name_or_id(self) -> "AccessRule":
        if bool(self.name) == bool(self.id):
            raise ValueError("expected either name or id")
        return self

    def matches(self, name: str, dataset_id: str) -> bool:
        return self.id == dataset_id if self.id else fnmatchcase(name, self.name)

    def admits(self, peer: Peer) -> bool:
        # A certificate without roles has all roles: any role in `allow` admits it, none in `deny` excludes it.
        names = {f"peer:{peer.peer_id}", f"org:{peer.org}"} | {f"role:{role}" for role in peer.scope.roles}
        if names & set(self.deny):
            return False
        if self.allow is None:
            return True
        any_role = not peer.scope.roles and any(item.startswith("role:") for item in self.allow)
        return any_role or bool(names & set(self.allow))


class _AccessList(BaseModel):
    model_config = ConfigDict(extra="forbid")
    dataset: list[AccessRule] = []


def read_rules(path: Path) -> list[AccessRule]:
    """Entries of an access list. Raises UsageError that names the entry and the key."""
    try:
        return _AccessList.model_validate(read_toml(path)).dataset
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        # pydantic counts from 0, people from 1
        location = " ".join(str(part + 1 if isinstance(part, int) else part) for part in first["loc"])
        raise UsageError(
            f"access list: {location}: {first['msg'].removeprefix('Value error, ')}, got {str(first['input'])[:80]!r} "
            f"({path}). See docs/how-to/network.md."
        ) from error


class AccessPolicy:
    """Checks requests of peers. Thread-safe; without a file it checks only the scopes of certificates.

    Raises UsageError if the file is invalid now.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._stamp: FileStamp = None
        self._rules = read_rules(path) if path is not None else []
        self._fault = ""
        self._usage = _QuotaStore(path.with_name(path.name + ".used")) if path is not None else None

    def check(self, peer: Peer, dataset_name: str, dataset_id: str, num_bytes: int, now: float) -> str | None:
        """Count bytes of a dataset against a peer's quota and return None, or return the reason for a refusal.

        Args:
            num_bytes: 0 for requests that quotas do not count: manifest, table, a lease.
            now: Unix seconds, for UTC days.
        """
        if not peer.scope.covers(dataset_name):
            return f"the certificate of {peer.peer_id} does not cover dataset {dataset_name!r}"
        if self.path is None or self._usage is None:
            return None
        with self._lock:
            self._refresh(self.path)
            if self._fault:
                return self._fault
            rule = next((rule for rule in self._rules if rule.matches(dataset_name, dataset_id)), None)
            if rule is None:
                return None
            if not rule.admits(peer):
                return f"peer {peer.peer_id} is not on the access list of dataset {dataset_name!r}"
            return self._usage.add(rule, peer, dataset_id, num_bytes, int(now // DAY_S))

    def close(self) -> None:
        """Close the quota file. May be repeated."""
        if self._usage is not None:
            with self._lock:
                self._usage.database.close()

    def _refresh(self, path: Path) -> None:
        stamp = file_stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._rules = read_rules(path)
            self._fault = ""
        except UsageError as error:
            log.error("%s All reads are denied until the file is fixed.", error)
            self._fault = "this node's access list cannot be read; ask its owner"


class _QuotaStore:
    """Bytes used of each dataset today, by peer and by organisation, on disk."""

    def __init__(self, path: Path) -> None:
        try:
            path.touch(mode=0o600)  # SQLite gives its other files the same mode
            self.database = sqlite3.connect(path, check_same_thread=False, timeout=2.0)
            self.database.execute("PRAGMA journal_mode=WAL")
            self.database.execute("PRAGMA synchronous=OFF")  # survives a killed process, not a power failure
            self.database.execute(
                "CREATE TABLE IF NOT EXISTS used (day INTEGER, dataset TEXT, who TEXT, bytes INTEGER, "
                "PRIMARY KEY (day, dataset, who))"
            )
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"quotas: cannot write {path}: {error}. Remove it to reset the quotas.") from error

    def add(self, rule: AccessRule, peer: Peer, dataset_id: str, num_bytes: int, day: int) -> str | None:
        """Count bytes against a rule's quotas, or return the reason if one is exceeded."""
        quotas = {f"peer:{peer.peer_id}": rule.bytes_per_day}
        if peer.org:
            quotas[f"org:{peer.org}"] = rule.org_bytes_per_day
        uses = [(day, dataset_id, subject, quota) for subject, quota in quotas.items() if quota is not None]
        for *key, quota in uses:
            query = "SELECT coalesce(sum(bytes), 0) FROM used WHERE day = ? AND dataset = ? AND who = ?"
            (used,) = self.database.execute(query, key).fetchone()
            if used + num_bytes > quota:
                return f"quota: {key[2]} has used {used:,} of {quota:,} bytes of this dataset today (UTC)"
        if uses and num_bytes:
            with self.database:
                self.database.execute("DELETE FROM used WHERE day < ?", (day - 1,))
                self.database.executemany(
                    "INSERT INTO used VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes",
                    [(*key, num_bytes) for *key, _ in uses],
                )
        return None
