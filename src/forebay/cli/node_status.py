"""What a data node says of itself, as lines for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from forebay.sizes import words_of_bytes

_MOST_PEERS = 10


def lines(status: Mapping[str, Any]) -> Iterator[str]:
    """The status of a data node: itself, its datasets with their swarms, and who had most of it."""
    state = "draining" if status["draining"] else "up"
    yield (
        f"data node {status['name']} ({status['peer_id']}) at {status['address']}: {state} for "
        f"{_span(status['up_s'])}, {status['connections']:,} connections, {words_of_bytes(status['bytes_sent'])} sent"
    )
    if status["announce_error"]:
        yield f"  cannot be found by name: {status['announce_error']}"
    for dataset in status["datasets"]:
        yield f"  {dataset['name']}  {dataset['id']}  {dataset['slices']:,} slices{_swarm(status, dataset['id'])}"
    readers = sorted(status["peers"].items(), key=lambda item: (-item[1], item[0]))
    if readers:
        yield "sent to"
    for peer_id, num_bytes in readers[:_MOST_PEERS]:
        yield f"  {peer_id}  {words_of_bytes(num_bytes):>10}"
    if len(readers) > _MOST_PEERS:
        yield f"  and {len(readers) - _MOST_PEERS:,} more"


def _swarm(status: Mapping[str, Any], dataset_id: str) -> str:
    """Nothing, while nobody shares."""
    swarm = status["swarms"].get(dataset_id, {})
    if not swarm.get("members"):
        return ""
    banned = f", banned: {', '.join(swarm['banned'])}" if swarm["banned"] else ""
    given, passed = swarm["from_origins"], swarm["from_peers"]
    return f"; swarm of {swarm['members']:,}: {given:,} slices from here, {passed:,} passed on{banned}"


def _span(seconds: float) -> str:
    for name, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {name}"
    return f"{seconds:,.0f} s"
