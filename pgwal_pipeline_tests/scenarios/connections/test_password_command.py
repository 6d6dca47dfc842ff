"""A password that a command tells: whatever connects to the source asks for it, and a drain that outlives it goes on with the next one."""

import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import SourceRefused, SourceUnavailable
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline.doctor import examine
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.postgres.dsn import connect, copying_connection, replication_connection
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.commands import Commands, command_lines
from pgwal_pipeline_tests.octets import octets_in
from pgwal_pipeline_tests.pipelines import MakePipeline, Pipeline
from pgwal_pipeline_tests.scenarios.connections.workload import assert_raw_is_whole, at_reads, drained, fill, prepared
from pgwal_pipeline_tests.support import Source, fresh_source, start_server

FAILS = "echo Zq7x; echo Zq7x >&2; exit 9"
FIRST, SECOND = "Zq7first 'tok\\en Zq", "Zq7second\ttoken=Zq"


@dataclass
class Vault:
    """A command that prints the password of a file, and writes down that it was asked."""

    folder: Path

    @property
    def command(self) -> str:
        script = self.folder / "token"
        if not script.exists():
            script.write_text(
                f"#!{sys.executable}\n"
                f"print(open({str(self.folder / 'password')!r}).read(), end='')\n"
                f"open({str(self.folder / 'asked')!r}, 'a').write('.')\n"
            )
            script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return str(script)

    @property
    def asked(self) -> int:
        path = self.folder / "asked"
        return path.stat().st_size if path.exists() else 0

    def holds(self, password: str) -> None:
        (self.folder / "password").write_text(f"{password}\n")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A server with a role that needs a password."""
    server = start_server(tmp_path_factory.mktemp("guarded") / "data")
    access = server.data_dir / "pg_hba.conf"
    lines = "".join(f"host {database} token 127.0.0.1/32 scram-sha-256\n" for database in ("all", "replication"))
    access.write_text(lines + access.read_text())
    with plain_session(server.dsn()) as admin:
        admin.execute(b"CREATE ROLE token SUPERUSER LOGIN; SELECT pg_reload_conf()")
    yield server
    server.destroy()


@pytest.fixture
def locked(guarded: Postgres) -> Iterator[Source]:
    with fresh_source(guarded) as source:
        changes_password(source, FIRST)
        yield source


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    made = Vault(tmp_path)
    made.holds(FIRST)
    return made


def changes_password(source: Source, password: str) -> None:
    source.sql("SELECT set_config('pgwal.p', %s, false)", password)
    source.sql("DO $$ BEGIN EXECUTE format('ALTER ROLE token PASSWORD %%L', current_setting('pgwal.p')); END $$".replace("%%", "%"))


def with_command(make_pipeline: MakePipeline, source: Source, vault: Vault, **settings: object) -> Pipeline:
    pipeline = make_pipeline(source_dsn=source.dsn_of("token"), password_command=vault.command, **settings)
    pipeline.source = source
    return pipeline


@pytest.mark.parametrize("make", [connect, copying_connection, replication_connection])
def test_each_kind_of_connection_asks_anew(make: type, locked: Source, vault: Vault) -> None:
    dsn = Settings.from_environment({}, source_dsn=locked.dsn_of("token", "not this"), password_command=vault.command).dsn
    for asked in (1, 2):
        with make(dsn) as conn:
            assert conn.execute("SELECT current_user").fetchone() == ("token",)
            assert "Zq7" not in repr(conn.dsn) + repr(vars(conn))
        assert vault.asked == asked
    vault.holds("another")
    with pytest.raises(SourceRefused, match="PGWAL_PASSWORD_COMMAND has to print the one that the server takes now") as told:
        make(dsn)
    assert "another" not in str(told.value)
    (vault.folder / "password").unlink()
    with pytest.raises(SourceUnavailable, match="PGWAL_PASSWORD_COMMAND failed with exit status 1"):
        make(dsn)


def test_a_drain_that_outlives_its_password_goes_on_with_the_next(
    locked: Source, vault: Vault, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "_PAUSE", 0.05)
    prepared(locked)
    pipeline = with_command(make_pipeline, locked, vault, memory_budget="1MB", window_size="1MB")
    drains.bootstrap(pipeline.settings, progress=Silent())
    fill(locked, 100)
    seen = []

    def expire(passed: int) -> None:
        if passed == 3:
            changes_password(locked, SECOND)
            with pytest.raises(SourceRefused):
                connect(pipeline.settings.dsn)
            vault.holds(SECOND)
            seen.append(vault.asked)
            locked.sql("SELECT pg_terminate_backend(pid, 200) FROM pg_stat_activity WHERE usename = 'token'")
        elif passed == 6:
            (vault.folder / "password").rename(vault.folder / "away")  # the vault itself is away when the next connection breaks
            locked.sql("SELECT pg_terminate_backend(pid, 200) FROM pg_stat_activity WHERE usename = 'token'")

    def warn(text: str) -> None:
        said.append(text)
        if "PGWAL_PASSWORD_COMMAND failed" in text:
            (vault.folder / "away").rename(vault.folder / "password")

    said: list[str] = []
    progress = Silent()
    monkeypatch.setattr(type(progress), "warn", lambda _, text: warn(text))
    at_reads(monkeypatch, expire)
    report = drained(pipeline)
    assert seen
    assert vault.asked > seen[0]
    assert any("PGWAL_PASSWORD_COMMAND failed with exit status 1" in text for text in said)
    assert "Zq7" not in " ".join(said)
    assert assert_raw_is_whole(locked, pipeline.settings.lake) == report.changes


def test_processes_of_a_catch_up_ask_too(
    locked: Source, vault: Vault, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgwal_pipeline.pipeline.catch_up.cores", lambda: 4)
    prepared(locked)
    pipeline = with_command(make_pipeline, locked, vault, catchup_threshold="512kB", catchup_slots=2)
    drains.bootstrap(pipeline.settings, progress=Silent())
    fill(locked, 100)
    report = drained(pipeline)
    assert len(report.windows) == 3
    assert assert_raw_is_whole(locked, pipeline.settings.lake) == report.changes
    pipeline.snapshot()
    assert status(pipeline.settings)["slot"]["lag_bytes"] >= 0


def checks(pipeline: Pipeline, **environment: str) -> dict[str, str]:
    return {check.name: check.found for check in examine(pipeline.environment(**environment)) if check.ok}


def test_the_doctor_says_where_the_password_comes_from(
    locked: Source, vault: Vault, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipeline = with_command(make_pipeline, locked, vault)
    command = {"PGWAL_PASSWORD_COMMAND": vault.command}
    bare = {"PGWAL_SOURCE_DSN": locked.dsn_of("token")}
    assert checks(pipeline, **command, **bare)["password"] == "PGWAL_PASSWORD_COMMAND prints it for each connection"
    assert "asked for none" in checks(pipeline, **command)["password"]
    assert checks(pipeline)["password"] == "the server asked for none"
    assert checks(pipeline, PGWAL_SOURCE_DSN=locked.dsn_of("token", FIRST))["password"] == "it is in PGWAL_SOURCE_DSN"
    monkeypatch.setenv("PGPASSWORD", FIRST)
    assert checks(pipeline, **bare)["password"] == "it is in PGPASSWORD"
    monkeypatch.delenv("PGPASSWORD")
    passwords = tmp_path / "pgpass"
    passwords.write_text("*:*:*:token:" + FIRST.replace("\\", "\\\\") + "\n")
    passwords.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passwords))
    assert checks(pipeline, **bare)["password"] == "it is in the password file"
    (failed,) = [check for check in examine(pipeline.environment(PGWAL_PASSWORD_COMMAND="exit 7", **bare)) if check.name == "source"]
    assert not failed.ok
    assert "PGWAL_PASSWORD_COMMAND failed with exit status 7" in failed.found


def test_commands_leave_no_trace_of_it(locked: Source, vault: Vault, tmp_path: Path) -> None:
    prepared(locked)
    commands = Commands(tmp_path / "run", locked.dsn_of("token"))
    commands.folder.mkdir()
    commands.environment["PGWAL_PASSWORD_COMMAND"] = vault.command
    said, lines = [], set[bytes]()
    running = commands.start("drain", "--json")
    while running.poll() is None:
        lines |= set(command_lines().values())
    said += [*running.communicate()]
    assert running.returncode == 0, said
    code, out, err = commands.run("status", "--json", PGWAL_PASSWORD_COMMAND=FAILS)
    assert (code, '"slot": null' in out) == (0, True)
    said += [out, err]
    code, out, err = commands.run("drain", PGWAL_PASSWORD_COMMAND=FAILS)
    assert (code, out) == (1, "")
    assert err.strip().splitlines() == [
        "pgwal: PGWAL_PASSWORD_COMMAND failed with exit status 9; it has to print the source's password: run it by hand to see why."
    ]
    assert not any("Zq7" in text for text in [*said, err])
    assert not any(b"Zq7" in line for line in lines)
    files = [path for path in commands.folder.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files for octets in octets_in(path) if b"Zq7" in octets] == []
