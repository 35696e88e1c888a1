"""Query many addresses, most of which may be dead, forged or traps, and collect the valid answers.

An announcement costs an attacker one packet, so a list of addresses may contain a thousand false ones. An address that
accepts no connection costs a file descriptor here, no thread; one that accepts and then stalls costs a thread until
its time-out. Addresses of different hosts take turns, so that one host cannot crowd out the others. The search ends
soon after the first valid answer.
"""

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from forebay.network.addresses import HostPort

MAX_CONNECTING = 512  # file descriptors
MAX_ASKING = 32  # threads
CONNECT_S = 1.5
CONNECT_AFTER_GOOD_S = 0.5  # enough for a round trip of half a second
ANSWER_AFTER_GOOD_S = 1.5
T = TypeVar("T")


def spread(addresses: Sequence[HostPort]) -> list[HostPort]:
    """The addresses without duplicates, round-robin over hosts."""
    num_before: Counter[str] = Counter()
    turns = []
    for address in dict.fromkeys(addresses):
        turns.append((num_before[address[0]], address))
        num_before[address[0]] += 1
    return [address for _, address in sorted(turns, key=lambda item: item[0])]


def ask_many(addresses: Sequence[HostPort], ask: Callable[[HostPort], T | None], deadline: float) -> list[T]:
    """Results of `ask` that are not None, in order of arrival; `ask` runs in threads and must have a time-out.

    Returns at `deadline` (of time.monotonic), when all addresses have answered, or soon after the first result.
    """
    if not addresses:
        return []

    with ThreadPoolExecutor(1) as thread:  # the caller's thread may run an event loop, as in a notebook
        return thread.submit(asyncio.run, _ask_many(spread(addresses), ask, deadline)).result()


async def _ask_many(addresses: Sequence[HostPort], ask: Callable[[HostPort], T | None], deadline: float) -> list[T]:
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(min(MAX_ASKING, len(addresses)), thread_name_prefix="ask")
    slots = asyncio.Semaphore(MAX_CONNECTING)
    finished: asyncio.Queue[asyncio.Task[T | None]] = asyncio.Queue()
    connecting: set[asyncio.Task[T | None]] = set()

    async def connect_and_ask(address: HostPort) -> T | None:
        if len(addresses) > MAX_ASKING:
            async with slots:
                if not await _accepts(address):
                    return None
        connecting.discard(asyncio.current_task())
        return await loop.run_in_executor(pool, ask, address)

    for address in addresses:
        task = loop.create_task(connect_and_ask(address))
        task.add_done_callback(finished.put_nowait)
        connecting.add(task)
    results: list[T] = []
    end = deadline
    try:
        for _ in addresses:
            task = await asyncio.wait_for(finished.get(), end - time.monotonic())
            result = None if task.cancelled() else task.result()
            if result is not None:
                if not results:
                    end = min(deadline, time.monotonic() + ANSWER_AFTER_GOOD_S)
                    loop.call_later(CONNECT_AFTER_GOOD_S, lambda: [task.cancel() for task in list(connecting)])
                results.append(result)
    except TimeoutError:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return results


async def _accepts(address: HostPort) -> bool:
    """Whether a TCP connection to an IP address is accepted within CONNECT_S."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, address)
            return True
    except (OSError, OverflowError):  # refused, too late, not a valid address, or no file descriptor
        return False
