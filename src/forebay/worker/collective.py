"""Gradients averaged over a generation's ranks by torch.distributed, for training in step.

A process group lives as long as a generation. Its ranks rendezvous through the coordinator, which keeps their addresses
for the members of the generation alone; no port is opened for that. A step's gradients, its loss and the wish to stop
are one sum: a rank either has all of it, or raises and does not apply the step. A rank that has the sum knows that
every rank contributed; so the step is done, even if another rank never learns of it.

Cost: one flat float32 copy of the gradients, summed after the backward pass and not during it. For the models that a
coordinator's workers train over ordinary networks; on one machine's GPUs DDP is faster.
"""

import contextlib
import io
import logging
import os
import re
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from forebay.errors import NetworkError, package_for
from forebay.storage.retry import log_while_waiting
from forebay.worker.membership_state import Generation
from forebay.worker.trainer import PeerLostError

with package_for("collective: training in step", ", or train apart."):
    import torch
    import torch.distributed as dist

log = logging.getLogger("forebay.worker")
WAIT_S = 1.0  # of one request for a value at the coordinator
MAX_POSITION_BYTES = 64 << 20  # of a rank's places in the data
MAX_STATE_RATIO = 8  # of an optimizer's state to the model's bytes; Adam's is 2
Meet = Callable[[int, str, bytes | None, float], bytes | None]
_GLOO_KEY = re.compile(r"//cpu//\d+/(?:rank_)?(\d+)$")  # of the address that a rank publishes


class CoordinatorStore(dist.Store):  # type: ignore[misc]
    """The key-value store of a rendezvous, kept by the coordinator for the members of a generation.

    Each rank sets its own keys only. Gloo has a key for each rank's address, in its name; all other keys are set by
    rank 0, as NCCL's id is. There is no counter or other key that several ranks change (add, compare_set, delete_key):
    no backend used here needs one.

    Args:
        meet: Sets a value under a key, or waits for one: see `Membership.meet`.
        abandon: Whether to stop waiting for a value, as another generation is requested.
    """

    def __init__(self, meet: Meet, timeout_s: float, abandon: Callable[[], bool]) -> None:
        super().__init__()
        self._meet = meet
        self._timeout_s = timeout_s
        self._abandon = abandon

    def set(self, key: str, value: str | bytes) -> None:
        self._request(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        deadline = time.monotonic() + self._timeout_s
        while (value := self._request(key, None, WAIT_S)) is None:
            if self._abandon() or time.monotonic() > deadline:
                raise RuntimeError("not all ranks joined")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        return all(self._request(key, None) is not None for key in keys)

    def _request(self, key: str, value: bytes | None, wait_s: float = 0.0) -> bytes | None:
        match = _GLOO_KEY.search(key)
        try:
            return self._meet(int(match[1]) if match else 0, key, value, wait_s)
        except NetworkError as error:
            raise RuntimeError(str(error)) from error


class Collective:
    """The process group of one generation. One at a time in a process; `close` it.

    Gradients on "cuda" use NCCL, else Gloo. A rank that is silent for `timeout_s` is lost: PeerLostError.

    Args:
        abandon: Polled while ranks are missing: whether to stop waiting, as another generation is requested.
        broken: Polled while gradients are summed: whether another rank reports that the sum cannot be completed.
    """

    def __init__(
        self, generation: Generation, meet: Meet, *, device: str, timeout_s: float,
        abandon: Callable[[], bool], broken: Callable[[], bool],
    ) -> None:  # fmt: skip
        _abandoned[:] = [(group, work) for group, work in _abandoned if not work.is_completed()]
        self._broken = broken
        self.generation = generation
        self._device = torch.device(device)
        self._open = False
        timeout = timedelta(seconds=timeout_s)
        with self._losing("met"):
            store = CoordinatorStore(meet, timeout_s, abandon)
            os.environ.setdefault("TORCH_NCCL_RANKS_PER_ROOT", "1024")  # above 128 ranks others set keys, too
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=generation.rank, world_size=generation.world_size, timeout=timeout
            )
            self._open = True
            dist.barrier()

    @contextlib.contextmanager
    def _losing(self, what: str) -> Any:
        """PeerLostError for any error of the group, which is closed, so that the other ranks' calls fail, too."""
        generation = self.generation
        others = f"generation {generation.number}, of which not all {generation.world_size} ranks have {what} yet"
        try:
            with log_while_waiting(log, lambda: others):
                yield
        except (RuntimeError, ValueError) as error:
            self.close()
            raise PeerLostError(
                f"collective: generation {generation.number}, rank {generation.rank} of {generation.world_size}: a "
                f"rank was lost as ranks {what}: {_reason(error)}. The step is not applied here."
            ) from error

    def share(self, model: Any, optimizer: Any) -> None:
        """Copy the weights, buffers and optimizer state of the generation's source to all ranks.

        The state is sent as torch.save writes it, and read with weights_only, so that it holds no code. After a
        PeerLostError this rank's are unchanged.
        """
        source = self.generation.source
        is_source = self.generation.rank == source
        data = io.BytesIO()
        if is_source:
            torch.save(optimizer.state_dict(), data)
        own = [*model.parameters(), *model.buffers()]
        with self._losing("shared weights"), torch.no_grad():
            received = [tensor.detach().clone() for tensor in own]
            for tensor in received:
                dist.broadcast(tensor, source)
            max_bytes = MAX_STATE_RATIO * sum(tensor.nbytes for tensor in own) + MAX_POSITION_BYTES
            body = self._broadcast(data.getvalue(), source, max_bytes)
            dist.barrier()
            if is_source:
                return
            try:  # before any weight is replaced
                state = torch.load(io.BytesIO(body), map_location=self._device, weights_only=True)
                optimizer.load_state_dict(state)
            except Exception as error:
                raise RuntimeError(f"the source's state cannot be read: {type(error).__name__}: {error}") from error
            for tensor, new in zip(own, received):
                tensor.copy_(new)

    def gather(self, data: bytes) -> list[bytes]:
        """The data of all ranks, in their order."""
        with self._losing("shared their places in the data"):
            return [self._broadcast(data, rank, MAX_POSITION_BYTES) for rank in range(self.generation.world_size)]

    def _broadcast(self, data: bytes, source: int, max_bytes: int) -> bytes:
        """The data of the rank `source`, at most max_bytes; that of others has no effect."""
        is_source = self.generation.rank == source
        size = torch.tensor([len(data)], dtype=torch.int64, device=self._device)
        dist.broadcast(size, source)
        if not 0 <= int(size) <= max_bytes:
            raise RuntimeError(f"rank {source} announced {int(size):,} bytes of state, more than {max_bytes:,}")
        body = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        if is_source:
            body.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(body, source)
        result: bytes = body.cpu().numpy().tobytes()
        return result

    def average(self, parameters: Iterable[Any], loss: float, *, stop: bool, weight: float) -> tuple[float, bool]:
        """Replace the gradients by their means over the ranks, the same bits on each; a missing one counts as zeros.

        `weight`: of this rank's batch; 1 where all are equally large. Returns the mean loss, and whether any rank asks
        to stop after this step. After a PeerLostError the gradients are unchanged: take no optimizer step.
        """
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        scalars = torch.tensor([loss * weight, float(stop)], device=self._device)
        flat = torch.cat([*(gradient.detach().reshape(-1).float() * weight for gradient in gradients), scalars])
        with self._losing("averaged gradients"):
            self._wait(dist.all_reduce(flat, async_op=True))
            mean, stops = (float(value) for value in flat[-2:])  # waits for the device, whose errors are raised here
        sums = flat[:-2].split([gradient.numel() for gradient in gradients])
        for parameter, gradient, total in zip(trained, gradients, sums):
            parameter.grad = (total.view_as(gradient) / self.generation.world_size).to(gradient.dtype)
        return mean / self.generation.world_size, stops > 0

    def _wait(self, work: Any) -> None:
        """Wait for a sum, but not for one that another rank reports as broken.

        In a ring only the neighbours notice a dead rank, and Gloo ends no wait before its timeout: such a sum is left
        to run in the background.
        """
        pause_s = 0.0
        while self._device.type == "cpu" and not work.is_completed():
            if self._broken():
                _abandoned.append((dist.group.WORLD, work))
                raise RuntimeError("another rank reports it")
            time.sleep(pause_s)
            pause_s = min(0.005, pause_s + 0.0001)
        work.wait()

    def close(self) -> None:
        """Leave the group at once, so that the calls of ranks that wait for this one fail. May be called twice."""
        if self._open:
            self._open = False
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group()


def _reason(error: Exception) -> str:
    """Return the first sentence; PyTorch's next ones are advice."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0])[:200].partition(". ")[0].rstrip(". ")


# Sums that no rank waits for, with their groups: freed before their timeout, they would block.
_abandoned: list[tuple[Any, Any]] = []
