"""A server and the system: forks, and no free descriptors for a while."""

import contextlib
import logging
import os
import resource
import socket
from collections.abc import Iterator

import pytest

from forebay.network.app import JsonResponse
from forebay.network.client import Client
from forebay.network.server import Server
from forebay.storage.retry import log_while_waiting
from support.handlers import serve
from support.waiting import until
from support.wire import read_answers

log = logging.getLogger("forebay.test")


@pytest.fixture
def server(make_identity) -> Iterator[Server]:
    with serve(make_identity("server"), lambda request: JsonResponse({})) as server:
        yield server


def test_a_forked_child_keeps_no_copy_of_the_listener(server, client: Client):
    """It would take connections in that no process answers, once the parent is gone."""
    client.request_json(server.address, "GET", "/")
    mine, its = socket.socketpair()
    child = os.fork()
    if child == 0:
        try:
            mine.close()
            its.sendall(b"r")
            its.recv(1)  # until the parent is done
        finally:
            os._exit(0)
    its.close()
    with mine:
        assert mine.recv(1) == b"r"
        server.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", server.port))
    assert os.waitpid(child, 0)[1] == 0


def test_no_free_descriptors_for_a_moment(server, client: Client, monkeypatch, caplog):
    # Who cannot read its revocation lists trusts nobody: here nobody looks at them amid the test.
    monkeypatch.setattr("forebay.network.pki.revocation.LOOK_EVERY_S", 3600.0)
    client.request_json(server.address, "GET", "/")
    context, waiting = client.identity.client_context(), socket.socket()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(os.open("/dev/null", os.O_RDONLY), 3) + 40, hard))
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        waiting.connect(("127.0.0.1", server.port))  # the kernel takes it in, the server cannot
        until(lambda: "accept failed, trying again" in caplog.text)
        client.request_json(server.address, "GET", "/")  # one that is there is answered
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with context.wrap_socket(waiting) as tls:
        tls.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert read_answers(tls)[0].status == 200


def test_a_fork_waits_for_itself_alone(monkeypatch):
    """Log lines of waits: the child has a thread of its own, and the parent's waits are not its."""
    for name in ("FIRST_S", "EVERY_S"):
        monkeypatch.setattr(f"forebay.storage.retry.{name}", 0.1)
    with log_while_waiting(log, lambda: "the parent"):
        read, write = os.pipe()
        child = os.fork()
        if not child:
            code = 1
            try:
                lines = []
                handler = logging.Handler()
                handler.emit = lambda record: lines.append(record.getMessage())
                log.addHandler(handler)
                with log_while_waiting(log, lambda: "the child"):
                    until(lambda: len(lines) > 2)
                os.write(write, "\n".join(lines).encode())
                code = 0
            finally:
                os._exit(code)
        os.close(write)
        with os.fdopen(read) as answer:
            text = answer.read()
    assert os.waitpid(child, 0)[1] == 0 and "the child" in text and "the parent" not in text
