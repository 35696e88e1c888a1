"""What the scheduler says to a worker, checked as it comes in: grants, and the answer to an exchange."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.errors import ProtocolViolation

MAX_PROVIDERS = 64
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COUNTS = (
    "epoch", "slice", "index", "bytes", "count", "start", "stop", "sample_base", "seq_len", "vocab_size",
)  # fmt: skip
_TEXTS = ("lease_id", "job", "job_id", "dataset_id", "name", "sha256", "layout", "dtype")


@dataclass(frozen=True)
class Provider:
    """Who may have a slice: `host:port` of the peer that must stand there; or the URL of an origin without one."""

    peer_id: str
    address: str
    is_origin: bool = True
    url: str = ""


@dataclass(frozen=True)
class Grant:
    """A lease as it was granted: samples [start, stop) of `count` in a slice's own shuffled order.

    `slice` counts over the job, as in the ledger; `index` over the dataset.
    """

    lease_id: str
    job: str
    job_id: str
    epoch: int
    slice: int
    index: int
    dataset: str
    dataset_id: str
    name: str
    sha256: str
    bytes: int
    count: int
    start: int
    stop: int
    sample_base: int
    seed: int
    seq_len: int
    layout: str
    dtype: str
    vocab_size: int
    providers: tuple[Provider, ...]
    expires_in_s: float

    @classmethod
    def from_json(cls, value: Any) -> Grant:
        """A lease as the scheduler must word it; ProtocolViolation if it does not."""
        whole = isinstance(value, dict) and all(_is_count(value.get(key)) for key in _COUNTS)
        whole = whole and all(isinstance(value.get(key), str) for key in _TEXTS)
        whole = whole and all(_SHA256.fullmatch(value[key]) for key in ("sha256", "dataset_id"))
        whole = whole and type(value.get("seed")) is int
        whole = whole and value["start"] < value["stop"] <= value["count"] and value["bytes"] > 0
        providers = value.get("providers") if whole else None
        if not isinstance(providers, list) or len(providers) > MAX_PROVIDERS:
            raise ProtocolViolation(f"lease: expected one as /v1/exchange words it, got {value!r:.300}")
        return cls(
            **{key: value[key] for key in (*_TEXTS, *_COUNTS, "seed")},
            dataset=str(value.get("dataset", value["job"])),
            providers=tuple(_provider(provider) for provider in providers),
            expires_in_s=_seconds(value.get("expires_in_s")),
        )


@dataclass(frozen=True)
class Answer:
    """The answer to an exchange.

    Attributes:
        uses: Of each lease whose use was recorded, the offset that the ledger has now and where the lease ends.
        refused: Of each whose use was not, the code, why, and the offset that the ledger has.
        live: Of each that the worker holds, where it ends and in how many seconds it expires.
        tell_have: Whether the scheduler has forgotten what this worker has cached.
        num_left_out: Samples that were set aside, and so are used by nobody.
    """

    uses: Mapping[str, tuple[int, int]]
    refused: Mapping[str, tuple[str, str, int]]
    live: Mapping[str, tuple[int, float]]
    lost: frozenset[str]
    leases: tuple[Grant, ...]
    wait_s: float
    done: bool
    paused: bool
    tell_have: bool
    num_left_out: int = 0

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        """An answer as the scheduler must word it; ProtocolViolation if it does not."""
        try:
            return cls(
                uses={str(use["lease_id"]): (_count(use["offset"]), _count(use["stop"])) for use in value["uses"]},
                refused={
                    str(no["lease_id"]): (str(no["code"]), str(no["message"])[:300], _count(no.get("offset", 0)))
                    for no in value["refused"]
                },
                live={
                    str(lease_id): (_count(told["stop"]), _seconds(told["expires_in_s"]))
                    for lease_id, told in value["live"].items()
                },
                lost=frozenset(str(lease_id) for lease_id in value["lost"]),
                leases=tuple(Grant.from_json(lease) for lease in value["leases"]),
                wait_s=_seconds(value["wait_s"]),
                done=bool(value["done"]),
                paused=bool(value["paused"]),
                tell_have=bool(value["tell_have"]),
                num_left_out=_count(value.get("num_left_out", 0)),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolViolation(f"exchange: expected an answer, got {error!r} in {value!r:.300}") from error


def _provider(value: Any) -> Provider:
    if isinstance(value, dict) and isinstance(value.get("url"), str):
        return Provider("", "", True, value["url"])
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in ("peer_id", "address")):
        raise ProtocolViolation(f"provider: expected peer_id and address, or url, got {value!r:.200}")
    return Provider(value["peer_id"], value["address"], bool(value.get("is_origin", True)))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _count(value: Any) -> int:
    if not _is_count(value):
        raise ProtocolViolation(f"exchange: expected a count, got {value!r:.80}")
    return int(value)


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not -1e12 < value < 1e12:
        raise ProtocolViolation(f"exchange: expected seconds, got {value!r:.80}")
    return max(0.0, float(value))
