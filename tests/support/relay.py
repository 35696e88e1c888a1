"""A wire of chosen delay in user space, for kernels without netem: packets out of a TUN and, later, back in."""

from __future__ import annotations

import fcntl
import os
import select
import struct
import time
from collections import deque

TUNSETIFF = 0x400454CA
IFF_TUN_NO_PI = 0x1001
MAX_WAITING = 20_000  # packets; a wire that is full drops


def relay(device: str, delay_s: str) -> None:
    """Hold each packet of a TUN device for `delay_s`; runs until killed. Order is kept."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN_NO_PI))
    print('{"ready": true}', flush=True)
    delay, waiting = float(delay_s), deque[tuple[float, bytes]]()
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        select.select([tun], [], [], timeout)
        try:
            while True:
                packet = os.read(tun, 65536)
                if len(waiting) < MAX_WAITING:
                    waiting.append((time.monotonic() + delay, packet))
        except BlockingIOError:
            pass
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            try:
                os.write(tun, waiting.popleft()[1])
            except OSError:
                continue  # what the kernel will not route is lost, as on any wire
