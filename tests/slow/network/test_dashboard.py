"""The dashboard and `forebay top` of real jobs: one data node, one scheduler, four workers, one of them killed."""

import contextlib
import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

import forebay
from forebay.cli import main
from forebay.network.limits import ServerLimits
from forebay.observe.dashboard import Dashboard
from forebay.observe.record import RunRecord
from forebay.observe.sources import NodeSource, PreparationSource, RecordSource, status_by
from forebay.observe.views import View
from forebay.scheduler import server as scheduler_server
from forebay.scheduler.server import SchedulerService
from forebay.stream.lane import TextEncoder
from support import processes
from support.browser import THEMES, WIDTHS, Browser, open_browser
from support.nodes import HOST, NAME, PACED_READER, Network, make_dataset
from support.preparing import write_jsonl
from support.waiting import until

Job = tuple[Network, SchedulerService, Dashboard]
WORKERS = ["worker-1", "worker-2", "worker-3", "worker-4"]


def source(network: Network, service: SchedulerService, name: str = "scheduler") -> NodeSource:
    return NodeSource(service.address, status_by(network.client(name)))


def wait_for(view: Callable[[], View], is_right: Callable[[View], object]) -> View:
    """Return the first view that is right."""
    views = []

    def check():
        time.sleep(0.1)
        views.append(view())
        return is_right(views[-1])

    until(check)
    return views[-1]


def get(url: str, host: str | None = None) -> tuple[int, dict[str, str], bytes]:
    address = url.split("/")[2]
    with contextlib.closing(http.client.HTTPConnection(address)) as connection:
        connection.request("GET", url.split(address, 1)[1], headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()


def shown_view(page: Dashboard) -> View:
    return dict(json.loads(get(f"{page.url}v1/status")[2]))


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    """A job of which four workers used a part, and one was killed; its page."""
    directory = tmp_path_factory.mktemp("job")
    with ExitStack() as stack:
        network = Network(directory, stack, *WORKERS)
        network.serve(make_dataset(directory / "dataset", 40, 20_000))
        service = network.schedule(seq_len=16, lease_s=2.0)
        page = stack.enter_context(Dashboard(source(network, service)).start())
        words = f"worker --scheduler {service.address} --batch-size 2 --listen {HOST}:0".split()
        words += ["--cache-bytes", 1 << 20]
        nodes = []
        for name in WORKERS:
            own = f"--identity {network.homes[name]} --cache-dir {directory}/cache-{name}".split()
            nodes.append(processes.forebay(*words, *own, "--", *PACED_READER, 0.02))
            stack.callback(nodes[-1].end)
        until(lambda: sum(w["samples"] > 40 for w in service.status()["workers"].values()) == len(WORKERS))
        time.sleep(4.5)  # Workers report about every two seconds: two reports make a share.
        nodes[0].end()
        lost = f"{WORKERS[0]} sent nothing for too long"
        wait_for(lambda: shown_view(page), lambda view: any(lost in event["text"] for event in view["events"]))
        yield network, service, page


def test_the_view_has_workers_waits_coverage_nodes_and_events(job):
    page = job[2]

    def is_whole(view):
        states = {row["name"]: row["state"] for row in view.get("workers", [])}
        working = [row for row in view.get("workers", []) if row["state"] == "working"]
        return (
            states.get(WORKERS[0]) == "silent" and len(working) == 3 and all(row["leases"] > 0 for row in working)
            and [node["state"] for node in view.get("nodes", [])] == ["up"]
            and {use["worker"] for use in view.get("uses", [])} >= set(WORKERS[1:])
        )  # fmt: skip

    shown = wait_for(lambda: shown_view(page), is_whole)
    assert shown["kind"] == "job" and shown["title"] == NAME and shown["state"] == "running"
    assert 0 < shown["progress"]["done"] < shown["progress"]["total"] and shown["progress"]["unit"] == "samples"
    coverage = shown["coverage"]
    assert len(coverage["used"]) == len(coverage["state"]) == 40 and coverage["slices_per_cell"] == 1
    assert set(coverage["used"]) > {"0"} and "L" in coverage["state"]
    for row in [row for row in shown["workers"] if row["state"] == "working"]:
        assert row["rate"] > 0 and row["origin_bytes"] + row["peer_bytes"] > 0
        assert 0 < row["cached_bytes"] <= row["cache_budget_bytes"] == 1 << 20 and 0 <= row["wait_share"] <= 1
    assert shown["figures"]["workers"][0] == 3 and shown["figures"]["ledger entries"][0] > 4
    assert {event["text"] for event in shown["events"]} >= {f"{name} joined" for name in WORKERS}
    (node,) = shown["nodes"]
    assert node["name"] == "data" and node["bytes_sent"] > 0


def test_the_page_is_closed_to_other_sites_and_loads_nothing_from_elsewhere(
    job,
):
    url = job[2].url
    status, headers, body = get(url)
    assert status == 200 and headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in headers["content-security-policy"] and b"http" not in body
    assert get(f"{url}v1/status", host="evil.example")[0] == 403
    assert get(f"{url}v1/status", host="localhost")[0] == 200
    assert get(f"{url}../../etc/passwd")[0] == 404
    assert get(f"{url}v1/views/nan")[0] in (400, 404) and get(f"{url}v1/views/x")[0] == 400
    names = ('forebay_worker_tokens_per_second{worker="worker-2"}', 'forebay_wait_ratio{cause="')
    wait_for(lambda: {"text": get(f"{url}metrics")[2].decode()}, lambda view: all(n in view["text"] for n in names))


def check_page(browser: Browser, url: str, name: str, selector: str, act: Callable[[], Collection[str]]):
    """At every width and theme: the texts that `act` returns, no error, nothing to scroll, nothing for axe-core."""
    for theme in THEMES:
        for size, width in WIDTHS.items():
            browser.open(url, width=width, theme=theme)
            browser.page.wait_for_selector(selector)
            expected = act()
            text = browser.page.inner_text("main")
            assert [part for part in expected if part not in text] == [], (theme, size)
            assert browser.overflow() == 0 and not browser.errors and browser.violations() == []
            if folder := os.environ.get("FOREBAY_SCREENSHOTS"):
                browser.screenshot(Path(folder) / f"{name}-{size}-{theme}.png")


def test_the_page_in_a_browser(job):
    url, parts = job[2].url, (*WORKERS, "silent", "Where the workers' time goes", "Data nodes", "joined")
    with open_browser() as browser:
        check_page(browser, url, "dashboard", "#table-workers tbody tr", lambda: parts)
        assert browser.page.inner_text("#title") == NAME
        assert {request.split("/")[2] for request in browser.requests} <= {url.split("/")[2]}
        browser.open(url)
        browser.page.wait_for_selector("#table-workers tbody tr")
        names = browser.focusable()
        assert any("set aside" in name for name in names) and any(name.startswith("BUTTON Theme") for name in names)
        browser.page.get_by_role("button", name="rate").first.click()
        assert browser.page.locator("#table-workers th[aria-sort=ascending]").inner_text() == "rate"


def test_texts_of_members_stay_text_and_long_tables_have_pages(tmp_path, capsys):
    hostile = "<img src=x onerror=document.title='owned'>\x1b[31m"
    view = {"version": 1, "kind": "job", "title": hostile, "state": hostile, "at": 1.0, "message": hostile}
    view["workers"] = [{"name": name, "state": "idle"} for name in (hostile, *(f"worker-{i}" for i in range(799)))]
    view["events"] = [{"at": 1.0, "level": "error", "text": hostile}]
    view["datasets"] = [{"name": hostile, "slices": 1, "id": hostile}]
    RunRecord(tmp_path / "record").add(view)
    assert main(["top", str(tmp_path / "record")]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "onerror" in shown
    with Dashboard(RecordSource(tmp_path / "record")).start() as page, open_browser() as browser:
        browser.open(page.url)
        browser.page.wait_for_selector("#table-workers tbody tr")
        assert "owned" not in browser.page.title().replace("'owned'", "") and not browser.errors
        assert browser.page.locator("main img").count() == 0
        browser.page.get_by_role("button", name="Next").first.click()
        assert browser.page.inner_text("#table-workers output") == "51 to 100 of 800"
        browser.page.get_by_label("Filter Workers").fill("worker-77")
        assert browser.page.inner_text("#table-workers output") == "1 to 11 of 11"


def test_a_preparation_has_its_page(tmp_path, stack: ExitStack):
    """While it runs, and afterwards: stages, rules, reasons, samples of what is dropped."""
    words = [
        a + b + c for a in "bcdfglmnprst" for b in ("an", "el", "or", "ist") for c in ("", "ing", "ed", "er", "ly")
    ]
    words += 40 * ["the", "of", "and", "to", "with", "that", "have", "be"]
    chance = np.random.default_rng(1)
    for number in range(24):
        lines = [" ".join(chance.choice(words, 90)) + "." for _ in range(1500)]
        lines += ["short"] * 700 + ["\x1b[31m<script>document.title='owned'</script> short"]
        write_jsonl(tmp_path / f"{number}.jsonl", lines)
    options = f"--out {tmp_path}/out --tokenizer bytes --filter gopher --workers 1".split()
    process = processes.forebay("prepare", *sorted(tmp_path.glob("*.jsonl")), *options)
    stack.callback(process.end)
    states = [{}]

    def view():
        with contextlib.suppress(forebay.ForebayError):
            states.append(PreparationSource(tmp_path / "out").poll())
        return states[-1]

    last = wait_for(view, lambda view: view.get("state") in ("done", "failed"))
    assert process.wait() == 0, process.errors
    during = [state for state in states if state.get("state") == "running" and state.get("rules")]
    assert during and 0 < during[0]["figures"]["documents read"][0] < last["figures"]["documents read"][0] == 24 * 2201
    dropped = {row["reason"]: row["documents"] for row in last["dropped"]}
    assert dropped["gopher_short"] == 24 * 700 and "52,824" in "".join(process.output)

    def click():
        browser.page.get_by_text("gopher_quality: gopher_short").first.click()
        return "gopher_short", "Dropped documents", "short"

    with Dashboard(PreparationSource(tmp_path / "out")).start() as page, open_browser() as browser:
        check_page(browser, page.url, "preparation", "#table-rules tbody tr", click)
        assert browser.page.title() != "owned"


# The cause that the page names when a part is throttled.


@pytest.mark.parametrize(
    "cause, gather_s, limits, slices, tokens, seq_len",
    [
        # A batch takes 17 ms of the network: longer than the step, also on a slow machine.
        ("network", scheduler_server.GATHER_S, ServerLimits(upload_bytes_per_s=60_000.0), 200, 20_000, 128),
        ("scheduler", 1.5, None, 400, 500, 16),  # Each exchange is answered after so long.
    ],
)
def test_a_slow_network_or_scheduler_is_named(
    cause, gather_s, limits, slices, tokens, seq_len,
    tmp_path, stack: ExitStack, monkeypatch,
):  # fmt: skip
    """One worker, which only counts, waits most of its time; a start that took long may be named before."""
    monkeypatch.setattr(scheduler_server, "GATHER_S", gather_s)
    network = Network(tmp_path, stack, "worker")
    network.serve(make_dataset(tmp_path / "dataset", slices, tokens), limits=limits)
    service, stop = network.schedule(seq_len=seq_len), threading.Event()
    settings = {"stop": stop, "on_batch": lambda batch: time.sleep(0.002), "receipt_s": 0.2, "listen": None}
    thread = threading.Thread(target=network.work, args=("worker", service), kwargs=settings)
    thread.start()
    stack.callback(thread.join)
    stack.callback(stop.set)

    def is_named(view):
        waiting = [row["waits_for"] for row in view.get("workers", []) if row["wait_share"] > 0.3]
        return waiting == [cause] and cause in view.get("advice", "")

    assert cause in wait_for(source(network, service).poll, is_named)["advice"]


def test_a_slow_tokenizer_is_named(tmp_path, monkeypatch):
    real = TextEncoder.encode

    def encode(self, texts, counts):
        time.sleep(0.1)
        return real(self, texts, counts)

    monkeypatch.setattr(TextEncoder, "encode", encode)
    (tmp_path / "text.txt").write_text("one more line of text\n" * 200_000)
    stream = forebay.TextStream(tmp_path / "text.txt", tokenizer="bytes", seq_len=4096, batch_size=64, epochs=None)

    def view():
        for _, _batch in zip(range(40), stream):
            pass
        return shown_view(page)

    with forebay.serve_dashboard(stream, record=tmp_path / "record") as page:
        wait_for(view, lambda view: "tokenize" in view.get("advice", ""))
    stream.close()
    assert RecordSource(tmp_path / "record").poll()["title"] == "text stream"
