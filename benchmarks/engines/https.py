"""HTTPS with mutual TLS 1.3, pinned keys and byte ranges, on three servers.

    python https.py bulk --variant threaded --size 1000000000

threaded: http.server and ssl, one thread a connection.  asyncio: asyncio streams.
uvicorn: an ASGI application on uvloop and httptools (pip install uvicorn httptools uvloop).
The receiver is the same for all: http.client in 1 MiB reads, written to a file.
"""

import argparse
import asyncio
import http.client
import http.server
import json
import os
import ssl
import sys
import time
from pathlib import Path

import common

MEMBERS = ("a", "b", "c", "d")


def span(header: str | None, size: int) -> tuple[int, int]:
    """bytes=FIRST-LAST or bytes=FIRST- as a half-open range."""
    if not header:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    return int(first), int(last) + 1 if last else size


def serve_threaded(path: Path, context: ssl.SSLContext, members: set[str]) -> None:
    sent = [0]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            if self.path == "/sent":
                body = str(sent[0]).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)
                return
            if common.peer_id(self.connection.getpeercert(True)) not in members:
                self.send_error(403)
                return
            first, end = span(self.headers.get("Range"), path.stat().st_size)
            self.send_response(206)
            self.send_header("Content-Length", str(end - first))
            self.end_headers()
            buffer = memoryview(bytearray(common.CHUNK))
            with path.open("rb", buffering=0) as file:
                file.seek(first)
                while first < end:
                    count = file.readinto(buffer[: min(len(buffer), end - first)])
                    self.wfile.write(buffer[:count])
                    first += count
                    sent[0] += count

        def log_message(self, *_):
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def finish_request(self, request, address):
            # In the connection's own thread, so that a slow handshake delays no other.
            with context.wrap_socket(request, server_side=True) as secure:
                Handler(secure, address, self)

        def handle_error(self, *_):
            pass

    server = Server(("127.0.0.1", 0), Handler)
    common.emit({"port": server.server_address[1]})
    server.serve_forever()


async def serve_asyncio(path: Path, context: ssl.SSLContext, members: set[str]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                der = writer.get_extra_info("ssl_object").getpeercert(True)
                if common.peer_id(der) not in members:
                    writer.write(b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n")
                    continue
                asked = [line[7:] for line in head.split("\r\n") if line.lower().startswith("range: ")]
                first, end = span(asked[0] if asked else None, path.stat().st_size)
                writer.write(b"HTTP/1.1 206 Part\r\nContent-Length: %d\r\n\r\n" % (end - first))
                with path.open("rb", buffering=0) as file:
                    file.seek(first)
                    while first < end:
                        piece = file.read(min(common.CHUNK, end - first))
                        writer.write(piece)
                        await writer.drain()
                        first += len(piece)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=context)
    common.emit({"port": server.sockets[0].getsockname()[1]})
    await server.serve_forever()


def serve_uvicorn(path: Path, home: Path, who: str) -> None:
    common.need("uvloop", "uvloop httptools uvicorn")
    uvicorn = common.need("uvicorn", "uvicorn httptools uvloop")

    async def application(scope, receive, send):
        # The scope holds no client certificate: membership is checked, the pinned peer is not.
        headers = dict(scope["headers"])
        first, end = span(headers.get(b"range", b"").decode() or None, path.stat().st_size)
        length = [(b"content-length", str(end - first).encode())]
        await send({"type": "http.response.start", "status": 206, "headers": length})
        with path.open("rb", buffering=0) as file:
            file.seek(first)
            while first < end:
                piece = file.read(min(common.CHUNK, end - first))
                first += len(piece)
                await send({"type": "http.response.body", "body": piece, "more_body": first < end})

    class Server(uvicorn.Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            common.emit({"port": self.servers[0].sockets[0].getsockname()[1]})

    config = uvicorn.Config(
        application,
        port=0,
        lifespan="off",
        log_level="critical",
        loop="uvloop",
        http="httptools",
        ssl_certfile=home / f"{who}.crt",
        ssl_keyfile=home / f"{who}.key",
        ssl_ca_certs=home / "root.crt",
        ssl_cert_reqs=ssl.CERT_REQUIRED,
    )
    Server(config).run()


def serve(args) -> None:
    home = common.certificates(args.dir)
    members = {(home / f"{name}.id").read_text() for name in MEMBERS}
    context = common.tls(home, args.who, server=True)
    if args.variant == "threaded":
        serve_threaded(args.file, context, members)
    elif args.variant == "asyncio":
        asyncio.run(serve_asyncio(args.file, context, members))
    else:
        serve_uvicorn(args.file, home, args.who)


def connect(home: Path, port: int, who: str | None, pin: str | None) -> http.client.HTTPSConnection:
    """Connect, and check the pinned key before a request is sent."""
    context = common.tls(home, who, server=False)
    connection = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
    connection.connect()
    peer = common.peer_id(connection.sock.getpeercert(True))
    if pin and peer != pin:
        connection.close()
        raise PermissionError("another peer answered than the one expected")
    return connection


def fetch(connection, out, first: int, end: int) -> int:
    """Bytes [first, end) into the file at their place; how many came before the connection broke."""
    connection.request("GET", "/data", headers={"Range": f"bytes={first}-{end - 1}"})
    response = connection.getresponse()
    if response.status != 206:
        raise PermissionError(f"status {response.status}")
    buffer = memoryview(bytearray(common.CHUNK))
    done = 0
    out.seek(first)
    while done < end - first:
        try:
            count = response.readinto(buffer)
        except (OSError, http.client.HTTPException):
            break
        if not count:
            break
        out.write(buffer[:count])
        done += count
    return done


def receive(args) -> None:
    """Fetch the whole file from the given ports in turn, each going on where the last one broke."""
    home = common.certificates(args.dir)
    began, cpu = time.perf_counter(), common.own_cpu()
    done, received = 0, []
    with args.file.open("wb", buffering=0) as out:
        for port, peer in zip(args.ports, MEMBERS):
            connection = connect(home, port, "d", (home / f"{peer}.id").read_text())
            got = fetch(connection, out, done, args.size)
            received.append(got)
            done += got
            cipher = connection.sock.cipher()[0] if connection.sock else None
            connection.close()
            if done == args.size:
                break
    record = {"seconds": time.perf_counter() - began, "cpu": common.own_cpu() - cpu}
    common.emit(record | {"bytes": received, "cipher": cipher})


def bulk(args) -> dict:
    data = common.dataset(args.dir, args.size)
    out = args.dir / "https-out.bin"
    server = ("_serve", "--dir", args.dir, "--variant", args.variant, "--file", data, "--who", "a")
    with common.children(server) as (sender,):
        ready = sender.line()
        if "skipped" in ready:
            return ready
        before = sender.cpu()
        arguments = ("_receive", "--dir", args.dir, "--file", out, "--size", args.size, "--ports", ready["port"])
        with common.children(arguments) as (receiver,):
            got = receiver.line()
        spent = sender.cpu() - before
    intact = common.same(data, out)
    out.unlink()
    return common.bulk_record(args.size, got["seconds"], spent, got["cpu"], intact, cipher=got["cipher"])


def kill(args) -> dict:
    """The provider dies at 40 %; the receiver asks the second one for the rest."""
    data = common.dataset(args.dir, args.size)
    out = args.dir / "https-out.bin"
    out.unlink(missing_ok=True)
    servers = [
        ("_serve", "--dir", args.dir, "--variant", args.variant, "--file", data, "--who", who) for who in ("a", "b")
    ]
    with common.children(*servers) as (first, second):
        ports = [first.line()["port"], second.line()["port"]]
        arguments = ("_receive", "--dir", args.dir, "--file", out, "--size", args.size, "--ports", *ports)
        with common.children(arguments) as (receiver,):
            bytes_at_kill = common.wait_for_size(out, args.size * 4 // 10)
            first.kill()
            got = receiver.line()
    finished = common.same(data, out)
    out.unlink()
    return {
        "held_at_kill": round(bytes_at_kill / args.size, 3),
        "kept": round(got["bytes"][0] / args.size, 3),
        "downloaded": round(sum(got["bytes"]) / args.size, 3),
        "finished": finished,
    }


def worker(args) -> None:
    """A receiver that serves what it has; the orders come on stdin, one JSON line each."""
    import threading

    home = common.certificates(args.dir)
    args.file.write_bytes(b"")
    members = {(home / f"{name}.id").read_text() for name in MEMBERS}
    context = common.tls(home, args.who, server=True)
    threading.Thread(target=serve_threaded, args=(args.file, context, members), daemon=True).start()
    with args.file.open("r+b", buffering=0) as out:
        for line in sys.stdin:
            for port, first, end in json.loads(line)["fetch"]:
                connection = connect(home, port, args.who, None)
                assert fetch(connection, out, first, end) == end - first
                connection.close()
            common.emit({"done": True})


def fanout(args) -> dict:
    """One origin, three receivers that want everything: left alone, then steered by hand."""
    data = common.dataset(args.dir, args.size)
    names = MEMBERS[1:]
    result = {}
    for mode in ("unsteered", "steered"):
        server = ("_serve", "--dir", args.dir, "--variant", "threaded", "--file", data, "--who", "a")
        outs = [args.dir / f"https-{name}.bin" for name in names]
        workers = [("_worker", "--dir", args.dir, "--file", out, "--who", n) for out, n in zip(outs, names)]
        with common.children(server, *workers) as (origin, *receivers):
            port = origin.line()["port"]
            ports = [receiver.line()["port"] for receiver in receivers]
            began = time.perf_counter()
            if mode == "unsteered":
                rounds = [[[[port, 0, args.size]]] * 3]
            else:
                # Each third leaves the origin once; then the receivers trade thirds.
                cut = [args.size * index // 3 for index in range(4)]
                rounds = [[[[port, cut[i], cut[i + 1]]] for i in range(3)]]
                for shift in (1, 2):
                    other = [(i + shift) % 3 for i in range(3)]
                    rounds.append([[[ports[j], cut[j], cut[j + 1]]] for j in other])
            for orders in rounds:
                for receiver, order in zip(receivers, orders):
                    receiver.send({"fetch": order})
                for receiver in receivers:
                    receiver.line()
            seconds = time.perf_counter() - began
            counter = connect(common.certificates(args.dir), port, "d", None)
            counter.request("GET", "/sent")
            sent = int(counter.getresponse().read())
        result[mode] = round(sent / args.size, 3)
        result[f"{mode}_s"] = round(seconds, 2)
        result[f"{mode}_intact"] = all(common.same(data, out) for out in outs)
        for out in outs:
            out.unlink()
    return result


def strangers(args) -> dict:
    """Bytes that each kind of outsider gets."""
    data = common.dataset(args.dir, args.size)
    home = common.certificates(args.dir)
    server = ("_serve", "--dir", args.dir, "--variant", args.variant, "--file", data, "--who", "a")
    result = {}
    with common.children(server) as (sender,):
        port = sender.line()["port"]
        right, wrong = ((home / f"{name}.id").read_text() for name in ("a", "b"))
        cases = {
            "member": ("d", right),
            "no certificate": (None, right),
            "another root": ("stranger", right),
            "right root, unlisted key": ("unlisted", right),
            "wrong server key": ("d", wrong),
        }
        for case, (who, pin) in cases.items():
            try:
                connection = connect(home, port, who, pin)
                with Path(os.devnull).open("wb", buffering=0) as out:
                    result[case] = fetch(connection, out, 0, args.size)
            except (OSError, http.client.HTTPException) as error:
                result[case] = f"0 ({getattr(error, 'reason', None) or error or type(error).__name__})"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["bulk", "fanout", "kill", "strangers", "_serve", "_receive", "_worker"])
    parser.add_argument("--variant", default="threaded", choices=["threaded", "asyncio", "uvicorn"])
    parser.add_argument("--dir", type=Path, default=Path("/dev/shm/engines"))
    parser.add_argument("--size", type=int, default=1_000_000_000)
    parser.add_argument("--file", type=Path)
    parser.add_argument("--who")
    parser.add_argument("--ports", type=int, nargs="+")
    args = parser.parse_args()
    common.need("cryptography", "cryptography psutil")
    steps = {"_serve": serve, "_receive": receive, "_worker": worker}
    if args.what in steps:
        steps[args.what](args)
    else:
        common.emit(globals()[args.what](args))


if __name__ == "__main__":
    main()
