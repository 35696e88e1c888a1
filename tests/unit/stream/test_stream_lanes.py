"""Lanes: disjoint and together everything, the same samples in worlds of any size, and fetched once by all ranks."""

from __future__ import annotations

import gzip
import io
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import DatasetError, StateError, UsageError
from forebay.formats.inputs import InputFile, ReadOptions
from forebay.prepare.inputs import divide_file, find_inputs, read_split, split_files
from forebay.storage import remote_file
from forebay.stream import StreamOptions, TextStream
from forebay.stream import records as stream_records
from forebay.stream.hub import records_of
from forebay.stream.records import Share, find_records, share_files
from support.hub_repos import write_repo
from support.hub_server import HubServer, make_hub

ROWS = [{"id": str(i), "text": f"document {i} é " + "word " * (i * 7 % 41)} for i in range(480)]


def jsonl(rows: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def parquet(rows: list[dict[str, str]], group: int = 7) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=group)
    return out.getvalue()


def write(folder: Path, kind: str) -> Path:
    """ROWS in files of a kind; fewer files than lanes where they can be divided."""
    folder.mkdir()
    if kind == "text":
        for row in ROWS:
            (folder / f"{row['id']}.txt").write_text(row["text"])
        return folder
    number, form = {
        "parquet": (2, parquet), "one-group.parquet": (2, lambda rows: parquet(rows, 1000)), "jsonl": (3, jsonl),
        "jsonl.gz": (9, lambda rows: gzip.compress(jsonl(rows))),
        "few.jsonl.gz": (2, lambda rows: gzip.compress(jsonl(rows))), "csv": (2, csv),
    }[kind]  # fmt: skip
    for i in range(number):
        (folder / f"{i}.{kind}").write_bytes(form(ROWS[480 * i // number : 480 * (i + 1) // number]))
    return folder


def csv(rows: list[dict[str, str]]) -> bytes:
    return b"id,text\n" + b"".join(f'{row["id"]},"{row["text"]}"\n'.encode() for row in rows)


def stream(inputs: Any, **changes: Any) -> TextStream:
    arguments = {
        "tokenizer": "bytes", "seq_len": 32, "batch_size": 2, "rank": 0, "world_size": 1, "epochs": None,
        "shuffle_documents": 20, "prefetch_batches": 0, **changes,
    }  # fmt: skip
    options = {field.name: arguments.pop(field.name) for field in fields(StreamOptions) if field.name in arguments}
    return TextStream(inputs, options=StreamOptions(**options), **arguments)


def samples(batches: Any) -> dict[int, tuple[list[int], list[int]]]:
    """Inputs and labels by sample id."""
    rows = [row for b in batches for row in zip(b.sample_ids.tolist(), b.inputs.tolist(), b.labels.tolist())]
    assert len({row[0] for row in rows}) == len(rows)
    return {number: (inputs, labels) for number, inputs, labels in rows}


@settings(max_examples=200, deadline=None)
@given(
    files=st.lists(st.tuples(st.integers(0, 9 << 20), st.booleans()), min_size=1, max_size=12),
    lanes=st.integers(1, 9),
)
def test_parts_of_files_are_disjoint_and_together_all(files: list[tuple[int, bool]], lanes: int) -> None:
    sources = [
        InputFile(str(i), str(i), "jsonl", "" if divides else "gz", size, "") for i, (size, divides) in enumerate(files)
    ]
    seen = Counter[tuple[str, tuple[int, ...], int]]()
    load = [0] * lanes
    for lane in range(lanes):
        for part in share_files(sources, Share(lane, lanes)):
            if part.share.lanes > 1:
                assert part.share == (lane, lanes) and not part.borders
            size = part.file.bytes
            seen[part.file.path, part.borders, part.index] += 1
            load[lane] += part.borders[part.index + 1] - part.borders[part.index] if part.borders else size
            assert not part.borders or (part.borders[0], part.borders[-1]) == (0, size)
    dealt = all(count == lanes for count in seen.values())
    assert dealt or set(seen.values()) == {1}
    assert {path for path, *_ in seen} == {source.path for source in sources}
    for path, borders, _ in seen:  # every part of a divided file
        assert {(path, borders, i) for i in range(max(1, len(borders) - 1))} <= set(seen)
    assert all(load) or dealt
    if not dealt and all(divides for _, divides in files):
        assert max(load) <= 1.06 * sum(load) / lanes + 1


@settings(max_examples=100, deadline=None)
@given(
    lines=st.lists(st.text("ab\r", max_size=30), max_size=20),
    ends=st.booleans(),
    cuts=st.lists(st.floats(0, 1, exclude_min=True, exclude_max=True), max_size=6, unique=True),
    group=st.integers(1, 9),
)
def test_every_record_of_a_divided_file_is_in_one_part(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], ends: bool, cuts: list[float], group: int
) -> None:
    folder = tmp_path_factory.mktemp("divided")
    (folder / "a.txt").write_bytes("\n".join(lines).encode() + b"\n" * ends)
    (folder / "a.parquet").write_bytes(parquet([{"id": "", "text": line} for line in [*lines, "x"]], group))
    for name, options in (("a.txt", ReadOptions(format="lines")), ("a.parquet", ReadOptions())):
        file = find_inputs(folder / name, options).files[0]
        borders = sorted({0, *(int(cut * file.bytes) for cut in cuts), file.bytes})
        if file.bytes:
            parts = divide_file(file, options, borders)
            assert len(parts) == len(borders) - 1
            records = [record.text for part in parts if part for record in read_split(part, options)]
            assert records == [r.text for split in split_files([file], options) for r in read_split(split, options)]


def test_a_damaged_file_is_reported_by_a_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_records, "MIN_SHARE_BYTES", 1)
    folder = write(tmp_path / "files", "parquet")
    (folder / "damaged.parquet").write_bytes((folder / "0.parquet").read_bytes()[:-100])
    records = find_records([folder], ReadOptions())
    for lanes in range(1, 5):
        shares = [list(records.open(0, None, share=Share(lane, lanes))) for lane in range(lanes)]
        problems = [record.problem for share in shares for record, _ in share if record.problem]
        assert len(problems) == 1 and "Parquet" in problems[0]
        assert sum(map(len, shares)) == 480 + 1


KINDS = ("parquet", "one-group.parquet", "jsonl", "jsonl.gz", "few.jsonl.gz", "text", "csv")


@pytest.mark.parametrize("min_share_bytes", [1, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_shares_are_disjoint_and_together_everything(
    tmp_path: Path, kind: str, min_share_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_records, "MIN_SHARE_BYTES", min_share_bytes)
    records = find_records([write(tmp_path / "files", kind)], ReadOptions())
    for lanes in range(1, 8):
        for epoch in range(2):
            key = bytes([epoch] * 16)
            shares = [
                [record.text for record, _ in records.open(epoch, key, share=Share(lane, lanes))]
                for lane in range(lanes)
            ]
            assert Counter(text for share in shares for text in share) == Counter(row["text"] for row in ROWS)
            assert all(shares), (kind, lanes)
            if kind == "jsonl" and min_share_bytes == 1:
                assert max(map(len, shares)) < 2 * 480 / lanes


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_an_epoch_of_all_ranks_is_every_document_once(tmp_path: Path, world_size: int) -> None:
    folder = write(tmp_path / "files", "jsonl")
    texts = Counter[str]()
    documents = 0
    for rank in range(world_size):
        created = stream(folder, rank=rank, world_size=world_size, seq_len=1, batch_size=1)
        tokens = []
        for batch in created:
            if batch.epoch:
                break
            tokens.append(int(batch.inputs[0, 0]))
            documents = created.position.lanes[rank].records or documents
        texts.update(bytes(0 if token == 256 else token for token in tokens).decode().split("\0")[:-1])
        assert documents <= 480 / world_size + 3
    assert texts == Counter(row["text"] for row in ROWS)


@pytest.mark.parametrize("lanes", [1, 4, 6])
def test_the_samples_are_the_same_in_every_world(tmp_path: Path, lanes: int) -> None:
    folder = write(tmp_path / "files", "parquet")
    expected = samples(stream(folder, lanes=lanes, global_batch_size=12, batch_size=None, steps=30))
    assert sorted(expected) == list(range(360)) or lanes == 1
    for world_size in (2, 3, 4, 6, 12):
        result = {}
        for rank in range(world_size):
            created = stream(
                folder, lanes=lanes, global_batch_size=12, batch_size=None, steps=30, rank=rank, world_size=world_size
            )
            own = samples(created)
            assert len(own) == 360 // world_size or lanes == 1
            assert {number % world_size for number in own} == {rank}
            result.update(own)
        assert result == expected


def test_ranks_have_equally_many_full_batches_beyond_the_end_of_their_lanes(tmp_path: Path) -> None:
    folder = write(tmp_path / "files", "jsonl")
    for rank in range(3):
        batches = list(stream(folder, rank=rank, world_size=3, batch_size=4, steps=400))
        assert len(batches) == 400 and batches[-1].epoch >= 1
        assert {(len(batch), batch.weight, batch.inputs.shape) for batch in batches} == {(4, 1.0, (4, 32))}
        assert [batch.step for batch in batches] == list(range(400))


def facts(batches: Any) -> list[Any]:
    return [(b.inputs.tolist(), b.labels.tolist(), b.sample_ids.tolist(), b.epoch, b.step) for b in batches]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", "few.jsonl.gz"])
def test_resume_is_exact_at_every_batch(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_records, "MIN_SHARE_BYTES", 1)
    folder = write(tmp_path / "files", kind)
    arguments = {"rank": 1, "world_size": 3, "batch_size": 8, "steps": 90, "lanes": 6}
    running = stream(folder, **arguments)
    states = [running.state_dict()]
    expected = []
    for batch in running:
        expected += facts([batch])
        states.append(running.state_dict())
    assert expected[-1][3] >= 1
    for stop in range(0, 91, 5):
        second = stream(folder, **arguments)
        second.load_state_dict(json.loads(json.dumps(states[stop])))
        assert facts(second) == expected[stop:]


def test_a_state_of_another_world_is_exact_or_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "files", "jsonl")
    common = {"lanes": 4, "global_batch_size": 8, "batch_size": None, "steps": 40}
    expected = samples(stream(folder, **common))
    states = []
    for rank in range(4):
        created = stream(folder, rank=rank, world_size=4, **common)
        for batch in created:
            if batch.step == 16:
                break
        states.append(json.loads(json.dumps(created.state_dict())))
    for world_size in (1, 2, 8):
        rest = {}
        for rank in range(world_size):
            created = stream(folder, rank=rank, world_size=world_size, **common)
            created.load_state_dict(states)
            rest.update(samples(created))
        assert rest == {number: row for number, row in expected.items() if number >= 17 * 8}
    with pytest.raises(StateError, match=r"expected the lanes \[0, 2\] that this rank reads, got \['0'\].*all ranks"):
        stream(folder, rank=0, world_size=2, **common).load_state_dict(states[0])
    with pytest.raises(StateError, match="expected lanes 2, got 4"):
        stream(folder, rank=0, world_size=2, **{**common, "lanes": None}).load_state_dict(states)
    stream(folder, **common).load_state_dict(states)
    with pytest.raises(StateError, match="states of one step"):
        stream(folder, **common).load_state_dict([*states[:3], {**states[3], "run_step": 3}])


def test_several_lanes_need_an_end_that_all_ranks_share(tmp_path: Path) -> None:
    folder = write(tmp_path / "files", "jsonl")
    with pytest.raises(UsageError, match=r"steps: expected the number of batches, as 2 lanes.*lanes=1"):
        stream(folder, world_size=2, epochs=1)
    with pytest.raises(UsageError, match=r"global_batch_size: expected a multiple of the world size, 2"):
        stream(folder, world_size=2, batch_size=None, global_batch_size=3)
    with pytest.raises(DatasetError, match=r"of lane 300 of 600 .*lanes=1"):
        list(stream(folder, rank=300, world_size=600, steps=1))


def test_one_for_is_a_pass_and_take_moves_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "files", "jsonl")
    expected = facts(stream(folder, epochs=3))
    created = stream(folder, epochs=1)
    first = created.take(3)
    assert facts(first) == expected[:3] == facts(first)
    result = []
    for _ in range(3):
        for batch in created:  # a break, a look, and on with the same pass
            result += facts([batch])
            if batch.epoch_step == 5:
                break
        start = next(i for i, fact in enumerate(expected) if fact[3] == created.epoch)
        assert [fact[:4] for fact in facts(created.take(2))] == [fact[:4] for fact in expected[start : start + 2]]
        result += facts(created)
    assert result == expected and created.epoch == 3
    bounded = stream(folder, rank=1, world_size=2, steps=5)
    assert len(list(bounded)) == 5 and bounded.step == 5
    assert not caplog.records and list(bounded) == []
    assert caplog.records[0].getMessage() == "stream: all 5 steps of the run were given out: no batch is left."


@pytest.mark.parametrize("lanes", [1, 4])
def test_a_process_that_was_killed_goes_on(tmp_path: Path, lanes: int) -> None:
    """State through a file after each batch; SIGKILL in the midst."""
    write(tmp_path / "files", "jsonl")
    code = (
        "import json, os, signal, sys; from pathlib import Path; from forebay.stream import StreamOptions, TextStream\n"
        f"made = TextStream('files', tokenizer='bytes', seq_len=32, batch_size=4, rank=1, world_size=2, steps=90,\n"
        f"    options=StreamOptions(lanes={lanes}, shuffle_documents=30))\n"
        "state = Path('state.json')\n"
        "if state.exists(): made.load_state_dict(json.loads(state.read_text()))\n"
        "for batch in made:\n"
        "    print(batch.step, batch.inputs.tolist(), batch.labels.tolist(), flush=True)\n"
        "    Path('new.json').write_text(json.dumps(made.state_dict())); Path('new.json').rename(state)\n"
        "    if batch.step == int(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)\n"
    )

    def run(stop: int) -> list[str]:
        done = subprocess.run([sys.executable, "-c", code, str(stop)], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == (0 if stop < 0 else -signal.SIGKILL), done.stderr
        return done.stdout.splitlines()

    full = run(-1)
    (tmp_path / "state.json").unlink()
    assert run(20) + run(57) + run(-1) == full and len(full) > 60


class Objects:
    """A re-iterable without a state."""

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter(ROWS)


class Streamed:
    """As `datasets.IterableDataset` keeps its state: loaded before an iteration, taken while it runs."""

    __module__ = "datasets.fake"

    def __init__(self) -> None:
        self._offset = 0

    def state_dict(self) -> dict[str, int]:
        return {"offset": self._offset}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._offset = state["offset"]

    def __iter__(self) -> Iterator[dict[str, str]]:
        for row in ROWS[self._offset :]:
            self._offset += 1
            yield row


@pytest.mark.parametrize("make", [lambda: ROWS, Objects, Streamed], ids=["index", "replay", "own"])
def test_lanes_of_a_dataset_object(make: Any) -> None:
    for lanes in range(1, 8):
        records = records_of(make(), ReadOptions())
        shares = [[r.text for r, _ in records.open(0, None, share=Share(lane, lanes))] for lane in range(lanes)]
        assert Counter(text for share in shares for text in share) == Counter(row["text"] for row in ROWS)
        assert max(map(len, shares)) <= -(-480 // lanes)
    expected = facts(stream(make(), lanes=3, steps=40))
    first = stream(make(), lanes=3, steps=40)
    for batch in first:
        if batch.step == 22:
            break
    second = stream(make(), lanes=3, steps=40)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert facts(second) == expected[23:]


class Origin(ThreadingHTTPServer):
    """Serves `files` with ranges, and counts the bytes of their bodies."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files, self.sent, self.lock = files, 0, threading.Lock()


class Answer(BaseHTTPRequestHandler):
    server: Origin
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        data = self.server.files[self.path]
        start, stop = 0, len(data)
        if asked := self.headers.get("Range", "").removeprefix("bytes="):
            start, stop = int(asked.partition("-")[0]), int(asked.partition("-")[2]) + 1
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("ETag", '"1"')
        self.end_headers()
        with suppress(BrokenPipeError, ConnectionResetError):
            for index in range(start, stop if self.command == "GET" else start, 16 << 10):
                chunk = data[index : min(stop, index + (16 << 10))]
                self.wfile.write(chunk)
                with self.server.lock:
                    self.server.sent += len(chunk)

    def log_message(self, format: str, *args: object) -> None:
        pass


def long_rows(count: int) -> list[dict[str, str]]:
    chance = np.random.default_rng(1)
    return [{"id": str(i), "text": chance.bytes(3000).hex()} for i in range(count)]


@pytest.fixture
def origin() -> Iterator[Origin]:
    rows, many = long_rows(4000), long_rows(8000)
    server = Origin({
        "/a.jsonl": jsonl(rows),
        "/a.parquet": parquet(rows, 100),
        **{f"/{i}.jsonl.gz": gzip.compress(jsonl(many[2000 * i : 2000 * i + 2000]), 1) for i in range(4)},
    })  # fmt: skip
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "jsonl.gz"])
def test_four_ranks_fetch_what_one_fetches(origin: Origin, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    url = f"http://127.0.0.1:{origin.server_address[1]}"
    names = [f"{url}/{i}.jsonl.gz" for i in range(4)] if kind == "jsonl.gz" else [f"{url}/a.{kind}"]

    steps = 5600 if kind == "jsonl.gz" else 2800

    def fetch(world_size: int) -> int:
        """The bytes that all ranks fetch for 96 % of the samples, of 24 or 48 MB of text."""
        origin.sent = 0
        for rank in range(world_size):
            created = stream(names, rank=rank, world_size=world_size, seq_len=4096, steps=steps // world_size)
            batches = [(batch.epoch, batch.inputs.nbytes) for batch in created]
            created.close()
            assert {epoch for epoch, _ in batches} == {0} and len(batches) == steps // world_size
            assert created.stats()["text_bytes"] < 1.05 * steps * 8192 / world_size + 1e6
        return origin.sent

    alone, together = fetch(1), fetch(4)
    print(f"{kind}: {alone} bytes by one, {together / alone:.3f} times as many by four")
    assert together <= 1.05 * alone


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_four_ranks_fetch_from_the_hub_what_one_fetches(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = write_repo(tmp_path / "datasets/a/b")
    rows = long_rows(4000)
    for i in range(2):
        (repo / f"train-{i}.{kind}").write_bytes((parquet if kind == "parquet" else jsonl)(rows[i::2]))
    monkeypatch.delenv("HF_TOKEN", raising=False)

    def fetch(world_size: int) -> int:
        hub.bytes_sent.clear()
        for rank in range(world_size):
            monkeypatch.setattr(remote_file, "_blocks", remote_file.BlockCache())  # as in a process of its own
            created = stream("hf:a/b", rank=rank, world_size=world_size, seq_len=4096, steps=2800 // world_size)
            assert {batch.epoch for batch in created} == {0}
            created.close()
        return sum(hub.bytes_sent.values())

    with HubServer(tmp_path) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        alone, together = fetch(1), fetch(4)
    print(f"hub, {kind}: {alone} bytes by one, {together / alone:.3f} times as many by four")
    assert together <= 1.05 * alone


def test_shares_of_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    repositories = make_hub(tmp_path / "hub")
    names = ("winglian/tiny-shakespeare", "HuggingFaceFW/fineweb-edu/sample-10BT", "EleutherAI/pile")
    with HubServer(repositories) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        for min_share_bytes in (1, 1 << 20):
            monkeypatch.setattr(stream_records, "MIN_SHARE_BYTES", min_share_bytes)
            for name in names:
                records = records_of(f"hf:{name}", ReadOptions())
                expected = Counter(record.text for record, _ in records.open(0, None))
                for lanes in range(2, 8):
                    shares = [
                        [record.text for record, _ in records.open(1, bytes(16), share=Share(lane, lanes))]
                        for lane in range(lanes)
                    ]
                    assert Counter(text for share in shares for text in share) == expected
                    assert all(shares), (name, lanes)


def test_helper_processes_of_a_rank_read_its_share(tmp_path: Path) -> None:
    folder = write(tmp_path / "files", "jsonl")
    ranks = [stream(folder, rank=rank, world_size=2, steps=21) for rank in range(2)]
    helpers = [[rank.helper(index, 3) for index in range(3)] for rank in ranks]
    expected = samples(stream(folder, lanes=6, batch_size=12, steps=7))
    result = samples(batch for rank in helpers for helper in rank for batch in helper)
    assert result == expected and len(result) == 84
    assert all(len(list(helper)) == 0 and helper.step == 7 for rank in helpers for helper in rank)
    assert len({tuple(helper.position.lanes) for rank in helpers for helper in rank}) == 6  # one lane each


def test_helpers_of_a_dataloader(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    created = stream(write(tmp_path / "files", "jsonl"), steps=9)
    expected = [facts(created.helper(index, 2)) for index in range(2)]

    class Dataset(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            info = torch.utils.data.get_worker_info()
            return (batch.inputs for batch in created.helper(info.id, info.num_workers))

    loader = torch.utils.data.DataLoader(Dataset(), batch_size=None, num_workers=2)
    assert [inputs.tolist() for inputs in loader] == [expected[step % 2][step // 2][0] for step in range(9)]
