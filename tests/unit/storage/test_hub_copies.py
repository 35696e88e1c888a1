"""Copies of the hub's files: verified, used without the hub; and tokenizers by their names."""

import errno
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest.mock import Mock

import pytest

from forebay.errors import (
    AccessError,
    DownloadError,
    IntegrityError,
    MissingPackageError,
    PrepareError,
    UnknownDatasetError,
)
from forebay.formats.inputs import ReadOptions
from forebay.prepare.inputs import find_inputs
from forebay.prepare.tokenize.tokenizers import load_tokenizer, train_tokenizer
from forebay.storage.hub_copies import download_hub, fetch_tokenizer
from support.hub_repos import write_repo
from support.hub_server import HubServer
from support.preparing import write_jsonl
from support.streams import as_tuples, stream, take_state

ROWS = [{"text": f"document {number} " * 50} for number in range(400)]


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[HubServer]:
    repo = write_repo(tmp_path / "hub/datasets/a/b")
    write_jsonl(repo / "data/train-0.jsonl", ROWS[:300])  # LFS by its size
    write_jsonl(repo / "data/train-1.jsonl", ROWS[300:])
    model = write_repo(tmp_path / "hub/models/Salesforce/codegen-350M-mono")
    (model / "tokenizer.json").write_bytes(train_tokenizer(iter(["some text"]), 300).data)
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (model / "weights.safetensors").write_bytes(bytes(1000))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("forebay.storage.base._FIRST_WAIT_S", 0.01)
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def test_a_copy_is_fetched_once_and_is_the_same_as_the_stream(hub):
    copy = download_hub("hf:a/b")
    num_bytes = sum(file.size for file in copy.files)
    assert [path.read_bytes() for path in copy.paths] == [
        (hub.directory / f"datasets/a/b/data/train-{n}.jsonl").read_bytes() for n in (0, 1)
    ]
    assert sum(hub.bytes_sent.values()) == num_bytes and not copy.offline
    assert download_hub("hf:a/b:train").files == copy.files
    assert sum(hub.bytes_sent.values()) == num_bytes
    settings = {"seq_len": 512, "batch_size": 4}
    expected, state = as_tuples(stream("hf:a/b", **settings)), take_state(stream("hf:a/b", **settings), 5)
    for inputs in ("hf:a/b", copy):
        assert as_tuples(stream(inputs, **settings)) == expected
        resumed = stream(inputs, **settings)
        resumed.load_state_dict(state)
        assert as_tuples(resumed) == expected[5:] != []
    write_jsonl(hub.directory / "datasets/a/b/data/train-1.jsonl", ROWS[350:])
    new = download_hub("hf:a/b")
    assert new.url != copy.url and new.files[0] == copy.files[0] and new.files[1] != copy.files[1]
    assert all(path.is_file() for path in (*copy.paths, *new.paths))


@pytest.mark.parametrize("offline", [False, True])
def test_what_was_fetched_is_used_without_the_hub(hub, monkeypatch, offline):
    with pytest.raises(UnknownDatasetError):
        download_hub("hf:a/c")
    copy = download_hub("hf:a/b")
    if offline:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    else:
        hub.close()
    again = download_hub("hf:a/b")
    assert again.offline and (again.files, again.url) == (copy.files, copy.url)
    assert sum(len(batch.sample_ids) for batch in stream(again, seq_len=512)) > 100
    with pytest.raises(DownloadError, match="Failed to download dataset 'a/c'"):
        download_hub("hf:a/c")
    again.paths[0].unlink()
    with pytest.raises(DownloadError):
        download_hub("hf:a/b")


@pytest.mark.parametrize("name", ["data/train-0.jsonl", "data/train-1.jsonl"])
def test_other_bytes_than_the_hub_says_are_refused(hub, tmp_path, name):
    hub.faults.corrupt[name] = 1000
    with pytest.raises(IntegrityError, match=f"expected {name} to have the hash"):
        download_hub("hf:a/b")
    assert not list((tmp_path / "cache").rglob(f"*/{name}"))
    hub.faults.corrupt.clear()
    assert len(download_hub("hf:a/b").files) == 2


def test_an_interrupted_download_is_continued(hub):
    copy = download_hub("hf:a/b")
    path, data = copy.paths[0], copy.paths[0].read_bytes()
    blob = path.resolve()
    partial = blob.with_name(f"{blob.name}.forebay.incomplete")
    for remaining in (data[:100_000], b"x" * 1000, data + b"more"):
        blob.unlink()
        partial.write_bytes(remaining)
        hub.reset()
        assert download_hub("hf:a/b").paths[0].read_bytes() == data
        sent = hub.bytes_sent["data/train-0.jsonl"]
        assert sent == len(data) - 100_000 if remaining == data[:100_000] else sent >= len(data)
    hub.faults.truncate = 0.7
    blob.unlink()
    assert download_hub("hf:a/b").paths[0].read_bytes() == data
    blob.write_bytes(b"of another size")
    assert download_hub("hf:a/b").paths[0].read_bytes() == data


def test_a_disk_that_is_full_or_too_small(hub, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(PrepareError, match="cannot write the copy: No space left"):
        patched.setattr(
            "forebay.storage.hub_copies.fetch_range", Mock(side_effect=OSError(errno.ENOSPC, "No space left"))
        )
        download_hub("hf:a/b")
    monkeypatch.setattr("forebay.storage.hub_copies.shutil.disk_usage", lambda path: Mock(free=1000))
    with pytest.raises(PrepareError, match=r"GB free in .*Stream it instead, or set HF_HUB_CACHE"):
        download_hub("hf:a/b")
    assert not hub.ranges


@pytest.mark.parametrize("change", [{"path": "../../../x"}, {"path": "/tmp/x"}, {"oid": "../../x", "sha256": ""}])
def test_a_path_or_hash_of_the_hub_leads_nowhere(hub, monkeypatch, tmp_path, change):
    monkeypatch.setattr("forebay.storage.hub_splits.HubSplit.files", lambda self: [replace(self.file(0), **change)])
    with pytest.raises(PrepareError, match="expected a file below the repository and its hash"):
        download_hub("hf:a/b")
    assert {path.name for path in tmp_path.iterdir()} <= {"hub", "cache"}


def test_ranks_that_start_together_fetch_once(hub):
    with ThreadPoolExecutor(6) as pool:
        copies = list(pool.map(download_hub, ["hf:a/b"] * 6))
    assert len({copy.paths for copy in copies}) == 1 and sum(hub.bytes_sent.values()) == sum(
        file.size for file in copies[0].files
    )


def test_a_directory_is_not_copied(tmp_path):
    with pytest.raises(PrepareError, match="got a directory, which is here already"):
        download_hub(f"hf:{tmp_path}")


def test_a_tokenizer_by_its_name_or_alias(hub):
    result = load_tokenizer("Salesforce/codegen-350M-mono")
    assert result.eos_id is not None and result.vocab_size <= 300
    assert hub.bytes_sent.keys() == {"tokenizer.json", "tokenizer_config.json"}
    hub.close()
    assert load_tokenizer("codegen-350M").data == result.data
    for name, hint in (("gpt2", ""), ("byte", r" Did you mean 'bytes'\?")):
        with pytest.raises(DownloadError, match=f"Failed to download tokenizer '{name}'.* which need none.{hint}$"):
            load_tokenizer(name)


def test_tokenizers_that_are_not_there(hub, monkeypatch):
    with pytest.raises(
        FileNotFoundError, match=r"^Tokenizer 'gtp2' not found: there is no such file.* Did you mean 'gpt2'\?"
    ):
        load_tokenizer("gtp2")
    model = write_repo(hub.directory / "models/a/slow")
    (model / "vocab.txt").write_text("a\nb\n")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(MissingPackageError, match=r"^HuggingFace datasets and transformers are required"):
        load_tokenizer("a/slow")


def test_a_gated_model_is_named_by_its_page(hub):
    (hub.directory / "models/Salesforce/codegen-350M-mono/.hub.json").write_text('{"gated": "manual"}')
    with pytest.raises(AccessError, match=f"Accept its terms on {hub.url}/Salesforce/codegen-350M-mono and set"):
        load_tokenizer("codegen-350M")


@pytest.mark.parametrize("commit", ["../../../escape", "/tmp/absolute", "main", "C" * 40, "c" * 41])
def test_a_commit_is_no_path(hub, tmp_path, commit):
    hub.commits = {"datasets/a/b": commit, "models/Salesforce/codegen-350M-mono": commit}
    for fetch in (lambda: download_hub("hf:a/b"), lambda: fetch_tokenizer("Salesforce/codegen-350M-mono")):
        with pytest.raises(PrepareError, match="expected the hub to say its commit, 40 hex digits"):
            fetch()
    assert {path.name for path in tmp_path.iterdir()} <= {"hub", "cache"}


def test_an_index_that_was_changed_leads_nowhere(hub, tmp_path):
    copy = download_hub("hf:a/b")
    (index,) = (tmp_path / "cache/datasets--a--b").glob("forebay-*.json")
    (tmp_path / "cache/secret.jsonl").write_text("secret")
    plain = json.loads(index.read_text())
    hub.close()
    file = {**plain["files"][0], "path": "../../secret.jsonl", "size": 6}
    for changed in ({"commit": "../datasets--a--b"}, {"files": [file]}, {"files": [{**file, "path": "/etc/hostname"}]}):
        index.write_text(json.dumps({**plain, **changed}))
        with pytest.raises(DownloadError):
            download_hub("hf:a/b")
    index.write_text(json.dumps(plain))
    assert download_hub("hf:a/b").files == copy.files


@pytest.mark.parametrize(
    "lie, message",
    [
        (10**15, "expected a file of at most 64 TiB"),
        (-1, "expected a file of at most 64 TiB"),
        ("13", "expected a file of at most 64 TiB"),
        ("again", "got a page again after 2 pages"),
        ("endless", "got no end after 30 pages"),
        ("ftp", "expected a redirect to http or https, got one to 'ftp'"),
    ],
)
def test_a_hub_that_lies(hub, monkeypatch, lie, message):
    def tree(self, repo, path):
        if lie == "ftp":
            return self.reply(302, b"", {"Location": "ftp://127.0.0.1:1/x"})
        cursor = 1 if lie == "again" else int(self._query.get("cursor", 0)) + 1
        link = {"Link": f'<http://h{self.path.partition("?")[0]}?cursor={cursor}>; rel="next"'}
        size = 13 if lie in ("again", "endless") else lie
        self.reply_json(
            [{"type": "file", "path": "a.jsonl", "size": size, "oid": "0" * 40}], link if size == 13 else {}
        )

    monkeypatch.setattr("forebay.storage.hub._MAX_PAGES", 30)
    monkeypatch.setattr("support.hub_handlers.HubHandler._tree", tree)
    with pytest.raises(DownloadError if lie == "ftp" else PrepareError, match=message):
        find_inputs("hf://datasets/a/b", ReadOptions())


def test_what_to_do_without_the_hub_fits_what_was_wanted(hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for fetch, name, advice in (
        (fetch_tokenizer, "gpt2", r"or name a tokenizer\.json that is here"),
        (download_hub, "hf:winglian/tiny-shakespeare", "or name files that are here"),
        (download_hub, "hf:a/b", "or take tiny_shakespeare: a part of it comes with"),
    ):
        with pytest.raises(DownloadError, match=advice):
            fetch(name)
