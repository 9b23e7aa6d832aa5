"""An S3-compatible server for tests (moto, in a process of its own), and one that speaks HTTP and misbehaves."""

import asyncio
import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import leaks
import pytest

from lmcache.core.tier import TierLocation
from lmcache.plugins.testing.ports import free_port

START_S = 120.0
CREDENTIALS = {"access_key": "AKIDTEST", "secret_key": "t0ps3cret"}


class S3Server:
    """moto's server, which keeps buckets in its memory."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        with (folder / "moto.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
                stdout=log,
                stderr=log,
                env=os.environ | {"PYTHONWARNINGS": "ignore"},
            )
        try:
            self._await_start(folder / "moto.log")
        except BaseException:
            self._process.kill()
            self._process.wait()
            raise

    def _await_start(self, log: Path) -> None:
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                self.make_bucket("test")
                return
            assert self._process.poll() is None, log.read_text()
            assert time.monotonic() < end, f"moto's server does not answer:\n{log.read_text()}"
            time.sleep(0.05)

    def make_bucket(self, name: str) -> None:
        """Create a bucket."""
        assert self.request("PUT", f"/{name}")[0] == 200

    def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """What the test itself asks the server: status and body of the answer."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as line:
            line.request(method, path, body, {"Authorization": "AWS4-HMAC-SHA256 Credential=AKIDTEST/x/us-east-1/s3/"})
            answer = line.getresponse()
            return answer.status, answer.read()

    def location(self, path: str = "", bucket: str = "test", **options: str) -> TierLocation:
        """Where a tier finds a bucket."""
        known = {"endpoint": f"http://127.0.0.1:{self.port}", "allow_http": "on", "region": "us-east-1"}
        return TierLocation("s3", bucket, path=path, options=known | options, secrets=CREDENTIALS)

    def close(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=START_S)


class WaywardServer:
    """Answers HTTP as `mood` says; `good` keeps objects in a dict, so that any store's GET, HEAD, PUT, DELETE work.

    Moods: good · a status (403) · never · slow (the body drips) · short (the body ends early) · other (a body that
    nobody stored) · N (a number below 100: so many times 503, then good).
    """

    def __init__(self) -> None:
        self.mood: str | int = "good"
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.connections: list[socket.socket] = []
        self.released = threading.Event()
        stand = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self) -> None:
                stand.answer(self)

            def setup(self) -> None:
                super().setup()
                stand.connections.append(self.connection)

            do_GET = do_HEAD = do_PUT = do_DELETE = do_POST = _answer  # noqa: N815 - as http.server wants them

            def log_message(self, *args: object) -> None:
                return

        class Quiet(ThreadingHTTPServer):
            daemon_threads = False

            def handle_error(self, *args: object) -> None:
                return  # clients that hang up are what the tests are about

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def location(self, **options: str) -> TierLocation:
        """Where a tier on S3 finds a bucket."""
        known = {"endpoint": self.endpoint, "allow_http": "on", "region": "us-east-1"}
        return TierLocation("s3", "test", options=known | options, secrets=CREDENTIALS)

    def answer(self, request: Any) -> None:
        """Answer one request, in a thread of its own."""
        request.connection.settimeout(20)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        path = unquote(request.path.partition("?")[0])
        self.requests.append((request.command, path))
        if isinstance(self.mood, int) and self.mood < 100:
            self.mood = self.mood - 1 if self.mood > 1 else "good"
            self._send(request, 503, b"<Error><Code>SlowDown</Code></Error>")
        elif isinstance(self.mood, int):
            # some servers repeat the address, signature and all
            self._send(request, self.mood, f"<Error><Code>Wayward</Code><R>{request.path}</R></Error>".encode())
        elif self.mood == "never":
            self.released.wait(30)
            request.close_connection = True
        elif request.command == "PUT":
            self.objects[path] = body
            self._send(request, 200 if "amz" in str(request.headers).lower() else 201, b"")
        elif request.command == "POST":
            self._delete_batch(request, body)
        elif request.command == "DELETE":
            self._send(request, 204 if self.objects.pop(path, None) is not None else 404, b"")
        elif path not in self.objects:
            self._send(request, 404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            self._send_object(request, self.objects[path])

    def close(self) -> None:
        """Let go of everybody, end it."""
        self.released.set()
        self._server.shutdown()
        self._thread.join()
        for connection in self.connections:
            with contextlib.suppress(OSError):  # ended before
                connection.shutdown(socket.SHUT_RDWR)
        self._server.server_close()

    def _send(self, request: Any, status: int, body: bytes, length: int | None = None, content_range: str = "") -> None:
        request.send_response(status)
        if content_range:
            request.send_header("Content-Range", content_range)
        request.send_header("Content-Length", str(len(body) if length is None else length))
        request.send_header("ETag", '"e"')
        request.send_header("x-ms-version", "2021-12-02")
        request.send_header("Last-Modified", "Mon, 30 Nov 2026 20:00:00 GMT")
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(body)
            request.wfile.flush()

    def _delete_batch(self, request: Any, body: bytes) -> None:
        """Azure's way to delete: requests in a request, answers in an answer."""
        answers = []
        for number, path in enumerate(re.findall(rb"DELETE ([^ ?]+)\S* HTTP/1.1", body)):
            found = self.objects.pop(path.decode(), None) is not None
            head = (
                b"Content-Type: application/http\r\nContent-Transfer-Encoding: binary\r\nContent-ID: %d\r\n\r\n"
                % number
            )
            line = b"HTTP/1.1 202 Accepted" if found else b"HTTP/1.1 404 The specified blob does not exist."
            code = b"" if found else b"x-ms-error-code: BlobNotFound\r\n"
            answers.append(b"--answers\r\n" + head + line + b"\r\n" + code + b"x-ms-request-id: r\r\n\r\n")
        answers.append(b"--answers--\r\n")
        request.send_response(202)
        request.send_header("Content-Type", "multipart/mixed; boundary=answers")
        request.send_header("Content-Length", str(sum(map(len, answers))))
        request.end_headers()
        request.wfile.write(b"".join(answers))

    def _send_object(self, request: Any, blob: bytes) -> None:
        if self.mood == "other":
            blob = b"x" * len(blob)
        if self.mood == "short":
            self._send(request, 200, blob[: len(blob) // 2], len(blob))
            request.close_connection = True
        elif self.mood == "slow" and request.command == "GET":
            self._send(request, 200, b"", len(blob))
            for at in range(len(blob)):
                if self.released.wait(0.02):
                    break
                request.wfile.write(blob[at : at + 1])
            request.close_connection = True
        elif part := re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range") or ""):
            first, last = int(part[1]), min(int(part[2]), len(blob) - 1)
            self._send(request, 206, blob[first : last + 1], content_range=f"bytes {first}-{last}/{len(blob)}")
        else:
            self._send(request, 200, blob)


@pytest.fixture(scope="session")
def object_store_runtime(tmp_path_factory: pytest.TempPathFactory) -> None:
    """obstore begins to run at its first call, and keeps threads and descriptors of its own from then on."""
    obstore = pytest.importorskip("obstore", reason="obstore is not installed (extra lmcache[s3])")
    from obstore.store import LocalStore

    with leaks.kept_for_the_process():
        store = LocalStore(tmp_path_factory.mktemp("runtime"))
        obstore.put(store, "a", b"a")
        asyncio.run(_put_later(store))


async def _put_later(store: Any) -> None:
    import obstore

    await obstore.put_async(store, "a", b"a")


@contextlib.contextmanager
def wayward_server() -> Iterator[WaywardServer]:
    """One for a moment."""
    server = WaywardServer()
    try:
        yield server
    finally:
        server.close()
