"""Ports for servers that are started a moment later, or never."""

import contextlib
import random
import socket


def free_port() -> int:
    """A port that no process has, of TCP and UDP, below those that the kernel gives to any that asks for one."""
    chance = random.SystemRandom()  # The other one has the same seed in several processes of tests.
    while True:
        address = "127.0.0.1", chance.randrange(20_000, 32_000)
        with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, contextlib.suppress(OSError):
            tcp.bind(address)
            udp.bind(address)
            return address[1]
