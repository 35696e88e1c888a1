"""The membership of a run in virtual time."""

from typing import Any

from forebay.coordinator.membership import apply
from forebay.coordinator.messages import (
    Heartbeat,
    Join,
    Leave,
    PollChange,
    RankGeneration,
    Ready,
    Refuse,
    Rules,
    RunState,
    Tick,
)

RULES = Rules(min_workers=1, heartbeat_s=30, stale_s=90, lost_s=5, grace_s=300)


class CoordinatorHarness:
    """A state with a clock, and all actions that it returned."""

    def __init__(self, rules: Rules = RULES, **config: Any) -> None:
        config = {"batch_size": 2, **config}
        self.state = RunState(rules, config, config)
        self.now = 0.0
        self.actions = []

    def send(self, *events: Any, after_s: float = 0.0) -> list:
        self.now += after_s
        new = []
        for event in events:
            self.state, actions = apply(self.state, event, self.now)
            new += actions
        self.actions += new
        return new

    def tick(self, after_s: float) -> None:
        self.send(Tick(), after_s=after_s)

    def beat(self, names: str, step: int, after_s: float = 0.0) -> None:
        number = self.generation.number
        self.send(*(Heartbeat(name, f"{name}/1", number, step) for name in names), after_s=after_s)

    def finish(self, *names: str) -> None:
        self.send(*(Leave(name, f"{name}/1", 1, 10, finished=True) for name in names))

    def join(self, worker_id: str, session: str = "", **fields: Any) -> list:
        session = session or f"{worker_id}/1"
        return self.send(Join(worker_id, session, **fields), PollChange(worker_id, session, +1))

    def ready(self, worker_id: str, step: int, *, broken: bool = False) -> list:
        member = self.state.members[worker_id]
        return self.send(Ready(worker_id, member.session, self.generation.number, step, broken))

    @property
    def generation(self) -> RankGeneration:
        return self.state.generation

    @property
    def ranks(self) -> list[str]:
        return [position.worker_id for position in self.generation.places]

    def codes(self, actions: list) -> list[str]:
        return [action.code for action in actions if isinstance(action, Refuse)]
