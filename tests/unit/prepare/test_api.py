"""Paged APIs, against a real HTTP server that limits, fails, drops, repeats and lies; and a run that is stopped."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from forebay.cli import main
from forebay.errors import PrepareError, UsageError
from forebay.formats.base import get_format
from forebay.formats.detect import detect
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.prepare.api import acquire
from support.answers import Answer, serve
from support.preparing import good_texts, read_lines

PER_PAGE, PAGES = 10, 12
FAULTS = {
    "429": ({"Retry-After": "20"}, b"no"),
    "html": ({}, b"<html>down for maintenance"),
    "limit": ({"X-Ratelimit-Remaining": "0.0", "X-Ratelimit-Reset": "30"}, b""),
    "302": ({"Location": "http://127.0.0.2:1/steal"}, b""),
}


@dataclass
class Server:
    """An API of `PAGES` pages at a virtual time; each request of a page has the next of its `faults`."""

    url: str = ""
    shape: str = "reddit"
    faults: dict[int, Iterator[str]] = field(default_factory=dict)
    requests: list[tuple[int, float]] = field(default_factory=list)
    seen_headers: list[str] = field(default_factory=list)
    now: float = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float):
        self.now += seconds

    def page(self, index: int) -> bytes:
        numbers = range(index * PER_PAGE, (index + 1) * PER_PAGE)
        following = f"c{index + 1}" if index + 1 < PAGES else None
        if self.shape == "x":
            meta = {"next_token": following} if following else {}
            return json.dumps({"data": [{"id": str(n), "text": f"post {n}"} for n in numbers], "meta": meta}).encode()
        # Listings move on while they are read: the last of the page before comes again.
        children = [
            {"data": {"name": f"t3_{n}", "title": f"Title {n}", "selftext": f"body {n}", "permalink": f"/r/s/{n}"}}
            for n in range(max(0, numbers[0] - 1), numbers[-1] + 1)
        ]
        return json.dumps({"data": {"children": children, "after": following}}).encode()

    def answer(self, path: str, headers: Mapping[str, str]) -> Answer | None:
        query = parse_qs(urlsplit(path).query)
        index = int((query.get("after") or query.get("next_token") or ["c0"])[0][1:])
        self.requests.append((index, self.now))
        self.seen_headers.append(headers.get("Authorization", ""))
        fault = next(self.faults.get(index, iter(())), "")
        if fault == "drop":
            return None
        more, body = FAULTS.get(fault, ({}, self.page(index)))
        if fault == "loop":
            body = body.replace(b'"c%d"' % (index + 1), b'"c%d"' % index)
        return int(fault) if fault.isdigit() else 200, more, body or self.page(index), 50 if fault == "short" else None


@pytest.fixture
def server(monkeypatch) -> Iterator[Server]:
    state = Server()
    for module in ("prepare.api", "storage.base"):
        monkeypatch.setattr(f"forebay.{module}.time", state)
    with serve(state.answer) as url:
        state.url = f"{url}/listing"
        yield state


def spec(tmp_path: Path, server: Server, more: str = "", preset: str = "reddit") -> Path:
    path = tmp_path / "a.api.toml"
    path.write_text(f'preset = "{preset}"\nurl = "{server.url}"\nrequests_per_s = 20\n{more}')
    return path


def ids(path: Path) -> list[str]:
    return [item["id"] for item in read_lines(path)]


ALL = [f"t3_{n}" for n in range(PER_PAGE * PAGES)]


def test_all_faults_at_once(tmp_path, server):
    faults = {0: "500 drop", 2: "429", 3: "html 503 short", 5: "drop drop drop", 7: "limit", 9: "429 500"}
    server.faults = {index: iter(names.split()) for index, names in faults.items()}
    reported = []
    path = acquire(spec(tmp_path, server), tmp_path / "out", reported.append)
    result = read_lines(path)
    assert ids(path) == ALL
    assert (result[3]["text"], result[3]["url"]) == ("Title 3\n\nbody 3", "https://www.reddit.com/r/s/3")
    assert (reported[-1].done, reported[-1].pages, reported[-1].repeats) == (True, PAGES, PAGES - 1)
    times = {index: [time_s for page, time_s in server.requests if page == index] for index in range(PAGES)}
    assert round(times[2][1] - times[2][0], 6) >= 20  # Retry-After
    assert round(times[8][0] - times[7][0], 6) >= 30  # X-Ratelimit-Reset
    num_requests = len(server.requests)
    assert acquire(spec(tmp_path, server), tmp_path / "out") == path
    assert len(server.requests) == num_requests  # done is done
    assert good_texts(path) == [item["text"] for item in result]
    command = f"prepare {tmp_path}/a.api.toml --tokenizer bytes --workers 1 --quiet --out {tmp_path}/d"
    assert main([*command.split(), "--write-ids", str(tmp_path / "ids")]) == 0
    assert (tmp_path / "ids").read_text().split() == ALL == ids(tmp_path / "d.inputs/a/items.jsonl")


def test_x_preset_and_limits(tmp_path, server):
    server.shape = "x"
    path = acquire(spec(tmp_path, server, "max_pages = 4\n", "x"), tmp_path / "out")
    assert [item["text"] for item in read_lines(path)] == [f"post {n}" for n in range(4 * PER_PAGE)]
    assert read_lines(path)[7]["url"] == "https://x.com/i/status/7"
    assert server.now - server.requests[0][1] == pytest.approx(3 / 20)


def test_failures_keep_what_was_fetched(tmp_path, server, monkeypatch):
    server.faults = {3: iter(["500"] * 3)}
    description = spec(tmp_path, server)
    monkeypatch.setattr("forebay.prepare.api.MAX_TRIES", 3)
    with pytest.raises(PrepareError, match=r"failed 3 times; last: HTTP status 500.*Run again to resume"):
        acquire(description, tmp_path / "out")
    assert ids(tmp_path / "out/items.jsonl") == ALL[: 3 * PER_PAGE]
    num_requests = len(server.requests)
    assert ids(acquire(description, tmp_path / "out")) == ALL
    assert server.requests[num_requests][0] == 3
    for fault, message in (("403", "HTTP status 403"), ("loop", "names itself"), ("302", "HTTP status 302")):
        server.faults = {1: iter([fault])}
        with pytest.raises(PrepareError, match=message):
            acquire(description, tmp_path / fault)
    server.faults = {0: iter(["429"])}
    with pytest.raises(PrepareError, match="more than max_wait_s"):
        acquire(spec(tmp_path, server, "max_wait_s = 0.1\n"), tmp_path / "wait")


def test_a_run_that_is_stopped_goes_on_at_its_cursor(tmp_path, server):
    description = spec(tmp_path, server)
    for pages in (3, 7):

        def stop(progress, pages=pages):
            if progress.pages == pages:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            acquire(description, tmp_path / "out", stop)
        with (tmp_path / "out/items.jsonl").open("ab") as file:
            file.write(b'{"id": "torn')  # what a kill between the page and its cursor leaves
    path = acquire(description, tmp_path / "out")
    assert ids(path) == ALL and [index for index, _ in server.requests] == list(range(PAGES))
    assert path.read_bytes() == acquire(description, tmp_path / "whole").read_bytes()


def test_secrets_stay_in_the_environment(tmp_path, server, monkeypatch):
    description = spec(tmp_path, server, 'max_pages = 1\n[headers]\nAuthorization = "Bearer ${MY_TOKEN}"\n')
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(UsageError, match="MY_TOKEN is not set"):
        acquire(description, tmp_path / "out")
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    acquire(description, tmp_path / "out")
    assert server.seen_headers == ["Bearer s3cret"]
    assert not any(b"s3cret" in path.read_bytes() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    "text, message",
    [
        ("url = 1", "url: expected a string"),
        ('url = "ftp://x"', "url: expected http"),
        ('preset = "myspace"', "preset: expected one of reddit, x"),
        ('url = "http://x"\nitem = "y"', "unknown key 'item'"),
        ('url = "http://x"\ntext = []', "text: expected more items"),
        ('url = "http://x"\nmax_pages = -1', "max_pages: expected at least 0"),
        ('url = "http://x"\nheaders = 3', "headers: expected a table"),
    ],
)
def test_wrong_descriptions(tmp_path, text, message):
    path = tmp_path / "a.api.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        acquire(path, tmp_path / "out")


def test_a_folder_has_one_description_and_a_text_that_shows_one_is_a_text(tmp_path, server):
    acquire(spec(tmp_path, server, "max_pages = 1\n"), tmp_path / "out")
    with pytest.raises(UsageError, match="another description"):
        acquire(spec(tmp_path, server, 'max_pages = 1\nid = "title"\n'), tmp_path / "out")
    path = spec(tmp_path, server)
    assert detect(path).format == "api"
    split = InputSplit((InputFile(str(path), path.name, "api", "", path.stat().st_size, ""),))
    with pytest.raises(UsageError, match="forebay prepare"):
        list(get_format("api").read_text(split, ReadOptions()))
    page = tmp_path / "apis.md"
    page.write_text('# APIs\n\nA description:\n\n```toml\nurl = "http://x"\nitems = "data"\n```\n')
    assert detect(page).format == "text"
    page.write_text('\n# Of articles\nurl = "http://x"\nitems = "data"\n')
    assert detect(page).format == "api"
