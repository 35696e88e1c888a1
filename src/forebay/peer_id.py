"""What names a peer: below the network and the ledger, which must agree on it and do not know each other."""

import base64
import hashlib


def peer_id_of(public_key: bytes) -> str:
    """The id of a peer with this public key (32 raw bytes): 32 characters of lower-case base32."""
    return base64.b32encode(hashlib.sha256(public_key).digest()[:20]).decode().lower()
