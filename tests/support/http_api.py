"""Schemathesis against one server over mutual TLS: `python http_api.py URL NODE_DIR EXAMPLES`; prints what it did.

Runs with an interpreter of its own, that has schemathesis and nothing of ours: a stranger's view of the routes.
"""

import contextlib
import json
import ssl
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from requests.adapters import HTTPAdapter
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]


class Mutual(HTTPAdapter):
    """Connections with a node's certificate, to a node that has one of the same network."""

    def __init__(self, node_dir: Path) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self.context.check_hostname = False
        self.context.load_cert_chain(node_dir / "node-cert.pem", node_dir / "node-key.pem")
        self.context.load_verify_locations(node_dir / "root-cert.pem")
        super().__init__()

    def init_poolmanager(self, *args: Any, **settings: Any) -> None:
        super().init_poolmanager(*args, **settings, ssl_context=self.context, assert_hostname=False)


@schemathesis.serializer("application/x-pem-file")
def write_pem(context: Any, value: Any) -> bytes:
    """A CRL, or what stands in its place."""
    return (value if isinstance(value, str) else json.dumps(value, default=str)).encode("utf-8", "surrogateescape")


def main(url: str, node_dir: Path, examples: int) -> None:
    session = requests.Session()
    session.mount("https://", Mutual(node_dir))
    document = session.get(f"{url}/openapi.json", timeout=10).json()
    schema = schemathesis.openapi.from_dict(document)
    seen = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            quick = settings(
                max_examples=examples, deadline=None, database=None, derandomize=True,
                suppress_health_check=list(HealthCheck), phases=[Phase.generate],
            )  # fmt: skip

            @quick
            @given(case=operation.as_strategy(generation_mode=mode))
            def send(case):
                answer = case.call(base_url=url, session=session, timeout=60)  # a valid join waits for up to 30 s
                seen[f"{answer.status_code}"] += 1
                case.validate_response(answer, checks=CHECKS)

            with contextlib.suppress(Unsatisfiable):  # nothing can be wrong about a route without arguments
                send()
    assert session.get(f"{url}/openapi.json", timeout=10).status_code == 200
    print(json.dumps({"routes": sum(map(len, document["paths"].values())), "answers": dict(sorted(seen.items()))}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
