"""The way through SSH, by a real sshd: one ssh for all connections of a process, which ends with it; what keeps it shut is one sentence."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from psycopg2.extensions import make_dsn, parse_dsn

from pgwal_pipeline.messages.errors import PgwalError, SettingError, SourceRefused, SourceUnavailable
from pgwal_pipeline.postgres import tunnel
from pgwal_pipeline.postgres.dsn import connect, copying_connection, describe_dsn, on_this_machine, replication_connection
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.bastion import Bastion, tunnels_of
from pgwal_pipeline_tests.support import Source, wait_for

_HOLDS = """
import sys, time
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.settings import Settings
conn = connect(Settings.from_environment().dsn)
print(conn.execute("select 1").fetchone(), flush=True)
sys.stdin.readline()
"""


def through(bastion: Bastion, dsn: str) -> str:
    return Settings.from_environment({}, source_dsn=dsn, ssh_tunnel=bastion.url).dsn


def refused(bastion: Bastion, dsn: str, kind: type[PgwalError]) -> str:
    """The sentence of a connection that cannot be made."""
    with pytest.raises(kind) as told:
        connect(through(bastion, dsn))
    assert type(told.value) is kind
    assert "\n" not in str(told.value)
    assert tunnels_of(os.getpid()) == []
    return str(told.value)


def test_all_connections_of_a_process_share_one_ssh(source: Source, bastion: Bastion) -> None:
    dsn = through(bastion, source.dsn)
    direct = describe_dsn(source.dsn)
    assert describe_dsn(dsn) == direct
    with ThreadPoolExecutor(4) as pool:
        makes = [connect, copying_connection, replication_connection, connect]
        connections = list(pool.map(lambda make: make(dsn), makes))
    (ssh,) = tunnels_of(os.getpid())
    for conn in connections:
        ((pid, port),) = conn.execute("SELECT pid, client_port FROM pg_stat_activity WHERE pid = pg_backend_pid()")
        assert pid != os.getpid()
        assert bastion.serves(port)
        assert not on_this_machine(conn)
    command = ssh.cmdline()
    assert "StrictHostKeyChecking=yes" in command
    assert not any("password" in word for word in command)
    for conn in connections:
        conn.close()
    # Its user's configuration has it share connections that outlive their owner.
    assert list(bastion.folder.glob("shared-*")) == []


def test_a_tunnel_that_broke_is_made_again(source: Source, bastion: Bastion) -> None:
    dsn = through(bastion, source.dsn)
    with connect(dsn) as conn:
        (first,) = tunnels_of(os.getpid())
        assert bastion.break_connections() >= 1
        first.wait(20)
        with pytest.raises(Exception, match=r"closed|terminat|lost"):
            conn.execute("SELECT 1")
    with connect(dsn) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
    bastion.stop()
    wait_for(lambda: not tunnels_of(os.getpid()), what="ssh to end")
    sentence = refused(bastion, source.dsn, SourceUnavailable)
    assert "Connection refused" in sentence
    assert bastion.url in sentence
    bastion.start()
    with connect(dsn) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_an_interrupted_statement_is_cancelled_through_it(source: Source, bastion: Bastion) -> None:
    environment = {**os.environ, "PGWAL_SOURCE_DSN": source.dsn, "PGWAL_SSH_TUNNEL": bastion.url}
    code = _HOLDS.replace("sys.stdin.readline()", 'conn.execute("select pg_sleep(61)")')
    with subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        at_work = "SELECT count(*) FROM pg_stat_activity WHERE query = 'select pg_sleep(61)' AND state = 'active'"
        wait_for(lambda: source.value(at_work) == 1, what="the statement to run")
        child.send_signal(signal.SIGINT)
        child.wait(30)
    assert source.value(at_work) == 0


@pytest.mark.parametrize("ending", ["kill", "end"])
def test_no_ssh_outlives_its_process(ending: str, source: Source, bastion: Bastion) -> None:
    environment = {**os.environ, "PGWAL_SOURCE_DSN": source.dsn, "PGWAL_SSH_TUNNEL": bastion.url}
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _HOLDS], env=environment, stdin=pipe, stdout=pipe) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        assert child.stdout.readline() == b"(1,)\n"
        (ssh,) = tunnels_of(child.pid)
        if ending == "kill":
            child.kill()
        else:
            child.stdin.close()
        child.wait(20)
        assert child.returncode == (-signal.SIGKILL if ending == "kill" else 0)
    ssh.wait(10)
    assert not psutil.pid_exists(ssh.pid)


def test_a_host_key_that_is_not_known_or_another(source: Source, bastion: Bastion) -> None:
    (bastion.folder / "known_hosts").write_text("")
    assert "its host key is not in known_hosts" in refused(bastion, source.dsn, SourceRefused)
    assert (bastion.folder / "known_hosts").read_text() == ""
    bastion.make_key("other")
    key = (bastion.folder / "other.pub").read_text()
    (bastion.folder / "known_hosts").write_text(f"[127.0.0.1]:{bastion.port} {key}")
    assert "its host key is not the one in known_hosts" in refused(bastion, source.dsn, SourceRefused)
    (bastion.folder / "known_hosts").write_text(f"@revoked * {(bastion.folder / 'host.pub').read_text()}")
    assert "revoked" in refused(bastion, source.dsn, SourceRefused)
    bastion.trust()
    connect(through(bastion, source.dsn)).close()


def test_keys_come_from_files_and_from_an_agent(source: Source, bastion: Bastion, monkeypatch: pytest.MonkeyPatch) -> None:
    bastion.make_key("another")
    bastion.configure(identity="another")
    assert "lets this user in by none of ssh's keys" in refused(bastion, source.dsn, SourceRefused)
    bastion.configure(identity=None)
    assert "lets this user in by none of ssh's keys" in refused(bastion, source.dsn, SourceRefused)
    place = bastion.folder / "agent"
    with subprocess.Popen(["ssh-agent", "-D", "-a", str(place)], stdout=subprocess.DEVNULL) as agent:
        try:
            wait_for(place.exists, what="the agent")
            monkeypatch.setenv("SSH_AUTH_SOCK", str(place))
            subprocess.run(["ssh-add", "-q", str(bastion.folder / "key")], check=True)
            connect(through(bastion, source.dsn)).close()
        finally:
            agent.terminate()


def test_what_is_behind_it_does_not_answer(source: Source, bastion: Bastion) -> None:
    tunnel.close_all()
    nobody = make_dsn(**{**parse_dsn(source.dsn), "port": "1"})
    with pytest.raises(SourceUnavailable, match="cannot be reached: Connection refused"):
        connect(through(bastion, nobody))
    nowhere = make_dsn(**{**parse_dsn(source.dsn), "host": "no-such-host.invalid"})
    with pytest.raises(SourceUnavailable, match=r"cannot be reached: .*(not known|resolution|resolve)"):
        connect(through(bastion, nowhere))
    with pytest.raises(SettingError, match="no host that a tunnel could lead to"):
        connect(through(bastion, make_dsn(**{**parse_dsn(source.dsn), "host": "/tmp"})))
    # Of several hosts the first that answers.
    parts = parse_dsn(source.dsn)
    several = make_dsn(**{**parts, "host": f"127.0.0.1,{parts['host']}", "port": f"1,{parts['port']}"})
    with connect(through(bastion, several)) as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)


def test_without_ssh(source: Source, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    dsn = Settings.from_environment({}, source_dsn=source.dsn, ssh_tunnel="ssh://me@nowhere.invalid").dsn
    with pytest.raises(SettingError, match="PGWAL_SSH_TUNNEL needs the program ssh, which is not on this machine"):
        connect(dsn)


def test_a_bastion_that_never_answers_is_given_up(source: Source, bastion: Bastion, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_LOGIN", 0.5)
    bastion.stop()
    script = bastion.bin / "ssh"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(SourceUnavailable, match="did not let ssh in within"):
        connect(through(bastion, make_dsn(source.dsn, connect_timeout=1)))
    wait_for(lambda: not any(child.name() == "sleep" for child in psutil.Process().children()), what="it to end")
