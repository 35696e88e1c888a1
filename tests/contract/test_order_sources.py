"""The promises of every order source of a Loader: ranks, owned slices, and leases of a scheduler.

Workers are threads here; `slow/contract` kills them as processes. A coordinator's ranks read the Loader that their rank
and world size give, as static ranks do. A Loader that cannot have an option says so when it is made.
"""

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain, islice
from typing import Any

import pytest

pytest.importorskip("libtorrent")

from forebay import DocumentSubset
from forebay.errors import StateError, UsageError
from support.order_sources import (
    GLOBAL_BATCH,
    SAMPLES_PER_WORKER,
    SOURCES,
    Leased,
    Line,
    LocalCluster,
    Source,
    Static,
    make_rows,
    make_slices,
)
from support.order_worker import describe, open_loader
from support.reference_samples import samples_of

FILTER = {"exclude": [0, 3, 17, 60], "min_tokens": 4, "max_tokens": 50}
FRACTION, CHANGE_AT, STEPS, EPOCHS = 0.3, 4, 14, 2
CASES = {
    "masks": {"dataset": "web", "document_masks": True},
    "best_fit": {"dataset": "web", "packing": "best_fit"},
    "filter": {"dataset": "web", "document_masks": True, "samples": {"documents": FILTER}},
    "filter_best_fit": {"dataset": "web", "packing": "best_fit", "samples": {"documents": FILTER, "pad_id": 7}},
    "train": {"dataset": "web", "split": "train", "samples": {"validation_fraction": FRACTION}},
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
    "epochs": {"epochs": EPOCHS},
    "best_fit": {"packing": "best_fit"},
    "filter": {"documents": DocumentSubset(**FILTER)},
    "filter_best_fit": {"documents": DocumentSubset(**FILTER), "packing": "best_fit"},
    "train": {"split": "train", "validation_fraction": FRACTION},
}
REFUSED = {
    # Every sample of an epoch is leased until it is used. The ends of workers' leases are short batches: only the
    # workers' speed could say which samples they leave out, and the ledger would miss these.
    ("lease", "drop_last"): "drop_last=True is not supported with scheduler=.*Leave it out",
    # Workers step apart: no step has a global batch. A worker's batch_size stays, as the ledger derives from it which
    # samples of a receipt a step had.
    ("lease", "growing"): r"global_batch_size=\[\[0, .* is not supported with scheduler=.*Leave it out",
    # A rank has the share of each dataset that its slices are, whatever the weights are.
    ("owned", "mixture"): r"dataset=Mixture.* is not supported with assignment='owned'. Use assignment='global'",
    # A rank spreads its samples evenly over the steps of an epoch: no batch is shorter than others by more than one.
    ("owned", "drop_last"): "drop_last=True is not supported with assignment='owned'. Use assignment='global'",
    # And so its batches follow from the steps of an epoch, and not from the size at a step.
    ("owned", "growing"): r"global_batch_size=\[\[0, .* with assignment='owned'. Use assignment='global'",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory) -> Iterator[LocalCluster]:
    with ExitStack() as stack:
        tokens = {"web": make_slices(18, 0), "books": make_slices(5, 30_000)}
        yield LocalCluster(tmp_path_factory.mktemp("cluster"), stack, tokens, make_rows(12))


def make(cluster: LocalCluster, source: str, case: str) -> Source:
    return SOURCES[source](cluster, CASES[case], JOBS.get(case, {}))


def reference(cluster: LocalCluster, case: str) -> dict[tuple[int, int], list]:
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


def check_contents(lines: list[Line], expected: dict[tuple[int, int], list]) -> Counter[tuple[int, int, int]]:
    """How often each sample came in each epoch, by epoch, dataset and id; all as the reference has them."""
    counts = Counter()
    for line in lines:
        assert line["rows"] == max(1, len(line["ids"])), "an empty batch"
        for source, number, row in zip(line["sources"], line["ids"], line["content"]):
            assert row == expected[source, number]
            counts[line["epoch"], source, number] += 1
    return counts


def check_shares(source: Source, workers: list[list[Line]]):
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
def test_an_epoch_has_each_sample_once_as_the_reference_has_it(cluster, name, case):
    source = make(cluster, name, case)
    if (name, case) in REFUSED:
        with pytest.raises(UsageError, match=REFUSED[name, case]):
            open_loader(source.loader(0))
        return
    workers = source.run()
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
    if case == "epochs" and source.is_lockstep:
        check_epochs(name, workers)
    num_validation = round(FRACTION * len(expected))
    sizes = {
        "train": len(expected) - num_validation, "epochs": EPOCHS * len(expected),
        "drop_last": len(expected) // GLOBAL_BATCH * GLOBAL_BATCH,
    }  # fmt: skip
    assert len(counts) == sizes.get(case, len(expected))
    if case == "train":
        other = Static(cluster, {**CASES[case], "split": "validation"}).run()
        validation = {number for line in chain(*other) for number in line["ids"]}
        assert len(validation) == num_validation
        assert {number for _, _, number in counts} == {number for _, number in expected} - validation
    if isinstance(source, Leased):
        report = source.verify(CASES[case]["dataset"])
        num_epochs = EPOCHS if case == "epochs" else 1
        once = {"samples": len(counts) // num_epochs, "missing": 0, "repeated": 0}
        assert report["ok"] and report["epochs"] == [{"epoch": epoch, **once} for epoch in range(num_epochs)], report
        used = [(use["name"], sample) for use in source.uses(CASES[case]["dataset"]) for sample in use["samples"]]
        delivered = [(f"worker-{i}", number) for i, of in enumerate(workers) for line in of for number in line["ids"]]
        assert sorted(used) == sorted(delivered)


def check_epochs(name: str, workers: list[list[Line]]):
    """Each has an order of its own; owned samples stay with their rank."""
    for lines in workers:
        orders = [[n for line in lines if line["epoch"] == epoch for n in line["ids"]] for epoch in range(EPOCHS)]
        assert orders[0] != orders[1] and (name != "owned" or set(orders[0]) == set(orders[1]))


def check_mixture(source: Source, workers: list[list[Line]], counts: Counter[tuple[int, int, int]]):
    """From a step on half of the samples are of the second dataset; none comes again before all of its dataset came."""
    by_step = defaultdict(Counter)
    for line in chain(*workers):
        by_step[line["step"]].update(line["sources"])
    assert all(by_step[step].keys() == {0} for step in range(CHANGE_AT))
    later = sum((by_step[step] for step in range(CHANGE_AT, STEPS)), Counter())
    assert abs(later[0] - later[1]) <= 4 * len(workers)
    assert set(counts.values()) == {1}
    if isinstance(source, Leased):
        for index, job in enumerate(("web", "books")):
            report = source.verify(job)
            assert not report["epochs"][0]["repeated"]
            assert report["epochs"][0]["samples"] == sum(of == index for _, of, _ in counts)
    else:
        assert sum(counts.values()) == STEPS * GLOBAL_BATCH


LEASED = {
    "epochs=2 is not supported with scheduler=.*leave it out": {"epochs": 2},
    "shuffle=False is not .*leave it out": {"shuffle": False},
    "seed=3 is not .*leave it out": {"seed": 3},
    "rank=0 is not .*Leave it out": {"rank": 0, "world_size": 2},
    "order=OrderOptions.* is not .*Leave it out": {"order": {"lanes": 2}},
    "global_batch_size=4 is not .*Leave it out": {"batch_size": None, "global_batch_size": 4},
    "batch size: expected one of batch_size": {"batch_size": None},
    "scheduler: expected a dataset forebay://NETWORK/NAME": {"dataset": "DIRECTORY"},
    "scheduler: expected 'host:port' or 'auto', got": {"scheduler": {"x": "127.0.0.1:1"}},
    "seq_len: expected that of the job web, 16, got 8. Change the Loader's arguments, or start a job": {"seq_len": 8},
    "packing: expected that of the job web, 'concat', got 'best_fit'. Change": {"packing": "best_fit"},
    "documents: expected that of the job web, None, got .*Change": {"samples": {"documents": FILTER}},
    "split: expected that of the job web, None, got .*Change": {
        "split": "train", "samples": {"validation_fraction": FRACTION}
    },
}  # fmt: skip
OWNED = {
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


@pytest.mark.parametrize("name, refused", [("lease", LEASED), ("owned", OWNED)])
def test_what_a_source_cannot_have_is_refused_when_the_loader_is_made(cluster, name, refused):
    spec = make(cluster, name, "epochs" if name == "owned" else "masks").loader(0)
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


@pytest.mark.parametrize("case", ["filter_best_fit", "rows"])
@pytest.mark.parametrize("name", ["static", "owned"])
def test_a_state_of_any_batch_resumes_with_the_next_one(cluster, name, case):
    """Over the end of an epoch, with batches made ahead by a thread, too."""
    spec = {**make(cluster, name, case).loader(1), "epochs": 2}

    def with_prefetch(batches):
        return {**spec, "samples": {**spec.get("samples", {}), "prefetch_batches": batches}}

    expected = lines_of(open_loader(spec))
    for stop in {*range(0, len(expected), 5), len(expected) // 2}:
        with open_loader(with_prefetch(stop % 3)) as loader:
            assert lines_of(islice(loader, stop)) == expected[:stop]
            state = json.loads(json.dumps(loader.state_dict()))
        with open_loader(with_prefetch((stop + 1) % 3)) as loader:
            loader.load_state_dict(state)
            assert lines_of(loader) == expected[stop:]


@pytest.mark.parametrize("case", ["masks", "mixture"])
def test_a_state_resumes_on_any_world_size(cluster, case):
    """As a coordinator's next generation does: ranks of another number go on with the same global batches."""
    source = Static(cluster, CASES[case])
    source.num_workers = 1
    expected = [sorted(zip(line["sources"], line["ids"])) for line in lines_of(open_loader(source.loader(0)))]
    chance, step, state, seen = random.Random(0), 0, None, []
    while step < len(expected):
        source.num_workers = chance.choice([1, 2, 3, 5, 8])
        stop = min(len(expected), step + chance.randrange(1, 6))
        parts = []
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


def test_a_lease_loader_resumes_with_what_is_not_committed(cluster):
    """Wherever it stops, committed batches never come again, and all others do."""
    source = make(cluster, "lease", "masks")
    assert isinstance(source, Leased)
    expected, counts = reference(cluster, "masks"), Counter[int]()
    chance, state, dropped = random.Random(0), None, Counter[int]()
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


def check_ids(lines: list[Line], expected: dict[tuple[int, int], list]) -> Counter[int]:
    return Counter({number: count for (_, _, number), count in check_contents(lines, expected).items()})
