"""Requests out of bytes: what is one, however it is cut; what is none."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.network.heads import MAX_BODY_BYTES, Incoming, RefusedError, parse_head

GET = b"GET /v1/x?a=1&b=%20&a=2 HTTP/1.1\r\nHost: h\r\nRange:bytes=0-5\r\n\r\n"
POST = b"POST /e HTTP/1.1\r\ncontent-LENGTH: 5\r\nAccept: a\r\nAccept: b\r\n\r\nhello"


@settings(max_examples=40)
@given(st.lists(st.sampled_from([GET, POST]), max_size=5), st.data())
def test_requests_are_found_however_they_are_cut(requests: list[bytes], data: st.DataObject) -> None:
    wire, incoming, found = b"".join(requests), Incoming(), []
    while wire:
        size = data.draw(st.integers(1, len(wire)))
        incoming.feed(wire[:size])
        wire = wire[size:]
        while (whole := incoming.next()) is not None:
            found.append((whole[0].method, whole[1]))
    assert found == [("GET", b"") if request is GET else ("POST", b"hello") for request in requests]
    assert incoming.phase == "rest"


def test_what_a_head_says() -> None:
    head = parse_head(GET[:-4])
    assert (head.method, head.path, head.query, head.length, head.keep) == (
        "GET",
        "/v1/x",
        {"a": "2", "b": " "},
        0,
        True,
    )
    assert head.headers["RANGE"] == "bytes=0-5" and "host" in head.headers and "Origin" not in head.headers
    assert parse_head(POST[:-9]).headers["Accept"] == "a, b"
    assert not parse_head(b"GET / HTTP/1.0").keep
    assert not parse_head(b"GET / HTTP/1.1\r\nConnection: x, Close").keep


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"GET / HTTP/1.1\nHost: x\n\n", 400),
        (b"\r\nGET / HTTP/1.1\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\n\r\n", 400),
        (b"GET http://x/ HTTP/1.1\r\n\r\n", 400),
        (b"GET /#x HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\r\n folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA : b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\rc\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: \x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: \xff\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1, 1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: +1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 0x1\r\n\r\nx", 400),
        (b"POST / HTTP/1.1\r\nContent-Length:\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: identity\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % (MAX_BODY_BYTES + 1), 413),
        (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nExpect: 100-continue\r\n\r\n", 417),
        (b"GET /" + b"a" * 70000, 414),
        (b"GET / HTTP/1.1\r\nA: " + b"a" * 70000, 431),
        (b"PUT / HTTP/1.1\r\n", 501),
        (b"GET / HTTP/2.0\r\n", 505),
    ],
)
def test_what_is_no_request(wire: bytes, status: int) -> None:
    incoming = Incoming()
    incoming.feed(wire)
    with pytest.raises(RefusedError) as caught:
        incoming.next()
    assert caught.value.status == status


@given(st.binary(max_size=300))
def test_garbage_is_refused_or_awaited(wire: bytes) -> None:
    incoming = Incoming()
    incoming.feed(wire)
    try:
        assert incoming.next() is None or b"HTTP/1" in wire
    except RefusedError as error:
        assert error.status in (400, 413, 414, 431, 501, 505)
