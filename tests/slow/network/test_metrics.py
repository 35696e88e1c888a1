"""Metrics of every kind of process, of a real job: names by promtool, the page that lists them, a real Prometheus."""

import json
import math
import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import forebay
from forebay.cli import main
from forebay.coordinator.server import Coordinator
from forebay.dataset.import_slices import import_slices
from forebay.dataset.slices import write_rows_slice
from forebay.load.sources import Mixture
from forebay.network.client import Client
from forebay.network.peer import ROLES, Scope
from forebay.network.pki.identity import Identity, create_organisation, join
from forebay.observe.dashboard import Dashboard
from forebay.observe.metrics import _METRICS
from forebay.observe.sources import NodeSource, PreparationSource, status_by
from forebay.swarm.share import SliceShare
from forebay.worker.membership import Membership
from support import prometheus
from support.nodes import HOST, NAME, PACED_READER, Network, make_dataset
from support.preparing import write_jsonl
from support.processes import forebay as forebay_process
from support.runner import ROOT, blocks
from support.waiting import until
from support.whole import texts

DASHBOARD = ROOT / "examples" / "grafana" / "forebay.json"
GUIDE = ROOT / "docs" / "how-to" / "metrics.md"
PAGE = ROOT / "docs" / "reference" / "metrics.md"
WORKERS = ["w1", "w2"]


@dataclass
class Processes:
    """Addresses by the kind of process; `nodes` over mutual TLS, `pages` over plain HTTP."""

    directory: Path
    nodes: dict[str, str]
    pages: dict[str, str]

    def expositions(self) -> dict[str, str]:
        with Client(Identity.load(self.directory / "monitor")) as client:
            texts = {kind: client.get_bytes(node, "/metrics", 1 << 22).decode() for kind, node in self.nodes.items()}
        for kind, address in self.pages.items():
            with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                assert answer.headers["Content-Type"].startswith("text/plain")
                texts[kind] = answer.read().decode()
        return texts

    def config(self) -> str:
        """The configuration of docs/how-to/metrics.md, with the addresses of these processes, scraped each second."""
        pages, nodes = list(self.pages.values()), list(self.nodes.values())
        config = yaml.safe_load(yaml_blocks()["prometheus.yml"])
        config["global"]["scrape_interval"] = "1s"
        for scrape, targets in zip(config["scrape_configs"], (pages, nodes), strict=True):
            scrape["static_configs"] = [{"targets": targets}]
        return yaml.safe_dump(config)


def yaml_blocks() -> dict[str, str]:
    """The YAML blocks of the guide, by the name of the file in their first line."""
    codes = [block.code for block in blocks(GUIDE) if block.language == "yaml"]
    return {code.partition(". ")[0].removeprefix("# "): code for code in codes}


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> Iterator[Processes]:
    with ExitStack() as stack:
        yield start(tmp_path_factory.mktemp("metrics"), stack)


def start(directory: Path, stack: ExitStack) -> Processes:
    network = Network(directory, stack, "reader", *WORKERS, dht_nodes=3)
    create_organisation(directory / "network", directory / "lab", "lab")
    for name in ("data-of-lab", "monitor"):  # Prometheus has to verify chains of three.
        identity = join(directory / "lab", directory / name, name, scope=Scope(ROLES, ("t*",)))
        network.homes[name] = identity.node_dir
    node = network.serve(make_dataset(directory / "dataset", 60, 20_000), name="data-of-lab")
    scheduler = network.schedule(seq_len=16, epochs=50)
    words = f"worker --scheduler {scheduler.address} --batch-size 2 --cache-bytes {1 << 20}".split()
    for name in WORKERS:
        own = f"--identity {network.homes[name]} --cache-dir {directory}/cache-{name}".split()
        stack.callback(forebay_process(*words, *own, "--", *PACED_READER, 0.02).end)
    share = SliceShare(network.identity("reader"), {}, {}, f"{HOST}:0")
    stack.callback(share.close)
    coordinator = stack.enter_context(Coordinator(HOST, 0, config={"num_steps": 1000}))
    joined = stack.enter_context(Membership(f"http://{coordinator.address}", "trainer-0"))
    joined.join()
    nodes = {"data node": node.address, "scheduler": scheduler.address, "worker": share.address}
    lines = [f"{text} {i}" if i % 3 else "short" for i, text in enumerate(texts(60))]
    write_jsonl(directory / "text.jsonl", lines)
    text = f"{directory}/text.jsonl --tokenizer bytes --filter gopher --workers 1 -q".split()
    assert main(["prepare", *text, "--out", str(directory / "out")]) == 0
    sources = {
        "dashboard of a job": NodeSource(scheduler.address, status_by(network.client("monitor"))),
        "dashboard of a run": NodeSource(coordinator.address, status_by(Client(None))),
        "dashboard of a preparation": PreparationSource(directory / "out"),
    }
    pages = {kind: stack.enter_context(Dashboard(source).start()) for kind, source in sources.items()}
    for kind, loader in loaders(network, scheduler.address).items():
        pages[f"training process: {kind}"] = stack.enter_context(forebay.serve_dashboard(loader))
        stop = threading.Event()
        thread = threading.Thread(target=consume, args=(loader, stop), daemon=True)
        thread.start()
        stack.callback(thread.join, 30.0)
        stack.callback(stop.set)
    addresses = {kind: page.url.split("/")[2] for kind, page in pages.items()} | {"coordinator": coordinator.address}
    result = Processes(directory, nodes, addresses)
    workers = lambda: list(scheduler.status()["workers"].values())  # noqa: E731
    until(lambda: len(workers()) > len(WORKERS) and all(w["samples"] and w["processes"] for w in workers()))
    names = ("forebay_worker_wait_ratio", "forebay_run_step", "forebay_prepare_elapsed_seconds")
    until(lambda: all(name in "".join(result.expositions().values()) for name in names))
    return result


def loaders(network: Network, scheduler: str) -> dict:
    directory = network.directory
    for name in ("a", "b"):
        (directory / name).mkdir()
        write_rows_slice(directory / name / "0.safetensors", {"x": np.zeros((500, 4), np.float32)})
        import_slices(directory / name, name)
    rows = {name: directory / name for name in ("a", "b")}
    tokens = dict.fromkeys(("c", "d"), directory / "dataset")
    remote = {
        "network": forebay.NetworkOptions(identity=network.homes["reader"], discovery=network.discovery),
        "seq_len": 16, "batch_size": 8, "cache_bytes": 1 << 20,
    }  # fmt: skip
    url, text = f"forebay://test/{NAME}", directory / "text.jsonl"
    result = {
        "a mixture": forebay.Loader(Mixture(tokens, {"c": 3, "d": 1}), seq_len=16, batch_size=8),
        "a mixture of rows": forebay.Loader(Mixture(rows, {"a": 3, "b": 1}), batch_size=8),
        "a cache": forebay.Loader(url, steps=100_000, cache_dir=directory / "cache", **remote),
        "leases": forebay.Loader(url, scheduler=scheduler, cache_dir=directory / "cache-leases", **remote),
        "a text stream": forebay.TextStream(text, tokenizer="bytes", seq_len=64, batch_size=2, epochs=None),
    }
    for loader in result.values():
        network.stack.callback(loader.close)
    return result


def consume(loader: Any, stop: threading.Event):
    while not stop.is_set():
        for _ in loader:
            if stop.wait(0.01):
                break


def test_promtool_finds_nothing_to_improve(processes):
    shown = processes.expositions()
    for kind, text in shown.items():
        assert prometheus.lint(text) == "", kind
    assert [kind for kind, text in shown.items() if "forebay_announce_failing" in text] == ["data node", "worker"]


def test_prometheus_scrapes_every_process_and_answers_grafana(processes):
    (processes.directory / "forebay-rules.yml").write_text(yaml_blocks()["forebay-rules.yml"])
    with prometheus.running(processes.config(), processes.directory) as server:
        # A scrape that takes longer than a second fails, and its values are missing until the next.
        num_targets = len(processes.nodes) + len(processes.pages)
        until(lambda: all(target["health"] == "up" for target in server.targets(num_targets)))
        for title, expressions in panels().items():
            if title != "Failures":  # Nothing failed in this job.
                until(lambda expressions=expressions: any(map(server.query, expressions)))
            results = [server.query(expression) for expression in expressions]
            values = [float(result["value"][1]) for series in results for result in series]
            assert not any(math.isnan(value) for value in values), (title, results)
        rules = [rule for group in server.get("/api/v1/rules")["groups"] for rule in group["rules"]]
        assert rules and not [rule for rule in rules if rule.get("lastError")]


def panels() -> dict[str, list[str]]:
    """The queries of Grafana's dashboard, by panel; of all instances, each for a minute."""
    return {
        panel["title"]: [
            target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
            for target in panel.get("targets", [])
        ]
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        if panel["type"] != "row"
    }


def test_grafana_reads_its_dashboard():
    """Nothing of the file is lost when Grafana's own model of dashboards reads and writes it."""
    model = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="pip install grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()
    original = json.loads(DASHBOARD.read_text())
    written = json.loads(JSONEncoder().encode(model.Dashboard.from_json(original)))

    def assert_subset(value, again, path):
        assert type(value) is type(again), path
        if isinstance(value, dict):
            for key, item in value.items():
                assert_subset(item, again.get(key), f"{path}.{key}")
        elif isinstance(value, list):
            for i, (item, other) in enumerate(zip(value, again, strict=True)):
                assert_subset(item, other, f"{path}[{i}]")
        else:
            assert value == again, path

    assert_subset(original, written, "dashboard")


def documented() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Type, labels and meaning of each metric of the page."""
    rows = re.findall(r"^\|`(\w+)`\|(\w+)\|([^|]*)\|(.*)\|$", PAGE.read_text(), re.MULTILINE)
    return {name: (kind, tuple(re.findall(r"`(\w+)`", labels)), about) for name, kind, labels, about in rows}


def exposed(processes: Processes) -> dict[str, tuple[str, tuple[str, ...], str]]:
    result = {}
    for text in processes.expositions().values():
        for family in text_string_to_metric_families(text):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            labels = {label for sample in family.samples for label in sample.labels}
            before = result.get(name, ("", (), ""))[1]
            result[name] = family.type, tuple(sorted(labels | set(before))), family.documentation
    return result


def test_the_page_lists_every_metric(processes):
    """In both directions, with types, labels and descriptions; those of the table also where this job has none."""
    real, listed = exposed(processes), documented()
    lines = [f"|`{n}`|{k}|{', '.join(f'`{x}`' for x in ls)}|{a}|" for n, (k, ls, a) in sorted(real.items())]
    for name, (kind, labels, about) in real.items():
        assert name in listed, "\n".join(lines)
        expected = listed[name]
        assert (kind, labels or expected[1], about) == (expected[0], tuple(sorted(expected[1])), expected[2]), name
    table = {f"forebay_{name}": about for name, about in _METRICS.values()}
    assert {name for name in table if listed.get(name, ("", (), ""))[2] != table[name]} == set()
    assert set(listed) - set(real) - set(table) == set()
