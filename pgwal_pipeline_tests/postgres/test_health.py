"""What `doctor` says of a source, each wrong thing made on a real server first."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from psycopg2.extensions import parse_dsn

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.messages import amounts
from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.postgres import health, publication, slot
from pgwal_pipeline.postgres.dsn import connect, replication_connection
from pgwal_pipeline.postgres.health import Check, doctor_checks
from pgwal_pipeline_tests.postgres.standby import standby_of
from pgwal_pipeline_tests.support import Source, fresh_source, wait_for

NAME = "health_test"


def checks(source: Source, dsn: str | None = None, globs: str = "*.*", slot_name: str | None = None) -> dict[str, Check]:
    found = doctor_checks(dsn or source.dsn, slot=slot_name or f"h_{source.database}", publication=NAME, globs=globs)
    named = {check.name: check for check in found}
    assert len(named) == len(found)
    assert all(check.ok or check.mend for check in found), "what is wrong has a way to mend it"
    return named


@contextmanager
def role(source: Source, name: str, options: str = "") -> Iterator[str]:
    source.sql(f"create role {name} login {options}")
    try:
        yield source.dsn_of(name)
    finally:
        source.sql(f"drop owned by {name}")
        source.sql(f"drop role {name}")


def make_slot(source: Source) -> None:
    slot.create(source.dsn, f"h_{source.database}", blocked_timeout=20, warn=lambda _: None)


def test_a_source_that_is_as_it_must_be(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table item (id int primary key)")
    before = checks(source)
    assert [name for name, check in before.items() if not check.ok] == []
    assert set(before) == {name for name, _ in health._CHECKS} - {"standby", "tunnel"} | {"source"}
    assert f"Postgres {source.connect().info.server_version // 10000}." in before["source"].found
    assert "may make it" in before["publication"].found
    assert before["tables"].found == "1 table to follow"
    assert source.sql("select 1 from pg_publication") == []
    assert source.sql("select 1 from pg_replication_slots where database = current_database()") == []
    with connect(source.dsn) as conn:
        publication.ensure(conn, NAME, "*.*")
    make_slot(source)
    after = checks(source)
    assert [name for name, check in after.items() if not check.ok] == []
    assert "is ours, with 1 table" in after["publication"].found
    assert "behind; unread" in after["slot"].found or "the source may write" in after["slot"].found


def test_a_source_that_is_not_there(make_server: Callable[..., Postgres]) -> None:
    server = make_server()
    dsn = server.dsn()
    server.stop()
    (only,) = doctor_checks(dsn, slot="s", publication="p", globs="*.*")
    assert (only.name, only.ok) == ("source", False)
    assert "cannot be reached" in only.found
    assert str(parse_dsn(dsn)["password"]) not in only.found


def test_settings_that_would_stop_it(make_server: Callable[..., Postgres]) -> None:
    server = make_server(
        wal_level="replica", max_replication_slots="1", max_wal_senders="1", wal_sender_timeout="1s", max_slot_wal_keep_size="-1"
    )
    with fresh_source(server) as source:
        source.sql("select pg_create_physical_replication_slot('taken')")
        found = checks(source)
        assert [name for name, check in found.items() if not check.ok] == ["wal_level", "max_replication_slots"]
        assert found["wal_level"].found == "replica"
        assert "1 of 1" in found["max_replication_slots"].found
        assert "too late" in found["wal_sender_timeout"].found
        assert found["wal_sender_timeout"].mend
        assert "unlimited" in found["max_slot_wal_keep_size"].found
        assert found["max_slot_wal_keep_size"].mend
        walsenders = "select count(*) from pg_stat_activity where backend_type = 'walsender'"
        wait_for(lambda: not source.value(walsenders), what="the walsender of the checks to end")
        with slot_walsender(source):
            found = checks(source)
            assert not found["max_wal_senders"].ok
            assert not found["replication"].ok
            assert "walsenders are taken" in found["replication"].found
        source.sql("select pg_drop_replication_slot('taken')")


@contextmanager
def slot_walsender(source: Source) -> Iterator[None]:
    walsender = replication_connection(source.dsn)
    try:
        yield
    finally:
        walsender.close()


def test_a_role_with_few_rights(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table item (id int primary key)")
    with role(source, "health_plain") as dsn:
        found = checks(source, dsn)
        assert [name for name, check in found.items() if not check.ok] == ["replication", "publication"]
        assert "health_plain has no REPLICATION" in found["replication"].found
        assert "ALTER ROLE health_plain REPLICATION" in (found["replication"].mend or "")
        assert "has no CREATE on database" in found["publication"].found
        assert "CREATE PUBLICATION" in (found["publication"].mend or "")
        assert "GRANT SELECT ON public.item TO health_plain" in found["tables"].found
        source.sql(f'grant create on database "{source.database}" to health_plain')
        source.sql("grant select on item to health_plain")
        source.sql("alter role health_plain replication")
        found = checks(source, dsn)
        assert [name for name, check in found.items() if not check.ok] == ["publication"]
        assert "does not own public.item" in found["publication"].found
        source.sql((found["publication"].mend or "").removeprefix("Have a superuser run: "))
        found = checks(source, dsn)
        assert [name for name, check in found.items() if not check.ok] == []
        source.sql("revoke select on item from health_plain")
        found = checks(source, dsn)
        assert not found["select"].ok
        assert "may not read public.item" in found["select"].found
        assert "GRANT SELECT ON public.item TO health_plain" in (found["select"].mend or "")
        source.sql("grant select (id) on item to health_plain")
        assert checks(source, dsn)["select"].ok
        source.sql("alter table item enable row level security")
        found = checks(source, dsn)
        assert not found["select"].ok
        assert "row-level security hides rows of public.item" in found["select"].found
        source.sql("alter role health_plain bypassrls")
        assert checks(source, dsn)["select"].ok


def test_a_publication_of_ours_that_another_role_has_to_bring_in_step(source: Source) -> None:
    source.sql("create table item (id int primary key); create table more (id int primary key)")
    with connect(source.dsn) as conn:
        publication.ensure(conn, NAME, "public.item")
    with role(source, "health_guest", "replication") as dsn:
        source.sql("grant select on item, more to health_guest")
        assert checks(source, dsn, globs="public.item")["publication"].ok
        # Not owned, so left out: that stops nothing.
        assert checks(source, dsn, globs="public.*")["publication"].ok
        for index in range(30):
            source.sql(f"create table gone_{index} (id int primary key); alter publication {NAME} add table gone_{index}")
        found = checks(source, dsn, globs="public.item")["publication"]
        assert not found.ok
        assert f"Publication {NAME} is not in step with PGWAL_TABLES, and role health_guest does not own it" in found.found
        owner = source.value("select current_user")
        assert f"have {owner} run ALTER PUBLICATION {NAME} DROP TABLE " in found.found
        assert all(f"ONLY public.gone_{index}" in found.found for index in range(30)), "shown whole here, where runs point to it"
        assert f"GRANT {owner} TO health_guest" in found.found
        assert source.value("select count(*) from pg_publication_rel") == 31
        with connect(dsn) as conn, pytest.raises(SourceRefused, match="is not in step with PGWAL_TABLES, and role health_guest"):
            publication.ensure(conn, NAME, "public.item")
        # Its owner brings it in step with the next run.
        assert checks(source, globs="public.item")["publication"].ok


def test_tables_that_must_be_left_out_are_no_failure(source: Source) -> None:
    source.sql("create table keyless (n int)")
    source.sql("create table item (id int primary key)")
    found = checks(source)
    assert found["tables"].ok
    assert found["tables"].found.startswith("1 table to follow; left out: public.keyless: ")
    assert found["tables"].mend
    none = checks(source, globs="nothing.*")["tables"]
    assert none.ok
    assert "no table matches PGWAL_TABLES=nothing.*" in none.found
    source.sql(f"create publication {NAME} for all tables with (publish = 'insert')")
    found = checks(source)
    assert found["publication"].ok
    assert "not ours" in found["publication"].found
    assert "does not publish some of insert, update, delete, truncate nor partition roots" in found["publication"].found
    assert "public.keyless" in found["tables"].found


def test_a_slot_that_is_not_ours_or_lost(source: Source, make_server: Callable[..., Postgres]) -> None:
    source.sql("select pg_create_logical_replication_slot(%s, 'test_decoding')", f"h_{source.database}")
    found = checks(source)["slot"]
    assert not found.ok
    assert "test_decoding" in found.found
    with fresh_source(make_server(max_slot_wal_keep_size="1MB", max_wal_size="32MB", min_wal_size="32MB")) as small:
        make_slot(small)
        small.sql("create table noise (note text)")
        for _ in range(20):
            small.sql("insert into noise select repeat('x', 1000) from generate_series(1, 10000)")
            small.sql("select pg_switch_wal()")
            small.sql("checkpoint")
            found = checks(small)["slot"]
            if "is lost" in found.found:
                break
        assert not found.ok
        assert "resnapshot --all" in found.found
        with connect(small.dsn) as conn:
            state = slot.inspect(conn, f"h_{small.database}")
        assert state is not None
        assert state.lost


def test_old_transactions_block_only_a_slot_that_is_still_to_be_made(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_OLD_TRANSACTION", 0.2)
    source.sql("create table busy (n int)")
    make_slot(source)
    writer, reader = source.connect(autocommit=False), source.connect(autocommit=False)
    writer.execute("insert into busy values (1)")
    reader.execute("select 1")
    time.sleep(0.3)
    found = checks(source)["transactions"]
    assert found.ok
    assert f"pid {writer.info.backend_pid}" in found.found
    assert f"pid {reader.info.backend_pid}" not in found.found
    assert found.mend
    found = checks(source, slot_name=f"other_{source.database}")["transactions"]
    assert not found.ok
    assert "insert into busy" in found.found
    writer.commit()
    assert checks(source, slot_name=f"other_{source.database}")["transactions"].ok


def test_a_standby(make_server: Callable[..., Postgres], tmp_path: Path) -> None:
    with fresh_source(make_server()) as source:
        source.sql("create table item (id int primary key)")
        with standby_of(source, tmp_path / "standby") as standby:
            found = checks(standby)
            assert found["standby"].ok
            assert "hot_standby_feedback off" in found["standby"].found
            assert found["standby"].mend
            assert not found["publication"].ok
            assert "on the primary: CREATE PUBLICATION" in (found["publication"].mend or "")


def test_sizes_and_durations_are_for_people() -> None:
    assert [amounts.size(count) for count in (0, 1023, 1536, 5 << 20, 3 << 30, 7 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 kB",
        "5.0 MB",
        "3.0 GB",
        "7.0 TB",
    ]
    assert [amounts.duration(seconds) for seconds in (5, 300, 12240)] == ["5 s", "5 min", "3.4 h"]
