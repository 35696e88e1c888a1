"""Join tokens: short-lived, scoped, counted permissions to request a certificate, signed by the issuer.

A token is base64url of JSON, a dot, base64url of the issuer's signature. It names the issuer's admission server by
address and key, so that the joiner talks to no other. It is a secret until it is used up or expired.
"""

import base64
import json
from dataclasses import asdict, dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import TypeAdapter

from forebay.errors import ProtocolError, UsageError
from forebay.network.peer import Scope
from forebay.network.pki.certificates import Issuer, check_scope
from forebay.peer_id import peer_id_of

MAX_TOKEN_CHARS = 64 << 10
_PREFIX = "forebay1."


@dataclass(frozen=True)
class JoinToken:
    """A permission to join."""

    id: str  # 32 random hexadecimal digits
    network_id: str
    issuer: str  # peer id of the signer, which issues the certificates
    address: str  # `host:port` of its admission server
    roles: tuple[str, ...]
    datasets: tuple[str, ...]  # with roles: the scope of the certificates
    uses: int  # number of keys
    expires_at: float  # Unix seconds
    valid_days: float  # of the certificates

    @property
    def scope(self) -> Scope:
        return Scope(frozenset(self.roles), self.datasets)


_TOKEN = TypeAdapter(JoinToken)


def sign_token(issuer: Issuer, token: JoinToken) -> str:
    """The token as text. Raises UsageError if the issuer may not give it."""
    check_scope(token.scope)
    if beyond := token.scope.exceeds(issuer.scope):
        raise UsageError(
            f"invite: this organisation may give {', '.join(sorted(issuer.scope.roles))}, "
            f"got {', '.join(sorted(beyond))}"
        )
    if token.uses < 1 or not token.valid_days > 0 or token.issuer != issuer.peer_id:
        raise UsageError(
            f"invite: expected at least one use and days above zero, got {token.uses} and {token.valid_days}"
        )
    body = json.dumps(asdict(token), sort_keys=True, separators=(",", ":")).encode()
    signature = issuer.key.sign(b"forebay/2 token\n" + body)
    return _PREFIX + ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in (body, signature))


def read_token(text: str) -> tuple[JoinToken, bytes, bytes]:
    """A token, its signed bytes and its signature, which is not checked. Raises ProtocolError."""
    try:
        if not text.startswith(_PREFIX) or len(text) > MAX_TOKEN_CHARS:
            raise ValueError("another prefix, or too long")
        body, signature = (
            base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
            for part in text.removeprefix(_PREFIX).split(".")
        )
        token = _TOKEN.validate_json(body)
    except ValueError as error:
        reason = " ".join(str(error).partition("[")[0].split())  # without the input: a token is a secret
        raise ProtocolError(f"token: expected {_PREFIX}…, as `forebay network invite` prints it: {reason}") from error
    return token, body, signature


def check_token(text: str, public_key: bytes, now: float) -> JoinToken:
    """Parse a token; verify this issuer's signature and the expiry. Raises ProtocolError."""
    token, body, signature = read_token(text)
    if token.issuer != peer_id_of(public_key):
        raise ProtocolError(f"token: it is of issuer {token.issuer[:40]}, not of this one")
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, b"forebay/2 token\n" + body)
    except InvalidSignature as error:
        raise ProtocolError(f"token {token.id[:8]}: forged or changed: its signature does not fit") from error
    if not now < token.expires_at:
        raise ProtocolError(f"token {token.id[:8]}: expired {now - token.expires_at:,.0f} s ago. Ask for another.")
    return token
