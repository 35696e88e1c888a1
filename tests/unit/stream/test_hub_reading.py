"""The hub without its library: rows, places, faults, refusals, against a server shaped as it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import TextStream
from forebay.errors import (
    AccessError,
    DownloadError,
    MissingPackageError,
    StateError,
    UnknownDatasetError,
    UsageError,
)
from forebay.formats.inputs import ReadOptions
from forebay.storage import remote_file
from forebay.storage.http import retry_delay_s
from forebay.storage.hub_splits import find_split
from forebay.stream import records as stream_records
from forebay.stream.hub import records_of
from forebay.stream.records import Share, find_records
from support.hub_repos import write_repo
from support.hub_server import TOKEN, HubServer, make_hub
from support.preparing import write_jsonl
from support.store import stored
from support.streams import stream


@pytest.fixture
def hub(monkeypatch) -> Iterator[HubServer]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with HubServer(stored(make_hub)) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


@pytest.fixture
def impatient(monkeypatch):
    """The same tries with shorter waits."""
    monkeypatch.setattr("forebay.storage.base._FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(remote_file, "_blocks", remote_file.BlockCache())


def texts(name: str, text_key: str = "text") -> list[str]:
    """All documents of a dataset of the hub, in order."""
    result = []
    for record, _ in records_of(name, ReadOptions(text_key=text_key)).open(0, None):
        assert not record.problem, record
        result.append(record.text)
    return result


def on_disk(repo: Path, *files: str, text_key: str = "text") -> list[str]:
    records = find_records([repo / file for file in files], ReadOptions(text_key=text_key))
    return [record.text for record, _ in records.open(0, None)]


ALL = [
    ("winglian/tiny-shakespeare", ["data/train-00000-of-00001.parquet"]),
    ("winglian/tiny-shakespeare:validation", ["data/validation-00000-of-00001.parquet"]),
    ("HuggingFaceFW/fineweb-edu/sample-10BT", ["sample/10BT/000_00000.parquet", "sample/10BT/001_00000.parquet"]),
    ("EleutherAI/pile", ["train/00.jsonl.zst", "train/01.jsonl.zst"]),
    ("benchaffe/shakespeare-lines", ["train.csv"]),
]


@pytest.mark.parametrize("name, files", ALL)
def test_every_row_in_the_order_of_the_files(hub, name, files):
    expected = on_disk(hub.directory / "datasets" / "/".join(name.partition(":")[0].split("/")[:2]), *files)
    assert texts(f"hf:{name}") == expected and len(expected) > 30


@pytest.mark.parametrize("min_share_bytes", [1, 1 << 20])
def test_shares_of_lanes_are_together_everything(hub, monkeypatch, min_share_bytes):
    monkeypatch.setattr(stream_records, "MIN_SHARE_BYTES", min_share_bytes)
    for name in ("HuggingFaceFW/fineweb-edu/sample-10BT", "EleutherAI/pile"):
        records, expected = records_of(f"hf:{name}", ReadOptions()), sorted(texts(f"hf:{name}"))
        for lanes in (2, 5):
            shares = [
                [record.text for record, _ in records.open(1, bytes(16), share=Share(lane, lanes))]
                for lane in range(lanes)
            ]
            assert sorted(text for share in shares for text in share) == expected and all(shares)


def test_files_are_mixed_anew_in_each_epoch_and_none_is_lost(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("forebay.stream.records.RUN_FILES", 8)
    hub.directory, hub.page_size = tmp_path / "hub", 6
    repo = write_repo(tmp_path / "hub/datasets/a/b")
    for number in range(20):
        write_jsonl(repo / f"train/{number:02d}.jsonl", [{"text": str(number)}])
    records = records_of("hf:a/b", ReadOptions())
    orders = [[int(record.text) for record, _ in records.open(epoch, bytes([epoch] * 16))] for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2] and sorted(orders[0]) == sorted(orders[2]) == list(range(20))
    assert sorted(orders[0][:8]) == list(range(8)) and orders[0][:8] != list(range(8))


@pytest.mark.parametrize(
    "faults", [{"drop": 0.3}, {"truncate": 0.5}, {"throttle": 4}, {"broken": 4}, {"expired": 1}], ids=str
)
def test_faults_that_pass_change_nothing(hub, impatient: None, faults):
    vars(hub.faults).update(faults)
    for name, files in ALL[2:4]:
        repo = hub.directory / "datasets" / "/".join(name.split("/")[:2])
        assert texts(f"hf:{name}") == on_disk(repo, *files)


def test_a_hub_that_is_away(hub, impatient: None, monkeypatch):
    hub.close()
    with pytest.raises(ConnectionError, match=r"^Failed to download dataset 'a/b': .*tiny_shakespeare") as caught:
        TextStream("hf:a/b", tokenizer="bytes", seq_len=8, batch_size=1)
    error = caught.value
    assert isinstance(error, DownloadError) and hub.url in str(error) and "tries: 5" in str(error)
    assert "Connection refused" in str(error)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DownloadError, match=r"HF_HUB_OFFLINE, which forbids to ask \(tries: 0"):
        find_split("a/b")


def test_a_hub_that_is_silent(hub, impatient: None, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT", 0.05)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.05)
    hub.faults.black_hole = True
    with pytest.raises(DownloadError, match=r"no answer from 127\.0\.0\.1:\d+ in 0\.05 s"):
        find_split("EleutherAI/pile")
    hub.faults.black_hole, hub.faults.black_hole_files = False, True
    for name in ("EleutherAI/pile", "HuggingFaceFW/fineweb"):  # no damage of the file, but the network's
        with pytest.raises(DownloadError, match="Failed to download dataset"):
            texts(f"hf:{name}")


@pytest.mark.parametrize(
    "name, advice",
    [("my-dataset", "a full path, OWNER/NAME, or a short name"), ("no/such", "a full path, OWNER/NAME such as")],
)
@pytest.mark.parametrize("token, private", [("", " If it is private, set HF_TOKEN."), (TOKEN, "")])
def test_a_name_that_nothing_has(hub, monkeypatch, name, advice, token, private):
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(
        FileNotFoundError, match=f"^Dataset '{name}' not found.*{advice}.*Check the spelling.{private}$"
    ) as caught:
        TextStream(f"hf:{name}", tokenizer="bytes", seq_len=8, batch_size=1)
    assert isinstance(caught.value, UnknownDatasetError)


def test_what_is_gated_needs_a_token_which_no_other_host_sees(hub, monkeypatch, tmp_path, impatient: None):
    expected = on_disk(
        hub.directory / "datasets/bigcode/the-stack",
        "data/python/train-00000-of-00001.parquet",
        "data/toml/train-00000-of-00001.parquet",
        text_key="content",
    )
    with pytest.raises(AccessError, match=r"no token was sent\. Accept its terms on .*and set HF_TOKEN") as caught:
        TextStream("hf:bigcode/the-stack", tokenizer="bytes", seq_len=8, batch_size=1)
    assert isinstance(caught.value, PermissionError) and "bigcode/the-stack" in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(AccessError, match="HF_TOKEN's account has no access"):
        texts("hf:bigcode/the-stack", "content")
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    assert texts("hf:bigcode/the-stack", "content") == expected
    monkeypatch.delenv("HF_TOKEN")
    (tmp_path / "token").write_text(TOKEN + "\n")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    hub.reset()
    monkeypatch.setattr(remote_file, "_blocks", remote_file.BlockCache())
    assert texts("hf:bigcode/the-stack/data/python", "content") == expected[: len(expected) - 1]
    shown = dict(zip(hub.paths, hub.authorizations))
    assert {bool(value) for path, value in shown.items() if path.startswith("/datasets/")} == {False}
    assert {value for path, value in shown.items() if path.startswith("/api/")} == {f"Bearer {TOKEN}"}


def test_a_state_names_the_commit_that_it_is_of(hub):
    first = stream("hf:HuggingFaceFW/fineweb")
    next(iter(first))
    state, url = first.state_dict(), first.state_dict()["inputs"]
    hub.revisions.add(url.rpartition("@")[2])  # an older one now
    hub.commits["datasets/HuggingFaceFW/fineweb"] = "f" * 40
    with pytest.raises(StateError, match=f"expected inputs .*{'f' * 40}.*, got '{url}'"):
        stream("hf:HuggingFaceFW/fineweb").load_state_dict(state)
    pinned = find_split(url)
    assert pinned.config == "default"


def test_revisions_and_a_dataset_that_was_renamed(hub):
    hub.revisions.add("refs/convert/parquet")
    for name in ("EleutherAI/pile@refs%2Fconvert%2Fparquet", "EleutherAI/pile:train@refs/convert/parquet"):
        result = find_split(name)
        assert len(result.files()) == 2
    hub.renamed["squad"] = "EleutherAI/pile"
    assert find_split("squad").url.startswith("hf://datasets/EleutherAI/pile:train@")
    with pytest.raises(UsageError, match="expected a revision of it"):
        find_split("EleutherAI/pile@nope")


def test_other_files_need_the_library(hub, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    message = "^HuggingFace datasets and transformers are required. Install with: pip install datasets transformers"
    with pytest.raises(ImportError, match=message) as caught:
        TextStream("hf:example/pictures", tokenizer="bytes", seq_len=8, batch_size=1)
    assert isinstance(caught.value, MissingPackageError)


def test_a_mirror_whose_pages_name_the_hub(hub):
    hub.page_size, hub.url = 1, "https://hub.invalid"
    result = find_split("hf://datasets/EleutherAI/pile")
    assert len(result.files()) == 2
    assert hub.requests["tree"] > 3


def test_how_long_the_hub_asks_to_wait():
    for name, value, wait_s in (("Retry-After", "7", 7), ("RateLimit", '"api";r=0;t=55', 55), ("RateLimit", "?", 0)):
        assert retry_delay_s({name: value}) == wait_s
    assert retry_delay_s({}) == 0
