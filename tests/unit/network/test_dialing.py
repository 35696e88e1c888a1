"""What a node tells others of where it listens."""

from __future__ import annotations

import pytest

from forebay.errors import ProtocolError
from forebay.network.reachability import advertised_host


def test_who_listens_everywhere_is_named_as_the_other_sees_it() -> None:
    for everywhere in ("", "0.0.0.0", "::", "[::]"):
        assert advertised_host(everywhere, "127.0.0.1:9") == "127.0.0.1"
        assert advertised_host(everywhere, "nowhere.invalid:9") == "127.0.0.1"
    assert advertised_host("10.1.2.3", "127.0.0.1:9") == "10.1.2.3"
    assert advertised_host("::", "[::1]:9") in ("[::1]", "127.0.0.1")
    with pytest.raises(ProtocolError, match="address"):
        advertised_host("", "127.0.0.1")
