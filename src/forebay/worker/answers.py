"""What the scheduler says to a worker, checked as it comes in: grants, and the answer to an exchange."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from forebay.errors import ProtocolViolation
from forebay.network.addresses import check_url, peer_address
from forebay.network.members import Holder
from forebay.network.messages import ExchangeReply, LeaseReply, ProviderReply
from forebay.schedule.ask import Accepted, Grant, Live, Refused, Reply

log = logging.getLogger("forebay.worker")


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
        return cls.of(_parsed(LeaseReply, value))

    @classmethod
    def of(cls, reply: LeaseReply) -> Lease:
        """A lease out of its message."""
        if not reply.start < reply.stop <= reply.count or reply.bytes < 1:
            raise ProtocolViolation(f"lease: expected samples of a slice, got {reply!r:.300}")
        fields = dict(reply) | {"slice_index": reply.slice, "dataset": reply.dataset or reply.job}
        fields["index"] = reply.slice if reply.index is None else reply.index
        fields["vocab_size"] = reply.vocab_size or 0
        fields["providers"] = tuple(one for said in reply.providers if (one := _provider(said)) is not None)
        del fields["slice"]
        return cls(**fields)


@dataclass(frozen=True)
class Answer(Reply):
    """A reply as a worker hears it."""

    leases: tuple[Lease, ...] = ()

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        """An answer as the scheduler must word it; ProtocolViolation if it does not."""
        reply = _parsed(ExchangeReply, value)
        fields = dict(reply) | {
            "uses": tuple(Accepted(use.lease_id, use.offset, use.stop) for use in reply.uses),
            "refused": tuple(Refused(no.lease_id, no.code, no.message[:300], no.offset) for no in reply.refused),
            "live": {lease_id: Live(live.stop, live.expires_in_s) for lease_id, live in reply.live.items()},
            "lost": tuple(reply.lost),
            "leases": tuple(map(Lease.of, reply.leases)),
        }
        return cls(**fields)


T = TypeVar("T", bound=BaseModel)


def _parsed(model: type[T], value: Any) -> T:
    try:
        return model.model_validate(value, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"{'.'.join(map(str, first['loc']))}: {first['msg']}, got {first['input']!r:.80}"
        raise ProtocolViolation(f"exchange: expected an answer as /v1/exchange words it: {where}") from error


def _provider(said: ProviderReply) -> Holder | None:
    """Who may have a slice; None if what is said of it makes no sense: the other providers of a lease still count."""
    try:
        if said.url:
            check_url(said.url)
            return Holder("", said.url, True)
        peer_address(said.address)
        return Holder(said.peer_id, said.address, said.is_origin)
    except ProtocolViolation as error:
        log.info("a provider is left out: %s", error)
        return None
