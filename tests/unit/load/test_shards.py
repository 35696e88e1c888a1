"""Shared shards that are fetched, swapped, kept, used in place and refused, of a web server or a directory."""

import asyncio
import contextlib
import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.cli import main
from forebay.errors import DatasetError, IntegrityError, NetworkError, UsageError
from forebay.load.shard_cache import ShardCache
from forebay.load.shards import SharedShardedDatasetManager
from forebay.order.shard_windows import receipt, window_sample_ids
from support.origin_server import ACCESS_KEY, BUCKET, SECRET_KEY, OriginServer
from support.shard_buckets import (
    HEADER_BYTES,
    PREFIX,
    SAMPLES,
    SETTINGS,
    SHARDS,
    TOKEN_BYTES,
    L,
    await_shard,
    complete_shards,
    file_names,
    read_chunks,
    sent_bytes,
    shard_tokens,
    write_bucket,
)
from support.store import stored
from support.waiting import until

MOST_HEADERS = 1000  # bytes sent for the headers of a shard, and for its sizes


@pytest.fixture
def bucket() -> Path:
    return stored(write_bucket) / PREFIX


@pytest.fixture
def own_bucket(bucket, tmp_path) -> Path:
    """A copy that may be damaged."""
    return shutil.copytree(bucket, tmp_path / "own")


@pytest.fixture
def server() -> Iterator[OriginServer]:
    with OriginServer(stored(write_bucket)) as server:
        yield server


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


def open_shards(source: Path | OriginServer, folder: Path, **settings: Any) -> SharedShardedDatasetManager:
    url = f"{source.url}/{PREFIX}" if isinstance(source, OriginServer) else source
    return SharedShardedDatasetManager(**{**SETTINGS, "url": url, "folder": folder, **settings})


def sample(index: int, number: int) -> list[int]:
    return shard_tokens(index)[number * L : (number + 1) * L].tolist()


def test_shards_cycle_and_swap_at_their_step(server, folder):
    """Two passes: order of shards, samples, disk."""
    trace, max_chunks = [], 0
    with open_shards(server, folder) as shards:
        assert shards.num_shards == SHARDS
        for batch in shards.batches(0, 2 * 3 * SHARDS, batch_size=8):
            index = int(batch.dataset_index[0])
            trace.append(index)
            rows = shard_tokens(index).reshape(-1, L)[batch.sample_ids]
            assert (batch.inputs == rows).all() and (batch.labels[:, :-1] == rows[:, 1:]).all()
            assert (batch.labels[:, -1] == -100).all()
            if batch.step % 3 == 2:
                await_shard(shards.upcoming_dataset)
            chunks = read_chunks(folder)
            max_chunks = max(max_chunks, len([name for name in chunks if name.startswith("tokens")]))
            assert {int(name[-1]) for name in chunks if "nothing" not in name} <= {index, (index + 1) % SHARDS}
        stats = shards.stats()
    assert trace == [i for _ in range(2) for i in range(SHARDS) for _ in range(3)]
    assert max_chunks == 2 and stats["swaps"] == 2 * SHARDS - 1
    assert all(sent_bytes(server, index) >= 2 * TOKEN_BYTES for index in range(SHARDS))  # each fetched anew


def test_kept_shards_are_fetched_once_by_all_ranks_of_a_machine(server, folder):
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(open_shards(server, folder, keep_shards=True, rank=rank, world_size=2))
            for rank in range(2)
        ]
        for batches in zip(*(rank.batches(0, 6 * SHARDS, batch_size=16) for rank in ranks), strict=True):
            assert len({index for batch in batches for index in batch.dataset_index.tolist()}) == 1
            assert len({number for batch in batches for number in batch.sample_ids.tolist()}) == 16
        with pytest.raises(UsageError, match="expected a multiple of 2 ranks, got batch_size=7"):
            next(ranks[0].batches(batch_size=7))
    assert complete_shards(folder) == list(range(SHARDS))
    assert all(TOKEN_BYTES <= sent_bytes(server, index) < TOKEN_BYTES + MOST_HEADERS for index in range(SHARDS))


def test_a_jump_to_another_step_leaves_nothing_behind(bucket, folder):
    with open_shards(bucket, folder, reset_step=10) as shards:
        for step, expected in ((0, 0), (7, 2), (9, 3), (10, 0), (5, 1)):
            assert shards.at_step(step).index == expected
            await_shard(shards.upcoming_dataset)
            assert complete_shards(folder) == sorted({expected, shards.upcoming_dataset.index})
            assert len(read_chunks(folder)) == 4


def test_as_the_guides_own_code_calls_it(server, tmp_path, monkeypatch):
    for name, value in environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    async def train():
        manager = SharedShardedDatasetManager(L, 0, 1, None, num_shards=SHARDS)
        await manager.initialize_datasets(2)
        assert manager.active_dataset[7].tolist() == sample(2, 7)
        for expected in (3, 0):
            await manager.swap_datasets()
            assert manager.active_dataset.index == manager.shard_index == expected
            assert (expected - 1) % SHARDS not in complete_shards(tmp_path / PREFIX)
        manager.close()

    asyncio.run(train())


def test_training_begins_with_the_first_shard_and_waits_for_a_late_one_at_the_swap(bucket, folder, monkeypatch, caplog):
    is_open, obtain = threading.Event(), ShardCache.obtain

    def obtain_later(cache, index, *args):
        if index:
            is_open.wait()
        return obtain(cache, index, *args)

    def open_when_waited_for():
        until(lambda: "waiting for shard 1: " in caplog.text)
        is_open.set()

    monkeypatch.setattr(ShardCache, "obtain", obtain_later)
    monkeypatch.setattr("forebay.storage.retry.FIRST_S", 0.0)
    opener = threading.Thread(target=open_when_waited_for)
    try:
        with open_shards(bucket, folder) as shards:
            steps = shards.batches(0, 9, batch_size=8)
            assert [next(steps).step for _ in range(3)] == [0, 1, 2] and complete_shards(folder) == [0]
            opener.start()
            assert next(steps).step == 3
            stats = shards.stats()
            assert stats["late_swaps"] == 1 and stats["stall_s"] > 0 and "s late" in caplog.text
            await_shard(shards.upcoming_dataset)
            assert complete_shards(folder) == [1, 2]
            assert [next(steps).step for _ in range(4)] == [4, 5, 6, 7]
            assert shards.stats()["late_swaps"] == 1 and shards.stats()["swaps"] == 2
    finally:
        is_open.set()
        opener.join()


def environment(server: OriginServer) -> dict[str, str]:
    return {
        "R2_DATASET_ENDPOINT": server.url,
        "R2_DATASET_ACCOUNT_ID": "account",
        "R2_DATASET_BUCKET_NAME": BUCKET,
        "R2_DATASET_READ_ACCESS_KEY_ID": ACCESS_KEY,
        "R2_DATASET_READ_SECRET_ACCESS_KEY": SECRET_KEY,
        "DATASET_BINS_PATH": f"{PREFIX}/",
    }


def test_variables_of_a_bucket_come_from_the_environment_or_a_file_and_no_secret_is_shown(
    server, tmp_path, monkeypatch, caplog
):
    caplog.set_level("DEBUG")
    monkeypatch.chdir(tmp_path)
    variables, path, wrong_secret = environment(server), tmp_path / "run.env", "a-secret-of-none"
    for name in variables:
        monkeypatch.setenv(name, "")  # Restored afterwards.

    def use(text, **settings):
        path.write_text(text)
        for name in variables:
            monkeypatch.delenv(name, raising=False)
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        with SharedShardedDatasetManager(**SETTINGS, env_file=path) as shards:
            assert SECRET_KEY not in repr(shards.stats())
            return shards.at_step(3)[7].tolist()

    lines = [f'{name}="{value}"' if "KEY" in name else f"export {name} = {value}" for name, value in variables.items()]
    text = "\n".join(["# of the run", "", "HF_TOKEN=another # of others", *lines])
    assert use(text) == sample(1, 7) == use("", **variables)
    with pytest.raises(DatasetError, match="credentials"):
        use(text, R2_DATASET_READ_SECRET_ACCESS_KEY=wrong_secret, DATASET_BINS_PATH="remote/tokenized")
    for wrong, match in (
        (f"R2_DATASET_READ_SECRET_KEY={wrong_secret}", r"run.env:13: .* got R2_DATASET_READ_SECRET_KEY\."),
        (f"R2_DATASET_READ_SECRET_ACCESS_KEY {wrong_secret}", "run.env:13: expected KEY=VALUE"),
        (f"R2_DATASET_READ_SECRET_ACCESS_KEY={wrong_secret} x", "run.env:13: expected KEY=VALUE"),
    ):
        with pytest.raises(UsageError, match=match) as caught:
            use(f"{text}\n\n\n\n{wrong}")
        assert wrong_secret not in str(caught.value) and wrong_secret not in repr(caught.value.__cause__)
    with pytest.raises(UsageError, match=r"none\.env: cannot be read"):
        SharedShardedDatasetManager(**SETTINGS, env_file=tmp_path / "none.env")
    assert SECRET_KEY not in caplog.text and wrong_secret not in caplog.text


def test_an_origin_that_stays_away_is_named(server, folder):
    server.faults.drop = 1.0
    with (
        open_shards(server, folder, timeout_s=0.5, num_shards=SHARDS) as shards,
        pytest.raises(NetworkError, match=rf"from {server.url}/{PREFIX}: no answer after \d+ attempts in"),
    ):
        shards.at_step(0)


def test_too_small_a_disk_is_refused_before_the_first_byte(server, folder, monkeypatch):
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1_000_000))
    for settings, match in (
        ({}, r"room for 3 shards of .* got 1000000 bytes .* Nothing was fetched"),
        ({"keep_shards": True}, "room for 4"),
    ):
        with open_shards(server, folder, **settings) as shards, pytest.raises(UsageError, match=match):
            shards.at_step(0)
    assert sum(server.bytes_sent.values()) < MOST_HEADERS and read_chunks(folder) == {}


def test_shards_in_their_place_are_used_there_and_stay(own_bucket):
    """Also by several ranks."""
    with open_shards(own_bucket, own_bucket) as first, open_shards(own_bucket, own_bucket) as second:
        for shards in (first, second):
            assert [batch.dataset_index[0] for batch in shards.batches(0, 6, batch_size=8)] == [0, 0, 0, 1, 1, 1]
            await_shard(shards.upcoming_dataset)
    assert {name for index in range(SHARDS) for name in file_names(index)} <= {p.name for p in own_bucket.iterdir()}
    assert not list(own_bucket.glob(".*.tmp")) and len(list(own_bucket.glob(".train_*.map"))) == 3  # One is upcoming.


def test_wrong_origins_and_arguments_are_refused_and_small_machines_warned_of(own_bucket, folder, monkeypatch, caplog):
    def read_indexes(*steps, **settings):
        with open_shards(own_bucket, folder, **settings) as shards:
            return [shards.at_step(step).index for step in steps]

    with pytest.raises(DatasetError, match="expected 128000 tokens, 64 for each"):
        read_indexes(0, sequence_length=64)
    with pytest.raises(DatasetError, match=r"train_000004\.npy"):
        read_indexes(9, 12, num_shards=9)
    for wrong in ({"remap": {1: -1}}, {"rank": 1}, {"sequence_length": 0}):
        with pytest.raises(UsageError, match=f"{next(iter(wrong))}="):
            read_indexes(0, **wrong)
    assert read_indexes(0, 3, 6, remap={1: 0}) == [0, 0, 2]
    assert read_indexes(10**15) == [10**15 // 3 % SHARDS]
    caplog.clear()
    usage = shutil.disk_usage
    monkeypatch.setattr("forebay.load.shards.COMMON_MEM_BYTES", 1 << 60)
    monkeypatch.setattr("forebay.load.shard_cache._MIN_RATED_S", 0.0)
    monkeypatch.setattr("forebay.load.shard_cache.COMMON_BYTES_PER_S", 1e15)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1_700_000))
    shutil.rmtree(folder)
    assert read_indexes(0) == [0]
    for words in ("disk: room for 1.7 MB in", "memory: ", "runs like this have 1 Gb/s or more"):
        assert words in caplog.text, caplog.text
    caplog.clear()
    shutil.copy(own_bucket / "sample_ids_000002.bin", own_bucket / "sample_ids_000001.bin")
    with pytest.raises(IntegrityError, match=r"shard 1: .* got (\d+) of \1 checked that have not"):
        read_indexes(0, 3)
    assert caplog.text.count("sent wrong bytes") <= 3 * 8  # three rounds, each of one chunk of a connection
    (own_bucket / "sample_ids_000001.bin").unlink()
    with pytest.raises(DatasetError, match=r"sample_ids_000001\.bin"):
        read_indexes(0, 3)


def test_a_validator_finds_the_samples_that_a_miner_read(own_bucket):
    with open_shards(own_bucket, own_bucket) as miner, open_shards(own_bucket, own_bucket) as validator:
        mined = []
        for batch in miner.batches(4, 6, batch_size=8):
            mined.append(miner.active_dataset.sample_ids[batch.sample_ids])
        data = validator.at_step(4)
        places = [window_sample_ids(0, step, len(data), 1, 8, mode="forebay", first_window=3) for step in (4, 5)]
        assert receipt(data.sample_ids[np.concatenate(places)]) == receipt(np.concatenate(mined))


@pytest.mark.parametrize("scheme", ["http", "s3", "r2"])
def test_a_plan_of_shards_agrees_with_the_server(scheme, server, folder, monkeypatch, capsys):
    for name, value in (environment(server) | server.s3_environment).items():
        monkeypatch.setenv(name, value)
    url = {"http": f"{server.url}/{PREFIX}", "s3": f"s3://{BUCKET}/{PREFIX}", "r2": "r2://"}[scheme]
    assert main(["plan", "--shards", url, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    server.reset()
    with SharedShardedDatasetManager(L, url=url, folder=folder, steps_per_shard=1) as shards:
        for step in range(SHARDS - 1):
            shards.at_step(step)
        await_shard(shards.upcoming_dataset)
    assert (plan["shards"], plan["shard_bytes"]) == (SHARDS, TOKEN_BYTES + HEADER_BYTES + 8 * SAMPLES)
    assert plan["requests"] == pytest.approx(server.requests.total(), rel=0.2)
    assert plan["fetched_bytes"] == pytest.approx(server.bytes_sent.total(), rel=0.2)
