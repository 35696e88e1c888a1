"""Paged APIs, against a real HTTP server that limits, fails, drops, repeats and lies; and a run that is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from forebay.errors import PrepareError, UsageError
from forebay.formats.base import get_format
from forebay.formats.detect import detect
from forebay.formats.inputs import InputFile, InputSplit, ReadOptions
from forebay.prepare.api import ApiProgress, acquire
from forebay.prepare.inputs import find_inputs, read_split, split_files
from support.calibration import scaled

PER_PAGE, PAGES = 10, 12


@dataclass
class Server:
    """An API of `PAGES` pages; `faults` are told off, one a request of that page."""

    url: str = ""
    shape: str = "reddit"
    faults: dict[int, list[str]] = field(default_factory=dict)
    asked: list[tuple[int, float]] = field(default_factory=list)
    seen_headers: list[str] = field(default_factory=list)
    slow_s: float = 0.0
    num_given: int = PAGES  # Later pages are waited for.

    def page(self, index: int) -> bytes:
        numbers = range(index * PER_PAGE, (index + 1) * PER_PAGE)
        following = f"c{index + 1}" if index + 1 < PAGES else None
        if self.shape == "x":
            meta = {"next_token": following} if following else {}
            return json.dumps({"data": [{"id": str(n), "text": f"post {n}"} for n in numbers], "meta": meta}).encode()
        children = [
            {"data": {"name": f"t3_{n}", "title": f"Title {n}", "selftext": f"body {n}", "permalink": f"/r/s/{n}"}}
            for n in numbers
        ]
        if index:  # listings move on while they are read: the last of the page before comes again
            again = index * PER_PAGE - 1
            children.insert(
                0, {"data": {"name": f"t3_{again}", "title": f"Title {again}", "selftext": f"body {again}"}}
            )
        return json.dumps({"data": {"children": children, "after": following}}).encode()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr("forebay.prepare.api.FIRST_WAIT_S", 0.01)
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            cursor = (query.get("after") or query.get("next_token") or ["c0"])[0]
            index = int(cursor[1:])
            state.asked.append((index, time.monotonic()))
            state.seen_headers.append(self.headers.get("Authorization", ""))
            time.sleep(state.slow_s)
            while index >= state.num_given:
                time.sleep(0.005)
            fault = state.faults.get(index, [])
            kind = fault.pop(0) if fault else ""
            body, status, headers = state.page(index), 200, {}
            if kind == "drop":
                self.connection.close()
                return
            if kind.isdigit():
                status, body = int(kind), b"no"
                headers = {"Retry-After": "0.2"} if status == 429 else {}
            elif kind == "html":
                body = b"<html>down for maintenance"
            elif kind == "short":
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: len(body) // 2])
                self.connection.close()
                return
            elif kind == "limit":
                headers = {"X-Ratelimit-Remaining": "0.0", "X-Ratelimit-Reset": "0.3"}
            elif kind == "loop":
                body = body.replace(b'"c%d"' % (index + 1), b'"c%d"' % index)
            elif kind == "elsewhere":
                status, headers = 302, {"Location": "http://127.0.0.2:1/steal"}
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    http.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{http.server_port}/listing"
    yield state
    http.shutdown()
    http.server_close()
    thread.join()


def spec(tmp_path: Path, server: Server, more: str = "", preset: str = "reddit") -> Path:
    path = tmp_path / "a.api.toml"
    path.write_text(f'preset = "{preset}"\nurl = "{server.url}"\nrequests_per_s = 1000\n{more}')
    return path


def items(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_all_faults_at_once(tmp_path: Path, server: Server) -> None:
    server.faults = {
        0: ["500", "drop"],
        2: ["429"],
        3: ["html", "503", "short"],
        5: ["drop", "drop", "drop"],
        7: ["limit"],
        9: ["429", "500"],
    }
    reported: list[ApiProgress] = []
    path = acquire(spec(tmp_path, server), tmp_path / "out", reported.append)
    result = items(path)
    assert [item["id"] for item in result] == [f"t3_{n}" for n in range(PER_PAGE * PAGES)]
    assert result[3]["text"] == "Title 3\n\nbody 3"
    assert result[3]["url"] == "https://www.reddit.com/r/s/3"
    assert (reported[-1].done, reported[-1].pages, reported[-1].repeats) == (True, PAGES, PAGES - 1)
    times = {index: [position for page, position in server.asked if page == index] for index in range(PAGES)}
    assert times[2][1] - times[2][0] >= 0.2  # Retry-After
    assert times[8][0] - times[7][0] >= 0.3  # X-Ratelimit-Reset
    requests = len(server.asked)
    assert acquire(spec(tmp_path, server), tmp_path / "out") == path
    assert len(server.asked) == requests  # done is done
    options = ReadOptions()
    records = [
        r for piece in split_files(find_inputs(path, options).files, options) for r in read_split(piece, options)
    ]
    assert [r.text for r in records] == [item["text"] for item in result]


def test_x_preset_and_limits(tmp_path: Path, server: Server) -> None:
    server.shape = "x"
    path = acquire(spec(tmp_path, server, "max_pages = 4\n", "x"), tmp_path / "out")
    assert [item["text"] for item in items(path)] == [f"post {n}" for n in range(4 * PER_PAGE)]
    assert items(path)[7]["url"] == "https://x.com/i/status/7"
    start = time.monotonic()
    slow = spec(tmp_path, server, "max_pages = 4\n", "x").read_text().replace("per_s = 1000", "per_s = 20")
    (tmp_path / "slow.api.toml").write_text(slow)
    acquire(tmp_path / "slow.api.toml", tmp_path / "slow")
    assert time.monotonic() - start >= 3 / 20


def test_failures_keep_what_was_fetched(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.faults = {3: ["500"] * 3}
    description = spec(tmp_path, server)
    monkeypatch.setattr("forebay.prepare.api.MAX_TRIES", 3)
    with pytest.raises(PrepareError, match=r"failed 3 times; last: HTTP status 500.*Run again to resume"):
        acquire(description, tmp_path / "out")
    assert len(items(tmp_path / "out/items.jsonl")) == 3 * PER_PAGE
    asked = len(server.asked)
    path = acquire(description, tmp_path / "out")
    assert [item["id"] for item in items(path)] == [f"t3_{n}" for n in range(PER_PAGE * PAGES)]
    assert server.asked[asked][0] == 3
    for fault, message in (("403", "HTTP status 403"), ("loop", "names itself"), ("elsewhere", "HTTP status 302")):
        server.faults = {1: [fault]}
        with pytest.raises(PrepareError, match=message):
            acquire(description, tmp_path / fault)
    server.faults = {0: ["429"]}
    with pytest.raises(PrepareError, match="more than max_wait_s"):
        acquire(spec(tmp_path, server, "max_wait_s = 0.1\n"), tmp_path / "wait")


def test_a_killed_run_goes_on_at_its_cursor(tmp_path: Path, server: Server) -> None:
    server.slow_s = 0.03
    description = spec(tmp_path, server)
    code = "import sys; from forebay.prepare.api import acquire; acquire(sys.argv[1], sys.argv[2])"
    command = [sys.executable, "-c", code, str(description), str(tmp_path / "out")]
    for pages in (3, 7):
        server.num_given = pages + 2  # It is killed before its end, also if this is late.
        run = subprocess.Popen(command)
        deadline = time.monotonic() + scaled(20)
        while max((index for index, _ in server.asked), default=0) < pages and time.monotonic() < deadline:
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
        run.wait()
        with (tmp_path / "out/items.jsonl").open("ab") as file:
            file.write(b'{"id": "torn')  # what a kill between the page and its cursor leaves
    server.num_given = PAGES
    path = acquire(description, tmp_path / "out")
    assert [item["id"] for item in items(path)] == [f"t3_{n}" for n in range(PER_PAGE * PAGES)]
    assert path.read_bytes() == acquire(description, tmp_path / "whole").read_bytes()


def test_secrets_stay_in_the_environment(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    description = spec(tmp_path, server, 'max_pages = 1\n[headers]\nAuthorization = "Bearer ${MY_TOKEN}"\n')
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(UsageError, match="MY_TOKEN is not set"):
        acquire(description, tmp_path / "out")
    monkeypatch.setenv("MY_TOKEN", "s3cret")
    acquire(description, tmp_path / "out")
    assert server.seen_headers == ["Bearer s3cret"]
    assert not any(b"s3cret" in path.read_bytes() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("url = 1", "url: expected a string"),
        ('url = "ftp://x"', "url: expected http"),
        ('preset = "myspace"', "preset: expected one of reddit, x"),
        ('preset = "reddit"', "url: expected http"),
        ('url = "http://x"\nitem = "y"', "unknown key 'item'"),
        ('url = "http://x"\ntext = []', "text: expected more items"),
        ('url = "http://x"\nmax_pages = -1', "max_pages: expected at least 0"),
        ('url = "http://x"\nheaders = 3', "headers: expected a table"),
        ("url = ", ":1: expected TOML"),
    ],
)
def test_wrong_descriptions(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.api.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        acquire(path, tmp_path / "out")


def test_a_text_that_shows_a_description_is_a_text(tmp_path: Path) -> None:
    page = tmp_path / "apis.md"
    page.write_text('# APIs\n\nA description:\n\n```toml\nurl = "http://x"\nitems = "data"\n```\n')
    assert detect(page).format == "text"
    page.write_text('\n# Of articles\nurl = "http://x"\nitems = "data"\n')
    assert detect(page).format == "api"


def test_a_folder_is_of_one_description(tmp_path: Path, server: Server) -> None:
    acquire(spec(tmp_path, server, "max_pages = 1\n"), tmp_path / "out")
    with pytest.raises(UsageError, match="another description"):
        acquire(spec(tmp_path, server, 'max_pages = 1\nid = "title"\n'), tmp_path / "out")
    path = spec(tmp_path, server)
    assert detect(path).format == "api"
    with pytest.raises(UsageError, match="forebay prepare"):
        list(
            get_format("api").read_text(
                InputSplit((InputFile(str(path), path.name, "api", "", path.stat().st_size, ""),)), ReadOptions()
            )
        )
