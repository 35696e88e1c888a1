"""What holds for every test: its own caches, a profile of hypothesis, patience in fast tests; and fixtures.

A thread that dies fails the test in which it dies: pytest warns of it, and warnings are errors (pyproject.toml).
"""

import itertools
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from forebay.network import admission, discovery, server
from forebay.network import join as joining
from forebay.network.pki.identity import Identity, create_network, join
from forebay.storage import remote_file
from forebay.worker.trainer import share_processors
from support import limits, store
from support.handlers import FOREVER_S, patient
from support.origin_server import OriginServer
from support.paths import TESTS

# Programs that tests start import the helpers beside this file.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(TESTS), str(TESTS / "support/unflushed"), os.environ.get("PYTHONPATH")])
)
# Only a loss of power loses what is not flushed, and no test has one: a kill loses nothing that was written. A flush
# waits for what all tests write: some 5 ms each on a busy disk, of which a dataset of many slices has thousands.
os.fsync = lambda descriptor: None
# A shell starts background jobs (`make test &`) with SIGINT ignored, and what they start inherits it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # As `forebay prepare` does.
share_processors()  # As a worker does: tests that import PyTorch themselves run one a core.

# The usual profiles find the same from run to run; `make test-long` looks elsewhere each time, LONGER times as long.
LONGER = 20
hypothesis.settings.register_profile("fast", derandomize=True, deadline=None, print_blob=True, max_examples=30)
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, print_blob=True, max_examples=100 * LONGER)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")
hypothesis.settings.load_profile(PROFILE)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config):
    """Watch what the fast tests do and what each test costs; the long profile has longer time-outs."""
    limits.install()
    if store.VARIABLE not in os.environ:  # The processes of a run inherit it.
        os.environ[store.VARIABLE] = tempfile.mkdtemp(prefix="forebay-tests-")
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(store.VARIABLE), ignore_errors=True))
    config.pluginmanager.register(limits.CostPlugin())
    if PROFILE == "long" and config.getoption("timeout", None) is None:
        config.option.timeout = float(config.getini("timeout")) * LONGER


def pytest_collection_modifyitems(items: list[pytest.Item]):
    """In the long profile laws that name a number of examples take LONGER times as many, too."""
    if PROFILE != "long":
        return
    seen: set[Any] = set()
    for item in items:
        law = getattr(item, "obj", None)
        registered = getattr(law, "_hypothesis_internal_use_settings", None)
        if registered is not None and law not in seen and registered.max_examples < 100 * LONGER:
            seen.add(law)
            law._hypothesis_internal_use_settings = hypothesis.settings(
                registered, max_examples=registered.max_examples * LONGER
            )


_terminal = []


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session):
    if not hasattr(session.config, "workerinput"):
        _terminal.append(session.config.pluginmanager.get_plugin("terminalreporter"))


def pytest_runtest_logreport(report: pytest.TestReport):
    """Name what fails when it fails, as a run that is cut off has no summary."""
    if report.failed and _terminal:
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", "").partition("\n")[0]
        _terminal[0].write(f"\n{report.when} of {report.nodeid} failed: {reason[:300]}\n")


def pytest_terminal_summary(terminalreporter: Any):
    """How many tests were skipped, by reason."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", ())]
    reasons = Counter(str(item[2] if isinstance(item, tuple) else item).removeprefix("Skipped: ") for item in skipped)
    if reasons:
        terminalreporter.section(f"{sum(reasons.values())} skipped; `make test-all` installs and runs more")
        for reason, number in reasons.most_common():
            terminalreporter.line(f"{number:5d}  {reason}")


_numbers = itertools.count()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test reads or writes the user's caches, or those of another test."""
    remote_file._blocks.after_fork()  # Drops all blocks of remote files that other tests read in this process.
    home = tmp_path_factory.getbasetemp() / f"user-{next(_numbers)}"
    monkeypatch.setenv("FOREBAY_CACHE", str(home / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(home / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)


@pytest.fixture(autouse=True)
def patience(request, monkeypatch):
    """In fast tests no server with the usual limits cuts a slow peer, and no search for claims ends early."""
    if not str(request.path).startswith(limits.SLOW):
        monkeypatch.setattr(server, "ServerLimits", patient)
        monkeypatch.setattr(admission, "LIMITS", patient(body_bytes=admission.LIMITS.body_bytes))
        monkeypatch.setattr(joining, "TIMEOUT_S", FOREVER_S)
        monkeypatch.setattr(discovery, "ANSWER_AFTER_GOOD_S", FOREVER_S)
        monkeypatch.setattr(discovery.read_claims, "__defaults__", (FOREVER_S,))


@pytest.fixture(name="server")
def data_server(data: Path) -> Iterator[OriginServer]:
    """A web server of the test's `data`."""
    with OriginServer(data) as created:
        yield created


@pytest.fixture
def changes_at_once(monkeypatch):
    """Nodes of this process look at their files of revocations at each request, not once a second."""
    monkeypatch.setattr("forebay.network.pki.revocation.LOOK_EVERY_S", 0.0)


@pytest.fixture
def network_dir(tmp_path) -> Path:
    """The directory of a fresh network: root key, root certificate, network.json."""
    directory = tmp_path / "network"
    create_network(directory, "test-network")
    return directory


@pytest.fixture
def make_identity(network_dir, tmp_path) -> Callable[[str], Identity]:
    """Issues members of the test's network: `make_identity("node-1")`; each lives in tmp_path/nodes/NAME."""

    def make(name: str) -> Identity:
        return join(network_dir, tmp_path / "nodes" / name, name)

    return make
