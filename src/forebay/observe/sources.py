"""Where views come from: a node's address, the folder of a record or of a preparation, or a loader in this process."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forebay.base import Json
from forebay.errors import MALFORMED, ForebayError, PrepareError, ProtocolError, UsageError
from forebay.files import nothing_there
from forebay.network.client import Client
from forebay.observe import views
from forebay.observe.record import RecordReader, is_record
from forebay.observe.views import Row, View
from forebay.prepare.progress import FINISHED_FILE, read_progress
from forebay.storage.addresses import is_bucket

if TYPE_CHECKING:
    from forebay.load.loader import Loader
    from forebay.stream.text_stream import TextStream

TIMEOUT_S = 5.0
_NODES_EVERY_S = 5.0
_MAX_NODES = 64


class Source(Protocol):
    """Gives views of one thing; without a record of it unless a class says so."""

    def poll(self) -> View:
        """The view now. Raises ForebayError."""

    def metrics(self) -> Iterable[Any]:
        """Metric families of it besides the view's."""
        return ()

    def times(self) -> list[float]:
        """The moments of which there is a record, Unix seconds; empty for a source that is live only."""
        return []

    def view_at(self, moment: float) -> View:
        """The view at a moment of the record."""
        raise UsageError("expected a record of earlier views, got none. Open a record (`--record DIR` writes it).")


@dataclass(eq=False)
class NodeSource(Source):
    """A scheduler, coordinator, data node or dashboard; of a scheduler also its data nodes.

    Args:
        get: Reads the status of an address. Workers and events are shown to the role viewer.
    """

    address: str
    get: Callable[[str], Row]

    def __post_init__(self) -> None:
        self._rates: dict[str, tuple[float, float]] = {}  # Of counts that rise: (value, at).
        self._nodes: list[Json] = []
        self._nodes_at = float("-inf")

    def poll(self) -> View:
        status = self.get(self.address)
        try:
            return self._view(status)
        except MALFORMED as error:
            raise ProtocolError(
                f"{self.address}: expected the status of a node of this version, got one that cannot "
                f"be read ({type(error).__name__}: {error}). Run one version in a network."
            ) from error

    def _view(self, status: Row) -> View:
        if "samples_used" not in status:
            counted = "bytes_sent" if "bytes_sent" in status else "step"
            return views.view_of(status, per_s=self._rate(counted, status.get(counted, 0)))
        if time.monotonic() - self._nodes_at > _NODES_EVERY_S:
            addresses = [p["address"] for p in status["providers"] if "://" not in p["address"]]
            self._nodes, self._nodes_at = list(map(self._node, addresses[:_MAX_NODES])), time.monotonic()
        return views.view_of(status, self._nodes)

    def _node(self, address: str) -> Json:
        try:
            status = self.get(address)
            return views.node_row(status, self._rate(address, status["bytes_sent"]))
        except (ForebayError, *MALFORMED) as error:
            return {"name": address, "address": address, "state": "does not answer", "error": str(error)}

    def _rate(self, name: str, value: float) -> float | None:
        now = time.monotonic()
        before = self._rates.get(name)
        self._rates[name] = value, now
        return None if before is None else max(0.0, value - before[0]) / max(now - before[1], 1e-3)


class RecordSource(RecordReader, Source):
    """A run's record; live while it is written."""

    poll = RecordReader.latest


@dataclass(eq=False)
class PreparationSource(Source):
    """The output of `forebay prepare`, while it runs and afterwards."""

    out: str

    def poll(self) -> View:
        return views.preparation_view(read_progress(self.out))


class LoaderSource(Source):
    """A Loader or TextStream of this process."""

    def __init__(self, loader: "Loader[Any] | TextStream") -> None:
        self._loader = loader
        self._before, self._read_at = loader.stats(), time.perf_counter()

    def metrics(self) -> Iterable[Any]:
        from forebay.observe.metrics import loader_metrics

        return loader_metrics(self._loader)

    def poll(self) -> View:
        loader, now, after = self._loader, time.perf_counter(), self._loader.stats()
        before, elapsed_s = self._before, now - self._read_at
        self._before, self._read_at = after, now
        position, last = {"step": loader.step, "epoch": loader.epoch}, loader.pass_of(max(0, loader.step - 1))[1]
        view = views.loader_view(
            loader.title, loader.rank, loader.world_size, before, after, elapsed_s, position, last, loader.cache_bytes,
            "network" if loader.cache_bytes else "disk",
        )  # fmt: skip
        return {**view, "settings": loader.settings}


def open_source(target: str, client: Callable[[], Client]) -> Source:
    """The source of a target: HOST:PORT, http://HOST:PORT, a folder with a record, or the output of a preparation.

    Args:
        client: Makes the client for HOST:PORT, with the identity that asks.

    Raises:
        UsageError: If it is none of them.
    """
    folder = Path(target)
    if folder.is_dir() and is_record(folder):
        return RecordSource(folder)
    if folder.is_dir() or is_bucket(target):
        try:
            read_progress(target)
        except PrepareError as error:
            inside = (path for path in sorted(folder.glob("*/")) if is_record(path) or (path / FINISHED_FILE).exists())
            near = "".join(f" Did you mean {path}?" for path in islice(inside, 1))
            raise UsageError(f"{error}{near}") from error
        return PreparationSource(target)
    address, is_plain = target.removeprefix("http://").rstrip("/"), target.startswith("http://")
    if folder.exists() or ":" not in address or "/" in address:
        raise UsageError(
            f"{target}: expected HOST:PORT of a scheduler, coordinator or data node, http://HOST:PORT of a coordinator "
            "or dashboard, the folder of a record, or the output directory of `forebay prepare`, got "
            f"{'a file. Check the path.' if folder.exists() else nothing_there(target)}"
        )
    return NodeSource(address, status_by(Client(None) if is_plain else client()))


def status_by(client: Client) -> Callable[[str], Row]:
    """A function that reads the status of the node at an address."""
    return lambda address: client.request_json(address, "GET", "/v1/status", timeout_s=TIMEOUT_S)[0]
