"""The HTTP API of whoever hands out slices: data nodes, and workers that share what they cached."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from prometheus_client.core import Metric

from forebay.errors import ProtocolViolation
from forebay.network.app import (
    BINARY,
    ApiError,
    JsonResponse,
    describe_error,
    file_response,
    make_app,
    peer_of,
    source_of,
)
from forebay.network.messages import ClaimsReply, SwarmReply, SwarmRequest
from forebay.network.peer import Peer
from forebay.store.tracker import Tracker


@dataclass(frozen=True)
class SliceFile:
    """A file that holds a slice; `num_bytes` as the dataset's table says."""

    path: Path
    num_bytes: int
    dataset: str
    dataset_id: str = ""


class SliceSource(Protocol):
    """What a node hands out. None of these waits."""

    tracker: Tracker

    def claims(self, peer: Peer) -> list[dict[str, Any]]:
        """Signed claims of what it has, as far as a peer's certificate covers it."""

    def find_slice(self, sha256: str) -> SliceFile | None:
        """The file of a slice; None if it has none of this hash now."""

    def dataset_name(self, dataset_id: str) -> str | None:
        """The name of a dataset; None if it is not served here."""

    def find_file(self, dataset_id: str, name: str) -> bytes | Path | None:
        """A small file of a dataset: its bytes or where it lies."""

    def check(self, peer: Peer, dataset: str, dataset_id: str, num_bytes: int) -> None:
        """Raises ApiError if a peer may not have so many bytes of a dataset; counts them if it may."""


# FastAPI silences warnings while it adds a route, and `warnings.catch_warnings` is not for several threads.
_building = threading.Lock()


def make_slice_app(title: str, source: SliceSource, metrics: Callable[[], Iterable[Metric]] = tuple) -> FastAPI:
    """The application over a source; safe to call from several threads."""
    with _building:
        return _make_slice_app(title, source, metrics)


def _make_slice_app(title: str, source: SliceSource, metrics: Callable[[], Iterable[Metric]]) -> FastAPI:
    app = make_app(title, metrics)
    ranged: dict[int | str, dict[str, Any]] = {
        200: {"content": {BINARY: {}}, "description": "All of it."},
        206: {"content": {BINARY: {}}, "description": "The range of the header Range: bytes=START-[END]."},
        416: describe_error("The range is malformed or not in the file."),
    }

    @app.get("/v1/claims", response_model=ClaimsReply, summary="Signed claims of what this node has.")
    async def read_claims(request: Request) -> Response:
        return JsonResponse({"claims": source.claims(peer_of(request))})

    @app.get("/v1/slices/{sha256}", response_class=Response, responses=ranged, summary="A slice, or a range of it.")
    async def read_slice(request: Request, sha256: str) -> Response:
        found = source.find_slice(sha256)
        if found is None:
            raise ApiError(404, "unknown_slice", "this node has no slice of this hash now")
        response = file_response(request, found.path, found.num_bytes)
        source.check(peer_of(request), found.dataset, found.dataset_id, response.stop - response.start)
        return response

    @app.get(
        "/v1/datasets/{dataset_id}/{name}", response_class=Response, responses=ranged,
        summary="A small file of a dataset: manifest.json, slices.parquet, tokenizer.json …",
    )  # fmt: skip
    async def read_file(request: Request, dataset_id: str, name: str) -> Response:
        source.check(peer_of(request), _named(source, dataset_id), dataset_id, 0)
        found = source.find_file(dataset_id, name)
        if found is None:
            raise ApiError(404, "unknown_file", f"dataset {dataset_id} has no {name[:80]!r} here")
        return file_response(request, found, len(found) if isinstance(found, bytes) else found.stat().st_size)

    @app.post(
        "/v1/swarm/{dataset_id}", response_model=SwarmReply,
        summary="What a reader has and wants; what it should fetch from whom.",
    )  # fmt: skip
    async def steer(request: Request, dataset_id: str, message: SwarmRequest) -> Response:
        peer = peer_of(request)
        source.check(peer, _named(source, dataset_id), dataset_id, 0)
        if not source.tracker.knows(dataset_id):
            raise ApiError(404, "unknown_swarm", "this node tracks no swarm of this dataset")
        try:
            return JsonResponse(source.tracker.answer(peer, dataset_id, message, source_of(request)))
        except ProtocolViolation as error:
            raise ApiError(400, "bad_request", str(error)) from error

    return app


def _named(source: SliceSource, dataset_id: str) -> str:
    name = source.dataset_name(dataset_id)
    if name is None:
        raise ApiError(404, "unknown_dataset", "this node serves no dataset of this id")
    return name
