"""`POST /v1/exchange`: what a worker says and is answered, as JSON; checked strictly, so that garbage ends here.

    {"job": NAME or "", "session": hex, "attempt": number, "address": "host:port" or "",
     "held": [lease ids that it knows of],
     "job_id": "…", "uses": [{"lease_id", "epoch", "slice", "start", "stop", "step", "digest"}],
     "signature": hex,
     "horizons": {lease_id: sample}, "release": [ids], "failed": [{"lease_id", "reason"}], "want": 0…16,
     "have": {dataset_id: "0-15,17"}, "bad": [{"peer_id", "sha256", "reason", "wrong"}],
     "speed": samples a second}

    {"uses": [{"lease_id", "offset", "stop"}], "refused": [{"lease_id", "code", "message", "offset"}],
     "live": {lease_id: {"stop", "expires_in_s"}}, "lost": [ids],
     "leases": [{"lease_id", "job", "job_id", "epoch", "slice", "index", "dataset", "dataset_id", "name", "sha256",
                 "bytes", "count", "start", "stop", "sample_base", "seed", "seq_len", "layout", "dtype", "vocab_size",
                 "providers": [{"peer_id", "address", "is_origin"}], "expires_in_s"}],
     "wait_s", "done", "paused", "tell_have", "num_left_out" (unless 0)}

Every field of the question may be left out. What its sender has to know:

- One exchange at a time a session. It is idempotent: if the answer was lost, ask again with what is true then, under
  a higher `attempt`: one that was given up and comes late is refused, so that it cuts and takes back nothing.
- `uses` are of one job: `job_id` says which, and `signature` is over `receipt_message(job_id, uses)`. Uses of two
  jobs go in two exchanges. `epoch` and `slice` repeat the lease's. `digest`, which may be left out, is
  `order.shard_windows.receipt` of the sample ids that were read. A use begins where the last one recorded ended.
- `refused`: code `lost`: the lease is gone, drop it; code `range`: go on from `offset`; what lies before it is on
  record. `offset` in `uses` is where the record stands now.
- `horizons`: the worker uses no sample from there on before it hears an answer to this exchange; it does not raise
  the horizon while an exchange is unanswered, though it may have been lost. A lease without one is not cut.
- `live` has each lease held that is not lost: its `stop` may have moved to the horizon. A lease whose stop is
  reached is over, at once if nothing of it was begun; forget it. A cut is told again for as long as it is `held`.
- `held` is what it knows of before this answer; what the scheduler gave it beyond that never arrived, and is
  taken back. An empty list gives all back. Left out: nothing is taken back.
- `have`: `index` of the slices cached, ranges with both ends in; a dataset left out is unchanged since the last time.
  `tell_have` asks for all of it.
- `bad`: of a slice that is or lately was leased to it, who gave wrong bytes (`wrong`, the default); or who came late,
  refused or was somebody else: that one is avoided for a while, and nobody is banned.
- `dataset` is left out where it is the job's name. `slice` counts over all datasets of the job, `index` within its
  dataset. `sample_base` + sample is the global id.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import ProtocolViolation
from forebay.ledger.receipts import Used
from forebay.network.exchange import BadRequestError
from forebay.network.members import RANGES, parse_ranges
from forebay.network.openapi import COUNT, FLAG, PEER_ID, SECONDS, SHA256, TEXT, Door, array, record
from forebay.schedule.ask import Ask, BadReport, Failed, Reply
from forebay.schedule.desk import MAX_LEASES

MAX_HELD = 256
MAX_USES = 4096
MAX_INDEX = 4_000_000
MAX_REPORTS = 64
MAX_REASON = 300
NAME = re.compile(r"[^\x00-\x1f\x7f/\\]{0,200}")
SESSION = re.compile(r"[A-Za-z0-9._-]{0,64}")
LEASE_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
ADDRESS = re.compile(r"[^\x00-\x20\x7f]{0,300}")
DATASET_ID = re.compile(r"[0-9a-f]{64}")
SIGNATURE = re.compile(r"[0-9a-f]{128}")
_KEYS = frozenset(Ask.__dataclass_fields__.keys() - {"receipt", "reports"} | {"signature"})

_LEASE_ID = {"type": "string", "pattern": f"^{LEASE_ID.pattern}$"}
_IDS = array(_LEASE_ID, MAX_HELD)
DOOR = Door(
    "POST",
    "/v1/exchange",
    "What a worker used, holds and wants; what it holds now and gets.",
    body=record(
        "all",
        job={"type": "string", "pattern": r"^[^\x00-\x1f\x7f/\\]{0,200}$"},
        session={"type": "string", "pattern": "^[A-Za-z0-9._-]{0,64}$"},
        attempt=COUNT,
        address={"type": "string", "pattern": r"^[^\x00-\x20\x7f]{0,300}$"},
        held=_IDS,
        job_id=SHA256,
        uses=array(
            record(("digest",), lease_id=_LEASE_ID, epoch=COUNT, slice=COUNT, start=COUNT, stop=COUNT, step=COUNT,
                   digest={"type": "string", "pattern": "^[0-9a-f]{32}$"}),
            MAX_USES,
        ),
        signature={"type": "string", "pattern": f"^{SIGNATURE.pattern}$"},
        horizons={"type": "object", "additionalProperties": COUNT, "maxProperties": MAX_HELD},
        release=_IDS,
        failed=array(record(lease_id=_LEASE_ID, reason=TEXT), MAX_HELD),
        want={"type": "integer", "minimum": 0, "maximum": MAX_LEASES},
        have={"type": "object", "additionalProperties": {"type": "string", "pattern": f"^{RANGES.pattern}$"}},
        bad=array(record(("wrong",), peer_id=PEER_ID, sha256=SHA256, reason=TEXT, wrong=FLAG), MAX_REPORTS),
        speed=SECONDS,
    ),
    answer=record(
        ("num_left_out",),
        uses=array(record(lease_id=TEXT, offset=COUNT, stop=COUNT)),
        refused=array(record(lease_id=TEXT, code=TEXT, message=TEXT, offset=COUNT)),
        live={"type": "object", "additionalProperties": record(stop=COUNT, expires_in_s=SECONDS)},
        lost=array(TEXT),
        leases=array({"type": "object"}),
        wait_s=SECONDS,
        done=FLAG,
        paused=FLAG,
        tell_have=FLAG,
        num_left_out=COUNT,
    ),
    refusals={404: "There is no job of this name.", 409: "The ledger cannot be written now, or have is out of range."},
)  # fmt: skip


def parse_ask(body: Any) -> Ask:
    """The question in a body; its reports of bad providers are for the catalogue to place.

    Raises:
        BadRequestError: If it is not what the docstring above says.
    """
    if not isinstance(body, dict):
        raise BadRequestError(f"body: expected a JSON object, got {type(body).__name__}")
    if unknown := set(body) - _KEYS:
        raise BadRequestError(f"body: expected {', '.join(sorted(_KEYS))}, got {', '.join(sorted(unknown))[:200]}")
    uses = tuple(_use(item) for item in _list(body, "uses", MAX_USES))
    horizons = _object(body, "horizons", MAX_HELD)
    have = _object(body, "have", 64)
    speed = body.get("speed")
    if speed is not None and not (type(speed) in (int, float) and 0 <= speed < 1e15):
        raise BadRequestError(f"speed: expected samples a second, got {str(speed)[:80]!r}")
    return Ask(
        job=_text(body, "job", NAME, ""),
        session=_text(body, "session", SESSION, ""),
        attempt=_count(body, "attempt", 0),
        address=_text(body, "address", ADDRESS, ""),
        held=_ids(body, "held") if body.get("held") is not None else None,
        job_id=_text(body, "job_id", DATASET_ID, None if uses else ""),
        uses=uses,
        receipt=_text(body, "signature", SIGNATURE, None if uses else ""),
        horizons={_match("horizons", key, LEASE_ID): _count(horizons, key) for key in horizons},
        release=_ids(body, "release"),
        failed=tuple(
            Failed(_text(item, "lease_id", LEASE_ID), _reason(item)) for item in _list(body, "failed", MAX_HELD)
        ),
        want=_count(body, "want", 0, MAX_LEASES),
        have={_match("have", key, DATASET_ID): _slices(have[key]) for key in have},
        reports=tuple(
            BadReport(
                _text(item, "peer_id", ADDRESS), _text(item, "sha256", DATASET_ID), _reason(item), _flag(item, "wrong")
            )
            for item in _list(body, "bad", MAX_REPORTS)
        ),
        speed=speed,
    )


def _use(item: Any) -> Used:
    epoch, index, start, stop, step = (_count(item, key) for key in ("epoch", "slice", "start", "stop", "step"))
    digest = _text(item, "digest", re.compile("[0-9a-f]{32}|"), "")
    return Used(_text(item, "lease_id", LEASE_ID), epoch, index, start, stop, step, digest)


def _slices(value: Any) -> NDArray[np.int64]:
    try:
        return parse_ranges(value, MAX_INDEX + 1)
    except ProtocolViolation as error:
        raise BadRequestError(f"have: {error}") from error


def reply_json(reply: Reply, leases: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer; `leases` are the reply's grants with what the catalogue knows of their slices."""
    return {
        "uses": [{"lease_id": u.lease_id, "offset": u.offset, "stop": u.stop} for u in reply.uses],
        "refused": [
            {"lease_id": r.lease_id, "code": r.code, "message": r.message, "offset": r.offset} for r in reply.refused
        ],
        "live": {i: {"stop": live.stop, "expires_in_s": live.expires_in_s} for i, live in reply.live.items()},
        "lost": list(reply.lost),
        "leases": leases,
        "wait_s": reply.wait_s,
        "done": reply.done,
        "paused": reply.paused,
        "tell_have": reply.tell_have,
    } | ({"num_left_out": reply.num_left_out} if reply.num_left_out else {})


def _list(body: Mapping[str, Any], key: str, most: int) -> list[Any]:
    value = body.get(key, [])
    if not isinstance(value, list) or len(value) > most:
        raise BadRequestError(f"{key}: expected a list of at most {most}, got {str(value)[:80]!r}")
    return value


def _object(body: Mapping[str, Any], key: str, most: int) -> dict[str, Any]:
    value = body.get(key, {})
    if not isinstance(value, dict) or len(value) > most:
        raise BadRequestError(f"{key}: expected an object of at most {most}, got {str(value)[:80]!r}")
    return value


def _ids(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    return tuple(_match(key, value, LEASE_ID) for value in _list(body, key, MAX_HELD))


def _text(body: Any, key: str, pattern: re.Pattern[str], default: str | None = None) -> str:
    value = body.get(key, default) if isinstance(body, dict) else None
    return default if value == default and default is not None else _match(key, value, pattern)


def _reason(body: Any) -> str:
    value = body.get("reason", "") if isinstance(body, dict) else None
    if not isinstance(value, str):
        raise BadRequestError(f"reason: expected text, got {str(value)[:80]!r}")
    return "".join(c if c.isprintable() else "?" for c in value[:MAX_REASON])


def _flag(body: Any, key: str) -> bool:
    value = body.get(key, True)
    if not isinstance(value, bool):
        raise BadRequestError(f"{key}: expected true or false, got {str(value)[:80]!r}")
    return value


def _match(key: str, value: Any, pattern: re.Pattern[str]) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise BadRequestError(f"{key}: expected text like {pattern.pattern}, got {str(value)[:80]!r}")
    return value


def _count(body: Any, key: str, default: int | None = None, most: int = 2**62) -> int:
    value = body.get(key, default) if isinstance(body, dict) else None
    if type(value) is not int or not 0 <= value <= most:
        raise BadRequestError(f"{key}: expected an integer from 0 to {most}, got {str(value)[:80]!r}")
    return value
