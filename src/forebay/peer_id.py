"""Peer ids, shared by the network and the ledger, which do not import each other."""

import base64
import hashlib


def peer_id_of(public_key: bytes) -> str:
    """The id of the peer with this public key (32 raw bytes): 32 characters of lower-case base32."""
    return base64.b32encode(hashlib.sha256(public_key).digest()[:20]).decode().lower()


def key_id_of(peer_id: str) -> bytes:
    """The 20 bytes that a peer id encodes; X.509 certificates of the key have them as key identifier."""
    return base64.b32decode(peer_id.upper())


def serial_number_of(peer_id: str) -> int:
    """The serial number of every certificate of this peer's key: a CRL entry revokes the key, not one certificate.

    It is `key_id_of` as a big-endian integer without the highest bit (X.509 serial numbers are positive and have at
    most 159 bits here); 1 instead of 0.
    """
    return int.from_bytes(key_id_of(peer_id), "big") & ((1 << 159) - 1) or 1
