"""Which files of a repository are a split: globs, cards, and the hub's rules about names."""

from collections.abc import Iterator

import pytest

from forebay.errors import PrepareError, UsageError
from forebay.prepare.sources import source_at
from forebay.storage.hub_splits import HubName, find_split, format_of, glob_matcher, parse_url
from support.hub_repos import write_repo
from support.hub_server import HubServer
from support.paths import read_cases

CASES = read_cases("hub_splits")


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Iterator[HubServer]:
    with HubServer(tmp_path / "hub") as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        yield server


def repo(hub: HubServer, names: list[str], card: dict | None = None) -> str:
    """A dataset of empty files of these names."""
    folder = write_repo(hub.directory / "datasets/a/b", card)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    return "a/b"


def paths(name: str) -> list[str]:
    result = find_split(name)
    return [file.path for file in result.files()]


@pytest.mark.parametrize(
    "text, name",
    [
        ("owner/name", HubName("owner/name")),
        ("squad", HubName("squad")),
        ("owner/name/en:test", HubName("owner/name", "en", "test")),
        ("owner/name@refs%2Fconvert%2Fparquet/en", HubName("owner/name", "en", "train", "refs/convert/parquet")),
        ("owner/name:train@refs/pr/1", HubName("owner/name", None, "train", "refs/pr/1")),
        ("owner/name/data/**/*.parquet", HubName("owner/name", "data/**/*.parquet")),
        ("./here:test", HubName("./here", None, "test")),
    ],
)
def test_names(text, name):
    assert parse_url(f"hf://datasets/{text}") == parse_url(text) == name


@pytest.mark.parametrize("text", ["", "a/b@x/c@y", "a/b:", "a:b:c", "@main"])
def test_what_is_no_name(text):
    with pytest.raises(PrepareError, match="expected hf://datasets/NAME"):
        parse_url(f"hf://datasets/{text}")


def test_hidden_files_are_found_if_they_are_named():
    assert not glob_matcher("**")(".git/a") and not glob_matcher("**")("__cache__/a") and not glob_matcher("*")(".a")
    assert glob_matcher(".git/*")(".git/a") and glob_matcher("**")("a/__a")
    with pytest.raises(UsageError, match=r"a\*\*b: expected a glob of files"):
        glob_matcher("a**b")


def test_kinds():
    names = {"a.parquet": "parquet", "a.jsonl.zst": "jsonl", "A.CSV.gz": "csv", "a.txt": "lines", "a.json": "json"}
    names |= {"a.png": "", "a": "", ".parquet": "", "a.zip": "", "a.gz": "", "b/a.arrow": "arrow"}
    assert {name: format_of(name) for name in names} == names


@pytest.mark.parametrize("names, splits", CASES["names"])
def test_splits_by_the_names_of_files(hub, names, splits):
    name = repo(hub, names)
    assert {split: paths(f"{name}:{split}") for split in splits} == splits
    with pytest.raises(UsageError, match=f"expected a split among .*{min(splits)}"):
        find_split(f"{name}:nope")


def test_a_folder_or_a_glob_in_place_of_a_configuration(hub):
    name = repo(hub, ["data/python/train-00000-of-00001.parquet", "data/c/train-0.parquet", "data/c/test.parquet"])
    assert paths(f"{name}/data/python") == ["data/python/train-00000-of-00001.parquet"]
    assert paths(f"{name}/data/c:test") == ["data/c/test.parquet"]
    assert paths(f"{name}/data/*/t*.parquet") == sorted(
        ["data/python/train-00000-of-00001.parquet", "data/c/train-0.parquet", "data/c/test.parquet"]
    )
    assert paths(f"{name}/data/c/test.parquet") == ["data/c/test.parquet"]
    with pytest.raises(PrepareError, match="expected files of split 'train', got none"):
        find_split(f"{name}/data/none/*.parquet")


@pytest.mark.parametrize("data_files, expected", CASES["cards"])
def test_configurations_of_the_card(hub, data_files, expected):
    card = {"configs": [{"config_name": "one", "data_files": data_files}]}
    name = repo(hub, ["a/1.csv", "a/2.csv", "b/c/3.csv"], card)
    for split, files in expected.items():
        assert paths(name + split) == paths(f"{name}/one{split}") == files


def test_which_configuration_is_the_default(hub):
    names = ["a/train.csv", "a/test.csv", "b/train.csv"]
    two = [{"config_name": "x", "data_dir": "a"}, {"config_name": "y", "data_files": "b/*"}]
    name = repo(hub, names, {"configs": two})
    assert paths(f"{name}/x:test") == ["a/test.csv"] and paths(f"{name}/y") == ["b/train.csv"]
    with pytest.raises(UsageError, match=r"several and no default: x, y\. Name one: hf:a/b/x"):
        find_split(name)
    with pytest.raises(UsageError, match="expected a configuration among x, y, got 'z'"):
        find_split(f"{name}/z")
    with pytest.raises(UsageError, match=r"configuration 'y'\): expected a split among train, got 'test'"):
        find_split(f"{name}/y:test")
    repo(hub, names, {"configs": [two[0], {**two[1], "default": True}]})
    assert paths(name) == ["b/train.csv"]


def test_what_only_the_library_reads(hub):
    assert find_split(repo(hub, ["train/1.png", "train/2.png", "train/metadata.csv"])) is None
    assert find_split(f"{hub.directory}/datasets/a/b") is None


def test_a_large_repository_is_not_listed_to_begin(hub):
    hub.page_size = 50
    names = [f"data/{dump}/{number:03d}.parquet" for dump in "abc" for number in range(60)]
    card = {"configs": [{"config_name": "default", "data_files": [{"split": "train", "path": "data/*/*"}]}]}
    name = repo(hub, names, card)
    result = find_split(name)
    assert result.file(0) is not None and hub.requests == {"info": 1, "tree": 1}
    assert result.url == f"hf://datasets/a/b/default:train@{hub.commit(hub.directory / 'datasets/a/b')}"
    assert [file.path for file in result.files()] == names and hub.requests["tree"] == -(-183 // 50)
    assert result.file(180) is None and source_at(result, 180) is None
