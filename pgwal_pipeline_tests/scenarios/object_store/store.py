"""An object store of the tests' own (moto), and before it one that fails as it is told to. Each is a process of its own: a store in the
test's process could not answer calls that hold the interpreter's lock.
"""

import contextlib
import http.client
import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import boto3

from pgwal_pipeline.host.spawn import free_port
from pgwal_pipeline_tests.support import wait_for

VARIABLES = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "Zq7s3cretZq"}
UNSET = ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ALLOW_HTTP", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_ENDPOINT_URL_S3")

Fault = Literal["500", "503", "stall", "reset", "lose", "half"]
"""An error of the store's; no answer at all; the connection cut before the work is done, after it, or in the middle of the answer."""


@contextlib.contextmanager
def object_store(bucket: str = "lakes") -> Iterator[str]:
    """A store with an empty bucket; its URL."""
    with _served([sys.executable, "-m", "pgwal_pipeline_tests.scenarios.object_store.moto_server", "{port}"]) as port:
        url = f"http://127.0.0.1:{port}"
        keys = {name.lower(): value for name, value in VARIABLES.items()}
        client = boto3.client("s3", region_name="us-east-1", endpoint_url=url, **keys)
        client.create_bucket(Bucket=bucket)
        yield url


class FaultyStore:
    """A store's stand-in at `url`: passes on what no rule makes fail, and notes every request."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self._rules = folder / "rules.json"
        self._log = folder / "requests.log"

    def fail(self, method: str, path: str, fault: Fault, *, times: int = -1, chance: float = 1.0, seed: int = 0) -> None:
        """From now on let requests of this method (a regular expression, as is `path`) fail, the first `times` of them, or by chance."""
        rule = {"method": method, "path": path, "fault": fault, "times": times, "chance": chance, "seed": seed, "id": time.monotonic()}
        self._write([*json.loads(self._rules.read_text()), rule])

    def heal(self) -> None:
        """Let nothing fail any more."""
        self._write([])

    def failed(self) -> list[tuple[str, str, str]]:
        """The requests that failed: method, path, fault."""
        return [(method, path, fault) for method, path, fault in self.requests() if fault]

    def requests(self) -> list[tuple[str, str, str]]:
        """All requests: method, path, and the fault if any."""
        if not self._log.exists():
            return []
        found = [line.split(" ", 2) for line in self._log.read_text().splitlines()]
        return [(line[1], line[2], line[0].strip("-")) for line in found if len(line) == 3]

    def _write(self, rules: list[dict[str, Any]]) -> None:
        draft = self._rules.with_suffix(".new")
        draft.write_text(json.dumps(rules))
        draft.replace(self._rules)


@contextlib.contextmanager
def faulty_store(target: str, folder: Path) -> Iterator[FaultyStore]:
    """A FaultyStore before `target`, which keeps what it needs in `folder`."""
    (folder / "rules.json").write_text("[]")
    with _served([sys.executable, "-m", __name__, target, str(folder), "{port}"]) as port:
        yield FaultyStore(f"http://127.0.0.1:{port}", folder)


@contextlib.contextmanager
def _served(command: list[str]) -> Iterator[int]:
    port = free_port()
    quiet = subprocess.DEVNULL
    server = subprocess.Popen([part.format(port=port) for part in command], stdout=quiet, stderr=quiet)
    try:

        def answers() -> bool:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            assert server.poll() is None
            return False

        wait_for(answers, pause=0.05, what="the store to answer")
        yield port
    finally:
        server.kill()
        server.wait()


class _Rules:
    """What is to fail, looked up again whenever the file changes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "rules.json"
        self._text = ""
        self._rules: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._log = (folder / "requests.log").open("a", buffering=1)

    def fault_of(self, method: str, path: str) -> str | None:
        with self._lock:
            text = self._path.read_text()
            if text != self._text:
                known = {rule["id"]: rule for rule in self._rules}
                self._rules = [known.get(rule["id"]) or {**rule, "dice": random.Random(rule["seed"])} for rule in json.loads(text)]
                self._text = text
            fault = next((rule["fault"] for rule in self._rules if self._applies(rule, method, path)), None)
            self._log.write(f"{fault or '-'} {method} {path}\n")
            return fault

    @staticmethod
    def _applies(rule: dict[str, Any], method: str, path: str) -> bool:
        if not re.fullmatch(rule["method"], method) or not re.search(rule["path"], path) or rule["times"] == 0:
            return False
        if rule["dice"].random() >= rule["chance"]:
            return False
        rule["times"] -= 1
        return True


def _main(target: str, folder: Path, port: int) -> None:
    rules, host = _Rules(folder), urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            chunked = self.headers.get("Transfer-Encoding", "").lower() == "chunked"
            body = self._chunks() if chunked else self.rfile.read(int(self.headers.get("Content-Length") or 0))
            fault = rules.fault_of(self.command, self.path)
            if fault in ("500", "503"):
                code = "InternalError" if fault == "500" else "SlowDown"
                self._answer(int(fault), [], f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode())
                return
            if fault == "stall":
                time.sleep(600)
            if fault in ("reset", "stall"):
                self._cut()
                return
            connection = http.client.HTTPConnection(host, timeout=60)
            kept = {name: value for name, value in self.headers.items() if name.lower() not in ("transfer-encoding", "expect")}
            connection.request(self.command, self.path, body, {**kept, "Content-Length": str(len(body))})
            response = connection.getresponse()
            octets = response.read()
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in ("transfer-encoding", "connection")]
            connection.close()
            if fault == "lose":
                self._cut()
                return
            self._answer(response.status, headers, octets, cut=fault == "half")

        def _chunks(self) -> bytes:
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline() not in (b"\r\n", b""):
                pass
            return b"".join(parts)

        def _answer(self, status: int, headers: list[tuple[str, str]], octets: bytes, *, cut: bool = False) -> None:
            self.send_response_only(status)
            for name, value in headers:
                if name.lower() != "content-length" or self.command == "HEAD":
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(octets)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(octets[: len(octets) // 2] if cut else octets)
            if cut:
                self._cut()

        def _cut(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.serve_forever()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
