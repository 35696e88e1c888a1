"""The servers answer as their OpenAPI documents say: data node, scheduler and coordinator, over mutual TLS.

With `FOREBAY_SCHEMATHESIS` naming a Python interpreter that has schemathesis installed, that sends each route hundreds
of requests (`FOREBAY_SCHEMATHESIS_EXAMPLES`, 100 each); without it a few of our own are sent.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from forebay.coordinator.server import Coordinator
from forebay.network.client import Client, RemoteError
from support.nodes import Network, make_dataset
from support.paths import TESTS

SCHEMATHESIS = os.environ.get("FOREBAY_SCHEMATHESIS")
EXAMPLES = os.environ.get("FOREBAY_SCHEMATHESIS_EXAMPLES", "100")
BODIES = [{}, [], "text", 5, {"held": 1, "worker_id": []}, {"want": -1, "generation": "x", "wait_s": 1e9},
    {"settings": {"x": 10**30}}, {"settings": {"x": "a" * 10_000}},
]  # fmt: skip
Running = tuple[Network, dict[str, str]]
SERVERS = ("data", "scheduler", "coordinator")


@pytest.fixture(scope="module")
def network(tmp_path_factory) -> Iterator[Running]:
    """A network with a member `client`, and the address of each server."""
    with ExitStack() as stack:
        network = Network(tmp_path_factory.mktemp("servers"), stack, "client", dht_nodes=2)
        data = network.serve(make_dataset(network.directory / "dataset", 4, 100))
        scheduler = network.schedule(seq_len=8)
        coordinator = stack.enter_context(Coordinator(identity=network.identity("scheduler")))
        yield network, dict(zip(SERVERS, (data.address, scheduler.address, coordinator.address)))


def request_status(client: Client, address: str, method: str, path: str, body: Any, is_json: bool) -> int:
    try:
        if is_json:
            client.request_json(address, method, path, body)
        else:
            client.get_bytes(address, path, 1 << 20)
    except RemoteError as error:
        return error.status
    return 200


@pytest.mark.parametrize("name, num_messages", [("data", 1), ("scheduler", 2), ("coordinator", 6)])
def test_servers_answer_as_their_documents_say(network, name, num_messages):
    """Every route declares how it refuses; a message has a schema without further fields, every list a bound."""
    client, address = network[0].client("client"), network[1][name]
    document, _ = client.request_json(address, "GET", "/openapi.json")
    assert document["openapi"] == "3.1.0"
    schemas, messages = document["components"]["schemas"], []
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            assert route["summary"] and "422" not in route["responses"], path
            for status in ("400", "403", "404", "413", "429", "500", "503"):
                content = route["responses"][status]["content"]["application/json"]
                assert content["schema"]["$ref"].endswith("/ErrorReply"), (path, status)
            if path == "/v1/crls" and method == "post":
                (content,) = route["requestBody"]["content"].values()  # a signed file
                assert content["schema"]["maxLength"] <= 1 << 20
            elif "requestBody" in route:
                schema = route["requestBody"]["content"]["application/json"]["schema"]
                messages.append(schema["$ref"].rpartition("/")[2])
                check_bounds(messages[-1], schemas, set())
            elif method == "post":
                assert path.endswith(("/pause", "/resume")), path
            is_json = route["responses"]["200"]["content"].keys() == {"application/json"}
            for body in BODIES if method == "post" else [None]:
                target = path.replace("{", "").replace("}", "")
                answered = request_status(client, address, method.upper(), target, body, is_json)
                assert str(answered) in route["responses"] and answered != 500, (method, path, body)
    assert len(messages) == num_messages


def check_bounds(name: str, schemas: dict, seen: set[str]):
    """No further fields; strings, lists and maps of a message have a largest size."""
    if name in seen:
        return
    seen.add(name)
    assert schemas[name]["additionalProperties"] is False, name
    todo = list(schemas[name]["properties"].items())
    while todo:
        field, schema = todo.pop()
        if "$ref" in schema:
            check_bounds(schema["$ref"].rpartition("/")[2], schemas, seen)
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


@pytest.mark.timeout(600 + 6 * int(EXAMPLES))
@pytest.mark.skipif(SCHEMATHESIS is None, reason="FOREBAY_SCHEMATHESIS names no interpreter with schemathesis")
@pytest.mark.parametrize("name", SERVERS)
def test_schemathesis_finds_nothing(network, name):
    command = [SCHEMATHESIS, str(TESTS / "support" / "http_api.py"), f"https://{network[1][name]}"]
    done = subprocess.run([*command, str(network[0].homes["client"]), EXAMPLES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    print(json.loads(done.stdout.splitlines()[-1]))
