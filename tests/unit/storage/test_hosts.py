"""Addresses: which text is one, where a node says it listens, and where a member may have it connect to."""

import pytest

from forebay.errors import ProtocolError, UsageError
from forebay.network.client import Client
from forebay.network.reachability import advertised_host, may_dial
from forebay.storage.hosts import parse_address, parse_peer_address


@pytest.mark.parametrize(
    "address",
    ["a..b:1", "nonsense", "", ":1", "h:0", "h:65536", "h:１", "h:1x", "h h:1", "::g:1", "a" * 64 + ":1", "-a:1",
     "a\x1b:1", "user@host:1", "a/b:1", f"{'a.' * 130}b:1", "ü..de:1"],
)  # fmt: skip
def test_malformed_addresses(address):
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(address)
    with pytest.raises(ProtocolError, match="HOST:PORT"):
        parse_peer_address(address)
    with Client(None) as client, pytest.raises(ProtocolError, match="HOST:PORT"):
        client.request_json(address, "GET", "/x")


def test_a_node_that_listens_everywhere_is_named_as_the_other_sees_it():
    for everywhere in ("", "0.0.0.0", "::", "[::]"):
        assert advertised_host(everywhere, "127.0.0.1:9") == "127.0.0.1"
        assert advertised_host(everywhere, "nowhere.invalid:9") == "127.0.0.1"
    assert advertised_host("10.1.2.3", "127.0.0.1:9") == "10.1.2.3"
    assert advertised_host("::", "[::1]:9") in ("[::1]", "127.0.0.1")
    with pytest.raises(ProtocolError, match="address"):
        advertised_host("", "127.0.0.1")


# An address that a member names, the address from which it comes, and whether a node connects to the first.
DIALS = """
8.8.8.8          9.9.9.9   yes
10.0.0.9         10.0.0.9  yes
10.0.0.8         10.9.0.9  yes
127.0.0.2        127.0.0.1 yes
10.0.0.8         9.9.9.9   no
127.0.0.1        9.9.9.9   no
::1              2600::1   no
::ffff:127.0.0.1 10.0.0.9  no
0.0.0.0          10.0.0.9  no
169.254.169.254  10.0.0.9  no
fe80::1%eth0     fd00::2   no
64:ff9b::7f00:1  2600::1   no
nowhere          10.0.0.9  no"""


@pytest.mark.parametrize("ip, source, allowed", [line.split() for line in DIALS.splitlines()[1:]])
def test_where_a_member_may_have_a_node_connect_to(ip, source, allowed):
    assert may_dial(ip, source) is (allowed == "yes")
