"""Runs on datasets that grow: an epoch ends on the slices it began with, the next has all, and owners stay."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain, islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import Loader, Mixture, OrderOptions, prepare_dataset
from forebay.dataset.reader import Dataset, open_dataset
from forebay.errors import StateError
from forebay.load.growth import GrownRun, ancestors, grow
from forebay.load.growth import owners_of as assign_dataset_owners
from forebay.load.samples import MAX_IMBALANCE, plan_samples
from forebay.load.state import make_state, run_identity, step_of_state
from forebay.order.plan import Order
from forebay.order.run import Run
from forebay.order.step_index import BatchSizes
from support.store import stored

SEQ_LEN = 64


def prepare(folder: Path) -> None:
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


class Training:
    """A run of a dataset that makes and loads states as a Loader does."""

    def __init__(self, dataset: Dataset, sizes: Any = 8, split: str | None = None, **limits: Any) -> None:
        self.dataset, self.limits = dataset, {"epochs": None, **limits}
        index = plan_samples(dataset, SEQ_LEN, split=split, validation=0.3 if split else 0.0)
        self.batches = BatchSizes.of(sizes)
        order = Order(index.counts, 3, self.batches.largest)
        self.own = self.run = Run([order], self.batches, **self.limits)
        self.own_identity = self.identity = run_identity(self.run, {"d": dataset}, [index], 3, False)
        self.step = 0

    def load(self, state: object) -> Training:
        lineages = [self.dataset.manifest.lineage]
        state = json.loads(json.dumps(state))
        self.run, self.identity, state = grow(state, self.own_identity, self.own, lineages, **self.limits)
        self.step = step_of_state(state, self.identity, self.run)
        return self

    def state(self) -> dict:
        return make_state(self.identity, self.run, self.step)

    def take(self, num_steps: int) -> list[tuple[int, int]]:
        """The (slice, sample) pairs of the next steps, of one of three ranks after the other."""
        stop, result = self.step + num_steps, []
        for rank in range(3):
            steps = self.run.steps(self.step, stop, rank, 3)
            result += list(zip(steps.slices.tolist(), steps.samples.tolist()))
        self.step = stop
        return result

    def finish_epoch(self) -> list[tuple[int, int]]:
        stop = self.run.epoch_stop(self.step)
        assert stop is not None
        return self.take(stop - self.step)

    def all_samples(self) -> list[tuple[int, int]]:
        counts = self.own.orders[0].samples_per_slice.tolist()
        return [(index, sample) for index, count in enumerate(counts) for sample in range(count)]


def test_ancestors(datasets: list[Dataset]) -> None:
    sizes = {dataset.id: dataset.num_slices for dataset in datasets}
    for number, dataset in enumerate(datasets):
        assert ancestors(dataset.manifest.lineage) == dict(list(sizes.items())[:number])
    for hostile in ({"parent": 3}, {"parent": {"id": 1, "slices": 2}}, {"parent": {"ancestors": [4, {"id": "x"}]}}):
        assert ancestors(hostile) == {}


@given(
    first=st.integers(0, 60), second=st.integers(0, 40), third=st.integers(0, 60),
    sizes=st.sampled_from([8, 5, [(0, 4), (11, 9), (40, 6)]]), split=st.sampled_from([None, "train", "validation"]),
)  # fmt: skip
def test_a_state_of_an_ancestor_finishes_its_epoch_then_has_all_and_resumes_exactly(
    datasets: list[Dataset], first: int, second: int, third: int, sizes: Any, split: str | None
) -> None:
    parent = Training(datasets[0], sizes, split)
    parent.take(first)
    state = parent.state()
    child, youngest = (Training(dataset, sizes, split).load(state) for dataset in datasets[1:])
    epoch = state["epoch"]
    if state["samples_taken"]:
        assert child.finish_epoch() == youngest.finish_epoch() == parent.finish_epoch()
        epoch += 1
    assert child.state()["epoch"] == epoch and child.state()["samples_taken"] == 0
    epochs = [child.finish_epoch(), child.finish_epoch()]
    assert [sorted(samples) for samples in epochs] == [child.all_samples()] * 2 and epochs[0] != epochs[1]
    assert child.state()["epoch"] == epoch + 2 and sorted(youngest.finish_epoch()) == youngest.all_samples()
    child.load(state).take(second)
    grown = child.state()
    grandchild, same = Training(datasets[2], sizes, split).load(grown), Training(datasets[1], sizes, split).load(grown)
    if grown["samples_taken"]:
        assert grandchild.finish_epoch() == child.finish_epoch() == same.finish_epoch()
    assert same.take(30) == child.take(30) and sorted(grandchild.finish_epoch()) == grandchild.all_samples()
    grandchild.take(third)
    again = grandchild.state()
    assert Training(datasets[2], sizes, split).load(again).take(25) == grandchild.take(25)
    assert step_of_state(again, grandchild.identity, grandchild.run) == again["step"]


def test_tables_and_next_uses_of_a_grown_run_agree_with_its_steps(datasets: list[Dataset]) -> None:
    parent = Training(datasets[0])
    parent.take(2)
    run = Training(datasets[1]).load(parent.state()).run
    assert isinstance(run, GrownRun)
    stop = run.growth.step + 30
    epochs, steps, taken = run.progress_table(2, stop)
    progress = [run.progress(step) for step in range(2, stop)]
    assert epochs.tolist() == [item.epoch for item in progress]
    assert steps.tolist() == [item.step_in_epoch for item in progress]
    assert taken.tolist() == [item.samples_taken for item in progress]
    together = run.steps(2, stop, 0, 1)
    assert np.diff(together.bounds).tolist() == run.batch_lens(2, stop).tolist()
    one_by_one = [run.steps(step, step + 1, 0, 1) for step in range(2, stop)]
    assert together.samples.tolist() == [sample for item in one_by_one for sample in item.samples.tolist()]
    used_steps, _, slices = run.uses(2, stop, 0, 1)
    expected = [(2 + i, index) for i, item in enumerate(one_by_one) for index in dict.fromkeys(item.slices.tolist())]
    assert list(zip(used_steps.tolist(), slices.tolist())) == expected
    # The next use of a sample is in the next epoch.
    for step in (3, run.growth.step):
        end = run.epoch_stop(step)
        assert end is not None
        stop = run.epoch_stop(end)
        assert stop is not None
        read = run.steps(end, stop, 0, 1)
        expected = end + np.repeat(np.arange(stop - end), np.diff(read.bounds))
        steps = run.next_steps(step, read.slices, read.samples, (0, 1), 1)
        assert steps.min() >= end and steps.max() < stop
        assert np.abs(steps - expected).max() <= stop - end and np.abs(steps - expected).mean() < (stop - end) / 2


@pytest.mark.parametrize("epochs, num_steps", [(1, None), (3, None), (None, 12), (2, 9)])
def test_limits_count_from_the_start_of_the_run(
    datasets: list[Dataset], epochs: int | None, num_steps: int | None
) -> None:
    parent = Training(datasets[0], epochs=epochs, num_steps=num_steps)
    parent.take(2)
    run = Training(datasets[1], epochs=epochs, num_steps=num_steps).load(parent.state()).run
    of_epochs = parent.own.steps_per_epoch + ((epochs or 999) - 1) * run.steps_per_epoch
    assert run.num_steps == min(of_epochs, num_steps or 999) and run.progress(run.num_steps).epoch <= (epochs or 999)


def test_states_that_cannot_continue_are_refused(datasets: list[Dataset]) -> None:
    parent, child = Training(datasets[0]), Training(datasets[1])
    parent.take(3)
    state = parent.state()
    unrelated = {**state, "dataset_id": "ab" * 32}
    with pytest.raises(StateError, match="Open the dataset that the state was taken of"):
        child.load(unrelated)
    with pytest.raises(StateError, match="Open the dataset that the state was taken of"):
        parent.load(child.state())  # from the larger to the smaller
    with pytest.raises(StateError, match="expected seed 3, got 4"):
        child.load({**state, "seed": 4})
    with pytest.raises(StateError, match="expected numbers lanes, window"):
        child.load({**state, "lanes": "x"})
    grown = child.load(state).state()
    for growth in (3, {**grown["growth"], "step": -1}, {**grown["growth"], "extra": 1}):
        with pytest.raises(StateError, match="expected growth with whole numbers"):
            child.load({**grown, "growth": growth})
    with pytest.raises(StateError, match="expected growth from a dataset in"):
        child.load({**grown, "growth": {**grown["growth"], "slices": 7}})


def test_no_sample_changes_its_split_when_a_dataset_grows(datasets: list[Dataset]) -> None:
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


@settings(max_examples=6)
@given(first=st.integers(0, 40), second=st.integers(0, 40), grows=st.sampled_from(["a", "b", "ab"]))
def test_each_dataset_of_a_mixture_continues_on_the_larger_one_after_its_own_pass(
    datasets: list[Dataset], first: int, second: int, grows: str
) -> None:
    """Passes through each dataset: through the smaller one to the end of what was begun, then through the larger."""
    small, large = datasets[:2], [datasets["a" in grows], datasets[1 + ("b" in grows)]]
    parent = mixed(small)
    before = take_samples(parent, first)
    state = json.loads(json.dumps(parent.state_dict()))
    child, again = mixed(large), mixed(large)
    child.load_state_dict(state)
    taken = before + take_samples(child, second)
    again.load_state_dict(json.loads(json.dumps(child.state_dict())))
    rest = take_samples(child, 120)
    assert take_samples(again, 120) == rest
    taken += rest
    for source in range(2):
        sizes = [plan_samples(item[source], SEQ_LEN).num_samples for item in (small, large)]
        used = Counter(number for index, number in taken if index == source)
        num_small = -(-sum(index == source for index, _ in before) // sizes[0])
        num_large, num_more = divmod(used.total() - num_small * sizes[0], sizes[1])
        passes = Counter([*range(sizes[0])] * num_small + [*range(sizes[1])] * num_large)
        more = used - passes
        assert not passes - used and more.total() == num_more and max(more.values(), default=1) == 1
    # Ranks agree, also over the steps at which datasets go over.
    shares = []
    for rank in range(3):
        loader = mixed(large, rank=rank, world_size=3)
        loader.load_state_dict(state)
        shares.append([batch.sample_ids.tolist() for batch in islice(loader, second + 120)])
    alone = [number for _, number in taken[24 * first :]]
    for i, of_ranks in enumerate(zip(*shares, strict=True)):
        assert sorted(chain(*of_ranks)) == sorted(alone[24 * i : 24 * i + 24])


def test_malformed_states_of_grown_mixtures_are_refused(datasets: list[Dataset]) -> None:
    parent, child = mixed(datasets[:2]), mixed(datasets[1:])
    take_samples(parent, 3)
    state = parent.state_dict()
    child.load_state_dict(state)
    grown = child.state_dict()
    growth = grown["growth"]
    for change in (
        {"growth": 3}, {"growth": {**growth, "c": None}}, {"growth": {"a": 3}}, {"lanes": [1]}, {"lanes": "x"},
        {"window": ["x", 1]}, {"dataset_id": {"a": [], "b": 3}}, {"dataset_id": "a"}, {"step": -1}, {"step": "3"},
    ):  # fmt: skip
        for valid in (state, grown):
            with pytest.raises(StateError, match="loader state: expected"):
                mixed(datasets[1:]).load_state_dict({**valid, **change})
    with pytest.raises(StateError, match="expected dataset_id"):
        child.load_state_dict({**state, "dataset_id": {**state["dataset_id"], "b": "ab" * 32}})
    with pytest.raises(StateError, match="expected growth from a dataset in"):
        child.load_state_dict({**grown, "growth": {"a": {**growth["a"], "slices": 7}}})


def test_owned_slices_continue_on_the_larger_dataset_at_the_end_of_an_epoch(datasets: list[Dataset]) -> None:
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


def test_steps_before_a_second_growth_are_unknown(datasets: list[Dataset]) -> None:
    parent = Training(datasets[0])
    parent.take(3)
    child = Training(datasets[1]).load(parent.state())
    child.finish_epoch()
    child.take(2)
    grandchild = Training(datasets[2]).load(child.state())
    assert isinstance(grandchild.run, GrownRun) and grandchild.run.growth.first_step == child.step - 2
    with pytest.raises(StateError, match=f"run step 0: expected one from {child.step - 2}"):
        grandchild.run.progress(0)


@pytest.mark.parametrize("slack", [None, MAX_IMBALANCE])
def test_owners_of_datasets_that_grow(slack: float | None) -> None:
    hashes = np.random.default_rng(0).integers(0, 256, (2500, 32), np.uint8)

    def dataset(num_slices, **lineage):
        table = SimpleNamespace(sha256=hashes[:num_slices])
        return SimpleNamespace(num_slices=num_slices, table=table, manifest=SimpleNamespace(lineage=lineage))

    small, large = dataset(2000), dataset(2500, parent={"id": "small", "slices": 2000})
    names = ["a", "b", "c"]
    before, after = (assign_dataset_owners(item, names, slack) for item in (small, large))
    assert np.array_equal(after[: len(before)], before)  # appended data move no slice
    assert slack is None or np.bincount(after).max() <= (1 + slack) * len(after) / len(names) + 2
