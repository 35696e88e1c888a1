"""Who may read which dataset, and how much of it a day: a TOML file, read again when it changes.

    [[dataset]]
    name = "c4-*"                    # a glob; or id = "…"; the first entry that fits counts
    allow = ["org:<peer id>", "peer:<peer id>", "role:worker"]     # without it: all members
    deny = ["peer:<peer id>"]        # goes before allow
    bytes_per_day = "100GB"          # of each peer, UTC days
    org_bytes_per_day = "1TB"        # of all peers of one organisation

What is used up stands in a SQLite file beside it, written before the bytes are sent, so that a restart gives nobody a
new day. A certificate's own scope is checked first, with or without a file. An unreadable file lets nobody in.

What the choice costs: one stat, and with a quota one write of some 30 us, a request. A quota counts what was asked
for, whether or not it arrived.
"""

from __future__ import annotations

import logging
import re
import sqlite3
import threading
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from forebay.errors import StateError, UsageError
from forebay.network.peer import ROLES, Peer
from forebay.network.pki.revocation import file_stamp
from forebay.toml import parse_toml, read_text
from forebay.units import parse_size

DAY_S = 86400
log = logging.getLogger("forebay.network")


@dataclass(frozen=True)
class Rule:
    """One entry. `name` is a glob, or `id` a dataset id; `allow` None: all members; quotas in bytes, None: no end."""

    name: str
    id: str
    allow: tuple[str, ...] | None
    deny: tuple[str, ...]
    bytes_per_day: int | None
    org_bytes_per_day: int | None

    def fits(self, name: str, dataset_id: str) -> bool:
        return self.id == dataset_id if self.id else fnmatchcase(name, self.name)


class Access:
    """Judges requests. Safe to share between threads; `Access(None)` knows only the scopes of certificates."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._rules: tuple[Rule, ...] = ()
        self._fault = ""
        self._used = _Used(path.with_name(path.name + ".used")) if path is not None else None

    @classmethod
    def load(cls, path: str | Path) -> Access:
        """The rules of a file."""
        read_rules(Path(path))
        return cls(Path(path))

    def check(self, peer: Peer, dataset_name: str, dataset_id: str, num_bytes: int, now: float) -> str | None:
        """Why a peer may not have so many bytes of a dataset; None if it may, and they are counted.

        `num_bytes` is 0 for what is not counted: manifest, table, a lease. `now`: unix seconds, for UTC days.
        """
        if not peer.scope.covers(dataset_name):
            return f"the certificate of {peer.peer_id} does not cover dataset {dataset_name!r}"
        if self.path is None or self._used is None:
            return None
        with self._lock:
            self._refresh(self.path)
            if self._fault:
                return self._fault
            rule = next((rule for rule in self._rules if rule.fits(dataset_name, dataset_id)), None)
            if rule is None:
                return None
            if not _admits(rule, peer):
                return f"peer {peer.peer_id} is not on the access list of dataset {dataset_name!r}"
            return self._used.take(rule, peer, dataset_id, num_bytes, int(now // DAY_S))

    def close(self) -> None:
        """Closes the file of what is used up. May be repeated."""
        if self._used is not None:
            with self._lock:
                self._used.close()

    def _refresh(self, path: Path) -> None:
        stamp = file_stamp(path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._rules, self._fault = read_rules(path), ""
        except UsageError as error:
            log.error("%s All reads are denied until the file is fixed.", error)
            self._fault = "this node's access list cannot be read; ask its owner"


def read_rules(path: Path) -> tuple[Rule, ...]:
    """The entries of an access list."""
    text = read_text(path)
    body = parse_toml(text, path)
    for key, value in body.items():
        if key != "dataset" or not isinstance(value, list):
            raise UsageError(
                f"access list: expected entries [[dataset]] alone, got {key!r} ({path}, line {_line_of(text, key)})."
            )
    rules = []
    for index, entry in enumerate(body.get("dataset", [])):
        try:
            rules.append(_rule(entry))
        except _KeyFault as fault:
            raise UsageError(f"access list: {fault} ({path}, line {_line_of(text, fault.key, index)}).") from fault
    return tuple(rules)


class _KeyFault(Exception):  # noqa: N818
    def __init__(self, key: str, text: str) -> None:
        super().__init__(f"{key}: {text}" if key else text)
        self.key = key


def _line_of(text: str, key: str, entry: int | None = None) -> int:
    """The line, from 1, of a key: anywhere, or in the entry of this index; else that of the entry's header."""
    found, seen = 1, -1
    for number, line in enumerate(text.splitlines(), 1):
        if re.match(r"\s*\[\[\s*dataset\s*\]\]", line):
            seen += 1
            found = number if seen == entry else found
        is_key = bool(key) and re.match(rf"[\s\[]*[\"']?{re.escape(key)}[\"']?\s*[=\].]", line)
        if is_key and entry in (None, seen):
            return number
    return found


def _rule(entry: Any) -> Rule:
    known = {"name", "id", "allow", "deny", "bytes_per_day", "org_bytes_per_day"}
    if not isinstance(entry, dict) or ("name" in entry) == ("id" in entry):
        raise _KeyFault("", f"[[dataset]]: expected either name or id, got {entry}")
    if unknown := sorted(entry.keys() - known):
        raise _KeyFault(unknown[0], f"expected one of {', '.join(sorted(known))}, got another key")
    allow = _whom("allow", entry["allow"]) if "allow" in entry else None
    quotas: list[int | None] = []
    for key in ("bytes_per_day", "org_bytes_per_day"):
        try:
            quotas.append(parse_size(str(entry[key])) if key in entry else None)
        except UsageError as error:
            raise _KeyFault(key, str(error).rstrip(".")) from error
    name, dataset_id = str(entry.get("name", "")), str(entry.get("id", ""))
    return Rule(name, dataset_id, allow, _whom("deny", entry.get("deny", [])), quotas[0], quotas[1])


def _whom(key: str, items: Any) -> tuple[str, ...]:
    if not isinstance(items, list):
        raise _KeyFault(key, f"expected a list, got {items!r}")
    for item in items:
        kind, _, value = str(item).partition(":")
        if kind not in ("peer", "org", "role") or not value or (kind == "role" and value not in ROLES):
            raise _KeyFault(key, f"expected peer:ID, org:ID or role:({'|'.join(sorted(ROLES))}), got {item!r}")
    return tuple(items)


def _admits(rule: Rule, peer: Peer) -> bool:
    # A certificate without roles has them all: it is allowed by any, and denied by none.
    names = {f"peer:{peer.peer_id}", f"org:{peer.org}"} | {f"role:{role}" for role in peer.scope.roles}
    if names & set(rule.deny):
        return False
    if rule.allow is None:
        return True
    any_role = not peer.scope.roles and any(item.startswith("role:") for item in rule.allow)
    return any_role or bool(names & set(rule.allow))


class _Used:
    """Bytes taken of each dataset today, by peer and by organisation, on disk."""

    def __init__(self, path: Path) -> None:
        try:
            path.touch(mode=0o600)  # SQLite's other files get the mode of this one
            self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=2.0)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=OFF")  # a killed process loses nothing, a machine a moment
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS used (day INTEGER, dataset TEXT, who TEXT, bytes INTEGER, "
                "PRIMARY KEY (day, dataset, who))"
            )
        except (OSError, sqlite3.Error) as error:
            raise StateError(
                f"quotas: cannot keep what is used up in {path}: {error}. Remove it to begin anew."
            ) from error

    def take(self, rule: Rule, peer: Peer, dataset_id: str, num_bytes: int, day: int) -> str | None:
        """Counts bytes against a rule's quotas, or says which is used up."""
        quotas = [(f"peer:{peer.peer_id}", rule.bytes_per_day)]
        quotas += [(f"org:{peer.org}", rule.org_bytes_per_day)] if peer.org else []
        quotas = [(who, quota) for who, quota in quotas if quota is not None]
        for who, quota in quotas:
            row = self._database.execute(
                "SELECT bytes FROM used WHERE day = ? AND dataset = ? AND who = ?", (day, dataset_id, who)
            ).fetchone()
            used = int(row[0]) if row else 0
            if quota is not None and used + num_bytes > quota:
                return f"quota: {who} has used {used:,} of {quota:,} bytes of this dataset today (UTC)"
        if quotas and num_bytes:
            self._database.execute("BEGIN")
            self._database.execute("DELETE FROM used WHERE day < ?", (day - 1,))
            for who, _ in quotas:
                self._database.execute(
                    "INSERT INTO used VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes",
                    (day, dataset_id, who, num_bytes),
                )
            self._database.execute("COMMIT")
        return None

    def close(self) -> None:
        self._database.close()
