"""Training in step with the other workers of a coordinator: generation by generation, no step half done.

Each step: gradients of this rank's samples, their mean over all ranks, one step of the optimizer. Where a peer dies in
a step, nothing of it was applied; it is taken again by the ranks of the next generation. At a generation's beginning
the source's weights, optimizer and place in the data go to all, so that it does not matter who was where.

Counts have no mean: each worker's are its own, and only ranks, samples and steps are shared. Such a worker that comes
late to a text reads what the others have read, for a place in a text may be megabytes large.
"""

from __future__ import annotations

import json
import threading
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, cast

from forebay.errors import MissingPackageError, UsageError, install_command
from forebay.load.batch import Batch
from forebay.threads import Supervised
from forebay.worker.config import WorkerConfig
from forebay.worker.dummy import DummyDataset
from forebay.worker.membership import Generation, Membership, MembershipLostError
from forebay.worker.trainer import LockstepTrainer, trainer_class
from forebay.worker.training import Training, TrainingReport

if TYPE_CHECKING:
    from forebay.network.pki.identity import Identity
    from forebay.worker.collective import Collective

SHARED = (
    "dataset_type", "dataset_name", "tokenizer_name", "batch_size", "seq_len", "num_steps", "model_size", "seed",
    "shuffle_buffer", "partition", "text_key", "vocab_size", "learning_rate",
)  # fmt: skip
"""Settings that all workers of a run have alike; the coordinator's go before a worker's."""
SETTLE_S = 5.0
"""A worker that is told to stop gets so long for its step; then it leaves, for it may be waiting for others."""
MAX_BREAKS = 20
"""Tries of a step in a row; more mean that something else is wrong."""
_alone = threading.Lock()


def train_together(training: Training) -> TrainingReport:
    """Train as a member of the coordinator's run to its end, or until told to stop. Raises as `WorkerClient` says."""
    if training.config.partition != "samples":
        raise UsageError("partition: expected 'samples' where a coordinator deals ranks, got 'records'.")
    if not _alone.acquire(blocking=False):
        raise UsageError("worker: expected one at a time that trains together, got two. Use a process for each.")
    try:
        return _Together(training).run()
    finally:
        _alone.release()


class _Together:
    def __init__(self, training: Training) -> None:
        config = training.config
        self.training, self.lockstep = training, hasattr(trainer_class(config.trainer), "gradients")
        self.collective: Collective | None = None
        self.generation: Generation | None = None
        self._ended = threading.Event()
        self._holds, self._breaks = False, 0
        step, samples = training.checkpointed()
        self.membership = Membership(
            config.resolved_coordinator(),
            config.worker_id,
            settings=shared_settings(config),
            defaults=default_settings(config),
            identity=_identity(config),
            lockstep=self.lockstep,
            step=step,
            samples=samples,
            patience_s=config.patience_s,
            on_note=training.tell,
        )

    def run(self) -> TrainingReport:
        training, ended = self.training, self._ended
        with self.membership as membership:
            Supervised(self._leave_when_stopped, "leave when stopped", stopping=self._ended).start()
            try:
                training.adopt(agreed(training.config, membership.agree()))
                training.resume()
                training.begin()  # The model is made before others wait for us.
                generation: Generation = membership.join()
                training.begin()
                while training.step < training.config.num_steps and not training.stop.is_set():
                    generation = self._step(generation)
                report = training.end()
                membership.leave(finished=report.finished)
                return report
            except MembershipLostError:
                if not training.stop.is_set():
                    raise
                return training.end()
            finally:
                ended.set()
                self._part()

    def _leave_when_stopped(self) -> None:
        """A worker that is told to stop while it waits for others leaves; in a step it ends that first."""
        while not self._ended.wait(0.1):
            if self.training.stop.is_set():
                if self.generation is None or not self._ended.wait(SETTLE_S):
                    self.membership.leave()
                return

    def _step(self, generation: Generation) -> Generation:
        """One step, or what has to be done in its place; the generation to go on in."""
        training, lost = self.training, _peer_lost(self.lockstep)
        try:
            if self.generation is None or self.generation.number != generation.number:
                self._enter(generation)
                if training.step >= training.config.num_steps:
                    return generation  # The others had done it all.
            mark = training.data.mark()
            batch = training.next_batch()
            try:
                loss, stop = self._learn(batch)
            except lost:
                training.close_batches()
                training.data.go_to(mark)
                raise
        except lost as error:
            self._breaks += 1
            if self._breaks > MAX_BREAKS:
                raise
            training.tell(str(error))
            self._part()
            return self._boundary(stop=True, broken=True)
        self._breaks = 0
        training.count(batch, loss)
        return self._boundary(stop=stop if training.step < training.config.num_steps else False)

    def _boundary(self, *, stop: bool | None, broken: bool = False) -> Generation:
        try:
            return self.membership.boundary(self.training.step, stop=stop, broken=broken, holds=self._holds)
        except MembershipLostError as error:
            if self.training.stop.is_set():
                raise
            self.training.tell(f"{error} Joining again.")
            self._part()
            self._holds = False
            return self.membership.join()

    def _learn(self, batch: Batch) -> tuple[float, bool | None]:
        """The loss over all ranks, and whether they agreed to stop after this step (None: nothing was agreed)."""
        training, trainer = self.training, self.training.trainer
        if self.collective is None:
            return training.learn(trainer.step, batch), None
        lockstep = cast(LockstepTrainer, trainer)
        loss = training.learn(lambda inputs, labels: lockstep.gradients(inputs, labels)[0], batch)
        mean, stop = self.collective.average(lockstep.model.parameters(), loss, stop=self.membership.changing)
        lockstep.apply()
        return mean, stop

    def _enter(self, generation: Generation) -> None:
        """Begin a generation: its group, the source's state, this rank's share of the data."""
        training, membership = self.training, self.membership
        self._part()
        here, training.report.step = training.step, generation.start_step
        self._holds = generation.rank == generation.source or (self._holds and here == generation.start_step)
        if self.lockstep:
            from forebay.worker.collective import Collective

            trainer = cast(LockstepTrainer, training.trainer)
            self.collective = Collective(
                generation,
                membership.meet,
                device=trainer.device.partition(":")[0],
                timeout_s=training.config.patience_s,
                abandon=lambda: membership.changing,
                broken=lambda: membership.broken,
            )
            self.collective.share(trainer.model, _Carried(trainer.optimizer, training))
            self._holds = True
        elif isinstance(training.data, DummyDataset):
            training.close_batches()
            training.data.go_to(generation.start_sample)
        elif here != generation.start_step:
            self._catch_up(here, generation.start_step)
            if training.stop.is_set():
                return
        training.samples_taken = generation.start_sample
        training.dealt(generation.rank, generation.world_size)
        training.report.generations += self.generation is not None
        self.generation = generation

    def _catch_up(self, here: int, start: int) -> None:
        """Read what the run's workers have read and leave it, up to step `start`: so the place is theirs."""
        training = self.training
        training.close_batches()
        training.tell(f"reading on from step {here if here < start else 0} to {start}, where the others are")
        if here > start:  # Of a checkpoint that nobody waited for.
            here = 0
            training.data.rewind()
        for first, stop, world_size in self.membership.past():
            if stop <= here:
                continue
            training.data = training.data.dealt(0, world_size)
            for step in range(max(first, here), stop):
                if training.stop.is_set():
                    return
                training.next_batch()
                training.report.step = step + 1
            training.close_batches()

    def _part(self) -> None:
        """Leave the group; peers that wait hear of it."""
        collective, self.collective = self.collective, None
        if collective is not None:
            collective.close()


class _Carried:
    """An optimizer's state with the place in the data, as one state: what a source hands to its generation."""

    def __init__(self, optimizer: Any, training: Training) -> None:
        self._optimizer, self._training = optimizer, training

    def state_dict(self) -> dict[str, Any]:
        """For the source."""
        self._training.close_batches()
        return {"optimizer": self._optimizer.state_dict(), "data": json.dumps(self._training.data.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For the others."""
        self._optimizer.load_state_dict(state["optimizer"])
        self._training.close_batches()
        self._training.data.load_state_dict(json.loads(state["data"]))


def shared_settings(config: WorkerConfig) -> dict[str, Any]:
    """What a worker would do, for the run to agree on: what it was given, or what differs from the default."""
    defaults = {field.name: field.default for field in fields(config)}
    found = {name: getattr(config, name) for name in SHARED if getattr(config, name) != defaults[name]}
    if config.seq_len_is_given:
        found["seq_len"] = config.seq_len
    return found


def default_settings(config: WorkerConfig) -> dict[str, Any]:
    """What nobody chose, but a run has to have."""
    names = ("dataset_type", "batch_size", "num_steps", "seed")
    return {name: getattr(config, name) for name in names}


def agreed(config: WorkerConfig, told: dict[str, Any]) -> WorkerConfig:
    """The configuration with what the run agreed on in its place; settings that a worker does not have are left out."""
    found = {name: told[name] for name in SHARED if name in told}
    if found.get("dataset_name") != config.dataset_name and "dataset_type" in found:
        found["dataset_type"] = "huggingface"  # A name from elsewhere says what kind it is.
    elif found.get("dataset_type") != "huggingface":
        found["dataset_name"] = None
    return replace(config, **found)


def _identity(config: WorkerConfig) -> Identity | None:
    if config.network is None:
        return None
    try:
        from forebay.network.pki.identity import Identity
    except ImportError as error:
        raise MissingPackageError(
            f"network {config.network}: {error.name} is not installed. Run: {install_command('network')}."
        ) from error
    return Identity.load(config.network)


def _peer_lost(lockstep: bool) -> type[Exception] | tuple[type[Exception], ...]:
    if not lockstep:
        return ()
    from forebay.worker.collective import PeerLostError

    return PeerLostError
