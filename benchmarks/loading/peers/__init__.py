"""One module a peer, each used as its own documentation says; it runs in its own interpreter (see `..fleet`).

What a module offers:
    LABEL: str                     how tables name it
    DETAIL: str                    what its use leaves out or adds, for the tables; may be empty
    DATA: str                      the folder of its format, below the corpus; several modules may share one
    versions() -> str
    write(corpus, folder) -> None  the corpus in its format
    open_feed(folder, ask) -> feed
A feed is iterated for the (rest of the) epoch, and again for the next one; `rows(batch)` are its samples' tokens as
integers [B, >= 4]; `cast(batch)` is what has to be done so that all tokens are int64. `state()` and `load(state)` are
there if the peer has a state; `ELASTIC` says in its own words that it may be loaded on another world size, of rank 0's
or of what `merge(states)` makes of all ranks'.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

NAMES = (
    "bare", "bare_take", "forebay", "megatron", "nanogpt", "grain", "mosaic", "litdata", "hf_map", "hf_stream",
    "webdataset", "lancedb", "energon",
)  # fmt: skip


YARDSTICKS = ("bare", "bare_take")
"""No loaders: they have no helper processes, no state and one order."""


@dataclass(frozen=True)
class Ask:
    """How a feed is opened: `batch` samples a rank, `workers` helper processes; endless: never the end of an epoch."""

    batch: int = 8
    rank: int = 0
    world: int = 1
    workers: int = 0
    seed: int = 1
    endless: bool = False


def find(name: str) -> ModuleType:
    """The peer's module. Its library is imported by what it offers, not by this."""
    return importlib.import_module(f"{__name__}.peer_{name}")


def torch_env(ask: Ask) -> None:
    """Join the ranks as torchrun does, for peers that ask torch.distributed for their rank."""
    import torch.distributed as dist

    if ask.world > 1 and not dist.is_initialized():
        dist.init_process_group("gloo", rank=ask.rank, world_size=ask.world)
