"""What names a peer: below the network and the ledger, which must agree on it and do not know each other."""

import base64
import hashlib


def peer_id_of(public_key: bytes) -> str:
    """The id of a peer with this public key (32 raw bytes): 32 characters of lower-case base32."""
    return base64.b32encode(hashlib.sha256(public_key).digest()[:20]).decode().lower()


def key_id_of(peer_id: str) -> bytes:
    """The 20 bytes behind a peer id, which X.509 certificates of its key carry as their key identifier."""
    return base64.b32decode(peer_id.upper())


def serial_number_of(peer_id: str) -> int:
    """The serial number of every certificate of this peer's key.

    The 20 bytes behind the peer id as a big-endian integer without its highest bit (X.509 serial numbers are positive
    and have at most 159 bits here); 1 in place of 0. A CRL entry therefore revokes a key, whatever certificates it has.
    """
    return int.from_bytes(key_id_of(peer_id), "big") & ((1 << 159) - 1) or 1
