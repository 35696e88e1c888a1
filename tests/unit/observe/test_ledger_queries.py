"""From a step to its documents and back: every sample of a job is found at the step and worker that used it."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from forebay.coordinator.messages import Formed, RankGeneration, RankSlot, Rules, Stepped
from forebay.coordinator.store import RunStore
from forebay.dataset.documents import Documents
from forebay.dataset.import_slices import import_slices
from forebay.dataset.reader import Dataset
from forebay.dataset.slices import write_token_slice
from forebay.errors import UsageError
from forebay.ledger.chain import Used
from forebay.ledger.index import LedgerIndex, encode_runs, open_index
from forebay.ledger.writer import Ledger
from forebay.observe.ledger_queries import blame_step, export_uses, is_roster, verify_steps, who_saw
from forebay.order.plan import lease_order
from forebay.peer_id import peer_id_of
from support.ledgers import KEY, sign

SEQ_LEN, BATCH = 4, 3
LENGTHS = [[5, 20, 15], [7], [33, 4]]  # The last document of a slice goes on in the next.
Seen = dict[tuple[str, int], list[int]]  # (worker, step): the global samples that it used
Job = tuple[LedgerIndex, Seen]
PEERS = {"w0": peer_id_of(b"0" * 32), "w1": peer_id_of(b"1" * 32)}


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    (tmp_path / "data" / "slices").mkdir(parents=True)
    token = 0
    for index, lengths in enumerate(LENGTHS):
        tail = 6 if index < 2 else 0
        count = sum(lengths) + tail
        tokens = np.arange(token, token + count, dtype=np.uint16)
        path = tmp_path / "data" / "slices" / f"{index:06d}.safetensors"
        write_token_slice(path, tokens, np.cumsum(lengths).astype(np.uint64))
        token += count
    return import_slices(tmp_path / "data", "tiny")


def train(path: Path, dataset: Dataset, epochs: int = 2, one_worker: bool = False) -> Seen:
    """A ledger as two workers make it, receipts now and then; (worker, step) to the global samples it used.

    `one_worker`: as two sessions of one worker.
    """
    samples = dataset.table.count // SEQ_LEN
    base = np.cumsum(samples) - samples
    seen = {}
    steps, chance = dict.fromkeys(PEERS, 0), np.random.default_rng(1)
    with Ledger.open(path, sign, now=lambda: 1000.0 + ledger.next_seq) as ledger:
        body = {"dataset_id": dataset.id, "seed": 9, "seq_len": SEQ_LEN, "layout": "tokens", "scheduler": KEY.hex()}
        ledger.append("job", {**body, "samples_per_slice": encode_runs(samples)}, sync=False)
        for name, peer in PEERS.items():
            ledger.append("worker", {"worker": peer, "certificate": "", "name": name}, sync=False)
        for epoch in range(epochs):
            for index, count in enumerate(samples.tolist()):
                name = f"w{(epoch + index) % 2}"
                order = lease_order(9, epoch, index, count, 0, count)
                acked = position = 0
                while position < count:
                    steps[name] += 1
                    seen[name, steps[name]] = (base[index] + order[position : position + BATCH]).tolist()
                    position = min(count, position + BATCH)
                    if position == count or chance.random() < 0.5:
                        use = Used(f"{epoch}-{index}", epoch, index, acked, position, steps[name])
                        row = {"worker": PEERS["w0" if one_worker else name], "uses": [use.to_row()], "receipt": ""}
                        row |= {"session": name} if one_worker else {}
                        ledger.append("uses", row, sync=False)
                        acked = position
    return seen


@pytest.fixture
def job(tmp_path, dataset) -> Job:
    seen = train(tmp_path / "ledger.jsonl", dataset)
    return open_index(tmp_path / "ledger.jsonl"), seen


def test_every_step_of_every_worker_is_found(job, dataset):
    index, seen = job
    documents = Documents(dataset)
    for (name, step), samples in seen.items():
        (part,) = blame_step(index, step, worker=name, documents=documents)
        assert part.exact and part.name == name and part.worker == PEERS[name] and part.samples == samples
        tokens = [t for p in part.documents for t in dataset.open_slice(p.slice).tokens[p.start : p.stop].tolist()]
        firsts = [(sample - int(index.job.samples[: part.slice].sum())) * SEQ_LEN for sample in samples]
        full = dataset.open_slice(part.slice).tokens
        assert tokens == [t for first in firsts for t in full[first : first + SEQ_LEN].tolist()]
    assert {p.name for p in blame_step(index, 1)} == {"w0", "w1"}
    for step, worker in ((0, ""), (10_000, ""), (1, "absent")):
        with pytest.raises(UsageError, match="blame"):
            blame_step(index, step, worker=worker)


def test_the_steps_of_two_sessions_of_a_worker_are_told_apart(tmp_path, dataset):
    seen = train(tmp_path / "ledger.jsonl", dataset, one_worker=True)
    index = open_index(tmp_path / "ledger.jsonl")
    assert len(index.workers) == 1
    for (session, step), samples in seen.items():
        (part,) = [part for part in blame_step(index, step, worker="w0") if part.session == session]
        assert part.exact and part.samples == samples


def test_whoever_saw_a_document_is_found(job, dataset):
    index, seen = job
    documents = Documents(dataset)
    bases = np.cumsum(index.job.samples) - index.job.samples
    for number in range(int(dataset.table.documents.sum())):
        places = list(documents.token_ranges(number))
        assert all(p.document == number for position, a, b in places for p in documents.pieces(position, a, b))
        for position, start, stop in places:
            ids = {
                int(bases[position]) + s
                for s in range(start // SEQ_LEN, -(-stop // SEQ_LEN))
                if s < index.job.samples[position]
            }
            expected = {(who, step): sorted(ids & set(used)) for (who, step), used in seen.items() if ids & set(used)}
            result = {
                (part.name, part.first_step): sorted(part.samples) for part in who_saw(index, position, start, stop)
            }
            assert result == expected
    assert documents.find("#2") == documents.find("2") == [2]
    with pytest.raises(UsageError, match="none in"):
        documents.find("#99")
    with pytest.raises(UsageError, match="has no ids"):
        documents.find("doc-1")
    with pytest.raises(UsageError, match="who"):
        who_saw(index, 3, 0, 1)


def test_all_tables_say_the_same(job, tmp_path):
    index, seen = job
    for name in ("uses.jsonl", "uses.parquet"):
        assert export_uses(index, tmp_path / name, sample_ids=True) == len(index.uses)
    lines = [json.loads(line) for line in (tmp_path / "uses.jsonl").read_text().splitlines()]
    table = pq.read_table(tmp_path / "uses.parquet").to_pylist()
    assert [{**row, "at": row["at"].timestamp()} for row in table] == lines
    used = sorted(sample for row in lines for sample in row["samples"])
    assert used == sorted(sample for samples in seen.values() for sample in samples)


def write_roster(directory: Path, rows: list[Stepped]):
    places = (RankSlot("w0", "s0"), RankSlot("w1", "s1"))
    roster = RunStore(directory)
    state, _ = roster.load(Rules(), {}, 0.0, "run")
    formed = [Formed(RankGeneration(1, places, 0, 0, 0)), Formed(RankGeneration(2, places, 6, 24, 0))]
    roster.save(state, [*formed, *rows], "run")
    roster.close()


def test_the_coordinators_log_is_proved(tmp_path):
    full = [Stepped(1, 0, 4, 0, 4), Stepped(1, 4, 9, 16, 4), Stepped(2, 6, 20, 24, 4)]
    write_roster(tmp_path / "a", full)
    report = verify_steps(tmp_path / "a")
    assert report.ok and report.steps == 20
    assert report.epochs == [{"epoch": 0, "samples": 80, "missing": 0, "repeated": 0, "redone": 12}]
    write_roster(tmp_path / "b", [full[0], Stepped(1, 4, 6, 20, 4), Stepped(2, 6, 7, 26, 4)])
    report = verify_steps(tmp_path / "b")
    assert not report.ok and report.epochs[0]["missing"] == 4 and report.epochs[0]["repeated"] == 2
    write_roster(tmp_path / "c", full[:1])
    assert verify_steps(tmp_path / "c").ok
    write_roster(tmp_path / "d", full[2:])
    assert "expected step 0" in verify_steps(tmp_path / "d").problems[0]
    assert is_roster(tmp_path / "a") and not is_roster(tmp_path / "nothing")
