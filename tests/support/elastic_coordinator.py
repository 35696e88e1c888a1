"""The coordinator in virtual time: `schedule.membership.apply` behind requests that wait, as its HTTP server answers.

Only waits and connections are simulated here. A request is answered when what it waits for is so, or its `wait_s` is
over; a connection that closes before tells the coordinator that the process ended.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from pydantic import TypeAdapter

from forebay.coordinator.membership import REQUESTS, apply, config_reply, is_due, reply
from forebay.coordinator.messages import (
    Disconnect,
    Event,
    Formed,
    Leave,
    MemberMessage,
    PollChange,
    ProposeConfig,
    RankGeneration,
    Refuse,
    Rules,
    RunState,
    Tick,
)
from forebay.network.client import RemoteError
from forebay.simulate.network import Clock
from forebay.worker.membership_state import Request

_TICK_S = 1.0
_RUN = "run"
Respond: TypeAlias = Callable[[dict[str, Any] | RemoteError], object]


class Coordinator:
    """One run's coordinator.

    Args:
        on_formed: Called with each generation as it begins.
    """

    def __init__(
        self, clock: Clock, rules: Rules, config: Mapping[str, Any], on_formed: Callable[[RankGeneration], object]
    ) -> None:
        self.state = RunState(rules, config, config)
        self._clock = clock
        self._on_formed = on_formed
        self._waiting: list[tuple[MemberMessage, Respond]] = []
        self._tick()

    def receive(self, request: Request, respond: Respond) -> None:
        """A request comes in; `respond` is called now or later."""
        body = dict(request.body or {})
        if request.path not in REQUESTS:
            self._apply(ProposeConfig(body["settings"]))
            respond(config_reply(self.state, _RUN))
            return
        message = TypeAdapter(REQUESTS[request.path]).validate_json(json.dumps(body))
        if (refused := self._apply(message)) is not None:
            respond(_error(refused))
            return
        item = message, respond
        self._waiting.append(item)
        if isinstance(message, Leave):
            return self._end(item)
        self._clock.call_later(message.wait_s, lambda: self._end(item))
        self._apply(PollChange(message.worker_id, message.session, +1, message.wait_s))

    def disconnect(self, session: str) -> None:
        """The connections of a process close."""
        for item in list(self._waiting):
            if item[0].session == session and item in self._waiting:
                self._remove(item)
        for worker_id in [name for name, item in self.state.members.items() if item.session == session]:
            self._apply(Disconnect(worker_id, session))

    def _tick(self) -> None:
        self._apply(Tick())
        self._clock.call_later(_TICK_S, self._tick)

    def _apply(self, event: Event) -> Refuse | None:
        self.state, actions = apply(self.state, event, self._clock.now)
        for action in actions:
            if isinstance(action, Formed):
                self._on_formed(action.generation)
        for item in [item for item in self._waiting if is_due(self.state, item[0])]:
            self._end(item)
        return next((action for action in actions if isinstance(action, Refuse)), None)

    def _end(self, one: tuple[MemberMessage, Respond]) -> None:
        if one in self._waiting:
            self._remove(one)
            answer = reply(self.state, one[0], _RUN)
            one[1](_error(answer) if isinstance(answer, Refuse) else answer)

    def _remove(self, one: tuple[MemberMessage, Respond]) -> None:
        self._waiting.remove(one)
        if not isinstance(one[0], Leave):
            self._apply(PollChange(one[0].worker_id, one[0].session, -1))


def _error(refused: Refuse) -> RemoteError:
    return RemoteError(f"refused with 409 {refused.code}: {refused.message}", 409, refused.code)
