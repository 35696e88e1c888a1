"""Steps taken together: gradients averaged over a generation's ranks, by torch.distributed.

A group lives as long as a generation. Its ranks find each other by the coordinator, which keeps their addresses for the
members of the generation alone; nothing listens for that. A step's gradients, its loss and whether
somebody wants to stop travel in one sum: either a rank has all of it, or it raises and the step is not applied.
A rank that has it knows that every rank gave its part; so the step is finished, even if others never learn.

What it costs: one flat float32 copy of the gradients, summed after the backward pass and not during it. Right for the
models that a coordinator's workers train over ordinary networks; one machine's GPUs are better served by DDP.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from forebay.errors import NetworkError, UsageError, install_command
from forebay.worker.membership import Generation

if importlib.util.find_spec("torch") is None:
    raise UsageError(f"collective: PyTorch is not installed. Run: {install_command('torch')}, or train apart.")

import torch
import torch.distributed as dist

WAIT_S = 1.0  # how long the coordinator may wait for a value before it is asked again
MAX_PLACE_BYTES = 64 << 20  # of the place in the data, which travels with it
MAX_STATE_RATIO = 8  # of an optimizer's state to the model's bytes; Adam's is 2
Meet = Callable[[str, bytes | None, float], bytes | None]


class PeerLostError(NetworkError):
    """A rank did not come or did not answer: the step under way was not applied here."""


class MeetingStore(dist.Store):  # type: ignore[misc]
    """Where the ranks of a generation find each other: values that the coordinator keeps for its members alone.

    `meet` sets a value under a key, or waits for one: see `Membership.meet`. `abandon` is asked while a value is
    missing: whether to stop waiting, as another generation is wanted.
    """

    def __init__(self, meet: Meet, timeout_s: float, abandon: Callable[[], bool]) -> None:
        super().__init__()
        self._meet, self._timeout_s, self._abandon = meet, timeout_s, abandon

    def set(self, key: str, value: str | bytes) -> None:
        """See torch.distributed.Store."""
        self._ask(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """See torch.distributed.Store."""
        deadline = time.monotonic() + self._timeout_s
        while (value := self._ask(key, None)) is None:
            if self._abandon() or time.monotonic() > deadline:
                raise RuntimeError("not all ranks came")
        return value

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """See torch.distributed.Store."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """See torch.distributed.Store."""
        return all(self._meet(key, None, 0.0) is not None for key in keys)

    def _ask(self, key: str, value: bytes | None) -> bytes | None:
        try:
            return self._meet(key, value, WAIT_S if value is None else 0.0)
        except NetworkError as error:
            raise RuntimeError(str(error)) from error


class Collective:
    """The ranks of one generation as a group. One at a time in a process; `close` it, or use it in a `with`.

    Gradients on "cuda" use NCCL, else Gloo. A rank that is silent for `timeout_s` counts as lost: PeerLostError.
    `abandon` is asked while ranks are missing: whether to stop waiting, as another generation is wanted; `broken` while
    gradients are summed: whether another rank says that this cannot end.
    """

    def __init__(
        self,
        generation: Generation,
        meet: Meet,
        *,
        device: str = "cpu",
        timeout_s: float = 60.0,
        abandon: Callable[[], bool] = lambda: False,
        broken: Callable[[], bool] = lambda: False,
    ) -> None:
        _left_behind[:] = [(group, work) for group, work in _left_behind if not work.is_completed()]
        self._broken = broken
        self.generation = generation
        self._device = torch.device(device)
        self._open = False
        timeout = timedelta(seconds=timeout_s)
        with self._losing("met"):
            store = MeetingStore(meet, timeout_s, abandon)
            backend = "nccl" if self._device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=store, rank=generation.rank, world_size=generation.world_size, timeout=timeout
            )
            self._open = True
            dist.barrier()

    @contextlib.contextmanager
    def _losing(self, what: str) -> Any:
        """Whatever the group raises says that a rank is lost; then the group is gone, so that others hear it, too."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self.close()
            generation = self.generation
            raise PeerLostError(
                f"collective: generation {generation.number}, rank {generation.rank} of {generation.world_size}: "
                f"a rank was lost as ranks {what}: {_words(error)}. "
                "Go on at the next boundary with broken=True."
            ) from error

    def share(self, model: Any, optimizer: Any) -> None:
        """All ranks take the weights, buffers and optimizer state of the generation's source.

        The state travels as torch.save writes it, and is read with weights_only: no code comes along. On a
        PeerLostError this rank has what it had.
        """
        source, is_source = self.generation.source, self.generation.rank == self.generation.source
        data = io.BytesIO()
        if is_source:
            torch.save(optimizer.state_dict(), data)
        ours = [*model.parameters(), *model.buffers()]
        size = torch.tensor([len(data.getvalue())], dtype=torch.int64, device=self._device)
        with self._losing("shared weights"), torch.no_grad():
            theirs = [tensor.detach().clone() for tensor in ours]
            for tensor in theirs:
                dist.broadcast(tensor, source)
            dist.broadcast(size, source)
            most = MAX_STATE_RATIO * sum(tensor.nbytes for tensor in ours) + MAX_PLACE_BYTES
            if not 0 <= int(size) <= most:
                raise RuntimeError(f"the source says {int(size):,} bytes of state, more than {most:,}")
            body = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            if is_source:
                body.copy_(torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8))
            dist.broadcast(body, source)
            dist.barrier()
        if is_source:
            return
        with self._losing("shared weights"):
            try:  # before anything of ours is replaced
                state = torch.load(
                    io.BytesIO(body.cpu().numpy().tobytes()), map_location=self._device, weights_only=True
                )
                optimizer.load_state_dict(state)
            except Exception as error:
                raise RuntimeError(f"the source's state cannot be read: {type(error).__name__}: {error}") from error
        with torch.no_grad():
            for mine, new in zip(ours, theirs):
                mine.copy_(new)

    def average(self, parameters: Iterable[Any], loss: float, *, stop: bool = False) -> tuple[float, bool]:
        """The gradients become their means over the ranks, the same bits on each; a missing one counts as zeros.

        Returns the mean loss, and whether any rank wants to stop after this step. On a PeerLostError the gradients are
        as they were: take no optimizer step.
        """
        held = [parameter for parameter in parameters if parameter.requires_grad]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in held]
        said = torch.tensor([loss, float(stop)], device=self._device)
        flat = torch.cat([part.detach().reshape(-1).float() for part in parts] + [said])
        with self._losing("averaged gradients"):
            self._finish(dist.all_reduce(flat, async_op=True))
            mean, stops = (float(value) for value in flat[-2:])  # waits for the device: an error shows here
        at = 0
        for parameter, part in zip(held, parts):
            mine = flat[at : at + part.numel()].view_as(part) / self.generation.world_size
            parameter.grad = mine.to(part.dtype)
            at += part.numel()
        return mean / self.generation.world_size, stops > 0

    def _finish(self, work: Any) -> None:
        """Waits for a sum, but not for one that another rank gave up.

        A ring shows a death to the neighbours only, and Gloo ends no wait before its time: such a sum is left behind.
        """
        pause_s = 0.0
        while self._device.type == "cpu" and not work.is_completed():
            if self._broken():
                _left_behind.append((dist.group.WORLD, work))
                raise RuntimeError("another rank lost one")
            time.sleep(pause_s)
            pause_s = min(0.005, pause_s + 0.0001)
        work.wait()

    def close(self) -> None:
        """Leaves the group at once; ranks that wait for this one hear of it. May be called twice."""
        if self._open:
            self._open = False
            with contextlib.suppress(RuntimeError, ValueError):
                dist.destroy_process_group()

    def __enter__(self) -> Collective:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _words(error: Exception) -> str:
    """What a group says, without the place in its source."""
    return re.sub(r"^\[\S+:\d+\] ", "", str(error).splitlines()[0])[:200].rstrip(". ")


# Sums that nobody waits for any more, with their groups: let go before their time they would block.
_left_behind: list[tuple[Any, Any]] = []
