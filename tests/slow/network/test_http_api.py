"""The doors as their OpenAPI documents say they are: data node, scheduler and coordinator, over mutual TLS.

With `FOREBAY_SCHEMATHESIS` naming a Python interpreter that has schemathesis installed, that asks each door hundreds
of times (`FOREBAY_SCHEMATHESIS_EXAMPLES`, 100 each); without it a few questions of our own are asked.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.coordinator.server import Coordinator
from forebay.data_node import DataNode
from forebay.network.client import Client, RemoteError
from forebay.network.dht import LibtorrentDht
from forebay.network.pki.identity import Identity
from forebay.scheduler.server import SchedulerService
from support.calibration import scaled
from support.nodes import HOST, NAME, Bootstrap, make_dataset, make_network
from support.paths import TESTS

SCHEMATHESIS = os.environ.get("FOREBAY_SCHEMATHESIS")
EXAMPLES = os.environ.get("FOREBAY_SCHEMATHESIS_EXAMPLES", "100")
BODIES: list[Any] = [{}, [], "text", 5, {"held": 1, "worker_id": []}, {"want": -1, "generation": "x", "wait_s": 1e9},
    {"settings": {"x": 10**30}}, {"settings": {"x": "a" * 10_000}},
]  # fmt: skip


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, str], Identity]]:
    """Address of each server, and an identity to ask with."""
    folder = tmp_path_factory.mktemp("doors")
    bootstrap = Bootstrap(2)
    nodes = make_network(folder, ["server", "asker"], bootstrap.at)
    server, asker = (Identity.load(nodes[name]) for name in ("server", "asker"))
    dht, client = LibtorrentDht(HOST, 0, bootstrap.at), Client(server)
    data = DataNode(server, [make_dataset(folder / "data", 4, 100)], HOST, 0, dht)
    scheduler = SchedulerService(server, NAME, dht, client, folder / "state", seq_len=8)
    coordinator = Coordinator(identity=server)
    with data, coordinator:
        scheduler.start()
        try:
            yield (
                {"data": data.address, "scheduler": scheduler.address, "coordinator": coordinator.address},
                asker,
            )
        finally:
            scheduler.stop()
            dht.close()
            bootstrap.close()
            client.close()


@pytest.mark.parametrize("which", ["data", "scheduler", "coordinator"])
def test_doors_answer_as_they_say(servers: tuple[dict[str, str], Identity], which: str) -> None:
    address = servers[0][which]
    with Client(servers[1]) as client:
        document, _ = client.request_json(address, "GET", "/openapi.json")
        assert document["openapi"] == "3.1.0"
        for path, methods in document["paths"].items():
            for method, door in methods.items():
                position = path.replace("{", "").replace("}", "")
                for body in BODIES if method == "post" else [None]:
                    try:
                        if door["responses"]["200"]["content"].keys() == {"application/json"}:
                            client.request_json(address, method.upper(), position, body)
                        else:
                            client.get_bytes(address, position, 1 << 20)
                        status = 200
                    except RemoteError as error:
                        status = error.status
                    assert str(status) in door["responses"] and status != 500, (method, path, body)


@pytest.mark.parametrize("which", ["data", "scheduler", "coordinator"])
def test_documents_name_errors_roles_and_messages(servers: tuple[dict[str, str], Identity], which: str) -> None:
    """Every route says how it refuses; what is sent to it has a schema without further fields, every list a bound."""
    with Client(servers[1]) as client:
        document, _ = client.request_json(servers[0][which], "GET", "/openapi.json")
    schemas = document["components"]["schemas"]
    num_messages = 0
    for path, methods in document["paths"].items():
        for method, door in methods.items():
            for status in ("400", "403", "404", "413", "429", "500", "503"):
                content = door["responses"][status]["content"]["application/json"]
                assert content["schema"]["$ref"].endswith("/ErrorReply"), (path, status)
            assert "422" not in door["responses"]
            assert door["summary"], path
            if path == "/v1/crls" and method == "post":
                (content,) = door["requestBody"]["content"].values()  # a signed file
                assert content["schema"]["maxLength"] <= 1 << 20
            elif method == "post" and "requestBody" in door:
                name = door["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                num_messages += 1
                _check_bounds(name, schemas, set())
            elif method == "post":
                assert path.endswith(("/pause", "/resume", "/pardon")), path
    assert num_messages == {"data": 1, "scheduler": 2, "coordinator": 6}[which]
    roles = {path: door["x-role"] for path, methods in document["paths"].items() for door in methods.values()
             if "x-role" in door}  # fmt: skip
    workers = {"/v2/exchange", *(f"/v1/members/{verb}" for verb in ("join", "ready", "heartbeat", "meet", "leave"))}
    admins = {f"/v1/job/{verb}" for verb in ("pause", "resume", "readmit")}
    admins.add("/v1/peers/{peer_id}/pardon")
    assert roles == {
        path: "worker" if path in workers else "admin"
        for path in (workers | admins) & set(document["paths"])
    }  # fmt: skip


def _check_bounds(name: str, schemas: dict[str, Any], seen: set[str]) -> None:
    """No further fields; strings, lists and maps of a message have a largest size."""
    if name in seen:
        return
    seen.add(name)
    assert schemas[name]["additionalProperties"] is False, name
    todo = list(schemas[name]["properties"].items())
    while todo:
        field, schema = todo.pop()
        if "$ref" in schema:
            _check_bounds(schema["$ref"].rpartition("/")[2], schemas, seen)
            continue
        todo += [(field, item) for item in schema.get("anyOf", [])]
        match schema.get("type"):
            case "string":
                assert {"maxLength", "pattern", "enum"} & set(schema), (name, field)
            case "array":
                assert "maxItems" in schema, (name, field)
                todo.append((field, schema["items"]))
            case "object":
                assert "maxProperties" in schema or "enum" in schema.get("propertyNames", {}), (name, field)
                values = [schema.get("additionalProperties"), *schema.get("patternProperties", {}).values()]
                todo += [(field, value) for value in values if isinstance(value, dict)]
            case "integer" | "number":
                assert schema.keys() & {"maximum", "exclusiveMaximum"}, (name, field)


@pytest.mark.timeout(200 + 3 * int(EXAMPLES))
@pytest.mark.skipif(SCHEMATHESIS is None, reason="FOREBAY_SCHEMATHESIS names no interpreter with schemathesis")
@pytest.mark.parametrize("which", ["data", "scheduler", "coordinator"])
def test_schemathesis_finds_nothing(servers: tuple[dict[str, str], Identity], which: str) -> None:
    assert SCHEMATHESIS is not None
    command = [SCHEMATHESIS, str(TESTS / "support" / "http_api.py"), f"https://{servers[0][which]}"]
    done = subprocess.run(
        [*command, str(servers[1].node_dir), EXAMPLES],
        capture_output=True,
        text=True,
        timeout=scaled(170 + 2 * int(EXAMPLES)),
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    print(json.loads(done.stdout.splitlines()[-1]))
