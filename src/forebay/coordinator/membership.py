"""The members of a run and their ranks: generations of membership, as a pure function of events.

`apply(state, event, now)` returns the next state and actions; there is no clock, disk or network, so a simulation runs
it in virtual time. Guarantees, whatever workers join, stall, die or come back:

- The ranks of a generation are 0 … W-1, one worker each. Ranks follow seats, and a worker id that finished a step keeps
  its seat: a restarted worker gets its rank back, and the others keep their order.
- A generation starts only when every live member of the last one is at a step boundary, and at a step which the last
  one finished. So the generations that count share no step and no sample.
- Late messages, from an old generation or a removed session, change nothing.

In lockstep (a collective operation) a step that one member finished contains all members' parts; the member furthest
ahead is the source of weights. Members may lie: a step counts once members of two certificates report it as finished,
and weights count that are at most one step further. Where all members have one certificate, it is believed. Independent
workers first catch up to the furthest, as each does a part of every step; a dead worker's missing part is a gap.
"""

from dataclasses import replace

from forebay.base import Json
from forebay.coordinator import messages
from forebay.coordinator.messages import Action, RankGeneration, RunMember, RunState

MAX_SEATS = 4096  # of workers that left, too; those that finished a step longest ago are forgotten first


def apply(state: RunState, event: messages.Event, now: float) -> tuple[RunState, list[Action]]:
    """The state after an event, and actions; a refused event changes nothing but expiries."""
    actions: list[Action] = []
    state = _advance(state, now, actions)
    match event:
        case messages.ProposeConfig():
            if not state.members and state.generation is None:
                state = replace(state, config={**event.settings, **state.fixed})
        case messages.Join():
            state = _join(state, event, now, actions)
        case messages.Tick():
            for member in [state.members[name] for name in event.revoked if name in state.members]:
                state = _remove(state, member, "its certificate is revoked", actions)
        case _:
            state = _apply_member(state, event, now, actions)
    return _advance(state, now, actions), actions


def _join(state: RunState, event: messages.Join, now: float, actions: list[Action]) -> RunState:
    old = state.members.get(event.worker_id)
    worker = f"worker {event.worker_id!r}"
    if old is not None:
        if old.session == event.session and old.peer_id == event.peer_id:
            return _put(state, replace(old, seen_at=now, lost_at=None))
        is_others = old.peer_id != event.peer_id
        if is_others or (old.polling and old.lost_at is None):
            who = "member" if is_others else "live process"
            text = f"{worker}: another {who} has this id. Give each worker an id of its own."
            return _refuse(state, "duplicate", text, actions)
        if old.lost_at is None and now - old.seen_at <= state.rules.lost_s:
            text = f"{worker}: was here {now - old.seen_at:.1f} s ago under another session. Ask again."
            return _refuse(state, "unsure", text, actions)
        state = _remove(state, old, "its process was replaced by another", actions)
    seats = [*state.seats.values(), *(member.seat for member in state.members.values())]
    seat = old.seat if old is not None else state.seats.get(event.worker_id, max(seats, default=-1) + 1)
    trained = (event.step, event.step, event.samples)
    member = RunMember(
        event.worker_id, event.session, seat, event.peer_id, *trained, now, now, organisation=event.organisation
    )
    actions.append(messages.LogLine(f"{worker} joins" + (" again" if event.worker_id in state.seats else "")))
    return _put(state, member)


def _refuse(state: RunState, code: str, text: str, actions: list[Action]) -> RunState:
    actions.append(messages.Refuse(code, text))
    return state


def _apply_member(
    state: RunState,
    event: messages.Ready | messages.Heartbeat | messages.Leave | messages.PollChange | messages.Disconnect,
    now: float,
    actions: list[Action],
) -> RunState:
    member = state.members.get(event.worker_id)
    if member is None or member.session != event.session:
        if isinstance(event, (messages.Leave, messages.PollChange, messages.Disconnect)):
            return state
        text = f"worker {event.worker_id!r}: not a member in this session, removed or replaced. Join again."
        return _refuse(state, "expelled", text, actions)
    if isinstance(event, messages.Disconnect):
        return _put(state, replace(member, lost_at=now if member.lost_at is None else member.lost_at))
    if isinstance(event, messages.PollChange):
        polling = max(0, member.polling + event.change)
        returns_at = member.returns_at
        if event.change > 0:
            returns_at = max(returns_at, now + event.wait_s + messages.ANSWER_S)
        return _put(state, replace(member, polling=polling, seen_at=now, returns_at=returns_at))
    member = replace(member, seen_at=now, lost_at=None)
    generation = state.generation
    if generation is None or event.generation != generation.number or generation.rank_of(member.session) is None:
        if isinstance(event, messages.Leave):
            return _remove(state, member, "it leaves", actions)
        return _put(state, member)  # it missed an answer, or waits for a generation: its steps do not count here
    if event.step < member.step and isinstance(event, messages.Ready):
        text = f"worker {member.worker_id!r}: expected at least {member.step} finished steps, got {event.step}."
        return _refuse(state, "bad_step", text, actions)
    if event.step > member.step:
        member = replace(member, step=event.step, moved_at=now)
    state = _put(state, member)
    reached = _confirmed(state) if state.lockstep else event.step
    if reached > state.reached:
        actions.append(_stepped(state, generation, reached))
        state = replace(state, reached=reached, floor=max(state.floor, 0 if state.lockstep else reached))
    match event:
        case messages.Ready():
            weights = event.step
            samples = generation.sample_at(event.step, state.batch_size)
            if event.held_step is not None:
                weights = event.held_step
                samples = event.held_samples
            member = replace(member, ready=True, weights=weights, samples=samples)
            state = _put(state, member)
            if event.broken and not state.broken:  # it may be another's fault: no member is removed for a report
                who = f"worker {member.worker_id!r} ({_voter(member)})"
                actions.append(messages.LogLine(f"generation {generation.number} is broken, reports {who}"))
            return replace(state, broken=state.broken or event.broken)
        case messages.Leave():
            if event.finished:
                state = replace(state, finished={**state.finished, member.session: (_voter(member), event.step)})
            return _remove(state, member, "it has finished" if event.finished else "it leaves", actions)
    return state


def _stepped(state: RunState, generation: RankGeneration, stop: int) -> messages.Stepped:
    return messages.Stepped(
        generation.number, state.reached, stop, generation.sample_at(state.reached, state.batch_size),
        state.batch_size * len(generation.places),
    )  # fmt: skip


def _voter(member: RunMember) -> str:
    """Members of one certificate count once; without certificates each session does."""
    return member.peer_id or member.session


def _confirmed(state: RunState) -> int:
    """The step that members of two certificates finished in this generation; of one, if there is no second."""
    best = dict[str, int]()
    ranked = ((_voter(member), member.step) for member in state.members.values() if _has_rank(state, member))
    for voter, step in [*state.finished.values(), *ranked]:
        best[voter] = max(step, best.get(voter, 0))
    return sorted([0, *best.values()])[-2 if len(best) > 1 else -1]


def _has_rank(state: RunState, member: RunMember) -> bool:
    return state.generation is not None and state.generation.rank_of(member.session) is not None


def _put(state: RunState, member: RunMember) -> RunState:
    return replace(state, members={**state.members, member.worker_id: member})


def _remove(state: RunState, member: RunMember, reason: str, actions: list[Action]) -> RunState:
    """Remove a member; its rank and step are remembered in `gone`."""
    actions.append(messages.LogLine(f"worker {member.worker_id!r} is out: {reason}"))
    state = replace(state, members={k: v for k, v in state.members.items() if k != member.worker_id})
    rank = state.generation.rank_of(member.session) if state.generation is not None else None
    if rank is None:
        return state
    state = _keep_seats(state, [member])
    return state if member.session in state.finished else replace(state, gone=(*state.gone, (rank, member.step)))


def _keep_seats(state: RunState, members: list[RunMember]) -> RunState:
    """Keep the seats of members that finished a step of this generation.

    In lockstep all had a part in a step that counts, though not all may have reported it yet.
    """
    assert state.generation is not None
    start = state.generation.start_step
    did_all = state.lockstep and state.reached > start
    new = {m.worker_id: m.seat for m in members if did_all or m.step > start}
    seats = {**{name: seat for name, seat in state.seats.items() if name not in new}, **new}
    return replace(state, seats=dict(list(seats.items())[-MAX_SEATS:]))


def _advance(state: RunState, now: float, actions: list[Action]) -> RunState:
    """Remove overdue members, then start a generation if one is wanted and all members are ready."""
    state = _mark_changing(state, now)
    for member in list(state.members.values()):
        reason = _overdue(state, member, now)
        if reason is not None:
            state = _remove(state, member, reason, actions)
    state = _mark_changing(_end(state), now)
    if state.changing:
        return _form(state, now, actions)
    if any(m.ready for m in state.members.values()):
        state = replace(state, members={k: replace(m, ready=False) for k, m in state.members.items()})
    return replace(state, run_to=0)


def _end(state: RunState) -> RunState:
    """End the run at the last step that a member reports as the last, once it counts."""
    max_step = _confirmed(state) if state.lockstep else None
    steps = [step for _, step in state.finished.values() if max_step is None or step <= max_step]
    if not steps:
        return state
    end = max(*steps, state.end or 0)
    return replace(state, end=end, floor=max(state.floor, end))


def _mark_changing(state: RunState, now: float) -> RunState:
    if not state.changing:
        return replace(state, changing_at=None)
    return state if state.changing_at is not None else replace(state, changing_at=now)


def _overdue(state: RunState, member: RunMember, now: float) -> str | None:
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
    is_late = now - max(state.changing_at, member.moved_at) >= rules.grace_s
    if _has_rank(state, member) and not member.ready and is_late:
        return f"its step took longer than {rules.grace_s:g} s while others wait"
    return None


def _form(state: RunState, now: float, actions: list[Action]) -> RunState:
    old = state.generation
    survivors = [m for m in state.members.values() if _has_rank(state, m)]
    if any(m.lost_at is not None for m in state.members.values()) or not all(m.ready for m in survivors):
        return state
    too_few = not survivors and state.end is None and len(state.members) < state.rules.min_workers
    if not state.members or too_few:  # after the run's end one is enough: it learns that all is done
        return state
    if survivors and not state.lockstep:
        target = max(state.floor, *(m.step for m in survivors))
        behind = [m for m in survivors if m.step < target]
        if behind:
            for member in behind:
                state = _put(state, replace(member, ready=False, moved_at=now))
            return replace(state, run_to=target)
    order = sorted(state.members.values(), key=lambda m: m.seat)
    source, step, sample = _choose_source(state, survivors, actions)
    if old is not None:
        state = _keep_seats(state, survivors)
        if state.lockstep and source in survivors and step > state.reached:
            actions.append(_stepped(state, old, step))
        for rank, reached in () if state.lockstep else state.gone:
            if reached < step:
                actions.append(messages.Gap(old.number, old.places[rank].worker_id, rank, reached, step))
    places = tuple(messages.RankSlot(m.worker_id, m.session) for m in order)
    generation = RankGeneration(1 if old is None else old.number + 1, places, step, sample, order.index(source))
    actions.append(messages.Formed(generation))
    members = {m.worker_id: replace(m, ready=False, step=step, moved_at=now) for m in order}
    return replace(
        state, generation=generation, members=members, changing_at=None, broken=False,
        floor=step, reached=step, run_to=0, finished={}, gone=(),
    )  # fmt: skip


def _choose_source(state: RunState, survivors: list[RunMember], actions: list[Action]) -> tuple[RunMember, int, int]:
    """The member whose weights the next generation starts with, and its first step and sample."""
    old = state.generation
    everyone = list(state.members.values())
    if old is not None and (state.end is not None or not state.lockstep):
        max_step = _confirmed(state) + 1 if state.lockstep else None
        pool = survivors or everyone
        pool = [m for m in pool if max_step is None or m.step <= max_step] or pool
        source = max(pool, key=lambda m: (m.step, -m.seat))
        step = max(source.step if max_step is None else min(source.step, max_step), state.floor)
        return source, step, old.sample_at(step, state.batch_size)
    # A member that could not take over the weights of this generation may have older ones; a new one a checkpoint.
    alive = old is not None and any(m.weights >= old.start_step for m in survivors)
    pool = survivors if alive else everyone
    if old is None:
        source = max(pool, key=lambda m: (m.weights, -m.seat))
        return source, source.weights, source.samples
    max_step = max(state.reached, _confirmed(state)) + alive
    source = max([m for m in pool if m.weights <= max_step] or pool, key=lambda m: (m.weights, -m.seat))
    step = min(source.weights, max_step)
    sample = old.sample_at(step, state.batch_size) if step >= old.start_step else min(source.samples, old.start_sample)
    if step < state.reached and not alive:
        lost = f"steps {step} to {state.reached} are redone" if step else "the run starts again"
        actions.append(messages.LogLine(f"no worker is left that has the weights of step {state.reached}: {lost}"))
    return source, step, sample


# Answers to a member's request. After its event an answer is due when `is_due` is true or the request's `wait_s` is
# over; then `reply` is the answer.

REQUESTS: dict[str, type[messages.MemberMessage]] = {
    "/v1/members/join": messages.Join,
    "/v1/members/ready": messages.Ready,
    "/v1/members/heartbeat": messages.Heartbeat,
    "/v1/members/leave": messages.Leave,
}


def is_due(state: RunState, message: messages.MemberMessage) -> bool:
    """Whether a request need not wait any longer: there is something to answer, or its session has ended."""
    if not is_member(state, message):
        return True
    generation = state.generation
    is_new = generation is None or generation.number != getattr(message, "generation", 0)
    match message:
        case messages.Join():
            return generation is not None and generation.rank_of(message.session) is not None
        case messages.Ready():
            return is_new or not state.changing or message.step < state.run_to
        case messages.Heartbeat():
            return is_new or (state.changing, state.broken) != (message.changing, message.broken)
    return True


def reply(state: RunState, message: messages.MemberMessage, run_id: str) -> Json | messages.Refuse:
    """The answer now: a generation, the step to continue to, or to ask again; to a heartbeat, whether to stop."""
    if isinstance(message, messages.Leave):
        return {"left": True}
    if not is_member(state, message):
        return messages.Refuse("expelled", f"worker {message.worker_id!r}: removed or replaced. Join again.")
    generation = state.generation
    is_old = generation is None or generation.number != getattr(message, "generation", 0)
    if isinstance(message, messages.Heartbeat):
        return {"changing": is_old or state.changing, "broken": is_old or state.broken}
    if generation is not None and (rank := generation.rank_of(message.session)) is not None:
        if is_old or not state.changing:
            return {"generation": {**generation_reply(state, run_id), "rank": rank}}
        if state.members[message.worker_id].step < state.run_to:
            return {"run_to": state.run_to}
    late = [m.worker_id for m in state.members.values() if m.lost_at or (_has_rank(state, m) and not m.ready)]
    return {"waiting": {"members": len(state.members), "waits_for": late[:8] or state.rules.min_workers}}


def generation_reply(state: RunState, run_id: str) -> Json:
    """The current generation; number 0 before the first."""
    generation = state.generation
    if generation is None:
        return {"run_id": run_id, "number": 0, "world_size": 0, "members": []}
    members = [{"worker_id": s.worker_id, "rank": r} for r, s in enumerate(generation.places)]
    return {
        "run_id": run_id, "number": generation.number, "world_size": len(members), "start_step": generation.start_step,
        "start_sample": generation.start_sample, "source": generation.source, "members": members,
    }  # fmt: skip


def config_reply(state: RunState, run_id: str) -> Json:
    """The settings of the run, and the coordinator's timeouts."""
    shown = {name: getattr(state.rules, name) for name in ("min_workers", "heartbeat_s", "lost_s")}
    return {"run_id": run_id, "config": dict(state.config), "fixed": dict(state.fixed), **shown}


def is_member(state: RunState, message: messages.MemberMessage) -> bool:
    """Whether a message is of a live member's session."""
    member = state.members.get(message.worker_id)
    return member is not None and member.session == message.session
