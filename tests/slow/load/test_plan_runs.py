"""Plans against real runs: a loader reads a web server whose rate is limited, and a step sleeps."""

import time

import numpy as np
import pytest

from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.load.loader import Loader
from forebay.observe.plan import DatasetSpec, RunSpec, make_plan
from support.calibration import slowness
from support.origin_server import OriginServer

SEQ_LEN, BATCH = 2048, 32


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    """33 MB in two slices, so that their chunks are of 64 KiB."""
    folder = tmp_path_factory.mktemp("planned")
    chance = np.random.default_rng(1)
    for index in range(2):
        tokens = chance.integers(0, 60_000, 4096 * SEQ_LEN + index).astype(np.uint16)
        write_token_slice(folder / f"{index:03d}.safetensors", tokens, np.array([len(tokens)], np.uint64))
    return import_slices(folder, "planned")


@pytest.mark.parametrize(
    "rate, step_s, epochs",
    [
        pytest.param(7e6, 0.012, 1, id="training waits"),
        pytest.param(10e6, 0.004, 2, id="the second epoch is in the cache"),
    ],
)
def test_a_run_takes_what_its_plan_says(dataset, tmp_path, rate, step_s, epochs):
    """Within 20 %, on a machine whose processors are not what limits the run: a busy one runs it more slowly.

    A step counts as long as it really took.
    """
    table = dataset.table
    total = int(table.bytes.sum())

    def plan(rate, real_step_s):
        dataset_spec = DatasetSpec(table.bytes, table.count // SEQ_LEN, table.chunk_bytes)
        spec = RunSpec(
            [dataset_spec], BATCH, SEQ_LEN, cache_bytes=2 * total, bandwidth=rate, step_s=real_step_s, epochs=epochs,
        )  # fmt: skip
        return make_plan(spec)

    ratios = {}
    for turn in range(5):
        slower = slowness() * 1.5**turn
        with OriginServer(dataset.path) as server:
            server.faults.bytes_per_s = rate / slower
            loader = Loader(
                server.url, seq_len=SEQ_LEN, global_batch_size=BATCH, rank=0, world_size=1, epochs=epochs,
                cache_dir=tmp_path / f"cache-{turn}", cache_bytes=2 * total,
            )  # fmt: skip
            with loader:
                started = time.perf_counter()
                for _ in loader:
                    time.sleep(step_s * slower)
                finish_s, stats = time.perf_counter() - started, loader.stats()
        planned = plan(rate / slower, stats["busy_s"] / stats["batches"])
        assert planned.ok
        ratios = {
            "finish": finish_s / planned.finish_s,
            "fetched": stats["fetched_bytes"] / planned.fetched_bytes,
            "cached": stats["cached_bytes"] / planned.peak_disk_bytes,
            "training share": (1 - stats["wait_s"] / finish_s) / (1 - planned.wait_share),
        }
        print(
            f"{slower:.2f} times slower, measured over planned",
            {name: round(ratio, 3) for name, ratio in ratios.items()},
        )
        if all(0.8 <= ratio <= 1.2 for ratio in ratios.values()):
            return
    raise AssertionError(f"expected what the plan says within 20 %, got {ratios}")
