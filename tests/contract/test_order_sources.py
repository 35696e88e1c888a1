"""What every order source of a Loader promises: ranks, a coordinator's ranks, owned slices, and leases of a scheduler.

Workers are processes. A Loader that cannot have an option says so when it is made. FOREBAY_CONTRACT_KILLS says how
often workers are killed (3 a source), FOREBAY_CONTRACT_SEED when (0).
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from typing import Any

import pytest

pytest.importorskip("libtorrent")

from forebay.errors import StateError, UsageError
from support.calibration import scaled
from support.order_sources import (
    GLOBAL_BATCH,
    SAMPLES_PER_WORKER,
    SOURCES,
    WORKERS,
    Cluster,
    Coordinated,
    Leased,
    Line,
    Source,
    Static,
    batches_of,
    ledger,
    make_rows,
    make_slices,
    wait_for,
)
from support.order_worker import describe, open_loader
from support.reference_samples import samples_of

KILLS = int(os.environ.get("FOREBAY_CONTRACT_KILLS", "3"))
SEED = int(os.environ.get("FOREBAY_CONTRACT_SEED", "0"))
FILTER = {"exclude": [0, 3, 17, 60], "min_tokens": 4, "max_tokens": 50}
FRACTION, CHANGE_AT, STEPS, EPOCHS = 0.3, 4, 14, 2
CASES: dict[str, dict[str, Any]] = {
    "concat": {"dataset": "web"},
    "masks": {"dataset": "web", "document_masks": True},
    "best_fit": {"dataset": "web", "packing": "best_fit"},
    "filter": {"dataset": "web", "document_masks": True, "samples": {"documents": FILTER}},
    "filter_best_fit": {"dataset": "web", "packing": "best_fit", "samples": {"documents": FILTER, "pad_id": 7}},
    "train": {"dataset": "web", "split": "train", "samples": {"validation_fraction": FRACTION}},
    "validation": {"dataset": "web", "split": "validation", "samples": {"validation_fraction": FRACTION}},
    "rows": {"dataset": "rows"},
    "epochs": {"dataset": "web", "epochs": EPOCHS},
    "drop_last": {"dataset": "web", "samples": {"drop_last": True}},
    "growing": {"dataset": "web", "global_batch_size": [[0, GLOBAL_BATCH], [5, 3 * GLOBAL_BATCH]]},
    "mixture": {
        "dataset": ["web", "books"], "document_masks": True, "steps": STEPS,
        "weights": [[0, {"web": 1}], [CHANGE_AT, {"web": 1, "books": 1}]],
    },
}  # fmt: skip
JOBS = {
    "epochs": ["--epochs", EPOCHS],
    "best_fit": ["--samples", "packing=best_fit"],
    "train": ["--samples", "split=train", "--samples", f"validation_fraction={FRACTION}"],
    "validation": ["--samples", "split=validation", "--samples", f"validation_fraction={FRACTION}"],
}
REFUSED = {
    ("lease", "filter"): r"documents: expected none with scheduler=, got .*leave it out",
    ("lease", "filter_best_fit"): r"documents: expected none with scheduler=, got .*leave it out",
    ("lease", "drop_last"): "drop_last: expected none with scheduler=.*Leave it out",
    ("lease", "growing"): "global_batch_size: expected none with scheduler=.*Leave it out",
    ("owned", "mixture"): r"assignment='owned': expected one dataset.*Use assignment='global'",
    ("owned", "drop_last"): "assignment='owned': expected .* no drop_last, got others. Use assignment='global'",
    ("owned", "growing"): "assignment='owned': expected .* one batch size .*Use assignment='global'",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ExitStack() as stack:
        tokens = {"web": make_slices(18, 0), "books": make_slices(5, 30_000)}
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack, tokens, make_rows(12))


def make(cluster: Cluster, source: str, case: str) -> Source:
    return SOURCES[source](cluster, CASES[case], JOBS.get(case, ()))


def reference(cluster: Cluster, case: str) -> dict[tuple[int, int], list[Any]]:
    """Each sample of a case by the index of its dataset and its id; of a split, the samples of both."""
    spec = CASES[case]
    if spec["dataset"] == "rows":
        rows = [[image.tolist(), int(label)] for of in cluster.rows for image, label in zip(of["image"], of["label"])]
        return {(0, number): row for number, row in enumerate(rows)}
    options = spec.get("samples", {})
    masks = spec.get("document_masks", False) or spec.get("packing") == "best_fit"
    names = spec["dataset"] if isinstance(spec["dataset"], list) else [spec["dataset"]]
    result = {}
    for index, name in enumerate(names):
        samples = samples_of(
            cluster.tokens[name], 16, packing=spec.get("packing", "concat"), masks=masks,
            pad_id=options.get("pad_id", 0), **options.get("documents", {}),
        )  # fmt: skip
        result |= {(index, number): list(row if masks else row[:2]) for number, row in samples.items()}
    return result


def check_contents(lines: list[Line], expected: dict[tuple[int, int], list[Any]]) -> Counter[tuple[int, int, int]]:
    """How often each sample came in each epoch, by epoch, dataset and id; all as the reference has them."""
    counts: Counter[tuple[int, int, int]] = Counter()
    for line in lines:
        assert line["rows"] == max(1, len(line["ids"])), "an empty batch"
        for source, number, row in zip(line["sources"], line["ids"], line["content"]):
            assert row == expected[source, number]
            counts[line["epoch"], source, number] += 1
    return counts


def check_shares(source: Source, workers: list[list[Line]]) -> None:
    """Equally many steps; weights that make the mean over ranks the mean over samples."""
    if not source.is_lockstep:
        assert all(line["weight"] == len(line["ids"]) / SAMPLES_PER_WORKER for line in chain(*workers))
        return
    steps = [[line["step"] for line in lines] for lines in workers]
    assert all(of_rank == list(range(len(steps[0]))) for of_rank in steps) and steps[0]
    is_uneven = False
    for lines in zip(*workers):
        sizes = [len(line["ids"]) for line in lines]
        is_uneven |= len(set(sizes)) > 1
        for line in lines:
            assert line["weight"] == pytest.approx(len(line["ids"]) * len(lines) / sum(sizes))
    assert is_uneven


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", SOURCES)
def test_an_epoch_has_each_sample_once_as_the_reference_has_it(cluster: Cluster, name: str, case: str) -> None:
    source = make(cluster, name, case)
    if (name, case) in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[name, case]):
            open_loader(source.loader(0))
        return
    workers = source.run(has_content=True)
    expected = reference(cluster, case)
    counts = check_contents(list(chain(*workers)), expected)
    check_shares(source, workers)
    if source.is_global:
        alone = Static(cluster, CASES[case])
        alone.num_workers = 1
        steps = [sorted(chain(*(line["ids"] for line in lines))) for lines in zip(*workers)]
        assert steps == [sorted(batch.sample_ids.tolist()) for batch in open_loader(alone.loader(0))]
    if case == "mixture":
        check_mixture(source, workers, counts)
        return
    assert set(counts.values()) == {1}
    num_validation = round(FRACTION * len(expected))
    sizes = {
        "train": len(expected) - num_validation, "validation": num_validation, "epochs": EPOCHS * len(expected),
        "drop_last": len(expected) // GLOBAL_BATCH * GLOBAL_BATCH,
    }  # fmt: skip
    assert len(counts) == sizes.get(case, len(expected))
    if case == "train":
        validation = {number for of_worker in make(cluster, "static", "validation").run() for line in of_worker
                      for number in line["ids"]}  # fmt: skip
        assert {number for _, _, number in counts} == {number for _, number in expected} - validation
    if isinstance(source, Leased):
        report = source.verify(CASES[case]["dataset"])
        num_epochs = EPOCHS if case == "epochs" else 1
        once = {"samples": len(counts) // num_epochs, "missing": 0, "repeated": 0}
        assert report["ok"] and report["epochs"] == [{"epoch": epoch, **once} for epoch in range(num_epochs)], report
        used = [(use["name"], sample) for use in source.uses(CASES[case]["dataset"]) for sample in use["samples"]]
        given = [(f"worker-{i}", number) for i, of in enumerate(workers) for line in of for number in line["ids"]]
        assert sorted(used) == sorted(given)


def check_mixture(source: Source, workers: list[list[Line]], counts: Counter[tuple[int, int, int]]) -> None:
    """From a step on half of the samples are of the second dataset; none comes again before all of its dataset came."""
    by_step: dict[int, Counter[int]] = defaultdict(Counter)
    for line in chain(*workers):
        by_step[line["step"]].update(line["sources"])
    assert all(by_step[step].keys() == {0} for step in range(CHANGE_AT))
    later = sum((by_step[step] for step in range(CHANGE_AT, STEPS)), Counter())
    assert abs(later[0] - later[1]) <= 2 * len(workers)
    assert set(counts.values()) == {1}
    if isinstance(source, Leased):
        for index, job in enumerate(("web", "books")):
            report = source.verify(job)
            assert not report["epochs"][0]["repeated"]
            assert report["epochs"][0]["samples"] == sum(of == index for _, of, _ in counts)
    else:
        assert sum(counts.values()) == STEPS * GLOBAL_BATCH


LEASED = {
    "epochs: expected none with scheduler=, got 2. .*leave it out": {"epochs": 2},
    "shuffle: expected none .*leave it out": {"shuffle": False},
    "seed: expected none .*leave it out": {"seed": 3},
    "rank, world_size: expected none .*Leave it out": {"rank": 0, "world_size": 2},
    "drop_last: expected none .*Leave it out": {"samples": {"drop_last": True}},
    "order: expected none .*Leave it out": {"order": {"lanes": 2}},
    "global_batch_size: expected none .*Leave it out": {"batch_size": None, "global_batch_size": 4},
    "batch_size: expected a number with scheduler=": {"batch_size": None},
    "scheduler: expected a dataset forebay://NETWORK/NAME": {"dataset": "DIRECTORY"},
    "scheduler: expected 'host:port' or 'auto', got": {"scheduler": {"x": "127.0.0.1:1"}},
    "seq_len: expected that of the job web, 16, got 8. Change the Loader's arguments, or start a job": {"seq_len": 8},
    "packing: expected that of the job web, 'concat', got 'best_fit'. Change": {"packing": "best_fit"},
    "split: expected that of the job web, None, got .*Change": {
        "split": "train", "samples": {"validation_fraction": FRACTION}
    },
}  # fmt: skip
OWNED = {
    "assignment='owned': expected .*no drop_last, got others. Use assignment='global'": {
        "samples": {"drop_last": True}
    },
    "assignment='owned': expected .*one batch size.*Use assignment='global'": {
        "global_batch_size": [[0, GLOBAL_BATCH], [3, 2 * GLOBAL_BATCH]]
    },
    "worker_names: expected a name for each of 3 ranks, got 2": {
        "order": {"assignment": "owned", "worker_names": ["a", "b"]}
    },
    "worker_names: expected assignment='owned', got 'global'. Leave the names out": {
        "order": {"worker_names": ["a", "b", "c"]}
    },
    "expected samples for each of 20 workers.*Prepare smaller slices .*or use assignment='global'": {
        "world_size": 20, "global_batch_size": 20, "order": {"assignment": "owned"}
    },
}  # fmt: skip


@pytest.mark.parametrize(("name", "refused"), [("lease", LEASED), ("owned", OWNED)])
def test_what_a_source_cannot_have_is_refused_when_the_loader_is_made(
    cluster: Cluster, name: str, refused: dict[str, dict[str, Any]]
) -> None:
    spec = make(cluster, name, "concat").loader(0)
    for message, wrong in refused.items():
        if wrong.get("dataset") == "DIRECTORY":
            wrong = {"dataset": cluster.datasets["web"]}
        with pytest.raises(UsageError, match=message):
            open_loader({**spec, **wrong})
    with open_loader(spec) as loader:
        if name == "owned":
            state = loader.state_dict()
            with pytest.raises(StateError, match="rank"), open_loader({**spec, "rank": 1}) as other:
                other.load_state_dict(state)
            return
        with pytest.raises(UsageError, match=r"num_workers: expected 0 with scheduler=.*Use prefetch"):
            next(loader.iterate(num_workers=1))
        with pytest.raises(UsageError, match="take: expected a loader without scheduler="):
            loader.take(1)
        for ask in (len, lambda loader: loader.steps_per_epoch):
            with pytest.raises(TypeError, match="expected a loader without scheduler="):
                ask(loader)


def lines_of(batches: Any) -> list[Line]:
    return [{**describe(batch, True), "at": 0.0} for batch in batches]


@pytest.mark.parametrize("case", ["best_fit", "filter", "rows"])
@pytest.mark.parametrize("name", ["static", "owned"])
def test_a_state_of_any_batch_resumes_with_the_next_one(cluster: Cluster, name: str, case: str) -> None:
    """Over the end of an epoch, with batches made ahead by a thread or by helper processes, too."""
    spec = {**make(cluster, name, case).loader(1), "epochs": 2}

    def ahead(batches: int) -> dict[str, Any]:
        return {**spec, "samples": {**spec.get("samples", {}), "prefetch_batches": batches}}

    expected = lines_of(open_loader(spec))
    for stop in range(len(expected) + 1):
        with open_loader(ahead(stop % 3)) as loader:
            batches = iter(loader)
            assert lines_of(next(batches) for _ in range(stop)) == expected[:stop]
            state = json.loads(json.dumps(loader.state_dict()))
        with open_loader(ahead((stop + 1) % 3)) as loader:
            loader.load_state_dict(state)
            rest = expected[stop:] if stop < len(expected) else []
            assert lines_of(next(batches) for batches in [iter(loader)] for _ in rest[:3]) == rest[:3]
            if stop % 7 == 0 and len(rest) > 3:
                assert lines_of(loader) == rest[3:]
    if case != "filter":
        return
    with open_loader(spec) as loader:
        batches = loader.iterate(num_workers=2, prefetch=2)
        assert lines_of(next(batches) for _ in range(5)) == expected[:5]
        state = loader.state_dict()
        assert lines_of(batches) == expected[5:]
        loader.load_state_dict(state)
        assert lines_of(loader.iterate(num_workers=2)) == expected[5:]


@pytest.mark.parametrize("case", ["masks", "mixture"])
def test_a_state_resumes_on_any_world_size(cluster: Cluster, case: str) -> None:
    """As a coordinator's next generation does: ranks of another number go on with the same global batches."""
    source = Static(cluster, CASES[case])
    source.num_workers = 1
    expected = [sorted(zip(line["sources"], line["ids"])) for line in lines_of(open_loader(source.loader(0)))]
    chance, step, state, seen = random.Random(SEED), 0, None, []
    while step < len(expected):
        source.num_workers = chance.choice([1, 2, 3, 5, 8])
        stop = min(len(expected), step + chance.randrange(1, 6))
        parts: list[list[list[tuple[int, int]]]] = []
        for rank in range(source.num_workers):
            with open_loader(source.loader(rank)) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                lines = lines_of(batch for _, batch in zip(range(step, stop), loader))
                parts.append([list(zip(line["sources"], line["ids"])) for line in lines])
                assert [line["step"] for line in lines] == list(range(step, stop))
                last = loader.state_dict()
        seen += [sorted(chain(*of_ranks)) for of_ranks in zip(*parts)]
        step, state = stop, last
    assert seen == expected


def test_a_lease_loader_resumes_with_what_is_not_committed(cluster: Cluster) -> None:
    """Wherever it stops, committed batches never come again, and all others do."""
    source = make(cluster, "lease", "masks")
    assert isinstance(source, Leased)
    expected, counts = reference(cluster, "masks"), Counter[int]()
    chance, state, dropped = random.Random(SEED), None, Counter[int]()
    for number in range(12):
        spec = source.loader(number % 2)
        with open_loader({**spec, "samples": {"prefetch_batches": number % 3}}) as loader:
            if state is not None:
                assert loader.step == 0
                loader.load_state_dict(state)
            first, stop = loader.step, chance.randrange(1, 5)
            for count, batch in enumerate(loader):
                line = describe(batch, True)
                assert line["step"] == first + count == loader.step - 1
                counts += check_ids([line], expected)
                if count + 1 == stop:
                    if number % 2:
                        loader.commit()
                    else:
                        dropped.update(line["ids"])
                    break
            state = json.loads(json.dumps(loader.state_dict()))
            assert state["step"] == first + stop
    with open_loader(source.loader(0)) as loader:
        loader.load_state_dict(state)
        counts += check_ids([describe(batch, True) for batch in loader], expected)
        assert loader.stats()["wasted_samples"] == 0
        with pytest.raises(StateError, match=r"expected one of the jobs .*they know what is used"):
            loader.load_state_dict({**state, "jobs": {"": "another"}})
    assert counts == Counter(number for _, number in expected) + dropped
    report = source.verify("web")
    assert report["ok"] and report["epochs"][0]["samples"] == len(expected)


def check_ids(lines: list[Line], expected: dict[tuple[int, int], list[Any]]) -> Counter[int]:
    return Counter({number: count for (_, _, number), count in check_contents(lines, expected).items()})


def any_moment(chance: random.Random, workers: list[Any], count: int) -> None:
    """Wait until the workers together have so many batches more, and then for a moment within a batch."""
    before = sum(len(batches_of(worker)) for worker in workers)
    deadline = time.monotonic() + scaled(30.0)
    while sum(len(batches_of(worker)) for worker in workers) < before + count:
        assert time.monotonic() < deadline, [worker.errors()[-1000:] for worker in workers]
        if all(worker.wait(0.0) is not None for worker in workers):
            return
        time.sleep(0.002)
    time.sleep(chance.uniform(0.0, 0.03))


@pytest.mark.parametrize("name", ["static", "owned"])
def test_ranks_killed_at_any_moment_resume_where_all_of_them_were(cluster: Cluster, name: str) -> None:
    """A checkpoint is of the last step that all ranks have done. Static ranks come back in another number."""
    chance, source = random.Random(f"{name} {SEED}"), make(cluster, name, "masks")
    alone = make(cluster, name, "masks")
    alone.num_workers = WORKERS if name == "owned" else 1
    ranks = [[batch.sample_ids.tolist() for batch in open_loader(alone.loader(i))] for i in range(alone.num_workers)]
    expected = [sorted(chain(*of_ranks)) for of_ranks in zip(*ranks)]
    committed: list[list[int]] = []
    states: list[Any] = [None] * WORKERS
    kills = 0
    while len(committed) < len(expected):
        if source.is_elastic:
            source.num_workers = chance.choice([1, 2, 3, 4])
            assert all(state == states[0] for state in states)
            states = states[:1] * source.num_workers
        workers = [source.start(i, state=state, has_state=True, pause_s=0.01) for i, state in enumerate(states)]
        if kills < KILLS:
            any_moment(chance, workers, chance.randrange(4 * len(workers)))
            for worker in chance.sample(workers, len(workers)):
                worker.kill()
            kills += 1
        for worker in workers:
            assert worker.wait() in (0, -9), worker.errors()
        for lines in zip(*map(batches_of, workers)):
            assert {line["step"] for line in lines} == {len(committed)}
            committed.append(sorted(chain(*(line["ids"] for line in lines))))
            states = [line["state"] for line in lines]
    assert committed == expected


def test_a_coordinators_ranks_go_on_when_any_of_them_is_killed(cluster: Cluster) -> None:
    """Others take the dead rank's part; newcomers, and it under its name, join in the middle of an epoch.

    The coordinator is killed, too, and started again where it was.
    """
    chance, spec = random.Random(SEED), {**CASES["masks"], "epochs": 2 + KILLS // 6}
    source = Coordinated(cluster, spec)
    alone = Static(cluster, spec)
    alone.num_workers = 1
    expected = [sorted(batch.sample_ids.tolist()) for batch in open_loader(alone.loader(0))]
    source.spec["steps"] = len(expected)  # One that joins after the end has no more.
    live = {index: source.start(index, pause_s=0.02) for index in range(WORKERS)}
    names = iter(range(WORKERS, 100))
    for _ in range(KILLS):
        any_moment(chance, list(live.values()), chance.randrange(1, 12))
        index = chance.choice(list(live))
        live[index].kill()
        again = index if chance.random() < 0.5 else next(names)
        del live[index]
        time.sleep(chance.uniform(0.0, 0.3))
        live[again] = source.start(again, pause_s=0.02)
    any_moment(chance, list(live.values()), 3)
    source.coordinator.kill()
    assert source.coordinator.wait() == -9
    source.start_coordinator(source.address)
    wait_for(live.values())
    lines = list(chain(*map(batches_of, source.processes)))
    last = {line["step"]: 0 for line in lines}
    for line in lines:
        last[line["step"]] = max(last[line["step"]], line["generation"])
    counted = [line for line in lines if line["generation"] == last[line["step"]]]
    steps: dict[int, list[Line]] = defaultdict(list)
    for line in counted:
        steps[line["step"]].append(line)
    assert sorted(steps) == list(range(len(expected)))
    for step, of_ranks in steps.items():
        assert all(line["of_ranks"] == of_ranks[0]["of_ranks"] for line in of_ranks)  # Of those that live.
        assert all(line["of_ranks"][line["rank"]] == line["ids"] for line in of_ranks)
        assert sorted(chain(*of_ranks[0]["of_ranks"])) == expected[step]
    assert len(set(last.values())) > 1
    report = ledger("verify", source.directory / "state")
    assert report["ok"] and report["steps"] == len(expected), report


class Brief(Leased):
    """With leases that a killed worker keeps from others only for a moment."""

    term_s = 1.0


def test_a_killed_workers_leases_are_used_by_others_once(cluster: Cluster) -> None:
    """What a killed worker had not committed comes again; what the ledger has as used does not.

    The scheduler is killed, too, and started again where it was.
    """
    chance, num_epochs = random.Random(SEED), 1 + KILLS // 4
    source = Brief(cluster, CASES["masks"], ["--epochs", str(num_epochs)])
    source.spec["samples"] = {"prefetch_batches": 2}  # Batches that were formed, and not given, come again, too.
    pause_s, names = 0.02, iter(range(WORKERS, 8))
    live = {index: source.start(index, pause_s=pause_s) for index in range(WORKERS)}
    killed = []
    for _ in range(KILLS):
        any_moment(chance, list(live.values()), chance.randrange(1, 15))
        index = chance.choice(list(live))
        live[index].kill()
        killed.append((index, live.pop(index)))
        again = index if chance.random() < 0.5 else next(names, index)
        live[again] = source.start(again, pause_s=pause_s)
    any_moment(chance, list(live.values()), 3)
    scheduler, address = source.schedulers["web"]
    scheduler.kill()
    assert scheduler.wait() == -9
    source.start_scheduler("web", address)
    wait_for(live.values())
    report = source.verify("web")
    numbers = {number for _, number in reference(cluster, "masks")}
    assert report["ok"] and [epoch["samples"] for epoch in report["epochs"]] == [len(numbers)] * num_epochs, report
    given: dict[tuple[int, int], list[tuple[float, str]]] = defaultdict(list)
    for index, process in [*killed, *live.items()]:
        for line in batches_of(process):
            for number in line["ids"]:
                given[line["epoch"], number].append((line["at"], f"worker-{index}"))
    assert given.keys() == {(epoch, number) for epoch in range(num_epochs) for number in numbers}
    used = {(use["epoch"], number): use["name"] for use in source.uses("web") for number in use["samples"]}
    assert used == {sample: max(times)[1] for sample, times in given.items()}
    repeated = sum(len(times) - 1 for times in given.values())
    wasted = sum(process.lines()[-1]["stats"]["wasted_samples"] for process in live.values())
    lines = list(chain(*(batches_of(process) for _, process in killed)))
    of_killed = [(line["epoch"], number) for line in lines for number in line["ids"]]
    assert repeated - wasted <= sum(len(given[sample]) > 1 for sample in of_killed)
    # Of each killed worker: what it used in one `receipt_s` of 0.2 s, and two steps.
    assert repeated - wasted <= KILLS * SAMPLES_PER_WORKER * (2 + scaled(0.2) / pause_s)
