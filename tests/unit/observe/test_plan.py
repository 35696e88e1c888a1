"""Plans: arithmetic that others published, what is refused and warned of, advice that the same check accepts."""

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from forebay.cli import main
from forebay.errors import UsageError
from forebay.observe.plan import DatasetSpec, RunSpec, make_plan
from forebay.order.footprint import check_traffic
from forebay.order.mixture import Weights
from forebay.units import format_bytes, format_seconds, parse_rate
from support.feeding import make_dataset

GB = 10**9


def job(num_slices: int = 10, size: int = 200 * GB, seq_len: int = 2048, batch: int = 512, **settings) -> RunSpec:
    sizes = np.full(num_slices, size)
    return RunSpec([DatasetSpec(sizes, sizes // 2 // seq_len)], batch, seq_len, **settings)


# --- figures that were published


def test_a_slice_of_215_gb_in_20_minutes_needs_179_mb_a_second():
    steps = 215 * GB // 2 // 2048 // 512
    plan = make_plan(job(size=215 * GB, step_s=1200 / steps, bandwidth=125e6))
    assert plan.slice_fetch_s == pytest.approx(1720, abs=1)  # 28.7 minutes at 1 Gb/s
    assert format_seconds(plan.slice_fetch_s) == "28.7 min"
    assert plan.needed_bandwidth == pytest.approx(179.2e6, rel=0.01)
    assert plan.needed_bandwidth * 8 / 1e9 == pytest.approx(1.43, abs=0.02)
    # At 1 Gb/s training waits for what is missing: 520 s for each slice.
    assert plan.stall_s == pytest.approx(10 * (1720 - 1200), rel=0.05)
    assert any("training waits" in text for text in plan.warnings)


def test_two_terabytes_need_a_few_hundred_megabytes_of_disk():
    """Whatever the size of slices: open are windows, and not slices."""
    plan = make_plan(job())
    assert plan.ok and plan.disk.open_bytes < plan.disk.next_bytes < 700 << 20
    assert plan.disk.next_bytes == pytest.approx(make_plan(job(1000, 2 * GB)).disk.next_bytes, rel=0.02)
    assert make_plan(job(cache_bytes=1 << 30)).ok
    for too_small in ({"cache_bytes": 100 << 20}, {"volume_bytes": 100 << 20}):
        plan = make_plan(job(**too_small))
        assert not plan.ok and f"expected at least {plan.least_bytes} bytes" in plan.refused[0]


# --- refusals and warnings


def test_a_cache_in_memory_needs_memory():
    full = make_plan(job(whole_in_memory=True, volume_bytes=2500 * GB, mem_bytes=64 * GB, cache_bytes=2001 * GB))
    assert not full.ok and "cache='ram'" in full.refused[-1] and full.to_json()["fits_memory"] is False
    for num_slices in (2, 1000, 100_000):  # What a plan proposes fits.
        plan = make_plan(job(num_slices, GB, whole_in_memory=True, volume_bytes=25 * GB, mem_bytes=25 * GB))
        assert plan.ok and plan.cache_bytes + plan.memory_bytes <= 25 * GB


def test_a_volume_smaller_than_the_cache_is_refused():
    plan = make_plan(job(cache_bytes=900 * GB, volume_bytes=850 * GB, lanes=1))
    assert not plan.ok and plan.refused[0].startswith("disk: expected space for the cache")


@pytest.mark.parametrize(
    "settings, warned",
    [
        ({"bandwidth": 60e6}, "1 Gb/s or more"),
        ({"volume_bytes": 500 << 20}, "disk: 524 MB"),
        ({"mem_bytes": 2 * GB}, "4 GB or more"),
        ({"mem_bytes": 110 << 20}, "the loader takes"),
    ],
)
def test_what_is_below_what_such_runs_have_is_said(settings, warned):
    assert not any(warned in text for text in make_plan(job()).warnings)
    assert any(warned in text for text in make_plan(job(**settings)).warnings)


def test_a_batch_that_cannot_be_is_refused():
    plan = make_plan(job(mem_bytes=64 << 20))
    assert "not even a batch of one sample fits" in plan.refused[0] and not any("batch_size" in a for a in plan.advice)
    assert "expected a sample for each of 8 ranks, got 4" in make_plan(job(batch=4, world_size=8)).refused[0]


def test_shards_of_the_manager_are_planned_as_it_keeps_them(capsys):
    command = ["plan", "--shards", "--bytes", "2TB", "--slice-bytes", "215GB", "--bandwidth", "1Gb/s", "--json"]
    assert main([*command, "--disk", "750GB"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert (reported["shards"], reported["in_use_bytes"], reported["start_bytes"]) == (10, 430 * GB, 645 * GB)
    assert reported["shard_fetch_s"] == pytest.approx(1720) and reported["refused"] == reported["warnings"] == []
    assert reported["swap_stall_s"] is None
    for step_s, stall_s in (("2", 810), ("4", 0)):
        assert main([*command, "--step-s", step_s]) == 0
        assert json.loads(capsys.readouterr().out)["swap_stall_s"] == pytest.approx(stall_s)
    assert main([*command[:-1], "--step-s", "2"]) == 0 and "swap waits     13.5 min" in capsys.readouterr().out
    assert main([*command, "--disk", "650GB"]) == 0 and "3.5 shards" in capsys.readouterr().out
    assert main([*command, "--disk", "600GB"]) == 1
    assert "for 3 shards" in capsys.readouterr().out
    assert main(["plan", "--shards", "--bytes", "2TB"]) == 2


def test_the_largest_batch_fits_the_memory_and_one_more_does_not():
    plan = make_plan(job(mem_bytes=4 * GB, world_size=4, ranks_per_node=2))
    fitting = make_plan(job(mem_bytes=4 * GB, world_size=4, ranks_per_node=2, batch=4 * plan.largest_batch))
    larger = make_plan(job(mem_bytes=4 * GB, world_size=4, ranks_per_node=2, batch=4 * plan.largest_batch + 4))
    assert fitting.memory_bytes <= 4 * GB < larger.memory_bytes


def test_a_thousand_ranks_share_a_dataset_evenly():
    plan = make_plan(job(1000, 2 * GB, batch=1000, world_size=1000))
    assert plan.ok and plan.fetch_ratio < 1.01 and plan.disk.num_lanes == 1
    for batch in (1024, 2000, 4096):  # Not divided by the ranks.
        assert make_plan(job(1000, 2 * GB, batch=batch, world_size=1000)).fetch_ratio < 1.01
    low, high = make_plan(job(997, 64 * 4096, batch=1024, world_size=1000)).samples_of_rank
    assert high - low <= -(-997 * 64 // 1024)  # One a step.


def test_a_run_that_fetches_the_dataset_several_times_is_refused_with_advice_that_works():
    nodes = partial(job, 1000, 2 * GB, lanes=64, world_size=1000, batch=1000)
    (refused,) = make_plan(nodes()).refused
    assert "1000 nodes with caches of their own, 1 rank each" in refused and "the default lanes (1 times)" in refused
    assert make_plan(nodes(max_fetch_ratio=31)).ok and make_plan(nodes(swarm=True)).ok  # From each other.


MIXED = [job(1000, 1010_000_000).datasets[0], job(100, 1010_000_000).datasets[0], job(1, GB).datasets[0]]
WEIGHTS = Weights(((0, (0.899, 0.1, 0.001)),))


@pytest.mark.parametrize("nodes, batch", [(8, 64), (64, 512), (512, 2048), (7, 100)])
def test_nodes_fetch_each_dataset_of_a_mixture_once(nodes, batch):
    plan = make_plan(RunSpec(MIXED, batch, 2048, WEIGHTS, world_size=nodes))
    assert plan.ok and not plan.warnings and max(plan.fetch_ratios) < 1.1


@pytest.mark.parametrize(
    "settings",
    [
        {"batch": 16, "world_size": 8, "lanes": 12},
        {"batch": 512, "cache_bytes": 150 << 20},
        {"batch": 1000, "world_size": 1000, "lanes": 64},
        {"batch": 64, "world_size": 64, "lanes": 8, "mixed": True},
        {"batch": 512, "world_size": 64, "lanes": 100, "mixed": True},
        {"batch": 512, "cache_bytes": 100 << 20, "mixed": True},
    ],
)
def test_advice_is_what_the_same_check_says_of_it(settings):
    """For one dataset and for a mixture, any number of nodes and any cache."""
    datasets, weights = (MIXED, WEIGHTS) if settings.pop("mixed", False) else (MIXED[:1], None)
    spec = RunSpec(datasets, settings.pop("batch"), 2048, weights, **settings)
    spec = replace(spec, cache_bytes=make_plan(spec).cache_bytes)
    with pytest.raises(UsageError) as raised:
        check_traffic(spec.footprints(spec.run()), spec.cache_bytes, 1.5)
    advised = re.findall(r"(the default lanes|lanes=\d+|cache_bytes=\d+) \(([\d.]+) times\)", str(raised.value))
    for text, ratio in advised:
        name, _, number = text.partition("=")
        ratios = make_plan(replace(spec, **({name: int(number)} if number else {"lanes": None}))).fetch_ratios
        assert max(ratios) == pytest.approx(float(ratio), rel=0.01) and float(ratio) <= 1.5
    assert advised


def test_wrong_arguments_are_said_so():
    with pytest.raises(UsageError, match="divisor"):
        make_plan(job(world_size=8, ranks_per_node=3))
    with pytest.raises(UsageError, match="expected samples"):
        make_plan(job(size=100))


def test_the_command_says_it_as_a_person_and_as_a_program_reads_it(tmp_path, capsys):
    dataset = make_dataset(tmp_path / "data", 8, 64, 256)
    common = f"plan {dataset} --seq-len 256 --global-batch-size 8 --bandwidth 1Gb/s --step-s 0.1".split()
    assert main([*common, *f"--json --disk {tmp_path} --memory 8GB".split()]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["ok"] and reported["slices"] == 8
    assert 0.1 < reported["first_batch_s"] < 0.101 and reported["stall_s"] >= 0
    assert reported["loader"]["lanes"] == 8 and reported["steps_per_epoch"] == 64
    assert main([*common, "--cache-bytes", "20kB"]) == 1
    text = capsys.readouterr().out
    assert "refused: cache: expected at least" in text and text.endswith("cannot work as requested\n")
    make_dataset(tmp_path / "other", 3, 64, 256)
    weights = "[[change]]\nstep = 0\nweights = { a = 3, b = 1 }\n"
    (tmp_path / "mix.toml").write_text(f"[datasets]\na = 'data'\nb = 'other'\n{weights}")
    mixed = f"plan {tmp_path}/mix.toml --seq-len 256 --global-batch-size 8 --world-size 4".split()
    assert main([*mixed, "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert [(of["name"], of["samples"]) for of in reported["datasets"]] == [("a", 512), ("b", 192)]
    assert reported["bytes"] == sum(of["bytes"] for of in reported["datasets"]) and reported["steps_per_epoch"] == 86
    assert reported["passes"] == pytest.approx([688 * 0.75 / 512, 688 * 0.25 / 192]) and reported["nodes"] == 4
    assert main(mixed) == 0 and "dataset b " in capsys.readouterr().out
    assert main(["plan", "--bytes", "2TB"]) == 2
    assert main(f"plan {dataset} --bytes 2TB".split()) == 2


@pytest.mark.parametrize(
    "text, rate",
    [("1Gb/s", 125e6), ("10 Gbit/s", 1.25e9), ("179MB/s", 179e6), ("100MiB/s", 100 << 20), ("2.5Gbps", 312.5e6)],
)
def test_rates(text, rate):
    assert parse_rate(text) == rate


def test_what_is_no_rate():
    for text in ("1G", "fast", "0Gb/s", "1 ib/s", "-1MB/s"):
        with pytest.raises(UsageError, match="rate"):
            parse_rate(text)
    assert [format_bytes(n) for n in (12, 1500, 215 * GB, 15e12)] == ["12 B", "1.5 kB", "215 GB", "15 TB"]
