"""Join tokens: what lets a machine ask for a certificate. Short-lived, scoped, counted, signed by who issues.

A token is text: base64url of JSON, a dot, base64url of the issuer's signature. It names the server that honours it by
address and by key, so that whoever holds a token speaks to that issuer and to nobody else. It is a secret until it
is used up or has expired: whoever has it may join.
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
class Token:
    """A right to join."""

    id: str  # 32 hexadecimal digits, of chance
    network_id: str
    issuer: str  # peer id of who signed it and will issue the certificates
    address: str  # `host:port` of its admission server
    roles: tuple[str, ...]
    datasets: tuple[str, ...]  # with roles: the scope of the certificates
    uses: int  # to how many keys
    expires_at: float  # unix seconds
    valid_days: float  # how long the certificates hold

    @property
    def scope(self) -> Scope:
        return Scope(frozenset(self.roles), self.datasets)


_TOKEN = TypeAdapter(Token)


def sign_token(issuer: Issuer, token: Token) -> str:
    """The token as text."""
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


def read_token(text: str) -> tuple[Token, bytes, bytes]:
    """What a token says, the bytes that are signed, and the signature; whether it fits is `check_token`'s to say."""
    try:
        if not text.startswith(_PREFIX) or len(text) > MAX_TOKEN_CHARS:
            raise ValueError("another beginning, or too long")
        body, signature = (_decode(part) for part in text.removeprefix(_PREFIX).split("."))
        token = _TOKEN.validate_json(body)
    except ValueError as error:
        reason = " ".join(str(error).partition("[")[0].split())  # without what was given: a token is a secret
        raise ProtocolError(f"token: expected {_PREFIX}…, as `forebay network invite` prints it: {reason}") from error
    return token, body, signature


def check_token(text: str, public_key: bytes, now: float) -> Token:
    """A token that this issuer signed and that has not expired."""
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


def _decode(part: str) -> bytes:
    return base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True)
