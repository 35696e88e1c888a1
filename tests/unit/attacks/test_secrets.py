"""The user, password and signature of a URL are sent, and are in nothing that is printed, logged, raised or written."""

import ast
import base64
import json
import logging
import pickle
import runpy
import traceback

import pyarrow.parquet as pq
import pytest

from forebay import Loader, Mixture, TextStream
from forebay.cli import main
from forebay.errors import PrintableUrl, full_url, printable_url
from forebay.formats.inputs import ReadOptions
from forebay.prepare.inputs import find_inputs
from forebay.prepare.tasks.keys import source_key
from forebay.storage.hub import find_repo
from forebay.storage.origins import open_origin, open_remote
from support.answers import serve
from support.preparing import stay_in_process, write_jsonl
from support.token_slices import write_tokens

CANARIES = ("CANARYUSER", "CANARYPASS", "CANARYSIG")
USER = "CANARYUSER:CANARYPASS@"
AUTHORIZATION = "Basic " + base64.b64encode(USER[:-1].encode()).decode()
OPTIONS = "--workers 1 --tokenizer bytes --document-ids -vv --out {output}/out"
COMMANDS = {
    f"prepare {{url}}/a.jsonl{{query}} {OPTIONS}": 0,
    f"prepare {{url}}/none.jsonl{{query}} {OPTIONS}": 1,
    f"prepare {{url}}/list.paths{{query}} {OPTIONS}": 0,
    f"prepare --config {{mine}}/recipe.toml {OPTIONS}": 0,
    f"prepare {{mine}}/page.api.toml {OPTIONS}": 0,
    f"prepare {{mine}}/none.api.toml {OPTIONS}": 1,
    "prepare {url}/a.jsonl{query} --dry-run": 0,
    "extract {url}/a.jsonl{query}": 0,
    "inspect {url}/d{query} --json": 0,
    "inspect {url}/none{query}": 1,
    "verify {url}/d{query}": 0,
    "report {url}/d{query}": 2,
    "plan {url}/d{query} --seq-len 8 --global-batch-size 8": 0,
    "doctor {url}/a.jsonl{query}": 2,
    "convert {url}/a.jsonl{query} {output}/a.parquet --to parquet": 0,
    "convert {url}/none.jsonl{query} {output}/a.parquet --to parquet": 1,
    "convert {url}/a.jsonl{query} {url}/b{query} --to parquet": 2,
    "mirror {url}/d{query} {output}/m -vv": 0,
    "mirror {url}/none{query} {output}/m -vv": 1,
    "mirror {url}/d{query} {url}/m{query}": 2,
    "mirror ftp://{user}host/d{query} {output}/m": 2,
    "inspect s3://{user}bucket/d?secret_access_key=CANARYSIG": 2,
    "serve {url}/d{query} --identity {mine}": 2,
    "top {url}/d{query}": 2,
    "worker --coordinator http://{user}127.0.0.1:1 -- true": 2,
    "network join --token {user}CANARYSIG {output}/n --name n": 2,
    "inspect {output} {url}/unknown{query}": 2,
    "{url}{query}": 2,
}
RECIPE = """inputs = ["{url}/a.jsonl{query}"]
[decontaminate]
sets = ["{url}/b.jsonl{query}"]
"""


@pytest.fixture
def places(tmp_path, monkeypatch):
    """A server that answers who has the secrets; `mine` has what the user wrote, `output` what a command writes."""
    served, mine, output = (tmp_path / name for name in ("served", "mine", "output"))
    mine.mkdir()
    output.mkdir()
    write_tokens(served / "d", [100] * 3)
    write_jsonl(served / "a.jsonl", [f"line {n} of a text, said the hare to the hedgehog" for n in range(50)])
    write_jsonl(served / "b.jsonl", ["an evaluation set has an instance of twenty words and more " * 3])
    (served / "list.paths").write_text("a.jsonl\n")
    (served / "page").write_text('[{"id": "1", "text": "one"}]')

    def answer(path, headers):
        name, _, query = path.partition("?")
        file = served / name.lstrip("/")
        if headers["Authorization"] != AUTHORIZATION or (query != "signature=CANARYSIG" and name != "/a.jsonl"):
            return 401, {}, b"", None
        return (200, {"ETag": '"1"'}, file.read_bytes(), None) if file.is_file() else (404, {}, b"", None)

    stay_in_process(monkeypatch)
    monkeypatch.setattr("forebay.storage.base._FIRST_WAIT_S", 0.001)
    for name in ("FOREBAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(output))
    with serve(answer) as address:
        urls = {
            "url": address.replace("//", f"//{USER}"),
            "query": "?signature=CANARYSIG",
            "mine": mine,
            "output": output,
        }
        (mine / "recipe.toml").write_text(RECIPE.format(**urls))
        for name in ("page", "none"):
            (mine / f"{name}.api.toml").write_text('url = "{url}/{name}{query}"'.format(**urls, name=name))
        yield {**urls, "user": USER}


@pytest.fixture
def check(places, caplog):
    """A check of texts, of the log, and of all files that were written."""
    caplog.set_level(logging.DEBUG)

    def check(*texts):
        files = [path for path in places["output"].rglob("*") if path.is_file()]
        shown = {"log": caplog.text, "texts": "\n".join(map(str, texts))}
        shown |= {path.name: path.read_bytes().decode(errors="replace") for path in files}
        shown |= {f"{p.name} (columns)": str(pq.read_table(p).to_pylist()) for p in files if p.suffix == ".parquet"}
        assert {name: text for name, text in shown.items() if any(canary in text for canary in CANARIES)} == {}

    return check


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_shows_what_it_sends(places, check, command, capsys):
    try:
        code = main([word.format(**places) for word in command.split()])
    except SystemExit as error:
        code = error.code
    shown = capsys.readouterr()
    check(*shown)
    assert code == COMMANDS[command], shown.err


def test_no_object_shows_what_it_sends(places, check):
    dataset, text = (places["url"] + name + places["query"] for name in ("/d", "/a.jsonl"))
    loader = Loader(dataset, seq_len=8, batch_size=4)
    mixture = Mixture({"a": dataset}, {"a": 1.0})
    mixed = Loader(mixture, seq_len=8, batch_size=4, steps=2)
    stream = TextStream([text], tokenizer="bytes", seq_len=8, batch_size=4)
    states = [json.dumps([next(iter(source)).step, source.state_dict()]) for source in (loader, mixed, stream)]
    objects = (loader, loader.config, loader.dataset, mixture, mixed, stream)
    cards = [shown._repr_html_() for shown in (loader, loader.dataset, mixture)]
    check(*map(repr, objects), *objects, *states, *cards, loader.describe(), loader.stats())
    url = pickle.loads(pickle.dumps(loader.dataset.url))  # for another process, which opens it
    assert open_remote(url).id == loader.dataset.id


@pytest.mark.parametrize(
    "fail, variables",
    [
        (lambda url, query: Loader(f"{url}/none{query}", seq_len=8, batch_size=4), {}),
        (lambda url, query: open_remote(f"http://{USER.replace('YP', 'Y/P')}host/d{query}"), {}),
        (lambda *_: open_origin("http://example.test/d").get("x", 9),
         {"no_proxy": "", "http_proxy": f"http://{USER}127.0.0.1:1"}),
        (lambda *_: open_origin("s3://bucket/d").get("x", 9),
         {"AWS_ENDPOINT_URL": f"http://{USER}127.0.0.1:1", "AWS_ACCESS_KEY_ID": "i", "AWS_SECRET_ACCESS_KEY": "k"}),
        (lambda *_: find_repo("dataset", "owner/name", tries=1),
         {"HF_ENDPOINT": f"http://{USER}127.0.0.1:1", "HF_TOKEN": "CANARYSIG"}),
    ],
)  # fmt: skip
def test_no_traceback_shows_what_it_sends(places, check, fail, variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Exception) as raised:
        fail(places["url"], places["query"])
    check(repr(raised.value), *traceback.format_exception(raised.value))


def test_a_url_that_is_signed_again_is_the_same_input_and_two_of_one_path_are_two(places):
    inputs = [f"{places['url']}/a.jsonl?id={name}" for name in (1, 2, 1)]
    first, second = (find_inputs(url, ReadOptions()).files[0] for url in inputs[:2])
    assert source_key(first) == source_key(second) and first.path != second.path
    both = find_inputs(inputs, ReadOptions()).files
    assert [full_url(file.path)[-4:] for file in both] == ["id=1", "id=2"]
    assert len(set(map(source_key, both))) == len({str(file.path) for file in both}) == 2


@pytest.mark.parametrize(
    "url, shown",
    [
        ("https://u:p@host:1/a@b/c?q=1#f", "https://host:1/a@b/c"), ("http://u:p/q?r#s@host/x", "http://host/x"),
        ("https://[::1]:8/x", "https://[::1]:8/x"), ("s3://b/k#1?x%20+&y=1", "s3://b/k#1?x%20+&y=1"),
        ("s3://i:k@b/k?endpoint=http://u:p@h&my_token=t&region=r", "s3://b/k?endpoint=http://h&my_token=…&region=r"),
        ("hf://datasets/o/n@main/part-?.parquet", "hf://datasets/o/n@main/part-?.parquet"),
        ("forebay://net/name?id=1", "forebay://net/name"), ("http://host/\x1b[2J", "http://host/\\x1b[2J"),
        ("/a/b?c#d@e", "/a/b?c#d@e"), ("file:///a?b", "file:///a?b"), ("pg://u:p@h/d?password=x", "pg://h/d"),
    ],
)  # fmt: skip
def test_what_is_shown_of_a_url(url, shown):
    again = pickle.loads(pickle.dumps(PrintableUrl(url)))
    assert printable_url(url) == shown == str(again) == f"{PrintableUrl(again)}"
    assert full_url(again) == url and again == PrintableUrl(url) and {again: 1}[url] == 1
    assert (again != shown) == (url != shown)


def test_a_text_that_shows_a_url_with_its_secrets_is_found():
    find_secrets = runpy.run_path("scripts/check_sources.py")["find_secrets"]
    code = """
def read(url: str, shown: PrintableUrl, base_url: str | Path) -> None:
    log.info("%s", url)
    print(f"{shown} {printable_url(url)}")
    raise PrepareError(f"{base_url}: cannot read {shown.full_url}")
"""
    assert sorted(use[:2] for use in find_secrets(ast.parse(code))) == [(3, "url"), (5, "base_url"), (5, "full_url")]
