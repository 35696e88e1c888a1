"""Proofs of possession made by hand, from the bytes that a provider of the lease gives."""

from forebay.lease.messages import proof_of, range_of
from forebay.network.client import Client


def proof_by_hand(client: Client, lease: dict, providers: list[dict] | None = None) -> str:
    """The proof that goes with the first use of a lease."""
    peer_id, (provider, *_) = client.identity.peer_id, providers or lease["providers"]
    start, stop = range_of(lease["lease_id"], peer_id, lease["bytes"])
    data = bytearray(stop - start)
    path = f"/v1/slices/{lease['sha256']}"
    client.read_range(provider["address"], path, memoryview(data), start, provider["peer_id"])
    return proof_of(lease["lease_id"], peer_id, bytes(data))
