"""Run a command that may open sockets of some families only, as `RestrictAddressFamilies` of systemd does (seccomp).

`restricted.py "AF_INET AF_UNIX" COMMAND ARG ...`; on x86-64 and ARM.
"""

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

SOCKET_CALL = {"x86_64": 41, "aarch64": 198}[platform.machine()]
LOAD, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EAFNOSUPPORT


def restrict(families: list[int]):
    count = len(families)
    rules = [(LOAD, 0, 0, 0), (JUMP_IF_EQUAL, 0, count + 2, SOCKET_CALL), (LOAD, 0, 0, 16)]  # the call, its family
    rules += [(JUMP_IF_EQUAL, count - index, 0, family) for index, family in enumerate(families)]
    rules += [(RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    head = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, head, 0, 0) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP, a filter


if __name__ == "__main__":
    restrict([getattr(socket, name) for name in sys.argv[1].split()])
    os.execvp(sys.argv[2], sys.argv[2:])
