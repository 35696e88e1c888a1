"""Plans: arithmetic that others published, a model against a simulation, and figures against a loader that runs."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cli import main
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_token_slice
from forebay.errors import UsageError
from forebay.load.loader import Loader
from forebay.load.options import OrderOptions
from forebay.load.resources import RunSpec
from forebay.load.sources import open_dataset
from forebay.observe.plan import Fetches, bandwidth_needed, fetches_of, format_plan, make_plan, times_of
from forebay.order.windows import Spans
from forebay.units import format_bytes, format_seconds, parse_rate
from support.origin_server import OriginServer

GB = 10**9


def job(num_slices: int = 10, size: int = 200 * GB, seq_len: int = 2048, batch: int = 512, **given) -> RunSpec:
    sizes = np.full(num_slices, size)
    return RunSpec(sizes, sizes // 2 // seq_len, batch, seq_len, **given)


# --- figures that were published


def test_a_slice_of_215_gb_in_20_minutes_needs_179_mb_a_second() -> None:
    # A lane of windows of one slice; a slice lasts as long as 20 minutes of training.
    steps = 215 * GB // 2 // 2048 // 512
    plan = make_plan(job(size=215 * GB, lanes=1, window=215 * GB // 2 // 2048, step_s=1200 / steps, bandwidth=125e6))
    assert plan.slice_fetch_s == pytest.approx(1720, abs=1)  # 28.7 minutes at 1 Gb/s
    assert format_seconds(plan.slice_fetch_s) == "28.7 min"
    assert plan.needed_bandwidth == pytest.approx(179.2e6, rel=0.01)
    assert plan.needed_bandwidth * 8 / 1e9 == pytest.approx(1.43, abs=0.02)
    # At 1 Gb/s training waits for what is missing: 520 s for each slice but the first.
    assert plan.times is not None
    assert plan.times.stall_s == pytest.approx(9 * (1720 - 1200), rel=0.05)
    assert any("training waits" in text for text in plan.warnings)


def test_two_terabytes_need_two_or_three_slices_of_disk() -> None:
    plan = make_plan(job())
    assert plan.ok and 400 * GB <= plan.peak_disk_bytes <= 600.1 * GB
    assert (plan.disk.open_slices, plan.disk.next_slices) == (2, 3)
    assert make_plan(job(cache_bytes=450 * GB)).ok
    for too_small in ({"cache_bytes": 300 * GB}, {"volume_bytes": 250 * GB}):
        plan = make_plan(job(**too_small))
        assert not plan.ok and "expected at least 400000190736 bytes" in plan.refused[0]


def test_ranges_of_2_gib_of_a_slice_are_101() -> None:
    assert make_plan(job(size=215 * GB, piece_bytes=2 << 30)).to_json()["requests_per_slice"] == 101


# --- refusals and warnings


def test_lanes_that_do_not_fit_are_refused_and_some_that_do_are_named() -> None:
    plan = make_plan(job(lanes=8, cache_bytes=700 * GB))
    assert not plan.ok and "lanes=8" in plan.refused[0]
    assert any(text.startswith("lanes=1, window=") for text in plan.advice)
    usual = make_plan(job(100, 20 * GB, cache_bytes=200 * GB))
    assert usual.ok and usual.lanes == 1 and "Pass these to the Loader" in usual.warnings[0]


def test_a_cache_in_memory_needs_memory() -> None:
    full = make_plan(job(whole_in_memory=True, volume_bytes=2500 * GB, mem_bytes=64 * GB, cache_bytes=2001 * GB))
    assert not full.ok and "cache_dir='ram'" in full.refused[-1] and full.to_json()["fits_memory"] is False
    assert make_plan(job(2, GB, whole_in_memory=True, mem_bytes=64 * GB)).ok


def test_a_volume_smaller_than_the_cache_is_refused() -> None:
    plan = make_plan(job(cache_bytes=900 * GB, volume_bytes=850 * GB, lanes=1))
    assert not plan.ok and plan.refused[0].startswith("disk: expected space for the cache")


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({"bandwidth": 60e6}, "1 Gb/s or more"),
        ({"volume_bytes": 500 * GB}, "disk: 500 GB"),
        ({"mem_bytes": 2 * GB}, "4 GB or more"),
        ({"mem_bytes": 110 << 20}, "the loader takes"),
    ],
)
def test_what_is_below_what_such_runs_have_is_said(given: dict, warned: str) -> None:
    assert not any(warned in text for text in make_plan(job()).warnings)
    assert any(warned in text for text in make_plan(job(**given)).warnings)


def test_a_batch_that_cannot_be_is_refused() -> None:
    plan = make_plan(job(mem_bytes=64 << 20))
    assert "not even a batch of one sample fits" in plan.refused[0] and not any("batch_size" in a for a in plan.advice)
    assert "expected a sample for each of 8 ranks, got 4" in make_plan(job(batch=4, world_size=8)).refused[0]


def test_shards_of_the_manager_are_planned_as_it_keeps_them(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--shards", "--bytes", "2TB", "--slice-bytes", "215GB", "--bandwidth", "1Gb/s", "--json"]
    assert main([*command, "--disk", "750GB"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["shards"], reported["in_use_bytes"], reported["start_bytes"]) == (10, 430 * GB, 645 * GB)
    assert reported["shard_fetch_s"] == pytest.approx(1720) and reported["refused"] == reported["warnings"] == []
    assert main([*command, "--disk", "650GB"]) == 0 and "3.5 shards" in capsys.readouterr().out
    assert main([*command, "--disk", "600GB"]) == 1
    assert "for 3 shards" in capsys.readouterr().out
    assert main(["plan", "--shards", "--bytes", "2TB"]) == 2


def test_the_largest_batch_fits_the_memory_and_one_more_does_not() -> None:
    plan = make_plan(job(mem_bytes=4 * GB, world_size=4, ranks_per_node=2))
    assert plan.largest_batch is not None
    fitting = make_plan(job(mem_bytes=4 * GB, world_size=4, ranks_per_node=2, batch=4 * plan.largest_batch))
    larger = make_plan(job(mem_bytes=4 * GB, world_size=4, ranks_per_node=2, batch=4 * plan.largest_batch + 4))
    assert fitting.memory_bytes <= 4 * GB < larger.memory_bytes


def test_a_thousand_ranks_share_a_dataset_evenly() -> None:
    plan = make_plan(job(1000, 64 * 4096, batch=1000, world_size=1000, lanes=1000, head=0))
    assert plan.disk.exact and plan.disk.epoch_slices == plan.disk.least_epoch_slices == 1
    assert plan.disk.origin_bytes == plan.total_bytes
    low, high = make_plan(job(997, 64 * 4096, batch=1024, world_size=1000)).samples_of_rank
    assert high - low <= -(-997 * 64 // 1024)  # One a step.


def test_a_run_that_fetches_the_dataset_several_times_is_refused_with_advice_that_works() -> None:
    nodes = {"world_size": 1000, "batch": 1000}
    plan = make_plan(job(1000, 2 * GB, **nodes))
    assert not plan.ok and 20 < plan.fetch_ratio < 25 and "1000 nodes without a common cache" in plan.refused[0]
    assert "Use lanes=1000, head=0 (1 times)" in plan.refused[0]
    assert make_plan(job(1000, 2 * GB, lanes=1000, head=0, **nodes)).fetch_ratio == 1
    assert make_plan(job(1000, 2 * GB, max_fetch_ratio=25, **nodes)).ok
    assert make_plan(job(1000, 2 * GB, swarm=True, **nodes)).ok  # From each other.
    some = make_plan(job(80, GB, batch=16, world_size=8, lanes=8))
    assert some.ok and 1.1 < some.fetch_ratio < 1.5 and "expected at most 1.1 times" in some.warnings[-1]


def test_wrong_arguments_are_said_so() -> None:
    with pytest.raises(UsageError, match="divisor"):
        job(world_size=8, ranks_per_node=3)
    with pytest.raises(UsageError, match="expected samples"):
        job(size=100)


# --- the model of time


@st.composite
def flows(draw: st.DrawFn) -> Fetches:
    steps = sorted(draw(st.lists(st.integers(0, 40), min_size=1, max_size=8, unique=True)))
    free = sorted(draw(st.integers(0, 40)) for _ in steps)
    sizes = [draw(st.integers(1, 50)) for _ in steps]
    return Fetches(np.array(sizes), np.array(steps), np.minimum(free, steps), 41)


@given(flows(), st.floats(0.1, 100), st.floats(0.01, 10))
def test_times_are_those_of_a_run_step_by_step(flow: Fetches, rate: float, step_s: float) -> None:
    over_at = [0.0]  # When so many steps are over.
    here, index, stall = 0.0, 0, []
    for step in range(flow.num_steps):
        wait = 0.0
        if index < len(flow.needed) and flow.needed[index] == step:
            here = max(here, over_at[flow.free[index]]) + flow.sizes[index] / rate
            wait = max(0.0, here - over_at[-1])
            index += 1
        stall.append(wait)
        over_at.append(over_at[-1] + wait + step_s)
    times = times_of(flow, rate, step_s)
    assert times.total_s == pytest.approx(over_at[-1])
    assert times.first_s == pytest.approx(stall[0]) and times.stall_s == pytest.approx(sum(stall[1:]), abs=1e-9)


@given(flows(), st.floats(0.01, 10))
def test_the_bandwidth_that_suffices_is_the_least(flow: Fetches, step_s: float) -> None:
    later = flow.needed > 0
    after = Fetches(flow.sizes[later], flow.needed[later], flow.free[later], flow.num_steps)
    needed = bandwidth_needed(flow, step_s)
    if needed is None:
        assert (after.free >= after.needed).any()
    elif needed:
        assert times_of(after, needed * 1.0001, step_s).stall_s == pytest.approx(0, abs=1e-6)
        assert times_of(after, needed * 0.99, step_s).stall_s > 0


def test_a_cache_without_room_for_the_next_slice_cannot_be_fast_enough() -> None:
    spans = Spans(np.arange(3), np.array([0, 10, 20]), np.array([9, 19, 29]), 30, True)
    sizes = np.full(3, 100)
    assert bandwidth_needed(fetches_of(spans, sizes, 100), 1.0) is None
    assert bandwidth_needed(fetches_of(spans, sizes, 200), 1.0) == pytest.approx(10)


# --- against a loader


def make_dataset(folder: Path, num_slices: int, samples: int, seq_len: int) -> Path:
    folder.mkdir()
    for index in range(num_slices):
        tokens = np.arange(samples * seq_len + index, dtype=np.uint16)
        write_token_slice(folder / f"{index:03d}.safetensors", tokens, np.array([len(tokens)], np.uint64))
    import_slices(folder, "planned")
    return folder


def run_it(
    server: OriginServer, cache: Path, budget: int, lanes: int, window: int, **given
) -> tuple[dict[str, float], int]:
    """A loader's stats, and the most bytes that its cache held."""
    server.reset()
    max_value = 0
    position = {"cache_dir": cache, "cache_bytes": budget, "rank": 0, "world_size": 1}
    order = OrderOptions(lanes=lanes, window_bytes=window * given["seq_len"] * 2, max_fetch_ratio=0)
    with Loader(server.url, order=order, **position, **given) as loader:
        for _ in loader:
            current = 0
            for file in cache.iterdir():
                with contextlib.suppress(FileNotFoundError):  # Evicted meanwhile.
                    current += file.stat().st_size if file.is_file() else 0
            max_value = max(max_value, current)
        return loader.stats(), max_value


@pytest.mark.parametrize(("lanes", "window"), [(1, 64), (2, 64), (4, 96)])
def test_a_loader_fetches_and_holds_what_the_plan_says(tmp_path: Path, lanes: int, window: int) -> None:
    seq_len = 256
    dataset = make_dataset(tmp_path / "data", 16, 64, seq_len)
    given = {"seq_len": seq_len, "global_batch_size": 8, "lanes": lanes, "window": window}
    table = open_dataset(dataset).table

    def planned(cache_bytes: int | None):
        samples = table.count // seq_len
        return make_plan(RunSpec(table.bytes, samples, 8, seq_len, lanes=lanes, window=window, cache_bytes=cache_bytes))

    min_value = planned(None).disk.least_bytes
    ample = 2 * planned(None).disk.once_bytes + 2
    with OriginServer(dataset) as server:
        for cache_bytes in (min_value, ample):
            plan = planned(cache_bytes)
            stats, max_value = run_it(server, tmp_path / str(cache_bytes), cache_bytes, **given)
            sent = sum(server.bytes_sent[name] for name in table.names.to_pylist())
            assert plan.ok and max_value <= plan.peak_disk_bytes
            assert plan.disk.epoch_bytes <= sent == stats["fetched_bytes"] <= plan.fetched_bytes
        assert plan.fetched_bytes == plan.disk.epoch_bytes and stats["repeated_fetches"] == 0


def test_a_cache_below_the_least_fetches_over_and_over(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "data", 24, 64, 256)
    table = open_dataset(dataset).table
    plan = make_plan(RunSpec(table.bytes, table.count // 256, 8, 256, lanes=8, window=50))
    capacity = plan.disk.least_bytes - 2 * int(table.bytes.max())
    assert not make_plan(replace(plan.job, cache_bytes=capacity)).ok
    with OriginServer(dataset) as server:
        given = {"seq_len": 256, "global_batch_size": 8, "lanes": 8, "window": 50}
        stats, max_value = run_it(server, tmp_path / "cache", capacity, **given)
    assert stats["fetched_bytes"] > plan.fetched_bytes and max_value <= capacity


def test_the_command_says_it_as_a_person_and_as_a_program_reads_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = str(make_dataset(tmp_path / "data", 8, 64, 256))
    common = [
        "plan",
        dataset,
        "--seq-len",
        "256",
        "--global-batch-size",
        "8",
        "--bandwidth",
        "1Gb/s",
        "--step-s",
        "0.1",
    ]
    assert main([*common, "--json", "--disk", str(tmp_path), "--memory", "8GB"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["ok"] and reported["slices"] == 8 and reported["first_batch_s"] < 0.001 and reported["stall_s"] >= 0
    assert reported["loader"]["lanes"] == 1 and reported["steps_per_epoch"] == 64
    assert main([*common, "--cache-bytes", "20kB"]) == 1
    text = capsys.readouterr().out
    assert "refused: cache: expected at least" in text and text.endswith("cannot work as requested\n")
    assert main(["plan", "--bytes", "2TB"]) == 2
    assert main(["plan", dataset, "--bytes", "2TB"]) == 2


def test_a_quarter_of_a_million_slices_are_planned_in_two_seconds() -> None:
    began = time.process_time()
    plan = make_plan(
        job(250_000, 64 << 20, batch=1024, world_size=64, ranks_per_node=8, epochs=3, bandwidth=1e9, step_s=1.0)
    )
    assert plan.ok and "lanes=64" in format_plan(plan) and time.process_time() - began < 2


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1Gb/s", 125e6), ("10 Gbit/s", 1.25e9), ("179MB/s", 179e6), ("100MiB/s", 100 << 20), ("2.5Gbps", 312.5e6)],
)
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


def test_what_is_no_rate() -> None:
    for text in ("1G", "fast", "0Gb/s", "1 ib/s", "-1MB/s"):
        with pytest.raises(UsageError, match="rate"):
            parse_rate(text)
    assert [format_bytes(n) for n in (12, 1500, 215 * GB, 15e12)] == ["12 B", "1.5 kB", "215 GB", "15 TB"]
