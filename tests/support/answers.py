"""A web server on a free port whose answers come from a function."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, Mapping[str, str], bytes, int | None]
"""Status, headers, body, and how many of its bytes are sent before the connection is closed (None: all)."""


@contextmanager
def serve(answer: Callable[[str, Mapping[str, str]], Answer | None]) -> Iterator[str]:
    """Yield the URL of a server; `answer(path, headers)` of None closes the connection. One request a connection."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            reply = answer(self.path, self.headers)
            if reply is None:
                return
            status, headers, body, sent = reply
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(OSError):  # the client has closed the connection
                self.wfile.write(body[:sent])

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
