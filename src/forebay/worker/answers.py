"""What the scheduler says to a worker, checked as it comes in: grants, and the answer to an exchange."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forebay.errors import ProtocolViolation
from forebay.network.members import Holder
from forebay.schedule.ask import Accepted, Grant, Live, Refused, Reply

MAX_PROVIDERS = 64
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COUNTS = (
    "epoch", "slice", "index", "bytes", "count", "start", "stop", "sample_base", "seq_len", "vocab_size",
)  # fmt: skip
_TEXTS = ("lease_id", "job", "job_id", "dataset_id", "name", "sha256", "layout", "dtype")


@dataclass(frozen=True)
class Lease(Grant):
    """A grant, and what a worker has to know of its slice; `job_id` is that of the ledger."""

    job_id: str
    dataset: str
    name: str
    sha256: str
    bytes: int
    sample_base: int
    seed: int
    seq_len: int
    layout: str
    dtype: str
    vocab_size: int

    @classmethod
    def from_json(cls, value: Any) -> Lease:
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
            **{"slice_index" if key == "slice" else key: value[key] for key in (*_TEXTS, *_COUNTS, "seed")},
            dataset=str(value.get("dataset", value["job"])),
            providers=tuple(_provider(provider) for provider in providers),
            expires_in_s=_seconds(value.get("expires_in_s")),
        )


@dataclass(frozen=True)
class Answer(Reply):
    """A reply as a worker hears it."""

    leases: tuple[Lease, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        """An answer as the scheduler must word it; ProtocolViolation if it does not."""
        try:
            return cls(
                uses=tuple(
                    Accepted(str(use["lease_id"]), _count(use["offset"]), _count(use["stop"])) for use in value["uses"]
                ),
                refused=tuple(
                    Refused(str(no["lease_id"]), str(no["code"]), str(no["message"])[:300], _count(no.get("offset", 0)))
                    for no in value["refused"]
                ),
                live={
                    str(lease_id): Live(_count(told["stop"]), _seconds(told["expires_in_s"]))
                    for lease_id, told in value["live"].items()
                },
                lost=tuple(str(lease_id) for lease_id in value["lost"]),
                leases=tuple(Lease.from_json(lease) for lease in value["leases"]),
                wait_s=_seconds(value["wait_s"]),
                done=bool(value["done"]),
                paused=bool(value["paused"]),
                tell_have=bool(value["tell_have"]),
                num_left_out=_count(value.get("num_left_out", 0)),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolViolation(f"exchange: expected an answer, got {error!r} in {value!r:.300}") from error


def _provider(value: Any) -> Holder:
    if isinstance(value, dict) and isinstance(value.get("url"), str):
        return Holder("", value["url"], True)
    if not isinstance(value, dict) or not all(isinstance(value.get(key), str) for key in ("peer_id", "address")):
        raise ProtocolViolation(f"provider: expected peer_id and address, or url, got {value!r:.200}")
    return Holder(value["peer_id"], value["address"], bool(value.get("is_origin", True)))


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
