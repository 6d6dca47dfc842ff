"""What tests of several rooms share: databases to work in, and servers with settings of their own."""

import contextlib
import fcntl
import os
import resource
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import psycopg2
import psycopg2.errors
from psycopg2.extensions import make_dsn, parse_dsn

from pgwal_pipeline.embedded.postgres import Installation, Postgres
from pgwal_pipeline.postgres.connection import Connection, plain_session
from pgwal_pipeline.postgres.copy import ChunkBounds, ChunkRead, ChunkReader
from pgwal_pipeline.values.relation import Relation

# Fast rather than safe: a test's data need not live through a power cut. Commits still wait for their flush: only flushed WAL is decoded.
TEST_SETTINGS: Mapping[str, str] = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "on",
    "shared_buffers": "64MB",
    "max_connections": "100",
    "max_wal_senders": "50",
    "max_replication_slots": "50",
    "max_prepared_transactions": "10",
    "max_slot_wal_keep_size": "4GB",
    "max_wal_size": "1GB",
    "min_wal_size": "96MB",
    "jit": "off",
}
# The variable that names a folder for what all processes of a run share.
MADE_ONCE = "PGWAL_TESTS_MADE_ONCE"
_PLACES = (("local", ""), ("host", "127.0.0.1/32"))


class DockerServer:
    """A server of an official image, with what of `Postgres` the tests of the matrix use. Any role may log in without a password."""

    def __init__(self, version: int) -> None:
        from testcontainers.core.config import testcontainers_config
        from testcontainers.postgres import PostgresContainer

        # It would remove containers that are left over, but is an image of its own, which cannot be had without a registry.
        testcontainers_config.ryuk_disabled = True
        self.installation = Installed(version)
        self.running = True
        settings = [part for name, value in {**TEST_SETTINGS, "wal_level": "logical"}.items() for part in ("-c", f"{name}={value}")]
        self._container = PostgresContainer(f"postgres:{version}", username="postgres", password="postgres", dbname="postgres", driver=None)
        self._container.with_env("POSTGRES_HOST_AUTH_METHOD", "trust").with_command(["postgres", *settings])
        self._container.start()

    def dsn(self, database: str = "postgres", user: str = "postgres", *, password: str | None = None) -> str:
        """As `Postgres.dsn`."""
        host, port = self._container.get_container_host_ip(), self._container.get_exposed_port(5432)
        secret = {"password": password} if password else {}
        return make_dsn(host=host, port=str(port), dbname=database, user=user, **secret)

    def destroy(self) -> None:
        """Remove the container."""
        self._container.stop()


@dataclass(frozen=True)
class Installed:
    """A server's major version, as `Installation.version` has it."""

    version: int


def docker_refusal(version: int) -> str | None:
    """Why no server of the image `postgres:<version>` can be run here, None where one can."""
    import docker
    from docker.errors import DockerException, ImageNotFound

    try:
        client = docker.from_env(timeout=10)
        try:
            client.images.get(f"postgres:{version}")
        except ImageNotFound:
            client.images.pull("postgres", tag=str(version))
    except (DockerException, OSError) as error:
        return f"no Docker engine with postgres:{version} can be reached: {str(error).splitlines()[0][:120]}"
    return None


@dataclass
class Source:
    """A database to work in. `sql` runs on one autocommit connection that is kept; `connect` opens more."""

    server: Any
    database: str
    dsn: str
    _connections: list[Connection] = field(default_factory=list)

    def connect(self, **overrides: Any) -> Connection:
        """A connection of the test's own (autocommit unless overridden); closed when the test ends."""
        connection = plain_session(self.dsn, **{"autocommit": True, **overrides})
        self._connections.append(connection)
        return connection

    def sql(self, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        """Run a statement and give its rows; `%s` stand for `params`. Without params a `%` is only a percent sign."""
        if not self._connections or self._connections[0].closed:
            self._connections.insert(0, plain_session(self.dsn))
        cursor = self._connections[0].execute(statement.encode(), params or None)
        return [] if cursor.description is None else cursor.fetchall()

    def value(self, statement: str, *params: Any) -> Any:
        """The first column of the first row."""
        return self.sql(statement, *params)[0][0]

    def wait_for_slot(self, name: str) -> None:
        """Wait until nobody reads from a slot: a walsender may go a moment after its reader."""
        active = "SELECT active FROM pg_replication_slots WHERE slot_name = %s"
        wait_for(lambda: not self.value(active, name), what=f"slot {name} to be free")

    def drop_slot(self, name: str) -> None:
        """Drop a slot as soon as nobody reads from it."""
        self.wait_for_slot(name)
        self.sql("SELECT pg_drop_replication_slot(%s)", name)

    def lose_slot(self, name: str, *statements: str) -> None:
        """Write WAL, with `statements` each time, until the server gives a slot up; its `max_slot_wal_keep_size` must be small."""

        def lost() -> bool:
            for statement in (*statements, "SELECT pg_switch_wal()", "CHECKPOINT"):
                self.sql(statement)
            return self.value("SELECT wal_status FROM pg_replication_slots WHERE slot_name = %s", name) == "lost"

        wait_for(lost, what="the slot to be lost")

    def dsn_of(self, user: str, password: str | None = None) -> str:
        """The DSN of the same database for another role."""
        parts = {name: value for name, value in parse_dsn(self.dsn).items() if name != "password"}
        return make_dsn(**{**parts, "user": user, **({"password": password} if password else {})})

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()


def start_server(data_dir: Path, installation: Installation | None = None, settings: Mapping[str, str] | None = None) -> Postgres:
    """Start a server with the tests' settings, `settings` over them. Any role may log in over TCP without a password.

    All servers of one version are the same cluster to those who ask for its identifier: their data is made once a run, and copied.
    """
    server = Postgres(data_dir, installation, {**TEST_SETTINGS, **(settings or {})})
    subprocess.run(["cp", "-a", _made_once(server.installation), data_dir], check=True)
    server.start()
    return server


def _made_once(installation: Installation) -> Path:
    """The data of a server that was never used. Making it takes ten times as long as copying it."""
    folder = Path(os.environ[MADE_ONCE])
    data, made = folder / str(installation.version), folder / f"{installation.version}.made"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            server = Postgres(data, installation, TEST_SETTINGS)
            server.start()
            server.stop()
            access = "\n".join(f"{kind} {database} all {place} trust" for kind, place in _PLACES for database in ("all", "replication"))
            (data / "pg_hba.conf").write_text(access + "\n")
            made.touch()
    return data


@contextlib.contextmanager
def fresh_source(server: Postgres | DockerServer, encoding: str | None = None) -> Iterator[Source]:
    """A new database on `server`, in another `encoding` than its own if one is given; its slots and itself are dropped at the end."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    encoded = f"encoding '{encoding}' template template0 lc_collate 'C' lc_ctype 'C'" if encoding else ""
    with plain_session(server.dsn()) as admin:
        admin.execute(f'create database "{name}" {encoded}'.encode())
    # Statements are sent in UTF-8, whatever the database is in.
    source = Source(server, name, make_dsn(server.dsn(name), client_encoding="UTF8") if encoding else server.dsn(name))
    try:
        yield source
    finally:
        source.close()
        if isinstance(server, Postgres) and not server.running:
            server.start()
        drop_database(server, name)


@contextlib.contextmanager
def no_room(server: Postgres, size: int) -> Iterator[None]:
    """No session that `server` begins meanwhile can make a file larger than `size` bytes, as on a disk that is full."""
    _limit_files(server, size)
    try:
        yield
    finally:
        _limit_files(server, resource.RLIM_INFINITY)


def _limit_files(server: Postgres, size: int) -> None:
    """The limit of the server's first process, which all others are born with; only its own user may set it."""
    if (pid := server.pid) is None:
        return
    owner = server.data_dir.stat()
    account = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []} if os.geteuid() == 0 else {}
    limits = (size, resource.RLIM_INFINITY)
    subprocess.run(["true"], check=True, preexec_fn=lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, limits), **account)


def drop_database(server: Postgres | DockerServer, name: str) -> None:
    """Drop a database with its slots, whoever holds them."""
    with plain_session(server.dsn()) as admin:
        admin.execute("select pg_terminate_backend(pid) from pg_stat_activity where datname = %s and pid <> pg_backend_pid()", [name])
        slots = [row[0] for row in admin.execute("select slot_name from pg_replication_slots where database = %s", [name])]
        for slot in slots:
            wait_for(lambda slot=slot: _drop_slot(admin, slot), what=f"slot {slot} to be free")
        for (transaction,) in admin.execute("select gid from pg_prepared_xacts where database = %s", [name]).fetchall():
            with plain_session(server.dsn(name)) as inside:
                inside.execute(b"rollback prepared '" + transaction.replace("'", "''").encode() + b"'")
        admin.execute(f'drop database if exists "{name}" with (force)'.encode())


def wait_for(
    condition: Callable[[], Any], *, seconds: float = 60.0, pause: float = 0.02, what: str | Callable[[], str] = "the condition"
) -> Any:
    """The first true value that `condition` gives, asked every `pause` seconds; AssertionError when there is none in `seconds`.

    `what` is what the error names, or a function that tells it when the time is over.
    """
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(pause)


def _drop_slot(admin: Connection, slot: str) -> bool:
    try:
        admin.execute("select pg_terminate_backend(active_pid) from pg_replication_slots where slot_name = %s and active", [slot])
        admin.execute("select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s", [slot])
    except psycopg2.errors.ObjectInUse:
        return False
    return True


def read_chunk(
    dsn: str,
    relation: Relation,
    bounds: ChunkBounds,
    on_rows: Callable[[bytearray, list[int]], None],
    *,
    exported_snapshot: str | None = None,
    **options: Any,
) -> ChunkRead:
    """Read one range in a transaction of its own."""
    with ChunkReader(dsn, exported_snapshot) as reader:
        return reader.read(relation, bounds, on_rows, **options)


def copy_messages(dsn: str, relation: Relation, bounds: ChunkBounds, **options: Any) -> tuple[ChunkRead, list[bytes]]:
    """What `read_chunk` says of its read, and the messages that came."""
    messages: list[bytes] = []

    def cut(rows: bytearray, lengths: list[int]) -> None:
        ends = [*accumulate(lengths)]
        assert ends[-1] == len(rows)
        messages.extend(bytes(rows[end - length : end]) for end, length in zip(ends, lengths, strict=True))

    return read_chunk(dsn, relation, bounds, cut, **options), messages
