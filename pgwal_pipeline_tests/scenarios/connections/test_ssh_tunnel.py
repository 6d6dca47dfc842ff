"""The whole pipeline through a real sshd: every connection, TLS for the source's own name, a tunnel that breaks amid a drain."""

import os
from pathlib import Path

import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline import drain as drains
from pgwal_pipeline.pipeline.doctor import examine
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.postgres import tunnel
from pgwal_pipeline.postgres.connection import plain_session
from pgwal_pipeline.postgres.dsn import connect, replication_connection
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.bastion import Bastion, tunnels_of
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.pipelines import MakePipeline
from pgwal_pipeline_tests.postgres.tls import Authority, terminator
from pgwal_pipeline_tests.scenarios.connections.workload import assert_raw_is_whole, at_reads, drained, fill, prepared
from pgwal_pipeline_tests.support import Source, start_server, wait_for

_OURS = "SELECT client_port FROM pg_stat_activity WHERE application_name LIKE 'pgwal%' AND datname = current_database()"


def test_a_drain_whose_tunnel_breaks_goes_on(
    source: Source, bastion: Bastion, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drains, "_PAUSE", 0.05)
    prepared(source)
    pipeline = make_pipeline(ssh_tunnel=bastion.url, memory_budget="1MB")
    drains.bootstrap(pipeline.settings, progress=Silent())
    fill(source, 100)
    broken = 0

    def act(passed: int) -> None:
        nonlocal broken
        if passed == 1:
            ports = [port for (port,) in source.sql(_OURS)]
            assert len(ports) >= 2
            assert all(bastion.serves(port) for port in ports)
        # What has come is read also after the tunnel broke.
        if passed % 7 == 0 and broken < 3 and tunnels_of(os.getpid()):
            broken += 1
            (ssh,) = tunnels_of(os.getpid())
            if broken == 1:
                ssh.kill()  # this end of it
            else:
                bastion.break_connections()

    at_reads(monkeypatch, act)
    report = drained(pipeline)
    assert broken == 3
    assert len(report.warnings) == 3
    assert assert_raw_is_whole(source, pipeline.settings.lake) == report.changes


def test_processes_of_a_catch_up_and_snapshots_go_through_it(
    source: Source, bastion: Bastion, make_pipeline: MakePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pgwal_pipeline.pipeline.catch_up.cores", lambda: 4)
    prepared(source)
    source.sql("INSERT INTO a (body) SELECT 'first' FROM generate_series(1, 100)")
    pipeline = make_pipeline(ssh_tunnel=bastion.url, catchup_threshold="512kB", catchup_slots=2)
    pipeline.drain()
    pipeline.snapshot()
    fill(source, 100)
    report = drained(pipeline)
    assert len(report.windows) == 3
    assert status(pipeline.settings)["slot"]["lag_bytes"] >= 0
    found = {check.name: check for check in examine(pipeline.environment(PGWAL_SSH_TUNNEL=bastion.url))}
    assert [name for name, check in found.items() if not check.ok] == []
    assert found["tunnel"].found == f"every connection goes through {bastion.url}, whose host key is known"
    tunnel.close_all()
    bastion.stop()
    wait_for(lambda: not tunnels_of(os.getpid()), what="ssh to end")
    failed = [check for check in examine(pipeline.environment(PGWAL_SSH_TUNNEL=bastion.url)) if check.name == "source"]
    assert "PGWAL_SSH_TUNNEL: no tunnel through" in failed[0].found


def test_tls_checks_the_name_of_the_source(postgres: Postgres, bastion: Bastion, tmp_path: Path) -> None:
    ca = Authority(tmp_path, "ca")
    client = ca.issue("postgres")
    assert postgres.port is not None
    with terminator(postgres.port, ca.issue("source", hosts=("localhost", "db.internal")), ca.certificate) as stand_in:
        files = {"sslmode": "verify-full", "sslrootcert": ca.certificate, "sslcert": client.certificate, "sslkey": client.key}

        def through(**host: str) -> str:
            parts = {"port": stand_in.port, "user": "postgres", "dbname": "postgres", **files, **host}
            text = make_dsn(**{name: str(value) for name, value in parts.items()})
            return Settings.from_environment({}, source_dsn=text, ssh_tunnel=bastion.url).dsn

        # As the bastion resolves the name, and with an address that it shall go to.
        for dsn in (through(host="localhost"), through(host="db.internal", hostaddr="127.0.0.1")):
            for make in (connect, replication_connection):
                with make(dsn) as conn:
                    assert conn.info.ssl_in_use
        assert stand_in.connections == 4
        with pytest.raises(SourceRefused, match="its certificate is for another host"):
            connect(through(host="127.0.0.1"))


def test_a_password_file_has_the_sources_own_port(bastion: Bastion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start_server(tmp_path / "data")
    try:
        access = server.data_dir / "pg_hba.conf"
        access.write_text("host all secretive 127.0.0.1/32 scram-sha-256\n" + access.read_text())
        with plain_session(server.dsn()) as admin:
            admin.execute(b"CREATE ROLE secretive LOGIN PASSWORD 'sesame'; SELECT pg_reload_conf()")
        passwords = tmp_path / "pgpass"
        passwords.write_text(f"127.0.0.1:{server.port}:postgres:secretive:sesame\n")
        passwords.chmod(0o600)
        monkeypatch.setenv("PGPASSFILE", str(passwords))
        text = server.dsn(user="secretive")
        with connect(Settings.from_environment({}, source_dsn=text, ssh_tunnel=bastion.url).dsn) as conn:
            assert conn.execute("SELECT current_user").fetchone() == ("secretive",)
        passwords.write_text(f"127.0.0.1:1:postgres:secretive:sesame\n127.0.0.1:{server.port}:postgres:secretive:wrong\n")
        with pytest.raises(SourceRefused, match="password of secretive is missing or wrong"):
            connect(Settings.from_environment({}, source_dsn=text, ssh_tunnel=bastion.url).dsn)
    finally:
        server.destroy()


def test_commands_go_through_it(source: Source, bastion: Bastion, tmp_path: Path) -> None:
    prepared(source)
    fill(source, 5)
    parts = parse_dsn(source.dsn)
    commands = Commands(tmp_path / "run", make_dsn(**{**parts, "host": "localhost"}))
    commands.folder.mkdir()
    commands.environment |= {"PGWAL_SSH_TUNNEL": bastion.url, "PATH": os.environ["PATH"]}
    assert commands.json("drain")["windows"] is not None
    assert commands.json("status")["slot"]["name"] == "cli_test"
    (bastion.folder / "known_hosts").write_text("")
    code, out, err = commands.run("drain")
    assert (code, out) == (1, "")
    assert err.startswith(f"pgwal: PGWAL_SSH_TUNNEL: no tunnel through {bastion.url}: its host key is not in known_hosts;")
    assert len(err.strip().splitlines()) == 1
    code, _, err = commands.run("status", PGWAL_SSH_TUNNEL="bastion")
    assert code == 2
    assert err.startswith("pgwal: PGWAL_SSH_TUNNEL is 'bastion', but it takes ssh://user@host")
    bastion.trust()
    assert commands.json("drop", "--yes") == {"dropped": ["slot cli_test", "publication cli_test"]}
