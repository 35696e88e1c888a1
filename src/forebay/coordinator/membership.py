"""Who is in a run, and in which rank: generations of membership, as a function of what happened.

`apply(state, event, now)` gives the next state and what is to be done about it; no clock, disk or network here, so
that a simulation runs it in virtual time. What it promises, whoever joins, stalls, dies or comes back:

- A generation's ranks are 0 … W-1, each one worker. Ranks follow seats, and a worker id that finished a step keeps its
  seat: who restarts gets its rank back, and who stays keeps its order.
- A generation begins only when every live member of the last one stands at a step boundary, and begins at a step
  which the last one finished. So the generations that count never share a step, nor a sample.
- What comes late, from an old generation or from a session that was given up, changes nothing.

In lockstep (a collective) a step that one member finished had everybody's part; the member furthest on is the
source of weights. Members may lie: a step counts once members of two certificates say that it is finished, and weights
count that are at most one step further. Where all members are of one certificate, it is believed. Independent workers
first catch up to the furthest, as each of them holds a part of every step; of one that died, what it left undone is
named as a gap.
"""

from dataclasses import replace
from typing import Any

from forebay.coordinator.messages import (
    ANSWER_S,
    Action,
    Disconnect,
    Event,
    Formed,
    Gap,
    Heartbeat,
    Join,
    Leave,
    LogLine,
    MemberMessage,
    PollChange,
    ProposeConfig,
    RankGeneration,
    RankSlot,
    Ready,
    Refuse,
    RunMember,
    RunState,
    Stepped,
    Tick,
)

MAX_BREAKS = 3
MAX_SEATS = 4096  # kept of workers that are gone, too; those that finished a step longest ago are forgotten first


def apply(state: RunState, event: Event, now: float) -> tuple[RunState, list[Action]]:
    """The state after an event, and what to do about it; a refused event changes nothing but expiries."""
    actions: list[Action] = []
    state = _settle(state, now, actions)
    match event:
        case ProposeConfig():
            state = _agree(state, event)
        case Join():
            state = _join(state, event, now, actions)
        case Tick():
            pass
        case _:
            state = _of_member(state, event, now, actions)
    return _settle(state, now, actions), actions


def _agree(state: RunState, event: ProposeConfig) -> RunState:
    if state.members or state.generation is not None:
        return state
    return replace(state, config={**event.settings, **state.told})


def _join(state: RunState, event: Join, now: float, actions: list[Action]) -> RunState:
    old = state.members.get(event.worker_id)
    rules = state.rules
    if old is not None and old.peer_id != event.peer_id:
        text = f"worker {event.worker_id!r}: another member has this id. Give each worker an id of its own."
        actions.append(Refuse("duplicate", text))
        return state
    if old is not None and old.session != event.session:
        if old.polling and old.lost_at is None:
            text = f"worker {event.worker_id!r}: another live process has this id. Give each worker an id of its own."
            actions.append(Refuse("duplicate", text))
            return state
        if old.lost_at is None and now - old.seen_at <= rules.lost_s:
            text = (
                f"worker {event.worker_id!r}: was here {now - old.seen_at:.1f} s ago under another session. Ask again."
            )
            actions.append(Refuse("unsure", text))
            return state
        state = _drop(state, old, "its process was replaced by another", actions)
    elif old is not None:
        return _put(state, replace(old, seen_at=now, lost_at=None, address=event.address))
    taken = [*state.seats.values(), *(member.seat for member in state.members.values())]
    seat = old.seat if old is not None else state.seats.get(event.worker_id, max(taken, default=-1) + 1)
    held = (event.step, event.step, event.samples)
    member = RunMember(event.worker_id, event.session, seat, event.address, event.peer_id, *held, now, now)
    actions.append(LogLine(f"worker {event.worker_id!r} joins" + (" again" if event.worker_id in state.seats else "")))
    return _put(state, member)


def _of_member(
    state: RunState, event: Ready | Heartbeat | Leave | PollChange | Disconnect, now: float, actions: list[Action]
) -> RunState:
    """What only a live session may say."""
    member = state.members.get(event.worker_id)
    if member is None or member.session != event.session:
        if not isinstance(event, (Leave, PollChange, Disconnect)):
            text = f"worker {event.worker_id!r}: not a member in this session, given up or replaced. Join again."
            actions.append(Refuse("expelled", text))
        return state
    if isinstance(event, Disconnect):
        return _put(state, replace(member, lost_at=now if member.lost_at is None else member.lost_at))
    if isinstance(event, PollChange):
        polling, returns_at = max(0, member.polling + event.change), member.returns_at
        if event.change > 0:
            returns_at = max(returns_at, now + event.wait_s + ANSWER_S)
        return _put(state, replace(member, polling=polling, seen_at=now, returns_at=returns_at))
    member = replace(member, seen_at=now, lost_at=None)
    generation = state.generation
    if generation is None or event.generation != generation.number or generation.rank_of(member.session) is None:
        if isinstance(event, Leave):
            return _drop(state, member, "it leaves", actions)
        return _put(state, member)  # it missed an answer, or waits to be let in: its steps do not count here
    if event.step < member.step and isinstance(event, Ready):
        text = f"worker {member.worker_id!r}: expected at least {member.step} finished steps, got {event.step}."
        actions.append(Refuse("bad_step", text))
        return state
    state, member = _advance(state, generation, member, event.step, now, actions)
    match event:
        case Ready():
            weights, samples = event.step, generation.sample_at(event.step, state.batch_size)
            if event.held_step is not None:
                weights, samples = event.held_step, event.held_samples
            member = replace(member, ready=True, weights=weights, samples=samples)
            state = _break(_put(state, member), member, actions) if event.broken else _put(state, member)
        case Leave():
            if event.finished:
                state = replace(state, finished={**state.finished, member.session: (_voter(member), event.step)})
            state = _drop(_put(state, member), member, "it has finished" if event.finished else "it leaves", actions)
        case _:
            state = _put(state, member)
    return state


def _advance(
    state: RunState, generation: RankGeneration, member: RunMember, step: int, now: float, actions: list[Action]
) -> tuple[RunState, RunMember]:
    """A member of the generation finished more steps."""
    if step > member.step:
        member = replace(member, step=step, moved_at=now)
    reached = _confirmed(_put(state, member)) if state.lockstep else step
    if reached > state.reached:
        actions.append(_stepped(state, generation, reached))
        floor = state.floor if state.lockstep else max(state.floor, reached)
        state = replace(state, reached=reached, floor=floor, breakers={})
    return state, member


def _break(state: RunState, member: RunMember, actions: list[Action]) -> RunState:
    """The step under way cannot be finished, says a member; one that says so again and again before a step is out."""
    if state.broken or state.generation is None:
        return state
    voter = _voter(member)
    num = state.breakers.get(voter, 0) + (state.reached <= state.generation.start_step)
    state = replace(state, broken=True, breakers={**state.breakers, voter: num})
    if num < MAX_BREAKS or all(_voter(other) == voter for other in state.members.values()):
        return state
    return _drop(state, member, f"{num} generations broke at its word before a step was finished", actions)


def _stepped(state: RunState, generation: RankGeneration, stop: int) -> Stepped:
    count = state.batch_size * len(generation.places)
    first = generation.sample_at(state.reached, state.batch_size)
    return Stepped(generation.number, state.reached, stop, first, count)


def _voter(member: RunMember) -> str:
    """Members of one certificate count once; without certificates each session does."""
    return member.peer_id or member.session


def _confirmed(state: RunState) -> int:
    """The step that members of two certificates finished in this generation; of one, if there is no second."""
    generation, best = state.generation, dict[str, int]()
    in_it = (m for m in state.members.values() if generation is not None and generation.rank_of(m.session) is not None)
    for voter, step in [*state.finished.values(), *((_voter(member), member.step) for member in in_it)]:
        best[voter] = max(step, best.get(voter, 0))
    return sorted([0, *best.values()])[-2 if len(best) > 1 else -1]


def _put(state: RunState, member: RunMember) -> RunState:
    return replace(state, members={**state.members, member.worker_id: member})


def _without(state: RunState, member: RunMember) -> RunState:
    return replace(state, members={k: v for k, v in state.members.items() if k != member.worker_id})


def _drop(state: RunState, member: RunMember, why: str, actions: list[Action]) -> RunState:
    """Takes a member out; its place in the generation is remembered as gone."""
    actions.append(LogLine(f"worker {member.worker_id!r} is out: {why}"))
    state = _without(state, member)
    rank = state.generation.rank_of(member.session) if state.generation is not None else None
    if rank is not None:
        state = _keep_seats(state, [member])
        if member.session not in state.finished:
            state = replace(state, gone=(*state.gone, (rank, member.step)))
    return state


def _keep_seats(state: RunState, members: list[RunMember]) -> RunState:
    """The seats of members of this generation that finished a step of it; of others that are gone, none is kept.

    In lockstep all had a part in a step that counts, though not all may have said so yet.
    """
    assert state.generation is not None
    start, all_did = state.generation.start_step, state.lockstep and state.reached > state.generation.start_step
    new = {m.worker_id: m.seat for m in members if all_did or m.step > start}
    seats = {**{name: seat for name, seat in state.seats.items() if name not in new}, **new}
    return replace(state, seats=dict(list(seats.items())[-MAX_SEATS:]))


def _settle(state: RunState, now: float, actions: list[Action]) -> RunState:
    """Gives up who is late, then begins a generation if one is wanted and all stand still."""
    state = _mark(state, now)
    for member in list(state.members.values()):
        why = _late(state, member, now)
        if why is not None:
            state = _drop(state, member, why, actions)
    state = _mark(_end(state), now)
    if state.changing:
        return _form(state, now, actions)
    if any(m.ready for m in state.members.values()):
        state = replace(state, members={k: replace(m, ready=False) for k, m in state.members.items()})
    return replace(state, run_to=0)


def _end(state: RunState) -> RunState:
    """Ends the run at the last step that a member says is the last, once it counts."""
    most = _confirmed(state) if state.lockstep else None
    steps = [step for _, step in state.finished.values() if most is None or step <= most]
    end = max([*steps, *([] if state.end is None else [state.end])], default=None)
    return replace(state, end=end, floor=max(state.floor, end)) if end is not None and steps else state


def _mark(state: RunState, now: float) -> RunState:
    """Remembers since when another generation is wanted."""
    if not state.changing:
        return replace(state, changing_at=None)
    return state if state.changing_at is not None else replace(state, changing_at=now)


def _late(state: RunState, member: RunMember, now: float) -> str | None:
    """Why a member is to be given up, None if it is not."""
    rules = state.rules
    if member.lost_at is not None and now >= member.lost_at + rules.lost_s:
        return f"its connection closed {now - member.lost_at:.1f} s ago"
    silent_s = now - member.seen_at
    if silent_s >= rules.stale_s:
        return f"no sign of it for {silent_s:.0f} s"
    if state.changing_at is None:
        return None
    waited_s = now - max(state.changing_at, member.seen_at, member.returns_at)
    if not member.polling and waited_s > rules.lost_s:
        return f"no sign of it for {silent_s:.1f} s while others wait"
    is_in = state.generation is not None and state.generation.rank_of(member.session) is not None
    if is_in and not member.ready and now - max(state.changing_at, member.moved_at) >= rules.grace_s:
        return f"its step took longer than {rules.grace_s:g} s while others wait"
    return None


def _form(state: RunState, now: float, actions: list[Action]) -> RunState:
    """The next generation, if every live member of this one is ready and present."""
    old = state.generation
    survivors = [m for m in state.members.values() if old is not None and old.rank_of(m.session) is not None]
    if any(m.lost_at is not None for m in state.members.values()) or not all(m.ready for m in survivors):
        return state
    too_few = not survivors and state.end is None and len(state.members) < state.rules.min_workers
    if not state.members or too_few:  # After the run's end one is enough: it learns that all is done.
        return state
    if survivors and not state.lockstep:
        target = max(state.floor, *(m.step for m in survivors))
        behind = [m for m in survivors if m.step < target]
        if behind:
            state = replace(state, run_to=target)
            for member in behind:
                state = _put(state, replace(member, ready=False, moved_at=now))
            return state
    order = sorted(state.members.values(), key=lambda m: m.seat)
    source, step, sample = _beginning(state, survivors, actions)
    if old is not None:
        state = _keep_seats(state, survivors)
        if state.lockstep and source in survivors and step > state.reached:
            actions.append(_stepped(state, old, step))
    if old is not None and not state.lockstep:
        for rank, reached in state.gone:
            if reached < step:
                actions.append(Gap(old.number, old.places[rank].worker_id, rank, reached, step))
    places = tuple(RankSlot(m.worker_id, m.session, m.address) for m in order)
    number = 1 if old is None else old.number + 1
    generation = RankGeneration(number, places, step, sample, order.index(source))
    actions.append(Formed(generation))
    members = {m.worker_id: replace(m, ready=False, step=step, moved_at=now) for m in order}
    return replace(
        state, generation=generation, members=members, changing_at=None, broken=False,
        floor=step, reached=step, run_to=0, finished={}, gone=(),
    )  # fmt: skip


def _beginning(state: RunState, survivors: list[RunMember], actions: list[Action]) -> tuple[RunMember, int, int]:
    """Whose weights the next generation begins with, at which step and sample."""
    old, everybody = state.generation, list(state.members.values())
    if old is not None and (state.end is not None or not state.lockstep):
        most = _confirmed(state) + 1 if state.lockstep else None
        pool = survivors or everybody
        pool = [m for m in pool if most is None or m.step <= most] or pool
        source = max(pool, key=lambda m: (m.step, -m.seat))
        step = max(source.step if most is None else min(source.step, most), state.floor)
        return source, step, old.sample_at(step, state.batch_size)
    # Who could not take over the weights of this generation may still have older ones; a joiner's checkpoint, too.
    alive = old is not None and any(m.weights >= old.start_step for m in survivors)
    pool = survivors if alive else everybody
    if old is None:
        source = max(pool, key=lambda m: (m.weights, -m.seat))
        return source, source.weights, source.samples
    most = max(state.reached, _confirmed(state)) + alive
    source = max([m for m in pool if m.weights <= most] or pool, key=lambda m: (m.weights, -m.seat))
    step = min(source.weights, most)
    sample = old.sample_at(step, state.batch_size) if step >= old.start_step else min(source.samples, old.start_sample)
    if step < state.reached and not alive:
        lost = f"steps {step} to {state.reached} are redone" if step else "the run begins again"
        actions.append(LogLine(f"no worker is left that has the weights of step {state.reached}: {lost}"))
    return source, step, sample


# What a member's request is answered. After its event the answer is due when `is_due` says so or the request's `wait_s`
# is over, and then `reply` is it.

REQUESTS: dict[str, type[Join | Ready | Heartbeat | Leave]] = {
    "/v1/members/join": Join,
    "/v1/members/ready": Ready,
    "/v1/members/heartbeat": Heartbeat,
    "/v1/members/leave": Leave,
}


def is_due(state: RunState, message: MemberMessage) -> bool:
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


def reply(state: RunState, message: MemberMessage, run_id: str) -> dict[str, Any] | Refuse:
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


def generation_reply(state: RunState, run_id: str) -> dict[str, Any]:
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


def config_reply(state: RunState, run_id: str) -> dict[str, Any]:
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


def _is_member(state: RunState, message: MemberMessage) -> bool:
    member = state.members.get(message.worker_id)
    return member is not None and member.session == message.session
