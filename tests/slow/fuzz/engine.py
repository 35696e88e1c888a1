"""A small fuzzer led by coverage: what reaches a line of ours that nothing reached before is kept and mutated on.

The law for each input: an error of our own tree or none, within HANG_S, and no more memory than GROWTH_BYTES for the
whole run. Lines are seen by a trace function, which slows Python down some five times and needs no package.
"""

import contextlib
import json
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from forebay.errors import ForebayError

HANG_S = 5.0  # of CPU: how busy the machine is does not matter
GROWTH_BYTES = 200 << 20
MAX_INPUT = 1 << 17
_OURS = f"{Path('src') / 'forebay'}/"
ODD = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**64, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"),
    "", "\x00", "\ud800", "../../etc/passwd", "a" * 5000, "0" * 64, "0-3999999", "1,1,1", [], {}, [[]], {"": None},
]  # fmt: skip
WORDS = [
    b"\r\n\r\n", b"\r\n", b"\x00", b"\xff" * 8, b"Content-Length: ", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1 ",
    b"Range: bytes=", b"-1", b"99999999999999999999", b"%2e%2e/", b"[" * 2000, b'{"a":' * 500, b"1e999", b"NaN",
]  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What is fuzzed: `run` takes one input; `allowed` are errors that are its way of saying no."""

    run: Callable[[bytes], object]
    seeds: Sequence[bytes]
    allowed: tuple[type[BaseException], ...] = (ForebayError,)
    close: Callable[[], object] = lambda: None


@dataclass
class Round:
    """What a round of one target did."""

    executions: int = 0
    num_lines: int = 0
    faults: dict[str, bytes] = field(default_factory=dict)  # by where it was raised


class HangError(BaseException):
    """An input took too long."""


def fuzz(target: Target, seconds: float, chance: random.Random) -> Round:
    """Run a target on its seeds and on mutations of what proved interesting. In the main thread, for hangs."""
    result, seen = Round(), set[tuple[str, int]]()
    corpus = list(target.seeds)
    for data in corpus:  # A first one imports packages and compiles kernels, which is no time of an input.
        with contextlib.suppress(Exception, *target.allowed):
            target.run(data)
    signal.signal(signal.SIGPROF, _hang)
    started, before = time.monotonic(), _peak_bytes()
    while result.executions < len(target.seeds) or time.monotonic() - started < seconds:
        index = result.executions
        data = corpus[index] if index < len(target.seeds) else mutate(chance.choice(corpus), corpus, chance)
        num_seen = len(seen)
        _run_one(target, data, seen, result)
        result.executions += 1
        if len(seen) > num_seen and index >= len(target.seeds):
            corpus.append(data)
    result.num_lines, grown_bytes = len(seen), _peak_bytes() - before
    if grown_bytes > GROWTH_BYTES:
        result.faults[f"memory grew by {grown_bytes} bytes"] = b""
    return result


def mutate(data: bytes, corpus: Sequence[bytes], chance: random.Random) -> bytes:
    """Another input near this one: bits, runs, words, pieces of others; or, of JSON, a value that no reader expects."""
    if data[:1] in (b"{", b"[") and chance.random() < 0.6:
        try:
            return json.dumps(_twist(json.loads(data), chance)).encode()[:MAX_INPUT]
        except (ValueError, RecursionError):
            pass
    current = bytearray(data)
    for _ in range(1 << chance.randrange(4)):
        index = chance.randrange(len(current) + 1)
        match chance.randrange(7):
            case 0 if current:
                current[index % len(current)] ^= 1 << chance.randrange(8)
            case 1 if current:
                current[index % len(current)] = chance.choice(b'\x00\xff\x7f\x80\r\n :"-0A')
            case 2:
                current[index:index] = chance.choice(WORDS)
            case 3:
                del current[index : index + chance.randrange(1, 64)]
            case 4:
                current[index:index] = current[index : index + chance.randrange(1, 64)] * chance.randrange(1, 5)
            case 5:
                other = chance.choice(corpus)
                start = chance.randrange(len(other) + 1)
                current[index:] = other[start:]
            case _:
                current[index : index + 4] = chance.randbytes(4)
    return bytes(current[:MAX_INPUT])


def _twist(obj, chance):
    """JSON with one value replaced, doubled or left out."""
    if isinstance(obj, dict) and obj and chance.random() < 0.85:
        key = chance.choice(list(obj))
        if chance.random() < 0.1:
            return {name: value for name, value in obj.items() if name != key}
        return {**obj, key: _twist(obj[key], chance)}
    if isinstance(obj, list) and obj and chance.random() < 0.85:
        index = chance.randrange(len(obj))
        if chance.random() < 0.2:
            return obj + obj[index:] * chance.choice([1, 1, 50])
        return [*obj[:index], _twist(obj[index], chance), *obj[index + 1 :]]
    if isinstance(obj, str) and obj and chance.random() < 0.5:
        position = chance.randrange(len(obj))
        return (
            obj[:position]
            + chance.choice(["", "\x00", "é", "/", "..", "9" * 30])
            + obj[position + chance.randrange(2) :]
        )
    if isinstance(obj, int) and not isinstance(obj, bool) and chance.random() < 0.5:
        return obj + chance.choice([-1, 1, 2**32, -(2**40)])
    return chance.choice(ODD)


def _run_one(target, data, seen, result):
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    sys.settrace(_tracer(seen))
    try:
        target.run(data)
    except target.allowed:
        pass
    except (Exception, HangError) as error:  # noqa: BLE001 - whatever it is, it is what was looked for
        sys.settrace(None)
        frame = traceback.extract_tb(error.__traceback__)[-1]
        location = f"{type(error).__name__} in {Path(frame.filename).name}:{frame.lineno}"
        result.faults.setdefault(location, data)
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_PROF, 0)


def _tracer(seen):
    def on_line(frame, event, _):
        seen.add((frame.f_code.co_filename, frame.f_lineno))
        return on_line

    def on_call(frame, event, _):
        return on_line if _OURS in frame.f_code.co_filename else None

    return on_call


def _hang(*_):
    raise HangError("no end in time")


def _peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
