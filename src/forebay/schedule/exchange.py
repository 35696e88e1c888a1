"""`POST /v1/exchange`: the worker's message as the desk takes it, and the desk's reply as the worker gets it.

The fields are those of ExchangeRequest and ExchangeReply in `network/messages.py`. What a sender has to know:

- One exchange at a time a session. It is idempotent: if the answer was lost, ask again with what is true then, under
  a higher `attempt`: one that was given up and comes late is refused, so that it cuts and takes back nothing.
- `uses` are of one job: `job_id` says which, and `signature` is over `receipt_message(job_id, uses)`. Uses of two
  jobs go in two exchanges. `epoch` and `slice` repeat the lease's. `digest`, which may be left out, is
  `order.shard_windows.receipt` of the sample ids that were read. A use begins where the last one recorded ended.
- `proof` with the first use of a lease: `possession.prove` over its slice. The scheduler checks some against a data
  node; a wrong one bars the peer for a while.
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
- `dataset` is left out where it is the job's name, `index` where it is `slice`. `slice` counts over all datasets of
  the job, `index` within its dataset. `sample_base` + sample is the global id.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forebay.errors import LeaseError, ProtocolViolation
from forebay.ledger.receipts import Used
from forebay.network.members import parse_ranges
from forebay.network.messages import MAX_REASON, ExchangeRequest
from forebay.schedule.ask import Ask, BadReport, Failed, Reply


def ask_of(message: ExchangeRequest, num_slices: Mapping[str, int]) -> Ask:
    """What a message asks of the desk.

    Args:
        num_slices: Of each dataset of the jobs, by its id; what a worker has of other datasets is left out.

    Raises:
        LeaseError: If a worker has slices that a dataset does not have.
    """
    return Ask(
        job=message.job,
        session=message.session,
        attempt=message.attempt,
        address=message.address,
        held=message.held,
        job_id=message.job_id,
        uses=tuple(Used(u.lease_id, u.epoch, u.slice, u.start, u.stop, u.step, u.digest) for u in message.uses),
        receipt=message.signature,
        proofs={use.lease_id: use.proof for use in message.uses if use.proof},
        horizons=message.horizons,
        release=message.release,
        failed=tuple(Failed(item.lease_id, _printable(item.reason)) for item in message.failed),
        want=message.want,
        have={key: _slices(text, num_slices[key]) for key, text in message.have.items() if key in num_slices},
        reports=tuple(BadReport(b.peer_id, b.sha256, _printable(b.reason), b.wrong) for b in message.bad),
        speed=message.speed,
    )


_ALWAYS = ("uses", "live", "leases", "wait_s", "done")


def _slices(text: str, num_slices: int) -> NDArray[np.int64]:
    try:
        return parse_ranges(text, num_slices)
    except ProtocolViolation as error:
        raise LeaseError(f"have: {error}") from error


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:MAX_REASON])


def reply_json(reply: Reply, leases: list[dict[str, Any]]) -> dict[str, Any]:
    """The answer; `leases` are the reply's grants with what the catalogue knows of their slices."""
    body = {
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
        "num_left_out": reply.num_left_out,
    }
    return {key: value for key, value in body.items() if value or key in _ALWAYS}
