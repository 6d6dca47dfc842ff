"""Open psycopg2 sessions, run statements, and wait for them in a way that can be interrupted.

psycopg2 waits for the server inside libpq, where no signal reaches Python. So sessions are asynchronous: this module does the waiting, and
an interrupt ends it at once. Only COPY needs a session that blocks (`open_session` with `blocking`); it belongs to a thread, which gets no
signals anyway.
"""

import ipaddress
import os
import pwd
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import psycopg2
from psycopg2 import extensions
from psycopg2.extras import LogicalReplicationConnection

from pgwal_pipeline.messages.errors import PgwalError, SettingError
from pgwal_pipeline.postgres import password, tunnel
from pgwal_pipeline.values.source_dsn import DIRECT, Way

CANCEL_WAIT = 5
"""Seconds that an interrupted statement gets to end on the server."""

_LONGEST_CONNECT = 130  # seconds for one address if no connect_timeout is set
_LEAST_CONNECT = 2
_VARIABLES = {
    "host": "PGHOST",
    "hostaddr": "PGHOSTADDR",
    "port": "PGPORT",
    "user": "PGUSER",
    "password": "PGPASSWORD",
    "dbname": "PGDATABASE",
    "service": "PGSERVICE",
    "connect_timeout": "PGCONNECT_TIMEOUT",
    "target_session_attrs": "PGTARGETSESSIONATTRS",
    "load_balance_hosts": "PGLOADBALANCEHOSTS",
}

OnWait = Callable[[], None]
Params = Sequence[Any] | Mapping[str, Any] | None


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int: ...
    @property
    def description(self) -> Any: ...
    def fetchone(self) -> tuple[Any, ...] | None: ...
    def fetchall(self) -> list[tuple[Any, ...]]: ...
    def __iter__(self) -> Iterator[tuple[Any, ...]]: ...


class _Statements:
    """What all sessions have in common. As a context manager it closes the session at the end.

    Threads may share a session: `lock` is held while a statement runs, and other threads wait for it.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.lock = threading.RLock()

    def execute(self: Any, statement: str | bytes, params: Params = None) -> Cursor:
        """Run a statement and return a cursor with its rows; of several statements sent together, the last one's. Raises psycopg2.Error.

        `%s` and `%(name)s` stand for `params`; without `params` a `%` is just a percent sign.
        """
        with self.lock:
            cursor = self.cursor()
            cursor.execute(statement, params or None)
            if self.async_:
                wait(self)
            return cursor

    @contextmanager
    def transaction(self: Any) -> Iterator[None]:
        """Run the context in a transaction (a savepoint inside of one): commit at its end, roll back if it raises."""
        inside = self.info.transaction_status != extensions.TRANSACTION_STATUS_IDLE
        begin, commit, back = ("SAVEPOINT pgwal", "RELEASE pgwal", "ROLLBACK TO pgwal; RELEASE pgwal") if inside else _WHOLE
        self.execute(begin)
        try:
            yield
        except BaseException:
            with suppress(psycopg2.Error):
                self.execute(back)
            raise
        self.execute(commit)

    def __enter__(self) -> Self:
        return self

    def __exit__(self: Any, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


_WHOLE = ("BEGIN", "COMMIT", "ROLLBACK")


class Connection(_Statements, extensions.connection):
    """A session for SQL."""

    parameters: Mapping[str, str]
    """The libpq parameters that `open_session` connected with, but for a password that a command gave."""
    way: Way = DIRECT
    """The way that `open_session` went."""


class ReplicationConnection(_Statements, LogicalReplicationConnection):
    """A session with a walsender, which takes replication commands and plain SQL."""

    parameters: Mapping[str, str]
    """The libpq parameters that `open_session` connected with, but for a password that a command gave."""
    way: Way = DIRECT
    """The way that `open_session` went."""


_Session = TypeVar("_Session", Connection, ReplicationConnection)


def wait(conn: Connection | ReplicationConnection, on_wait: OnWait | None = None, every: float = 0.25) -> None:
    """Wait until `conn` is connected, or its statement has ended.

    `on_wait` is called about every `every` seconds meanwhile. An exception from it ends the wait, and the statement goes on. Without
    `on_wait`, an interrupt first has the server cancel the statement. Raises psycopg2.Error.
    """
    try:
        _poll(conn, on_wait, every)
    except psycopg2.Error:
        raise
    except BaseException:
        if on_wait is None:
            _call_off(conn)
        raise


def open_session(kind: type[_Session], parameters: Mapping[str, str], way: Way = DIRECT, *, blocking: bool = False) -> _Session:
    """Connect with libpq's `parameters`, to the first of their addresses that accepts the connection.

    This function resolves host names and applies `connect_timeout` to each address, as libpq does neither in asynchronous mode. Raises
    psycopg2.OperationalError, with the reason of each address, and a PgwalError for what `way` needs.
    """
    secret = _secret(way)
    failures: list[str] = []
    for attempt in _attempts(parameters, way):
        try:
            return (_connected if way.tunnel is None else _connected_through)(kind, attempt, way, secret, blocking=blocking)
        except psycopg2.OperationalError as error:
            said = str(error).strip()
            # A server may repeat what it was given.
            failures.append(said.replace(secret["password"], "(the password)") if secret else said)
    raise psycopg2.OperationalError("\n".join(failures))


def plain_session(dsn: str, *, autocommit: bool = True, **parameters: Any) -> Connection:
    """Open a session that blocks, with `dsn` and `parameters` that override it. No settings are pinned. Raises psycopg2.Error."""
    conn = psycopg2.connect(extensions.make_dsn(dsn, **parameters), connection_factory=Connection)
    conn.autocommit = autocommit
    return conn


def default_of(keyword: str) -> str | None:
    """Return libpq's default for a parameter: the value of its environment variable, or for `user` the name of this process's user."""
    value = os.environ.get(_VARIABLES[keyword])
    if value is None and keyword == "user":
        try:
            value = pwd.getpwuid(os.geteuid()).pw_name
        except KeyError:
            return None
    return value


def _secret(way: Way, within: float = password.LONGEST) -> dict[str, str]:
    """Return the password as a parameter, if a command gives it."""
    return {} if way.password_command is None else {"password": password.ask(way.password_command, within)}


def _connected_through(
    kind: type[_Session], attempt: Mapping[str, str], way: Way, secret: Mapping[str, str], *, blocking: bool
) -> _Session:
    """Connect by way of a tunnel; of one that is found to have just broken, a new one is made."""
    assert way.tunnel is not None
    host, port = attempt.get("hostaddr") or attempt["host"], int(attempt.get("port") or 5432)
    for last in (False, True):
        end = tunnel.local_end(way.tunnel, host, port, connect_timeout=_connect_timeout(attempt))
        try:
            return _connected(kind, {**attempt, "hostaddr": end.address, "port": str(end.port)}, way, secret, blocking=blocking)
        except psycopg2.OperationalError as error:
            if "FATAL" in str(error):  # the server's own answer
                raise
            complaint = end.complaint()
            if complaint is not None:
                raise psycopg2.OperationalError(f"connection to {host} through {way.tunnel} failed: {complaint}") from None
            if last or not end.broken:
                raise
    raise AssertionError


def _connected(kind: type[_Session], parameters: Mapping[str, str], way: Way, secret: Mapping[str, str], *, blocking: bool) -> _Session:
    dsn = extensions.make_dsn(**{**parameters, **secret})
    if blocking:
        conn = psycopg2.connect(dsn, connection_factory=kind)
        conn.autocommit = True
        conn.way = way
        return conn
    conn = psycopg2.connect(dsn, connection_factory=kind, async_=1)
    conn.parameters, conn.way = parameters, way
    deadline = time.monotonic() + _connect_timeout(parameters)

    def give_up() -> None:
        if time.monotonic() > deadline:
            at = (parameters.get("hostaddr") if way.tunnel is None else None) or parameters.get("host") or "the server"
            raise psycopg2.OperationalError(f"connection to {at} failed: timeout expired")

    try:
        _poll(conn, give_up, 0.25)
    except BaseException:
        conn.close()
        raise
    return conn


def _poll(conn: Connection | ReplicationConnection, on_wait: OnWait | None, every: float) -> None:
    while (state := conn.poll()) != extensions.POLL_OK:
        ready = select.poll()
        ready.register(conn.fileno(), select.POLLOUT if state == extensions.POLL_WRITE else select.POLLIN)
        # With a time-out: data that TLS has already taken out of the socket does not make the socket readable.
        if not ready.poll(every * 1000) and on_wait is not None:
            on_wait()


def _call_off(conn: Connection | ReplicationConnection) -> None:
    """Cancel the running statement, so that it does not go on, or wait for a lock, after its client has gone.

    It uses a session of its own, as libpq's cancel blocks all of Python. It gives up after 5 s if the server does not answer.
    """
    deadline = time.monotonic() + CANCEL_WAIT

    def give_up() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    with suppress(psycopg2.Error, PgwalError, TimeoutError):
        parameters = {**conn.parameters, "connect_timeout": str(CANCEL_WAIT)}
        with _connected(Connection, parameters, conn.way, _secret(conn.way, CANCEL_WAIT), blocking=False) as other:
            cursor = other.cursor()
            cursor.execute("SELECT pg_catalog.pg_cancel_backend(%s)", [conn.info.backend_pid])
            _poll(other, give_up, 0.1)
        _poll(conn, give_up, 0.1)


def _connect_timeout(parameters: Mapping[str, str]) -> float:
    seconds = int(float(parameters.get("connect_timeout") or default_of("connect_timeout") or 0))
    return max(seconds, _LEAST_CONNECT) if seconds > 0 else _LONGEST_CONNECT


def _attempts(parameters: Mapping[str, str], way: Way) -> list[dict[str, str]]:
    """Return the parameters once for each address, in the order in which libpq would try them. Raises psycopg2.OperationalError.

    Names of hosts behind a tunnel are left to its other end.
    """

    def given(keyword: str) -> str:
        return parameters.get(keyword) or default_of(keyword) or ""

    lists = {keyword: given(keyword).split(",") for keyword in ("host", "hostaddr", "port") if given(keyword)}
    count = max((len(values) for keyword, values in lists.items() if keyword != "port"), default=1)
    if any(len(values) not in ({1, count} if keyword == "port" else {count}) for keyword, values in lists.items()):
        raise psycopg2.OperationalError(f"could not match {count} hosts, addresses and ports")
    prefer_standby = given("target_session_attrs") == "prefer-standby"
    base = dict(parameters) | ({"target_session_attrs": "any"} if prefer_standby else {})
    found: list[dict[str, str]] = []
    failure: OSError | None = None
    for number in range(count):
        attempt = base | {keyword: values[number % len(values)] for keyword, values in lists.items()}
        try:
            found += [attempt | address for address in (_addresses(attempt) if way.tunnel is None else _behind(attempt))]
        except OSError as error:
            failure = error
    if not found:
        raise psycopg2.OperationalError(f"failed to resolve host: {failure}")
    if given("load_balance_hosts") == "random":
        random.shuffle(found)
    return [attempt | {"target_session_attrs": "standby"} for attempt in found] + found if prefer_standby else found


def _addresses(attempt: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the addresses of a host, as parameters. Raises OSError, and UnicodeError for an impossible name."""
    host = attempt.get("host", "")
    if attempt.get("hostaddr") or not host or host.startswith(("/", "@")):
        return [{}]
    with suppress(ValueError):
        return [{"hostaddr": str(ipaddress.ip_address(host))}]
    answers = socket.getaddrinfo(host, attempt.get("port") or "5432", proto=socket.IPPROTO_TCP, type=socket.SOCK_STREAM)
    return [{"hostaddr": str(answer[4][0])} for answer in answers]


def _behind(attempt: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the name by which libpq knows a host behind a tunnel, for its certificate and for the password file. Raises SettingError."""
    host = attempt.get("host") or attempt.get("hostaddr") or ""
    if not host or host.startswith(("/", "@")):
        raise SettingError(
            f"{tunnel.VARIABLE} is set, but the source has no host that a tunnel could lead to; name it in PGWAL_SOURCE_DSN or PGHOST, as "
            "the tunnel's other end knows it."
        )
    return [{"host": host}]
