"""Addresses and URLs of hosts: parsing what users and peers write, and which IP addresses are public."""

import ipaddress
import re
import socket
import urllib.parse
from functools import lru_cache

from forebay.errors import ProtocolError, UsageError

HostPort = tuple[str, int]

MAX_URL_BYTES = 2048
_SCHEMES = ("https", "http", "s3", "gs", "az")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def parse_address(address: str, min_port: int = 1) -> HostPort:
    """Host and port of `HOST:PORT` (IPv6 in brackets) from a user. Raises UsageError."""
    try:
        return parse_peer_address(address, min_port)
    except ProtocolError as error:
        raise UsageError(str(error)) from error


@lru_cache(4096)  # trackers name the same members repeatedly
def parse_peer_address(address: str, min_port: int = 1) -> HostPort:
    """Like `parse_address` for an address from a peer: raises ProtocolError."""
    host, colon, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    is_port = port.isascii() and port.isdigit() and min_port <= int(port[:6]) < 65536
    if not colon or not is_port or not is_host(host):
        raise ProtocolError(f"address: expected HOST:PORT, got {address.rpartition('@')[2][:300]!r}")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """`host:port`, IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_towards(target: HostPort | None = None) -> str:
    """The IP address of this host on the route to `target`; `0.0.0.0` if there is none. Sends nothing."""
    if target is None:
        return "0.0.0.0"
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(*target, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(sockaddr)
            return str(sock.getsockname()[0])
    except OSError:
        return "0.0.0.0"


def is_host(host: str) -> bool:
    """Whether it is an IP address or a valid DNS name; socket calls then raise no UnicodeError for it."""
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
    """Parts of an origin's URL from a peer: web server or bucket, without user, query or fragment.

    Raises ProtocolError for any other URL.
    """
    try:
        if len(url) > MAX_URL_BYTES or not re.fullmatch(r"[!-~]+", url) or "\\" in url:
            raise ValueError(f"more than {MAX_URL_BYTES} characters, or other than printable ASCII")
        parts = urllib.parse.urlsplit(url)
        has_scheme = parts.scheme in _SCHEMES and url.startswith(f"{parts.scheme}://")
        if not has_scheme or not is_host(parts.hostname or ""):
            raise ValueError("no such scheme or host")
        if "@" in parts.netloc or "?" in url or "#" in url:
            raise ValueError("a user, a query or a fragment")
        if parts.port is not None and parts.scheme not in ("https", "http"):
            raise ValueError("a bucket with a port")
    except ValueError as error:
        raise ProtocolError(
            f"URL of a peer: expected {', '.join(_SCHEMES)} with a host and a path, got {url[:200]!r}: {error}"
        ) from error
    return parts


def parse_ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IP address without its zone; an IPv4 address that is mapped to IPv6 as itself. Raises ValueError."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return (address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None) or address


@lru_cache
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host's ports."""
    try:
        addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(addresses) and all(ipaddress.ip_address(item.partition("%")[0]).is_loopback for item in addresses)


def is_public(ip: str) -> bool:
    """Whether an IP address is a public one: not loopback, link-local, private, shared, multicast or reserved."""
    address = parse_ip(ip)
    if isinstance(address, ipaddress.IPv6Address):
        if address in _NAT64:
            return is_public(str(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)))
        inner = address.sixtofour or (address.teredo[1] if address.teredo else None)
        if inner is not None and not inner.is_global:
            return False
    return address.is_global and not address.is_multicast
