"""Runs on datasets that grow: an epoch is finished on what it began with, the next has all, and owners stay."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay import prepare_dataset
from forebay.dataset.reader import Dataset
from forebay.errors import StateError
from forebay.load.growth import GrownRun, ancestors, grow, owners_of
from forebay.load.samples import MAX_IMBALANCE, plan_samples
from forebay.load.state import make_state, run_identity, step_of_state
from forebay.order.plan import Order
from forebay.order.run import Run
from forebay.order.step_index import BatchSizes

SEQ_LEN = 64


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    """A dataset, one that extends it, and one that extends that."""
    folder, made = tmp_path_factory.mktemp("grown"), list[Dataset]()
    for number, count in enumerate((30, 9, 14)):
        (folder / f"in{number}").mkdir()
        for i in range(count):
            text = f"{number} {i} " + "some words " * (60 + (7 * i + number) % 50)
            (folder / f"in{number}/{i:03d}.txt").write_text(text)
        made.append(
            prepare_dataset(
                [folder / f"in{number}"], folder / str(number), tokenizer="bytes", slice_bytes=8192, name="d",
                workers=1, extend=made[-1].path if made else None,
            ).open()
        )  # fmt: skip
    assert [dataset.num_slices for dataset in made] == [8, 10, 14]
    return made


class Training:
    """A run of a dataset, and what a Loader does with its states."""

    def __init__(self, dataset: Dataset, sizes: Any = 8, split: str | None = None, **limits: Any) -> None:
        self.dataset, self.limits = dataset, {"epochs": None, **limits}
        index = plan_samples(dataset, SEQ_LEN, split=split, validation=0.3 if split else 0.0)
        self.batches = BatchSizes.of(sizes)
        order = Order(index.counts, 3, self.batches.largest)
        self.own = self.run = Run([order], self.batches, **self.limits)
        self.own_identity = self.identity = run_identity(self.run, {"d": dataset}, [index], 3, False)
        self.step = 0

    def load(self, state: object) -> Training:
        lineage = self.dataset.manifest.lineage
        state = json.loads(json.dumps(state))
        self.run, self.identity, state = grow(state, self.own_identity, self.own, lineage, **self.limits)
        self.step = step_of_state(state, self.identity, self.run)
        return self

    def state(self) -> dict[str, Any]:
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


@settings(deadline=None, max_examples=25)
@given(
    steps=st.integers(0, 60), sizes=st.sampled_from([8, 5, [(0, 4), (11, 9), (40, 6)]]),
    split=st.sampled_from([None, "train", "validation"]),
)  # fmt: skip
def test_a_state_of_the_parent_finishes_its_epoch_and_then_has_all(
    datasets: list[Dataset], steps: int, sizes: Any, split: str | None
) -> None:
    parent, child = Training(datasets[0], sizes, split), Training(datasets[1], sizes, split)
    parent.take(steps)
    state = parent.state()
    child.load(state)
    epoch = state["epoch"]
    if state["samples_taken"]:
        assert child.finish_epoch() == parent.finish_epoch()
        epoch += 1
    assert child.state()["epoch"] == epoch and child.state()["samples_taken"] == 0
    whole = [child.finish_epoch(), child.finish_epoch()]
    assert [sorted(samples) for samples in whole] == [child.all_samples()] * 2 and whole[0] != whole[1]
    assert child.state()["epoch"] == epoch + 2


@settings(deadline=None, max_examples=25)
@given(
    first=st.integers(0, 40), second=st.integers(0, 40), third=st.integers(0, 60),
    sizes=st.sampled_from([7, [(0, 4), (11, 9)]]),
)  # fmt: skip
def test_states_of_grown_runs_resume_exactly_also_on_a_further_dataset(
    datasets: list[Dataset], first: int, second: int, third: int, sizes: Any
) -> None:
    parent = Training(datasets[0], sizes)
    parent.take(first)
    child = Training(datasets[1], sizes).load(parent.state())
    child.take(second)
    state = child.state()
    expected = child.take(30)
    assert Training(datasets[1], sizes).load(state).take(30) == expected
    grandchild = Training(datasets[2], sizes).load(state)
    if state["samples_taken"]:
        same = Training(datasets[1], sizes).load(state)
        assert grandchild.finish_epoch() == same.finish_epoch()
    assert sorted(grandchild.finish_epoch()) == grandchild.all_samples()
    grandchild.take(third)
    again = grandchild.state()
    assert Training(datasets[2], sizes).load(again).take(25) == grandchild.take(25)
    assert step_of_state(again, grandchild.identity, grandchild.run) == again["step"]


def test_a_state_of_an_earlier_ancestor_goes_over_at_once(datasets: list[Dataset]) -> None:
    parent = Training(datasets[0])
    parent.take(3)
    last = Training(datasets[2]).load(parent.state())
    assert last.finish_epoch() == parent.finish_epoch()
    assert sorted(last.finish_epoch()) == last.all_samples()


def test_tables_of_a_grown_run_agree_with_its_steps(datasets: list[Dataset]) -> None:
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


def test_the_next_use_of_samples_is_in_the_next_epoch(datasets: list[Dataset]) -> None:
    parent = Training(datasets[0])
    parent.take(3)
    run = Training(datasets[1]).load(parent.state()).run
    assert isinstance(run, GrownRun)
    for step in (3, run.growth.step):
        end = run.epoch_stop(step)
        assert end is not None
        stop = run.epoch_stop(end)
        assert stop is not None
        read = run.steps(end, stop, 0, 1)
        expected = end + np.repeat(np.arange(stop - end), np.diff(read.bounds))
        steps = run.next_steps(step, read.slices, read.samples, (0, 1), 1)
        assert steps is not None and steps.min() >= end and steps.max() < stop
        assert np.abs(steps - expected).max() <= stop - end and np.abs(steps - expected).mean() < (stop - end) / 2


@pytest.mark.parametrize(("epochs", "num_steps"), [(1, None), (3, None), (None, 12), (2, 9)])
def test_limits_count_from_the_start_of_the_run(
    datasets: list[Dataset], epochs: int | None, num_steps: int | None
) -> None:
    parent = Training(datasets[0], epochs=epochs, num_steps=num_steps)
    parent.take(2)
    run = Training(datasets[1], epochs=epochs, num_steps=num_steps).load(parent.state()).run
    smaller, larger = parent.own.steps_per_epoch, run.steps_per_epoch
    limits = [num_steps] if num_steps is not None else []
    limits += [smaller + (epochs - 1) * larger] if epochs is not None else []
    assert run.num_steps == min(limits) and run.progress(min(limits)).epoch <= (epochs or 99)


def test_what_cannot_go_over_is_refused(datasets: list[Dataset]) -> None:
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
    child.own_identity = {**child.own_identity, "workers": ["a"]}
    with pytest.raises(StateError, match="mixtures and of assignment='owned' do not go over"):
        child.load({**state, "workers": ["a"]})


@pytest.mark.parametrize("validation", [0.1, 0.5])
def test_no_sample_changes_its_split_when_a_dataset_grows(datasets: list[Dataset], validation: float) -> None:
    indexes = [
        [plan_samples(dataset, SEQ_LEN, split=split, validation=validation) for split in ("train", "validation")]
        for dataset in datasets
    ]
    for dataset, (train, held_out) in zip(datasets, indexes):
        assert (train.counts + held_out.counts).tolist() == plan_samples(dataset, SEQ_LEN).counts.tolist()
        assert abs(held_out.num_samples / (train.num_samples + held_out.num_samples) - validation) < 0.03
    for parent, child in pairwise(indexes):
        for before, after in zip(parent, child):
            size = len(before.counts)
            assert after.counts[:size].tolist() == before.counts.tolist()
            assert after.offsets[:size].tolist() == before.offsets.tolist()


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


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    """Two datasets of some thousand real slices, the second extends the first by a quarter."""
    folder, made = tmp_path_factory.mktemp("many"), list[Dataset]()
    for number, megabytes in ((0, 3), (1, 0.75)):
        (folder / str(number)).mkdir()
        letters = np.random.default_rng(number).integers(97, 123, int(megabytes * 1e6), np.uint8)
        (folder / f"{number}/text.txt").write_bytes(letters.tobytes())
        made.append(
            prepare_dataset(
                [folder / str(number)], folder / f"out{number}", tokenizer="bytes", slice_bytes=4096, name="d",
                workers=1, extend=made[-1].path if made else None,
            ).open()
        )  # fmt: skip
    assert made[0].num_slices > 1500 and made[1].num_slices > 1.2 * made[0].num_slices
    return made


@pytest.mark.parametrize("slack", [None, MAX_IMBALANCE])
@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8])
def test_owners_of_datasets_that_grow(many: list[Dataset], workers: int, slack: float | None) -> None:
    names = [f"host-{number}" for number in range(workers + 1)]
    before, after = (owners_of(dataset, names[:-1], slack) for dataset in many)
    assert np.array_equal(after[: len(before)], before)  # appended data move no slice
    joined = owners_of(many[1], names, slack)
    assert (joined != after).mean() <= 1.1 / (workers + 1)
    if slack is not None:
        assert np.bincount(joined).max() <= (1 + slack) * len(joined) / len(names) + 2
