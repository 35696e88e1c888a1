"""First batches of the peers that can read from a remote origin, each as its documentation says; in their interpreters.

Their formats are those of `benchmarks.loading.peers`, with shards of the same size, uncompressed. Nothing is kept
from an earlier run. Helper processes: none, as for ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.loading.corpus import SEQ_LEN
from benchmarks.loading.peers import Ask, find, torch_env

NAMES = ("mosaic", "litdata", "webdataset")
NOTES = {
    "mosaic": "s3 by boto3",
    "litdata": "s3 by obstore",
    "webdataset": "http by curl; it reads a tar from its start on, and mixes a buffer of 100 at first",
}


def _mosaic(what: dict[str, Any], ask: Ask) -> Callable[[], Iterator[Any]]:
    streaming = find("mosaic")._import()

    def batches() -> Iterator[Any]:
        torch_env(ask)
        dataset = streaming.StreamingDataset(
            remote=f"s3://bucket/{what['prefix']}", local=what["cache"], shuffle=True, shuffle_seed=ask.seed,
            batch_size=ask.batch, num_canonical_nodes=1,
        )  # fmt: skip
        return iter(streaming.StreamingDataLoader(dataset, batch_size=ask.batch, num_workers=0))

    return batches


def _litdata(what: dict[str, Any], ask: Ask) -> Callable[[], Iterator[Any]]:
    from litdata import StreamingDataLoader, StreamingDataset, TokensLoader
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # Its bucket's client speaks https alone.

    def batches() -> Iterator[Any]:
        torch_env(ask)
        dataset = StreamingDataset(
            f"s3://bucket/{what['prefix']}", item_loader=TokensLoader(block_size=SEQ_LEN + 1), shuffle=True,
            drop_last=ask.world > 1, seed=ask.seed, cache_dir=what["cache"],
            storage_options={"endpoint_url": os.environ["AWS_ENDPOINT_URL"]},
        )  # fmt: skip
        return iter(StreamingDataLoader(dataset, batch_size=ask.batch, num_workers=0))

    return batches


def _webdataset(what: dict[str, Any], ask: Ask) -> Callable[[], Iterator[Any]]:
    import numpy as np
    import webdataset

    peer = find("webdataset")

    def batches() -> Iterator[Any]:
        torch_env(ask)
        shards = [f"{what['http']}/{what['prefix']}/{name}" for name in what["names"]]
        samples = webdataset.WebDataset(
            shards, shardshuffle=len(shards), seed=ask.seed,
            nodesplitter=webdataset.split_by_node if ask.world > 1 else webdataset.single_node_only,
        ).shuffle(1000)  # fmt: skip
        return iter(samples.map(peer.to_tokens).batched(ask.batch, collation_fn=np.stack))

    return batches


def open_task(what: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Import what the peer needs; then what opens it and takes a batch."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    ask = Ask(batch=what["batch"], rank=int(os.environ.get("RANK", "0")), world=world)
    openers = {"mosaic": _mosaic, "litdata": _litdata, "webdataset": _webdataset}
    batches = openers[what["peer"]](what, ask)

    def first(_: dict[str, Any]) -> dict[str, Any]:
        began = time.perf_counter()
        batch = next(batches())
        took = time.perf_counter() - began
        return {"first_s": took, "rows": len(batch["tokens"] if isinstance(batch, dict) else batch)}

    return first
