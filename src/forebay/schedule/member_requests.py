"""What a member's request means, when its answer is due, and the answer: functions of a run's state.

The coordinator's HTTP server and its simulation both answer by these. Each request is an event; after it the answer is
due when `is_due` says so or the request's `wait_s` is over, and then `reply` is it.
"""

from typing import Any

from forebay.schedule.members import Heartbeat, Join, Leave, MemberMessage, Ready, Refuse, State

REQUESTS: dict[str, type[Join | Ready | Heartbeat | Leave]] = {
    "/v1/members/join": Join,
    "/v1/members/ready": Ready,
    "/v1/members/heartbeat": Heartbeat,
    "/v1/members/leave": Leave,
}


def is_due(state: State, message: MemberMessage) -> bool:
    """Whether a request need not wait any longer: there is something to answer, or its session has ended."""
    if not _is_member(state, message):
        return True
    generation = state.generation
    match message:
        case Join():
            return generation is not None and generation.rank_of(message.session) is not None
        case Ready():
            if generation is None or generation.number != message.generation:
                return True
            return not state.changing or message.step < state.run_to
        case Heartbeat():
            if generation is None or generation.number != message.generation:
                return True
            return (state.changing, state.broken) != (message.changing, message.broken)
    return True


def reply(state: State, message: MemberMessage, run_id: str) -> dict[str, Any] | Refuse:
    """The answer now: a generation, how far to run on, or to ask again; to a heartbeat, whether to stop."""
    if isinstance(message, Leave):
        return {"left": True}
    if not _is_member(state, message):
        return Refuse("expelled", f"worker {message.worker_id!r}: given up or replaced. Join again.")
    generation, known = state.generation, getattr(message, "generation", 0)
    if isinstance(message, Heartbeat):
        is_old = generation is None or generation.number != known
        return {"changing": is_old or state.changing, "broken": is_old or state.broken}
    if generation is not None and (rank := generation.rank_of(message.session)) is not None:
        if generation.number != known or not state.changing:
            return {"generation": {**generation_reply(state, run_id), "rank": rank}}
        if state.members[message.worker_id].step < state.run_to:
            return {"run_to": state.run_to}
    waits_for = sum(not m.ready for m in state.members.values()) if generation else state.rules.min_workers
    return {"waiting": {"members": len(state.members), "waits_for": waits_for}}


def generation_reply(state: State, run_id: str) -> dict[str, Any]:
    """The generation now; number 0 before the first."""
    generation = state.generation
    if generation is None:
        return {"run_id": run_id, "number": 0, "world_size": 0, "members": []}
    return {
        "run_id": run_id,
        "number": generation.number,
        "world_size": len(generation.places),
        "start_step": generation.start_step,
        "start_sample": generation.start_sample,
        "source": generation.source,
        "members": [
            {"worker_id": place.worker_id, "rank": rank, "address": place.address}
            for rank, place in enumerate(generation.places)
        ],
    }


def config_reply(state: State, run_id: str) -> dict[str, Any]:
    """What the run does, and how patient its coordinator is."""
    rules = state.rules
    return {
        "run_id": run_id,
        "config": dict(state.config),
        "told": dict(state.told),
        "min_workers": rules.min_workers,
        "heartbeat_s": rules.heartbeat_s,
        "lost_s": rules.lost_s,
    }


def _is_member(state: State, message: MemberMessage) -> bool:
    member = state.members.get(message.worker_id)
    return member is not None and member.session == message.session
