"""Names, values and messages that are made to do something where they are shown, run or stored: they do nothing."""

import json
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from pgwal_pipeline.values.relation import TableName, quote_ident
from pgwal_pipeline_tests.commands import Commands
from pgwal_pipeline_tests.support import Source

ESCAPES = ["\x1b]0;owned\x07", "\x1b[31mred", "\x9b32mgreen"]
SCHEMA = 's"; DROP TABLE victims; --'
TABLES = [
    "<script>x()</script> `![x](http://evil.example/)` $(touch ran)",
    "../../../escaped/t; %s %n {0} {task.description} [bold]x[/nope]",
    "\x1b]0;owned\x07 \x1b[31mred",
    "two\nlines\r\nFATAL: \x9b32mgreen '; DROP TABLE victims; --",
]
COLUMNS = [
    "'; DROP TABLE victims; --",
    "../../x",
    "\x1b[31mred",
    "%(id)s {0} [/nope]",
    "${jndi:ldap://127.0.0.1:1/a}",
    "<b>`x`",
    "two\nlines",
]
VALUES = [*COLUMNS, *TABLES, "\x1b]0;owned\x07", "=cmd|' /C calc'!A0", "\\N", '{"a": 1}', "\ufeff\u202e"]


def _make(source: Source) -> list[str]:
    """The hostile tables, with hostile values in hostile columns; their quoted names."""
    assert all(len(name.encode()) < 64 for name in (*TABLES, *COLUMNS))
    source.sql("CREATE TABLE victims (id int PRIMARY KEY); INSERT INTO victims VALUES (1)")
    source.sql(f"CREATE SCHEMA {quote_ident(SCHEMA)}")
    names = [str(TableName(SCHEMA, name)) for name in TABLES]
    columns = ", ".join(f"{quote_ident(column)} text" for column in COLUMNS)
    for name in names:
        source.sql(f"CREATE TABLE {name} (id int PRIMARY KEY, {columns})")
        _fill(source, name, 0)
    return names


def _fill(source: Source, name: str, first: int) -> None:
    marks = ", ".join(["%s"] * len(COLUMNS))
    for number, value in enumerate(VALUES):
        statement = f"INSERT INTO {name.replace('%', '%%')} VALUES (%s, {marks})"
        source.sql(statement, first + number, *[value] * len(COLUMNS))


def _on_a_terminal(commands: Commands, *arguments: str) -> tuple[int, bytes]:
    """Run a command with all its output on a terminal; its exit code and what the terminal got."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "pgwal_pipeline.cli", *arguments]
    process = subprocess.Popen(
        command, cwd=commands.folder, env={**commands.environment, "TERM": "xterm-256color"}, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    shown, deadline = b"", time.monotonic() + 240
    try:
        while time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                try:
                    octets = os.read(ours, 1 << 16)
                except OSError:  # the terminal's last writer is gone
                    break
                shown += octets
            elif process.poll() is not None:
                break
        return process.wait(20), shown
    finally:
        process.kill()
        os.close(ours)


def _harmless(octets: bytes) -> None:
    for escape in ESCAPES:
        assert escape.encode() not in octets
    assert b"\x07" not in octets
    assert b"\nFATAL" not in octets


@pytest.mark.long
def test_hostile_names_and_values_do_nothing(
    source: Source, tmp_path: Path, connect_address: str, spark_connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "deep" / "deeper" / "deepest"
    folder.mkdir(parents=True)
    commands = Commands(folder, source.dsn)
    commands.environment.pop("SPARK_CONNECT_MODE_ENABLED", None)
    commands.environment["PGWAL_SPARK_REMOTE"] = connect_address
    names = _make(source)
    source.sql(f"CREATE TABLE {quote_ident(SCHEMA)}.{quote_ident('keyless' + ESCAPES[0])} (a int)")
    code, shown = _on_a_terminal(commands, "sync")
    assert code == 0, shown
    _harmless(shown)
    assert b"keyless\\x1b]0;owned" in shown
    for name in names:
        _fill(source, name, 100)
        source.sql(f"UPDATE {name} SET {quote_ident(COLUMNS[0])} = {quote_ident(COLUMNS[1])} WHERE id % 3 = 0")
    for prefix in (*TABLES, "pgwal"):
        source.sql("SELECT pg_logical_emit_message(true, %s, %s)", prefix, "'; DROP TABLE victims; --")
    code, shown = _on_a_terminal(commands, "verify")
    assert code == 0, shown
    _harmless(shown)
    code, shown = _on_a_terminal(commands, "status")
    assert code == 0, shown
    _harmless(shown)
    assert b"\x1b" not in shown
    status = commands.json("status")
    latest = status["publish"]["tables"]
    assert {"public.victims", *names} == set(latest)
    for name in names:
        assert status["tables"][name]["state"] == "ready"
        rows = spark_connect.read.format("delta").option("versionAsOf", latest[name]["version"]).load(latest[name]["path"]).collect()
        columns = ["id", *COLUMNS]
        assert sorted(tuple(row[column] for column in columns) for row in rows) == sorted(source.sql(f"SELECT * FROM {name}"))
        assert Path(latest[name]["path"]).resolve().is_relative_to(folder / "lake" / "current")
    code, shown = _on_a_terminal(commands, "resnapshot", str(TableName(SCHEMA, "not there" + ESCAPES[0] + "\nFATAL")))
    assert code != 0
    _harmless(shown)
    # Nothing of it ran, and nothing was written anywhere but where it belongs.
    assert source.sql("SELECT id FROM victims") == [(1,)]
    assert sorted(path.name for path in folder.iterdir()) == ["dagster", "lake"]
    assert [path.name for path in tmp_path.iterdir()] == ["deep"]
    assert not Path("ran").exists()
    _as_text_in_dagster(folder / "dagster", monkeypatch)


def _as_text_in_dagster(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the instance keeps shows names as plain text: no kind of metadata that a page would render is made of them."""
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    seen = 0
    with dg.DagsterInstance.get() as instance:
        for run in instance.get_runs():
            for record in instance.all_logs(run.run_id):
                text = record.user_message + json.dumps(record.dagster_event.message if record.dagster_event else "")
                _harmless(text.encode())
                materialization = record.asset_materialization
                for value in materialization.metadata.values() if materialization else ():
                    assert not isinstance(value, (dg.MarkdownMetadataValue, dg.UrlMetadataValue, dg.NotebookMetadataValue)), value
                    seen += 1
    assert seen > 20
