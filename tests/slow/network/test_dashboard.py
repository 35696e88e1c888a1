"""The dashboard and `forebay top` of real jobs: one data node, one scheduler, four workers, one of them killed."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import psutil
import pytest

pytest.importorskip("libtorrent")

import forebay
from forebay.data_node import DataNode
from forebay.lease.messages import ExchangeRequest, WorkerStats
from forebay.network.client import Client
from forebay.network.dht import LibtorrentDht
from forebay.network.limits import ServerLimits
from forebay.network.peer import Scope
from forebay.network.pki.identity import Identity, join
from forebay.observe.dashboard import POLL_S, Dashboard
from forebay.observe.record import RunRecord
from forebay.observe.sources import NodeSource, PreparationSource, RecordSource, status_by
from forebay.observe.views import View
from forebay.scheduler import server as scheduler_server
from forebay.scheduler.activity import Activity
from forebay.scheduler.core import SchedulerCore
from forebay.scheduler.leases import JobSpec
from forebay.scheduler.server import SchedulerService
from forebay.scheduler.status import full_status
from forebay.stream import documents
from support.browser import THEMES, WIDTHS, open_browser
from support.calibration import scaled
from support.leases import work
from support.nodes import HOST, NAME, Bootstrap, Node, make_dataset, make_network

WORKERS = ["worker-1", "worker-2", "worker-3", "worker-4"]


class World:
    """A data node and a scheduler in this process."""

    def __init__(self, directory: Path, stack: ExitStack, *, num_slices: int, tokens: int, **settings: Any) -> None:
        self.directory, self.stack = directory, stack
        bootstrap = Bootstrap(3)
        stack.callback(bootstrap.close)
        self.homes = make_network(directory, ["data", "scheduler", *WORKERS], bootstrap.at)
        join(directory / "network", directory / "plain", "plain", scope=Scope(frozenset({"worker"})))
        self.dht = LibtorrentDht(HOST, 0, bootstrap.at)
        stack.callback(self.dht.close)
        limits = settings.pop("limits", None)
        dataset = make_dataset(directory / "dataset", num_slices, tokens)
        node = DataNode(self.identity("data"), [dataset], HOST, 0, self.dht, ttl_s=30, limits=limits)
        node.start()
        stack.callback(node.stop)
        self.scheduler = SchedulerService(
            self.identity("scheduler"), NAME, self.dht, self.client("scheduler"), directory / "state",
            **{"rediscover_s": 0.5, **settings},
        )  # fmt: skip
        self.scheduler.start()
        stack.callback(self.scheduler.stop)

    def identity(self, name: str) -> Identity:
        return Identity.load(self.directory / name)

    def client(self, name: str) -> Client:
        return self.stack.enter_context(Client(self.identity(name)))

    def source(self, name: str = "scheduler") -> NodeSource:
        return NodeSource(self.scheduler.address, status_by(self.client(name)))


def until(view: Callable[[], View], is_right: Callable[[View], bool], what: str) -> View:
    """The first view that is right. Fails after a while, with the last one."""
    deadline = time.monotonic() + scaled(60)
    while not is_right(last := view()):
        assert time.monotonic() < deadline, f"{what}: {json.dumps(last)[:3000]}"
        time.sleep(0.2)
    return last


def get(url: str, host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    address = url.split("/")[2]
    with contextlib.closing(http.client.HTTPConnection(address)) as connection:
        connection.request("GET", url.split(address, 1)[1], headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, Dashboard, RecordSource]]:
    """A job of which four workers used a part, and one was killed; with its page, and a record of it."""
    directory = tmp_path_factory.mktemp("job")
    with ExitStack() as stack:
        world = World(directory, stack, num_slices=40, tokens=20_000, seq_len=16, lease_s=2.0)
        record = RunRecord(directory / "record", interval_s=0.5)
        page = stack.enter_context(Dashboard(world.source(), record=record).start())
        nodes = []
        for name in WORKERS:
            cache = {"cache": str(directory / f"cache-{name}"), "cache_bytes": 1 << 20}
            nodes.append(Node("work", directory / f"{name}.log", node=str(world.homes[name]), pause_s=0.02, **cache))
            stack.callback(nodes[-1].kill)
        status = world.scheduler.status
        until(lambda: dict(status()), lambda s: sum(w["samples"] > 40 for w in s["workers"].values()) == 4, "start")
        time.sleep(4.5)  # Workers report about every two seconds: two reports make a share.
        nodes[0].kill()
        texts = [f"{WORKERS[0]} sent nothing for too long"]
        until(world.source().poll, lambda v: any(t in e["text"] for e in v["events"] for t in texts), "expiry")
        yield world, page, RecordSource(directory / "record")


def test_the_view_has_workers_waits_coverage_nodes_and_events(job: tuple[World, Dashboard, RecordSource]) -> None:
    _, page, _ = job

    def view() -> View:
        return json.loads(get(f"{page.url}v1/status")[2])

    def is_whole(v: View) -> bool:
        states = {row["name"]: row["state"] for row in v.get("workers", [])}
        working = [row for row in v.get("workers", []) if row["state"] == "working"]
        return (
            states.get(WORKERS[0]) == "silent" and len(working) == 3 and all(row["leases"] > 0 for row in working)
            and [node["state"] for node in v.get("nodes", [])] == ["up"]
            and {use["worker"] for use in v.get("uses", [])} >= set(WORKERS[1:])
        )  # fmt: skip

    shown = until(view, is_whole, "one silent worker")
    assert shown["kind"] == "job" and shown["title"] == NAME and shown["state"] == "running"
    assert 0 < shown["progress"]["done"] < shown["progress"]["total"] and shown["progress"]["unit"] == "samples"
    coverage = shown["coverage"]
    assert len(coverage["used"]) == len(coverage["state"]) == 40 and coverage["slices_per_cell"] == 1
    assert set(coverage["used"]) > {"0"} and "L" in coverage["state"]
    alive = [row for row in shown.get("workers", []) if row["state"] == "working"]
    for row in alive:
        assert row["rate"] > 0 and row["leases"] > 0 and row["origin_bytes"] + row["peer_bytes"] > 0
        assert 0 < row["cached_bytes"] <= row["cache_bytes"] == 1 << 20 and 0 <= row["wait_share"] <= 1
    assert shown["figures"]["workers"][0] == 3 and shown["figures"]["ledger entries"][0] > 4
    assert {event["text"] for event in shown["events"]} >= {f"{name} joined" for name in WORKERS}
    assert {use["worker"] for use in shown["uses"]} >= set(WORKERS[1:])
    (node,) = shown["nodes"]
    assert node["name"] == "data" and node["state"] == "up" and node["bytes_sent"] > 0


def test_other_members_see_progress_and_no_names(job: tuple[World, Dashboard, RecordSource]) -> None:
    view = job[0].source("plain").poll()
    assert view["progress"]["done"] > 0 and view["coverage"] and not view.get("workers")
    assert not view.get("events") and not view.get("uses")
    assert not any(name in json.dumps(view) for name in WORKERS)


def test_the_page_is_closed_to_other_sites_and_loads_nothing_from_elsewhere(
    job: tuple[World, Dashboard, RecordSource],
) -> None:
    url = job[1].url
    status, headers, body = get(url)
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"] and b"http" not in body
    assert get(f"{url}v1/status", host="evil.example")[0] == 400
    assert get(f"{url}v1/status", host="localhost")[0] == 200
    assert get(f"{url}../../etc/passwd")[0] == 404
    assert get(f"{url}v1/views/nan")[0] in (400, 404) and get(f"{url}v1/views/x")[0] == 400
    names = ('forebay_worker_tokens_per_second{worker="worker-2"}', 'forebay_wait_ratio{cause="')
    until(lambda: {"text": get(f"{url}metrics")[2].decode()}, lambda v: all(n in v["text"] for n in names), "metrics")


def test_the_record_replays(job: tuple[World, Dashboard, RecordSource], tmp_path: Path) -> None:
    world, _, record = job
    times = record.times()
    assert len(times) > 3 and times == sorted(times)
    first, last = record.view_at(times[0]), record.view_at(times[-1])
    assert times[0] <= first["at"] < times[0] + 1  # Views within a second are of one moment.
    assert first["progress"]["done"] <= last["progress"]["done"]
    command = [sys.executable, "-m", "forebay", "top"]
    folder = str(world.directory / "record")
    shown = subprocess.run([*command, folder], capture_output=True, text=True, check=True).stdout
    assert NAME in shown and all(name in shown for name in WORKERS) and "slices of the epoch" in shown
    node = ["--identity", str(world.homes["scheduler"])]
    live = subprocess.run(
        [*command, world.scheduler.address, *node, "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(live.stdout)["kind"] == "job"
    wrong = subprocess.run([*command, "--replay", world.scheduler.address, *node], capture_output=True, text=True)
    assert wrong.returncode == 2 and "expected a folder with the record of a run" in wrong.stderr
    absent = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True)
    assert absent.returncode == 2 and len(absent.stderr.splitlines()) == 1


def test_the_page_in_a_browser(job: tuple[World, Dashboard, RecordSource]) -> None:
    """Every width and theme: figures, no error, nothing to scroll sideways, nothing serious for axe-core."""
    _, page, _ = job
    with open_browser() as browser:
        for theme in THEMES:
            for name, width in WIDTHS.items():
                browser.open(page.url, width=width, theme=theme)
                browser.page.wait_for_selector("#table-workers tbody tr")
                assert browser.page.inner_text("#title") == NAME
                text = browser.page.inner_text("main")
                for expected in (*WORKERS, "silent", "Where the workers' time goes", "Data nodes", "joined"):
                    assert expected in text, (theme, name, expected)
                assert browser.overflow() == 0 and not browser.errors
                assert browser.violations() == []
                if folder := os.environ.get("FOREBAY_SCREENSHOTS"):
                    browser.screenshot(Path(folder) / f"dashboard-{name}-{theme}.png")
        assert {url.split("/")[2] for url in browser.requests} <= {page.url.split("/")[2]}
        names = browser.focusable()
        assert any("set aside" in name for name in names) and any(name.startswith("BUTTON Theme") for name in names)
        browser.page.get_by_role("button", name="rate").first.click()
        assert browser.page.locator("#table-workers th[aria-sort=ascending]").inner_text() == "rate"


def test_texts_of_members_stay_text(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=document.title='owned'>\x1b[31m"
    view = {"version": 1, "kind": "job", "title": hostile, "state": hostile, "at": 1.0, "message": hostile}
    view |= {
        "workers": [{"name": hostile, "state": "idle"}],
        "events": [{"at": 1.0, "level": "error", "text": hostile}],
    }
    view["datasets"] = [{"name": hostile, "slices": 1, "id": hostile}]
    RunRecord(tmp_path / "record").add(view)
    shown = subprocess.run(
        [sys.executable, "-m", "forebay", "top", str(tmp_path / "record")], capture_output=True, text=True, check=True
    ).stdout
    assert "\x1b" not in shown and "onerror" in shown
    with Dashboard(RecordSource(tmp_path / "record")).start() as page, open_browser() as browser:
        browser.open(page.url)
        browser.page.wait_for_selector("#table-workers tbody tr")
        assert "owned" not in browser.page.title().replace("'owned'", "") and not browser.errors
        assert browser.page.locator("main img").count() == 0


def test_a_preparation_has_its_page(tmp_path: Path) -> None:
    """While it runs, and afterwards: stages, rules, reasons, samples of what is dropped."""
    words = [
        a + b + c for a in "bcdfglmnprst" for b in ("an", "el", "or", "ist") for c in ("", "ing", "ed", "er", "ly")
    ]
    words += 40 * ["the", "of", "and", "to", "with", "that", "have", "be"]
    chance = np.random.default_rng(1)
    for number in range(24):
        lines = [" ".join(chance.choice(words, 90)) + "." for _ in range(1500)]
        lines += ["short"] * 700 + ["\x1b[31m<script>document.title='owned'</script> short"]
        (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    command = [sys.executable, "-m", "forebay", "prepare", *map(str, sorted(tmp_path.glob("*.jsonl")))]
    options = ["--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--filter", "gopher", "--workers", "1"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    states: list[View] = []

    def view() -> View:
        with contextlib.suppress(forebay.ForebayError):
            states.append(PreparationSource(tmp_path / "out").poll())
        return states[-1] if states else {}

    until(view, lambda v: v.get("state") in ("done", "failed"), "done")
    out, err = process.communicate()
    assert process.returncode == 0, err
    during = [state for state in states if state["state"] == "running" and state.get("rules")]
    assert during and 0 < during[0]["figures"]["documents read"][0] < states[-1]["figures"]["documents read"][0]
    last = states[-1]
    assert last["figures"]["documents read"][0] == 24 * 2201
    dropped = {row["reason"]: row["documents"] for row in last["dropped"]}
    assert dropped["gopher_short"] == 24 * 700 and "52,824" in out
    with Dashboard(PreparationSource(tmp_path / "out")).start() as page, open_browser() as browser:
        for theme in THEMES:
            for name, width in WIDTHS.items():
                browser.open(page.url, width=width, theme=theme)
                browser.page.wait_for_selector("#table-rules tbody tr")
                browser.page.get_by_text("gopher_quality: gopher_short").first.click()
                text = browser.page.inner_text("main")
                assert "gopher_short" in text and "Dropped documents" in text and "short" in text
                assert browser.overflow() == 0 and not browser.errors and browser.violations() == []
                if folder := os.environ.get("FOREBAY_SCREENSHOTS"):
                    browser.screenshot(Path(folder) / f"preparation-{name}-{theme}.png")
        assert browser.page.title() != "owned"


class ManyWorkers:
    """A scheduler's status with 1,000 workers and 250,000 slices: the real core and activity, without a network."""

    def __init__(self, num_workers: int = 1000, num_slices: int = 250_000) -> None:
        self.core = SchedulerCore(JobSpec("many", "0" * 64, np.full(num_slices, 4096)))
        self.activity, self.cpu_s, self.num_polls = Activity(), 0.0, 0
        table = SimpleNamespace(bytes=np.full(num_slices, 1 << 26), row=None)
        self._catalog: Any = SimpleNamespace(seq_len=2048, table=table, claims=[])
        self.peers: Any = [SimpleNamespace(peer_id=f"{i:032d}", name=f"worker-{i}") for i in range(num_workers)]
        self._began = time.monotonic()
        for peer in self.peers:
            self.core.exchange(peer.peer_id, ExchangeRequest(session="s", want=2), 0.0)
        for moment in range(-120, 1):
            self.report(self._began + moment / 4)

    def report(self, now: float) -> None:
        for peer in self.peers:
            usage, _ = self.activity.notice(peer, now)
            usage.add(64, 64 * 2048, now)
            busy_s = now - self._began + 1000
            usage.add_stats(
                "s", WorkerStats(7, busy_s, {"network": busy_s / 50, "decode": 1.0}, cache_bytes=1 << 32), now
            )

    def read(self, address: str) -> dict[str, Any]:
        self.report(time.monotonic())
        began = time.thread_time()
        status = full_status(self.core, self.activity, self._catalog, 10, time.monotonic())
        body = orjson.dumps(status, option=orjson.OPT_SORT_KEYS)
        self.cpu_s, self.num_polls = self.cpu_s + time.thread_time() - began, self.num_polls + 1
        return dict(orjson.loads(body))


def test_a_thousand_workers_load_in_two_seconds_and_cost_the_scheduler_little(
    capsys: pytest.CaptureFixture[str],
) -> None:
    many = ManyWorkers()
    with Dashboard(NodeSource("x", many.read)).start() as page, open_browser() as browser:
        until(
            lambda: dict(json.loads(get(f"{page.url}v1/status")[2])),
            lambda v: len(v.get("workers", [])) == 1000,
            "view",
        )
        began = time.monotonic()
        browser.open(page.url)
        browser.page.wait_for_selector("#table-workers tbody tr")
        load_s = time.monotonic() - began
        browser.page.get_by_role("button", name="Next").first.click()
        assert browser.page.inner_text("#table-workers output") == "51 to 100 of 1,000"
        browser.page.get_by_label("Filter Workers").fill("worker-77")
        assert browser.page.inner_text("#table-workers output") == "1 to 11 of 11"
        polls = many.num_polls
        until(lambda: {"polls": many.num_polls}, lambda v: v["polls"] >= polls + 4, "polls")
        renderers = [p for p in psutil.Process().children(recursive=True) if "--type=renderer" in p.cmdline()]
        memory = max(process.memory_full_info().uss for process in renderers)  # Its own, without shared libraries.
        share = many.cpu_s / many.num_polls / POLL_S
        with capsys.disabled():
            print(f"\n1,000 workers: {share:.2%} of a core, {memory / 1e6:.0f} MB in the browser, "
                  f"load {load_s / scaled(1):.2f} of a calibrated second")  # fmt: skip
        assert load_s < scaled(2) and memory < 100e6
        assert share < scaled(0.05) and browser.errors == []


# What the page names as the cause when a part is throttled.


def wait_for_cause(world: World, cause: str) -> View:
    """The page, once it names the cause for which the one worker of a job, which only counts, waits most of the time.

    A start that took long may be named before.
    """
    stop, pause = threading.Event(), 0.002
    seen: list[str] = []

    def run() -> None:
        work(
            world.identity(WORKERS[0]), NAME, world.scheduler.address, world.directory / "cache", batch_size=4,
            stop=stop, cache_bytes=1 << 20, on_batch=lambda batch: time.sleep(pause), receipt_s=0.2, listen=None,
        )  # fmt: skip

    thread = threading.Thread(target=run)
    thread.start()
    try:

        def view() -> View:
            shown = world.source().poll()
            seen.extend(row["waits_for"] for row in shown.get("workers", []) if row["wait_share"] > 0.3)
            return shown

        return until(
            view, lambda v: seen[-11:] == 11 * [cause] and cause in v.get("advice", ""), f"waiting for {cause}"
        )
    finally:
        stop.set()
        thread.join()


def test_a_slow_network_is_named(tmp_path: Path) -> None:
    with ExitStack() as stack:
        limits = ServerLimits(upload_bytes_per_s=60_000.0)
        # A batch takes 17 ms of the network: longer than the step, also on a slow machine.
        world = World(tmp_path, stack, num_slices=200, tokens=20_000, seq_len=128, limits=limits)
        assert "network" in wait_for_cause(world, "network")["advice"]


def test_a_slow_scheduler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_server, "GATHER_S", scaled(1.5))  # Each exchange is answered after so long.
    with ExitStack() as stack:
        world = World(tmp_path, stack, num_slices=400, tokens=500, seq_len=16)
        assert "scheduler" in wait_for_cause(world, "scheduler")["advice"]


def test_a_slow_tokenizer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, pause_s = documents.TextEncoder.encode, scaled(0.1)

    def encode(self: Any, texts: list[bytes], counts: dict[str, int]) -> Any:
        time.sleep(pause_s)
        return real(self, texts, counts)

    monkeypatch.setattr(documents.TextEncoder, "encode", encode)
    (tmp_path / "text.txt").write_text("one more line of text\n" * 200_000)
    stream = forebay.TextStream(tmp_path / "text.txt", tokenizer="bytes", seq_len=4096, batch_size=64, epochs=None)
    with forebay.serve_dashboard(stream, record=tmp_path / "record") as page:
        until(lambda: _after_batches(stream, page), lambda v: v.get("advice", "").count("tokenize") > 0, "tokenize")
    stream.close()
    assert RecordSource(tmp_path / "record").poll()["title"] == "text stream"


def _after_batches(stream: Any, page: Dashboard) -> View:
    for _, _batch in zip(range(40), stream):
        pass
    with urllib.request.urlopen(f"{page.url}v1/status") as answer:
        return dict(json.loads(answer.read()))


def test_a_slow_disk_is_named(tmp_path: Path) -> None:
    """A process whose disk is throttled by the kernel reads a dataset that is not in the page cache."""
    group = Path("/sys/fs/cgroup/blkio") / f"forebay-test-{os.getpid()}"
    device = tmp_path.stat().st_dev
    try:
        group.mkdir()
        (group / "blkio.throttle.read_bps_device").write_text(f"{os.major(device)}:{os.minor(device)} 2000000")
    except OSError as error:
        pytest.skip(f"the kernel's throttle of disks cannot be set here: {error}")
    try:
        dataset = make_dataset(tmp_path / "dataset", 8, 4_000_000)
        program = (
            "import os, sys, time, forebay\n"
            f"open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            f"loader = forebay.Loader({str(dataset.path)!r}, seq_len=4096, batch_size=8)\n"
            "page = forebay.serve_dashboard(loader)\n"
            "print(page.url, flush=True)\n"
            "for batch in loader: time.sleep(0.001)\n"
        )
        slices = sorted((tmp_path / "dataset" / "slices").iterdir())
        subprocess.run(["sync", *slices], check=True)  # Python's own fsync does nothing in these tests.
        for path in slices:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        url = process.stdout.readline().strip()

        def view() -> View:
            return dict(json.loads(get(f"{url}v1/status")[2]))

        try:
            shown = until(view, lambda v: v.get("waits", {}).get("disk", 0) > 0.3, "disk")
            assert "for the disk" in shown["advice"]
        finally:
            process.kill()
            process.communicate()
    finally:
        group.rmdir()
