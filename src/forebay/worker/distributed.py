"""Training in step with the other workers of a coordinator, by generations; no step is applied in part.

Each step: gradients of this rank's samples, their mean over all ranks, one step of the optimizer. If a peer dies in a
step, none of it was applied, and the ranks of the next generation take it again. At the start of a generation all ranks
receive the weights, the optimizer's state and the position in the data of one of them, the source.

A `count` trainer has no gradients: each worker counts on its own, and only ranks, samples and steps are shared. Such a
worker reads the lanes that it takes over from their beginning, as a position in a text may take megabytes.
"""

import json
import os
import threading
from dataclasses import fields, replace
from typing import TYPE_CHECKING, cast

from forebay.base import Json
from forebay.errors import StateError, UsageError, package_for
from forebay.load.batch import NumpyTokens
from forebay.threads import SupervisedThread
from forebay.worker.config import WorkerConfig
from forebay.worker.membership import Membership
from forebay.worker.membership_state import Generation, MembershipLostError
from forebay.worker.trainer import LockstepTrainer, PeerLostError
from forebay.worker.training import Training, TrainingReport, trainer_class

if TYPE_CHECKING:
    from forebay.network.pki.identity import Identity
    from forebay.worker.collective import Collective

SHARED = (
    "dataset_type", "dataset_name", "tokenizer_name", "batch_size", "seq_len", "num_steps", "model_size", "seed",
    "shuffle_buffer", "text_key", "learning_rate",
)  # fmt: skip
"""Settings that are the same for all workers of a run; the coordinator's replace a worker's."""
NEEDED = ("dataset_type", "batch_size", "num_steps", "seed")
STOP_S = 5.0
"""How long a worker that is stopped has for its step; then it leaves, as it may be waiting for others."""
SHARE_STEPS = 2000
"""Steps after which ranks share their places in the data: what is read again of a killed one's lanes at most."""
MAX_FAILURES = 20
"""Failures of a step in a row after which the last one is raised."""
_one_at_a_time = threading.Lock()


def train_distributed(training: Training) -> TrainingReport:
    """Train as a member of the coordinator's run to its end, or until stopped. Raises as `WorkerClient` says."""
    if not _one_at_a_time.acquire(blocking=False):
        raise UsageError("worker: expected one at a time that trains with others, got two. Use a process for each.")
    try:
        return DistributedRun(training).run()
    finally:
        _one_at_a_time.release()


class DistributedRun:
    """A worker's part of a run, generation by generation."""

    def __init__(self, training: Training) -> None:
        config = training.config
        self.training = training
        self.lockstep = hasattr(trainer_class(config.resolved_trainer()), "gradients")
        self.collective: Collective | None = None
        self.generation: Generation | None = None
        self._ended = threading.Event()
        self._holds_state = False
        self._num_failures = 0
        self.membership = Membership(
            config.coordinator or os.environ.get("FOREBAY_COORDINATOR") or "127.0.0.1:8000", config.worker_id,
            settings=shared_settings(config), identity=_load_identity(config), lockstep=self.lockstep,
            patience_s=config.timeout_s, on_note=training.log,
        )  # fmt: skip

    def run(self) -> TrainingReport:
        """Train to the end; see `train_distributed`."""
        training = self.training
        with self.membership as membership:
            SupervisedThread(self._leave_when_stopped, "leave when stopped", stopping=self._ended).start()
            try:
                settings = membership.agree()
                training.apply_config(merge_settings(training.config, settings))
                self.lockstep = hasattr(trainer_class(training.config.resolved_trainer()), "gradients")
                if self.lockstep != settings["lockstep"]:
                    raise UsageError(
                        "trainer: expected a model of all workers, or of none, got both. Give each worker of the run "
                        "the same model_size, or the same trainer."
                    )
                training.start()  # the model is made before others wait for this worker
                generation = membership.join()
                training.start()
                while training.step < training.config.num_steps and not training.stop.is_set():
                    generation = self._step(generation)
                report = training.finish()
                membership.leave(finished=report.finished)
                return report
            except MembershipLostError:
                if not training.stop.is_set():
                    raise
                return training.finish()
            finally:
                self._ended.set()
                self._leave_group()

    def _leave_when_stopped(self) -> None:
        """Leave if the worker is stopped while it waits for others; in a step, give it STOP_S to end."""
        while not self._ended.wait(0.1):
            if self.training.stop.is_set():
                if self.generation is None or not self._ended.wait(STOP_S):
                    self.membership.leave()
                return

    def _step(self, generation: Generation) -> Generation:
        training = self.training
        try:
            if self.generation is None or self.generation.number != generation.number:
                self._enter(generation)
                if training.step >= training.config.num_steps:
                    return generation  # the others have done all steps
            position = training.data.stream.position
            batch = training.next_batch()
            try:
                loss, stop = self._learn(batch)
            except PeerLostError:
                training.close_batches()
                training.data.stream.seek(position)
                raise
            self._num_failures = 0
            training.record_step(batch, loss)
            if self.collective is not None and training.step % SHARE_STEPS == 0:
                self._share_places(self.collective)
        except PeerLostError as error:
            self._num_failures += 1
            if self._num_failures > MAX_FAILURES:
                raise
            training.log(f"{error} The others go on without it; start it again, and it joins them.")
            self._leave_group()
            return self._boundary(stop=True, broken=True)
        return self._boundary(stop=stop if training.step < training.config.num_steps else False)

    def _boundary(self, *, stop: bool | None, broken: bool = False) -> Generation:
        try:
            return self.membership.boundary(self.training.step, stop=stop, broken=broken, holds=self._holds_state)
        except MembershipLostError as error:
            if self.training.stop.is_set():
                raise
            self.training.log(f"{error} Joining again.")
            self._leave_group()
            self._holds_state = False
            return self.membership.join()

    def _learn(self, batch: NumpyTokens) -> tuple[float, bool | None]:
        """The loss over all ranks, and whether they agreed to stop after this step (None: nothing was agreed)."""
        training = self.training
        if self.collective is None:
            return training.learn(training.trainer.step, batch), None
        lockstep = cast(LockstepTrainer, training.trainer)
        loss = training.learn(lambda inputs, labels: lockstep.gradients(inputs, labels)[0], batch)
        mean, stop = self.collective.average(
            lockstep.model.parameters(), loss, stop=self.membership.changing, weight=batch.weight
        )
        lockstep.apply()
        return mean, stop

    def _enter(self, generation: Generation) -> None:
        """Begin a generation: join its group, receive the source's state, read this rank's share of the data."""
        training = self.training
        membership = self.membership
        self._leave_group()
        step = training.step
        training.report.step = generation.start_step
        is_source = generation.rank == generation.source
        self._holds_state = is_source or (self._holds_state and step == generation.start_step)
        training.set_rank(generation.rank, generation.world_size, generation.start_sample)
        if self.lockstep:
            from forebay.worker.collective import Collective

            trainer = cast(LockstepTrainer, training.trainer)
            self.collective = Collective(
                generation, membership.meet, device=trainer.device.partition(":")[0],
                timeout_s=training.config.timeout_s, abandon=lambda: membership.changing,
                broken=lambda: membership.broken,
            )  # fmt: skip
            self.collective.share(trainer.model, trainer.optimizer)
            self._share_places(self.collective)
            self._holds_state = True
        for part, _ in enumerate(training.data.stream.read_on()):
            if training.stop.is_set():
                raise MembershipLostError(f"worker {membership.worker_id!r}: stopped while it read on.")
            if not part:
                training.log(f"reading again the text of this rank up to step {generation.start_step}")
        training.report.generations += self.generation is not None
        self.generation = generation

    def _share_places(self, collective: "Collective") -> None:
        """Have all ranks know where each is in its lanes, so that who reads these next need not read them again."""
        stream = self.training.data.stream
        for data in collective.gather(json.dumps(stream.state_dict()).encode()):
            try:
                stream.learn(json.loads(data))
            except (ValueError, StateError) as error:
                self.training.log(f"a rank's place in the data is not used: {error}")

    def _leave_group(self) -> None:
        collective = self.collective
        self.collective = None
        if collective is not None:
            collective.close()


def shared_settings(config: WorkerConfig) -> Json:
    """The settings for the run to agree on: those that it must have, and those that differ from the default."""
    defaults = {field.name: field.default for field in fields(config)} | dict.fromkeys(NEEDED)
    settings = {name: getattr(config, name) for name in SHARED if getattr(config, name) != defaults[name]}
    model = {"model_size": config.model_size or "tiny"} if config.resolved_trainer() == "gpt" else {}
    return settings | model | ({"seq_len": config.seq_len} if config.seq_len_is_given else {})


def merge_settings(config: WorkerConfig, settings: Json) -> WorkerConfig:
    """The configuration with the run's settings; those that a worker does not have are left out."""
    changes = {name: settings[name] for name in SHARED if name in settings}
    if changes.get("dataset_name") != config.dataset_name and "dataset_type" in changes:
        changes["dataset_type"] = "huggingface"  # A name that is not this worker's decides the type.
    elif changes.get("dataset_type") != "huggingface":
        changes["dataset_name"] = None
    return replace(config, **changes)


def _load_identity(config: WorkerConfig) -> "Identity | None":
    if config.identity is None:
        return None
    with package_for(f"identity {config.identity}: the network"):
        from forebay.network.pki.identity import Identity
    return Identity.load(config.identity)
