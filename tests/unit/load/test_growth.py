"""Runs on datasets that grow: an epoch ends on the slices it began with, the next has all, and owners stay."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import astuple
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import Loader, Mixture, OrderOptions, prepare_dataset
from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import StateError
from forebay.load.samples import MAX_IMBALANCE, plan_samples
from forebay.order.growth import ancestors, grow, owners_of
from forebay.order.mixture import Weights
from forebay.order.plan import Order
from forebay.order.run import Run
from forebay.order.step_index import BatchSizes
from support.store import stored

SEQ_LEN = 64


def prepare(folder: Path):
    """Prepare a dataset, one that extends it, and one that extends that."""
    parent = None
    for number, count in enumerate((30, 9, 14)):
        (folder / f"in{number}").mkdir()
        for i in range(count):
            text = f"{number} {i} " + "some words " * (60 + (7 * i + number) % 50)
            (folder / f"in{number}/{i:03d}.txt").write_text(text)
        parent = prepare_dataset(
            [folder / f"in{number}"], folder / str(number), tokenizer="bytes", slice_bytes=8192, name="d", workers=1,
            extend=parent,
        ).path  # fmt: skip


@pytest.fixture(scope="module")
def datasets() -> list[Dataset]:
    result = [open_dataset(stored(prepare) / str(number)) for number in range(3)]
    assert [dataset.num_slices for dataset in result] == [8, 10, 14]
    return result


def test_ancestors(datasets):
    sizes = {dataset.id: dataset.num_slices for dataset in datasets}
    for number, dataset in enumerate(datasets):
        assert ancestors(dataset.manifest.lineage) == dict(list(sizes.items())[:number])
    for hostile in ({"parent": 3}, {"parent": {"id": 1, "slices": 2}}, {"parent": {"ancestors": [4, {"id": "x"}]}}):
        assert ancestors(hostile) == {}


GENERATIONS = [2, 5, 8]


def lineage_of(name: str, generation: int) -> dict:
    """Of one of the datasets NAME0, NAME1, ..., each of which extends the one before."""
    older = [{"id": f"{name}{i}", "slices": GENERATIONS[i]} for i in range(generation)][::-1]
    return {"parent": {**older[0], "ancestors": older[1:]}} if older else {}


@given(st.data(), st.booleans(), st.sampled_from([8, 5, 1, [(0, 4), (11, 9), (40, 6)]]))
def test_epochs_end_on_the_slices_with_which_they_began_over_several_generations(data, is_mixture, sizes):
    names, batches = "ab" if is_mixture else "a", BatchSizes.of(sizes)
    weights = Weights(((0, (3, 1)), (17, (1, 2)))) if is_mixture else None
    counts = [data.draw(st.lists(st.integers(1, 12), min_size=8, max_size=8)) for _ in names]

    def load(numbers: list[int], state: dict | None) -> tuple[Run, dict]:
        orders = [Order(np.array(of[: GENERATIONS[i]]), 3, batches.largest) for of, i in zip(counts, numbers)]
        run = Run(orders, batches, weights=weights, epochs=None)
        ids = {name: f"{name}{i}" for name, i in zip(names, numbers)}
        identity = {"version": 6, "dataset_id": ids if is_mixture else ids["a"], **run.shape, "growth": {}}
        if state is None:
            return run, identity
        lineages = [lineage_of(name, i) for name, i in zip(names, numbers)]
        return grow(json.loads(json.dumps(state)), identity, run, lineages)[:2]

    step, numbers = 0, [0] * len(names)
    run, identity = load(numbers, None)
    for _ in range(3):
        step += data.draw(st.integers(0, 30))
        before, unread = run, run.unread_epochs(step)
        numbers = [data.draw(st.integers(i, 2)) for i in numbers]
        run, identity = load(numbers, {**identity, "step": step})
        assert all(map(np.array_equal, astuple(run.steps(0, step, 0, 1)), astuple(before.steps(0, step, 0, 1))))
        for order, epoch, of, i in zip(run.orders, unread, counts, numbers):
            assert order.epoch_order(epoch).num_samples == sum(of[: GENERATIONS[i]])
    read = run.steps(0, step + 60, 0, 1)
    for source, order in enumerate(run.orders):
        mine = read.sources == source
        used = Counter(order.sample_ids_of(read.slices[mine], read.samples[mine]).tolist())
        num_whole = run.progress(step + 60).epoch
        if run.mixture is not None:
            sources, own = run.mixture.locate(np.arange(len(mine)))
            num_whole = int(order.passes(np.setdiff1d(np.arange(len(mine) + 1), own[sources == source])[:1])[0][0])
        passes = Counter(i for epoch in range(num_whole) for i in range(order.epoch_order(epoch).num_samples))
        assert not passes - used and (used - passes).total() < 12 * batches.largest + order.num_samples


def test_states_that_cannot_continue_are_refused(datasets):
    parent, child, other = (
        Loader(dataset, seq_len=SEQ_LEN, global_batch_size=8, seed=seed)
        for dataset, seed in ((datasets[0], 3), (datasets[1], 3), (datasets[1], 4))
    )
    take_samples(parent, 3)
    state = parent.state_dict()
    child.load_state_dict(state)
    grown = child.state_dict()
    with pytest.raises(StateError, match="Open the dataset that the state was taken of"):
        parent.load_state_dict(grown)  # from the larger to the smaller
    with pytest.raises(StateError, match="expected seed 4, got 3"):
        other.load_state_dict(state)
    [[dataset_id, shape, epoch]] = grown["growth"][""]
    wrong = [[dataset_id, shape, 0], [dataset_id, shape, "1"], [dataset_id, shape], ["ab" * 32, shape, epoch]]
    wrong += [[[], shape, epoch], [dataset_id, {**shape, "lanes": 0}, epoch], [dataset_id, {"lanes": 1}, epoch]]
    changes = [{"growth": {"": [entry]}} for entry in wrong] + [{"growth": {"": [[dataset_id, shape, epoch]] * 2}}]
    changes += [{"growth": 3}, {"order": "x"}, {"order": []}, {"order": [{**shape, "window": "x"}]}, {"step": "3"}]
    for change in [*changes, {"dataset_id": "ab" * 32}]:
        with pytest.raises(StateError, match="loader state: expected"):
            child.load_state_dict({**(grown if "growth" in change else state), **change})


def test_no_sample_changes_its_split_when_a_dataset_grows(datasets):
    indexes = [
        [plan_samples(dataset, SEQ_LEN, split=split, validation=0.1) for split in ("train", "validation")]
        for dataset in datasets
    ]
    for parent, child in pairwise(indexes):
        for before, after in zip(parent, child):
            size = len(before.counts)
            assert after.counts[:size].tolist() == before.counts.tolist()
            assert after.offsets[:size].tolist() == before.offsets.tolist()


def mixed(datasets: list[Dataset], **more: Any) -> Loader[Any]:
    mixture = Mixture({"a": datasets[0], "b": datasets[1]}, [(0, {"a": 3, "b": 1}), (9, {"a": 1, "b": 1})])
    return Loader(mixture, seq_len=SEQ_LEN, global_batch_size=24, seed=2, **more)


def take_samples(loader: Loader[Any], num_batches: int) -> list[tuple[int, int]]:
    """(dataset, sample id) of the next batches, in order."""
    taken = []
    for batch in islice(loader, num_batches):
        taken += zip(batch.dataset_index.tolist(), batch.sample_ids.tolist())
    return taken


@pytest.mark.parametrize("grows", ["a", "b", "ab"])
def test_each_dataset_of_a_mixture_continues_on_the_larger_one_after_its_own_pass(datasets, grows):
    """Passes in full: test_epochs_end_on_the_slices_with_which_they_began_over_several_generations."""
    large = [datasets["a" in grows], datasets[1 + ("b" in grows)]]
    parent, child, again = mixed(datasets[:2]), mixed(large), mixed(large)
    take_samples(parent, 3)
    child.load_state_dict(json.loads(json.dumps(parent.state_dict())))
    assert take_samples(child, 2) == take_samples(parent, 2)
    again.load_state_dict(json.loads(json.dumps(child.state_dict())))
    rest = take_samples(child, 120)
    assert take_samples(again, 120) == rest
    seen = [{number for index, number in rest if index == source} for source in range(2)]
    assert seen == [set(range(plan_samples(dataset, SEQ_LEN).num_samples)) for dataset in large]


def test_malformed_states_of_mixtures_are_refused(datasets):
    state = mixed(datasets[:2]).state_dict()
    for change in (
        {"growth": {"a": 3}}, {"order": [1]}, {"streams": "x"}, {"streams": 1 << 20}, {"step": -1},
        {"dataset_id": {"a": [], "b": 3}}, {"dataset_id": {**state["dataset_id"], "b": "ab" * 32}},
    ):  # fmt: skip
        with pytest.raises(StateError, match="loader state: expected"):
            mixed(datasets[1:]).load_state_dict({**state, **change})


def test_owned_slices_continue_on_the_larger_dataset_at_the_end_of_an_epoch(datasets):
    def open_ranks(dataset):
        order = OrderOptions(assignment="owned")
        arguments = {"seq_len": SEQ_LEN, "batch_size": 8, "seed": 4, "epochs": None, "order": order}
        return [Loader(dataset, rank=rank, world_size=2, **arguments) for rank in range(2)]

    def finish_epoch(loaders):
        ids = []
        for loader in loaders:
            stop = loader.run.epoch_stop(loader.step)
            assert stop is not None
            for batch in islice(loader, stop - loader.step):
                ids += batch.sample_ids.tolist() if batch.weight else []
        return ids

    parents, children, again = (open_ranks(dataset) for dataset in (datasets[0], datasets[1], datasets[1]))
    for parent, child in zip(parents, children):
        take_samples(parent, 4)
        child.load_state_dict(parent.state_dict())
    assert finish_epoch(children) == finish_epoch(parents)
    for loader, child in zip(again, children):
        loader.load_state_dict(json.loads(json.dumps(child.state_dict())))
    ids = finish_epoch(children)
    assert sorted(ids) == list(range(plan_samples(datasets[1], SEQ_LEN).num_samples)) and finish_epoch(again) == ids


@pytest.mark.parametrize("slack", [None, MAX_IMBALANCE])
def test_owners_of_datasets_that_grow(slack):
    hashes = np.random.default_rng(0).integers(0, 256, (2500, 32), np.uint8)

    names, lineage = ["a", "b", "c"], {"parent": {"id": "small", "slices": 2000}}
    before, after = owners_of(hashes[:2000], {}, names, slack), owners_of(hashes, lineage, names, slack)
    assert np.array_equal(after[: len(before)], before)  # appended data move no slice
    assert slack is None or np.bincount(after).max() <= (1 + slack) * len(after) / len(names) + 2
