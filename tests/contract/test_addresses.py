"""An address means the same to every command: keys are literal, each is read, and what is printed opens again."""

import json
import os
from collections.abc import Iterator

import pytest

from forebay import Loader, TextStream
from forebay.cli import main
from forebay.errors import UsageError
from forebay.formats.shard_writer import write_shards
from forebay.load.shards import SharedShardedDatasetManager
from forebay.mirror import mirror
from forebay.prepare.path_lists import list_paths
from forebay.storage.addresses import BucketAddress
from forebay.storage.base import load_env_file
from forebay.storage.origins import open_origin, open_remote
from forebay.storage.remote_file import find_urls, open_url
from forebay.storage.remote_path import find_paths
from support.memory_bucket import MemoryBucket
from support.origin_server import ACCESS_KEY, SECRET_KEY
from support.preparing import good_texts
from support.token_slices import write_tokens

PLAIN = [
    "a b", "a+b", "a#b", "a?b", "100%", "%20", "a%2Fb", "a&b=c", "*", "x[1]", "{x}", "'\"", "ü", "u\u0308", "日本",
    "a;b", "a:b", "a\\b", " a ", "<a>&amp;", "~", "q?region=eu", "k?endpoint=http:", "$(x)", "a@b", "a|b", "`a`",
]  # fmt: skip
ODD = ["d//e", "/lead", "slash/", "tab\tx", "nl\nx"]  # obstore normalises or refuses them


@pytest.fixture
def bucket(monkeypatch, tmp_path) -> Iterator[MemoryBucket]:
    with MemoryBucket({}) as created:
        keys = [
            f"R2_DATASET_{right}_{name}"
            for right in ("READ", "WRITE")
            for name in (f"ACCESS_KEY_ID={ACCESS_KEY}", f"SECRET_ACCESS_KEY='{SECRET_KEY}'")
        ]
        other = ["MOTD=it's {fine", "export PATH", 'JSON={"a": 1}', "R2_DATASET_ACCOUNT_ID="]
        own = [f"R2_DATASET_ENDPOINT={created.url}", "R2_DATASET_BUCKET_NAME=bucket", "DATASET_BINS_PATH=./shards//"]
        (tmp_path / "r2.env").write_text("\n".join([*other, *own, *keys]))
        for name in [name for name in os.environ if name.startswith(("AWS_", "R2_DATASET", "DATASET_BINS"))]:
            monkeypatch.delenv(name)
        for line in (*own, *keys):
            monkeypatch.setenv(line.partition("=")[0], "")
        for name, value in created.s3_environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        load_env_file("r2.env")
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        yield created


def row(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


def run(*arguments: str) -> int:
    return main([*arguments, "--quiet"] if arguments[0] in ("convert", "mirror", "verify") else [*arguments])


@pytest.mark.parametrize("scheme", ["s3", "r2"])
@pytest.mark.parametrize("page", [7, 1000])
def test_every_key_is_listed_and_read_and_its_address_opens_it_again(bucket, scheme, page):
    names = [*PLAIN, *ODD, "a", "a/b", *(f"n{number}" for number in range(1100 if page == 1000 else 0))]
    bucket.page, bucket.objects = page, {f"in/{name}": row(name) for name in names}
    bucket.objects |= {"in/": b"", "in/sub/": b"", "in/a/": b"", "inside": row("another")}
    _, files = find_urls(f"{scheme}://bucket/in")
    assert len(files) == len(names)
    for file in files[:60]:
        with open_url(*file) as stream:
            data = stream.read()
        key = BucketAddress.parse(file.url).key
        assert bucket.objects[key] == data == row(key.removeprefix("in/"))
        assert [again.size for again in find_urls(file.url)[1]] == [len(data)] or key in ("in/a", "in/slash/")


def test_prepare_convert_and_streams_read_the_same(bucket, tmp_path):
    names = [*PLAIN, *(name for name in ODD if not name.endswith("/")), "x/y"]
    bucket.objects = {f"in/{name}.jsonl": row(name) for name in names} | {"in/": b"", "in/x": b""}
    assert sorted(good_texts("s3://bucket/in")) == sorted(names)
    assert run("convert", "s3://bucket/in", "t.jsonl", "--to", "jsonl") == 0
    assert {json.loads(line)["text"] for line in (tmp_path / "t.jsonl").read_text().splitlines()} == {*names}
    bucket.objects["l/x#1.paths"] = "\n".join(f"in/{name}.jsonl" for name in PLAIN).encode()
    listed = [BucketAddress.parse(entry.path).key[3:-6] for entry in list_paths("s3://bucket/l/x#1.paths")]
    assert listed == PLAIN
    stream = TextStream(["s3://bucket/in/a?b.jsonl"], tokenizer="bytes", seq_len=3, batch_size=1)
    assert next(iter(stream)).inputs.tolist() == [list(b"a?b")]


@pytest.mark.parametrize(
    "url, expected",
    [
        ("s3://bucket/*/a.jsonl", ["d1/a", "d2/a"]), ("s3://bucket/d?/[bc].jsonl", ["d1/b", "d2/c"]),
        ("s3://bucket/**/c.jsonl", ["d2/c", "d2/e/c"]), ("s3://bucket/d2/**", ["d2/a", "d2/c", "d2/e/c"]),
        ("s3://bucket/d*", ["d*/z"]), ("s3://bucket/d*/*.jsonl", ["d*/z", "d1/a", "d1/b", "d2/a", "d2/c"]),
        ("r2://bucket/d1", ["d1/a", "d1/b"]), ("s3://bucket/d2/e/", ["d2/e/c"]),
    ],
)  # fmt: skip
def test_a_pattern_may_stand_for_any_part_and_a_key_of_that_name_comes_first(bucket, url, expected):
    bucket.objects = {f"{name}.jsonl": row(name) for name in ("d1/a", "d1/b", "d2/a", "d2/c", "d2/e/c", "d*/z")}
    assert [BucketAddress.parse(file.url).key[:-6] for file in find_urls(url)[1]] == expected
    assert sorted(BucketAddress.parse(path.url).key[:-6] for path in find_paths(url)) == expected


@pytest.mark.parametrize("name", ["a b", "x#1?y=2", "%20", "n+1&c", "*[1]", "ü日本", "q?region=eu?region="])
def test_a_dataset_below_any_prefix(bucket, tmp_path, name):
    local = write_tokens(tmp_path / "d", [500] * 2)
    url = f"s3://bucket/out/{name}"
    key = BucketAddress.parse(url).key
    assert run("mirror", "d", url) == 0 and f"{key}/manifest.json" in bucket.objects
    assert run("mirror", url, f"r2://bucket/copy/{name}") == run("verify", url) == run("inspect", url) == 0
    assert open_remote(f"r2://bucket/copy/{name}").id == local.id
    with Loader(url, seq_len=16, batch_size=2, cache_dir=tmp_path / "c", cache_bytes=1 << 22) as loader:
        assert sum(len(batch.inputs) for batch in loader) == 62


@pytest.mark.parametrize("prefix", ["a//b", "./a", "a/../b", "a\tb"])
def test_a_prefix_that_cannot_be_written_is_refused_at_once(bucket, tmp_path, prefix):
    write_tokens(tmp_path / "d", [500])
    for command in (("mirror", "d"), ("convert", "d", "--to", "forebay"), ("prepare", "d")):
        target = ["--out", f"s3://bucket/{prefix}"] if command[0] == "prepare" else [f"s3://bucket/{prefix}"]
        assert run(*command[:2], *target, *command[2:]) in (1, 2)
    assert not bucket.objects


def test_options_are_known_names():
    address = BucketAddress.parse("S3://b/k?x?endpoint=http://h:9&region=auto")
    assert address == ("s3", "b", "k?x", (("endpoint", "http://h:9"), ("region", "auto")))
    assert BucketAddress.parse(str(address)) == address and address.location == "s3://b/k?x"
    for url in ("s3://b/k?x", "s3://b/k?x=1", "s3://b/k?region", "s3://b/k#f", "s3://b/%6B"):
        assert BucketAddress.parse(url).key == url[7:] and not BucketAddress.parse(url).options


def test_shards_in_a_bucket(bucket, tmp_path, capsys, monkeypatch):
    """Written from a local and a remote dataset, after a kill too; looked at, planned, and read by a validator."""
    local, settings = write_tokens(tmp_path / "d", [700] * 3), {"seq_len": 16, "shard_tokens": 530}
    mirror(open_remote(str(tmp_path / "d")), "s3://bucket/d")
    expected = write_shards(local, tmp_path / "s", **settings)
    for source in (local, open_remote("s3://bucket/d")):
        bucket.objects = {name: data for name, data in bucket.objects.items() if name[:2] == "d/"}
        read, indexes = type(source).read_slice, list[int]()

        def read_slice(dataset, index, read=read, indexes=indexes):
            indexes.append(index)
            if indexes == [0, 1, 2]:
                raise OSError("killed")
            return read(dataset, index)

        monkeypatch.setattr(type(source), "read_slice", read_slice)
        with pytest.raises(OSError, match="killed"):
            write_shards(source, "r2://", **settings)
        shards = write_shards(source, "r2://", **settings)
        assert bucket.uploads.completed["shards/train_000000.npy"] == 1, "it goes on behind what is in the bucket"
        bucket.uploads.completed.clear()
        monkeypatch.setattr(type(source), "read_slice", read)
        assert [shard.num_samples for shard in shards] == [shard.num_samples for shard in expected] == [33, 33, 33, 32]
        for shard in expected:
            for path in (shard.tokens, shard.ids):
                assert bucket.objects[f"shards/{path.name}"] == path.read_bytes()
    assert sorted(bucket.objects)[-8:] == sorted(f"shards/{path.name}" for path in (tmp_path / "s").iterdir())
    capsys.readouterr()
    assert main(["inspect", "s3://bucket/shards", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["format"], shown["shards"], shown["samples"], shown["seq_len"]) == ("shared shards", 4, 131, 16)
    assert run("verify", "r2://") == 0
    with SharedShardedDatasetManager(16, url="r2://", folder="cache", steps_per_shard=2) as shards:
        batches = [(step, shards.read_window(step, batch_size=4, uid=3)) for step in range(8)]
        active = shards.at_step(0)
        for batch, (step, (index, positions, tokens)) in zip(shards.batches(0, 8, batch_size=4, uid=3), batches):
            assert (batch.step, batch.sample_ids.tolist()) == (step, positions.tolist())
            assert (batch.inputs == tokens).all() and set(batch.dataset_index.tolist()) == {index}
        assert active is not None
        name = "shards/train_000002.npy"
        bucket.objects[name] = bytes([*bucket.objects[name][:-1], bucket.objects[name][-1] ^ 1])
    assert run("verify", "s3://bucket/shards") == 1


P, KEYS = {"PROFILE": "p"}, {"ACCESS_KEY_ID": "KEY", "SECRET_ACCESS_KEY": "SECRET"}


@pytest.mark.parametrize(
    "config, credentials, variables, error",
    [
        ("[default]\nregion=r\nendpoint_url=URL", "[default]\naws_access_key_id=KEY\naws_secret_access_key=SECRET", {},
         ""),
        ("[profile p]\nendpoint_url = URL\naws_access_key_id = KEY\naws_secret_access_key = SECRET", "", P, ""),
        ("[profile p]\nendpoint_url=URL", "[p]\naws_access_key_id=x", P | KEYS, ""),
        ("[default]\nendpoint_url=URL\ncredential_process=/bin/x", "", KEYS, ""),
        ("", "", P, "AWS profile p: .* no such profile"),
        ("[default]\nsso_session=s", "", {}, "got sso_session. Set what `aws configure export-credentials"),
        ("[default]\ncredential_process=/bin/x", "", {}, "got credential_process"),
        ("[default]\nrole_arn=a", "", {}, "got role_arn"), ("garbage", "", {}, "config: expected AWS profiles"),
    ],
)  # fmt: skip
def test_credentials_come_from_profiles(
    bucket, monkeypatch, tmp_path, config, credentials,
    variables, error,
):  # fmt: skip
    for name in bucket.s3_environment:
        monkeypatch.delenv(name)
    values = {"URL": bucket.url, "KEY": ACCESS_KEY, "SECRET": SECRET_KEY}

    def filled(text):
        for name, value in values.items():
            text = text.replace(f"={name}", f"={value}").replace(f"= {name}", f"= {value}")
        return text

    for name, text in (("CONFIG_FILE", config), ("SHARED_CREDENTIALS_FILE", credentials)):
        path = tmp_path / name.split("_")[0].lower()
        path.write_text(filled(text))
        monkeypatch.setenv(f"AWS_{name}", str(path))
    for name, value in variables.items():
        monkeypatch.setenv(f"AWS_{name}", values.get(value, value))
    bucket.objects["k"] = b"1"
    if error:
        with pytest.raises(UsageError, match=error):
            open_origin("s3://bucket").get("k", 1)
    else:
        assert open_origin("s3://bucket").get("k", 1) == b"1"


def test_a_public_bucket_is_read_without_credentials(bucket, monkeypatch, tmp_path, caplog):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    bucket.is_public, bucket.objects = True, {"p/a": row("a"), "p/b//c": row("c")}
    _, files = find_urls("s3://bucket/p")
    assert [open_url(*file).read() for file in files] == [row("a"), row("c")]
    assert "no credentials were found" in caplog.text and not any(bucket.authorizations)
