"""A TCP proxy between the pipeline and its source that can be told to fail as networks do."""

import fcntl
import select
import socket
import struct
import termios
import threading
import time
from array import array
from types import TracebackType
from typing import Self

from psycopg2.extensions import make_dsn, parse_dsn

from pgwal_pipeline_tests.support import Source


class Proxy:
    """Passes bytes on to `host:port` from a port of its own (`port`), until it is told otherwise. A context manager.

    `cut_after`: each connection ends after so many bytes from the server have come; `reset` decides whether with a reset or in peace.
    `frozen`: nothing passes any more, though nothing ends. `refusing`: new connections are ended at once. `sent` counts the bytes that went
    to the server.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.cut_after: int | None = None
        self.reset = False
        self.frozen = threading.Event()
        self.refusing = False
        self.connections = 0
        self.cuts = 0
        self.sent = 0
        self._ended = False

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended = True
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                client.close()
                continue
            self.connections += 1
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        server = socket.create_connection(self._target)
        came = 0
        try:
            while not self._ended:
                if self.frozen.is_set():
                    threading.Event().wait(0.05)
                    continue
                for ready in select.select([client, server], [], [], 0.1)[0]:
                    if self.frozen.is_set():
                        break
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    if ready is server:
                        came += len(data)
                        if self.cut_after is not None and came > self.cut_after:
                            client.sendall(data[: max(0, len(data) - (came - self.cut_after))])
                            self.cuts += 1
                            if self.reset:
                                _await_arrival(client)
                                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                            return
                    else:
                        self.sent += len(data)
                    (client if ready is server else server).sendall(data)
        except OSError:
            pass
        finally:
            client.close()
            server.close()


def tcp(source: Source) -> tuple[str, int]:
    """The host and the port of the source."""
    parts = parse_dsn(source.dsn)
    return str(parts["host"]), int(parts["port"] or 5432)


def proxied(source: Source, proxy: Proxy) -> str:
    """The source's DSN by way of `proxy`."""
    parts = parse_dsn(source.dsn)
    return make_dsn(**{**parts, "host": "127.0.0.1", "port": str(proxy.port), "sslmode": "disable"})


def _await_arrival(client: socket.socket) -> None:
    """Wait until what was sent has come: a reset takes the rest away, and how much that is depends on how busy the machine is."""
    waiting = array("i", [1])
    deadline = time.monotonic() + 30
    while waiting[0] and time.monotonic() < deadline:
        fcntl.ioctl(client, termios.TIOCOUTQ, waiting)
        time.sleep(0.001)
