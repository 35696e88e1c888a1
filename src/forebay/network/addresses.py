"""Addresses of hosts: `HOST:PORT` as users and peers write it, and which IP addresses are public."""

import ipaddress
import re
import socket
import urllib.parse
from functools import lru_cache

from forebay.errors import ProtocolViolation, UsageError

MAX_URL_BYTES = 2048
_SCHEMES = ("https", "http", "s3", "gs", "az")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def parse_address(address: str) -> tuple[str, int]:
    """`HOST:PORT` (IPv6 in brackets) as a pair, where a user wrote it."""
    try:
        return peer_address(address)
    except ProtocolViolation as error:
        raise UsageError(str(error)) from error


@lru_cache(4096)  # a tracker names the same members again and again
def peer_address(address: str) -> tuple[str, int]:
    """As `parse_address`, where a peer said it: a wrong one is that peer's fault and nobody's usage."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65536
    if not colon or not is_port or not is_host(host):
        raise ProtocolViolation(f"address: expected HOST:PORT, got {address[:300]!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_towards(target: tuple[str, int] | None = None) -> str:
    """The address of this host from which another is reached; `0.0.0.0` where none is known. Sends nothing."""
    if target is None:
        return "0.0.0.0"
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError:
        return "0.0.0.0"


def is_host(host: str) -> bool:
    """Whether it is an IP address or a name that the DNS can hold; then no socket call raises UnicodeError for it."""
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        pass
    try:
        name = host if host.isascii() else host.encode("idna").decode("ascii")
    except UnicodeError:
        return False
    labels = name.removesuffix(".").split(".")
    return len(name) <= 253 and all(_LABEL.fullmatch(label) for label in labels)


def check_url(url: str) -> urllib.parse.SplitResult:
    """The parts of a URL that a peer named as an origin: web server or bucket, without user, query or fragment."""

    def wrong(why: str) -> ProtocolViolation:
        return ProtocolViolation(
            f"URL of a peer: expected {', '.join(_SCHEMES)} with a host and a path, got {url[:200]!r}: {why}"
        )

    if len(url) > MAX_URL_BYTES:
        raise wrong(f"more than {MAX_URL_BYTES} characters")
    if not re.fullmatch(r"[!-~]+", url) or "\\" in url:
        raise wrong("other than printable ASCII")
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise wrong(str(error)) from error
    if parts.scheme not in _SCHEMES or not url.startswith(f"{parts.scheme}://") or not is_host(host):
        raise wrong("no such scheme or host")
    if "@" in parts.netloc or "?" in url or "#" in url:
        raise wrong("a user, a query or a fragment")
    if port is not None and parts.scheme not in ("https", "http"):
        raise wrong("a bucket with a port")
    return parts


def is_public(ip: str) -> bool:
    """Whether an IP address is one of the public internet: not loopback, link-local, private, shared or reserved."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None and not inner.is_global:
            return False
        if address in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        if address.ipv4_mapped is not None:
            return inner is not None and inner.is_global and not inner.is_multicast
    return address.is_global and not address.is_multicast


_NAT64 = ipaddress.ip_network("64:ff9b::/96")
