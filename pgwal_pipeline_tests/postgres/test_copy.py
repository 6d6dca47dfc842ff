"""Reading a table in chunks: every row once, whatever the key; every value as its output function writes it."""

import struct
import threading
from typing import Any

import pytest

from pgwal_pipeline.messages.errors import SourceUnavailable, TableError
from pgwal_pipeline.postgres import catalog, copy, dsn
from pgwal_pipeline.postgres.copy import ChunkBounds, ChunkRead, TableChanged, plan_chunks
from pgwal_pipeline.postgres.table_locks import TableLocked
from pgwal_pipeline_tests.postgres.reading import WHOLE, check_chunks, fields_of, plan, read, relation_of
from pgwal_pipeline_tests.support import Source, copy_messages, read_chunk, wait_for

# ---- values

TYPES = """
bool bool | int2 int2 | int4 int4 | int8 int8 | oid oid | float4 float4 | float8 float8 | numeric numeric | numeric_s numeric(10,3)
money money | text text | varchar varchar(20) | char char(6) | qchar "char" | name name | bytea bytea | uuid uuid
json json | jsonb jsonb | xml xml
date date | time time | timetz timetz | timestamp timestamp(3) | timestamptz timestamptz | interval interval
inet inet | cidr cidr | macaddr macaddr | bit bit(5) | varbit varbit | point point | box box | tsvector tsvector | pg_lsn pg_lsn
ints int[] | texts text[] | chars char(3)[] | boxes box[] | numerics numeric(5,2)[] | times timestamptz[]
mood mood | moods mood[] | dmood dmood | dint dint | dchar dchar | darr darr | dcomp dcomp | comp comp | comps comp[] | dints dint[]
int4range int4range | tstzrange tstzrange | ranges int4multirange | int2vector int2vector | regclass regclass
"""
VALUES = {
    "bool": ["true", "false"],
    "int2": ["-32768", "7"],
    "int4": ["-2147483648"],
    "int8": ["9223372036854775807"],
    "oid": ["4294967295"],
    "float4": ["0.1", "NaN", "-Infinity", "1e30"],
    "float8": ["0.30000000000000004", "NaN", "Infinity", "-0", "1e300"],
    "numeric": ["123456789012345678901234567890.123456789", "NaN", "0.000000000000000001", "1e100"],
    "numeric_s": ["1.5"],
    "money": ["1234567.891", "-5"],
    "text": ["", "a\nb\tc\\d", "ünïcödé 🐘", "NULL", "\\N"],
    "varchar": ["x "],
    "char": ["ab", ""],
    "qchar": ["x", ""],
    "name": ["a name"],
    "bytea": ["\\x00ff5c", ""],
    "uuid": ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11"],
    "json": [' {"a" : 1,  "a":2} '],
    "jsonb": [' {"b" : 1,  "a":2} '],
    "xml": ["<a>é</a>"],
    "date": ["2024-02-29", "infinity", "0044-03-15 BC", "20000-01-01"],
    "time": ["24:00:00", "01:02:03.000004"],
    "timetz": ["01:02:03+05:30"],
    "timestamp": ["2024-02-29 01:02:03.1239", "-infinity"],
    "timestamptz": ["2024-02-29 01:02:03.123456+05", "infinity", "0001-01-01 00:00:00+00 BC"],
    "interval": ["1 year -2 mons 3 days -04:05:06.7"],
    "inet": ["192.168.0.1", "192.168.0.0/24", "::1"],
    "cidr": ["10.0.0.0/8"],
    "macaddr": ["08-00-2b-01-02-03"],
    "bit": ["10101"],
    "varbit": ["", "1"],
    "point": ["(1.5,-2)"],
    "box": ["(0,0),(1,1)"],
    "tsvector": ["b:2 a:1"],
    "pg_lsn": ["16/B374D848"],
    "ints": ["{}", "{1,NULL,3}", "{{1,2},{3,4}}", "[0:1]={5,6}"],
    "texts": ['{"",NULL,"NULL","a,b","q\\"x"}'],
    "chars": ["{a,bc}"],
    "boxes": ["{(0,0),(1,1);(2,2),(3,3)}"],
    "numerics": ["{1,2.5}"],
    "times": ['{"2024-01-01 00:00:00+02",infinity}'],
    "mood": ["sad", "o k"],
    "moods": ['{sad,"o k"}'],
    "dmood": ["o k"],
    "dint": ["5"],
    "dchar": ["x"],
    "darr": ["{1,2}"],
    "dcomp": ['(1,"a b")', "(,)"],
    "comp": ['(1,"a,b")', "(,)"],
    "comps": ['{"(1,x)",NULL}'],
    "dints": ["{5,6}"],
    "int4range": ["[1,5]", "empty", "(,)"],
    "tstzrange": ["[2024-01-01 00:00:00+02,)"],
    "ranges": ["{[1,2],[5,6]}"],
    "int2vector": ["1 2 3"],
    "regclass": ["pg_class"],
}


@pytest.mark.matrix
def test_values_are_the_output_functions_texts(source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create type mood as enum ('sad', 'o k'); create type comp as (a int, b text)")
    source.sql("create domain dmood as mood; create domain dint as int check (value > 0); create domain dchar as char(4)")
    source.sql("create domain darr as int[]; create domain dcomp as comp")
    columns = [entry.strip().split(" ", 1) for line in TYPES.strip().splitlines() for entry in line.split("|")]
    assert {name for name, _ in columns} == set(VALUES)
    has_xml = source.value("select count(*) from pg_settings where name = 'xmloption'") and _can(source, "select '<a/>'::xml")
    columns = [(name, kind) for name, kind in columns if name != "xml" or has_xml]
    source.sql(f"create table t ({', '.join(f'c_{name} {kind}' for name, kind in columns)})")
    source.sql("alter table t replica identity full")
    for name, _ in columns:
        for value in VALUES[name]:
            source.sql(f"insert into t (c_{name}) values (%s)", value)
    source.sql("insert into t default values")
    relation = relation_of(source)
    with dsn.connect(source.dsn) as conn:
        # format writes a value with its type's output function, and null as nothing.
        expected = conn.execute(
            ("select " + ", ".join(f"case when c_{name} is distinct from null then format('%s', c_{name}) end" for name, _ in columns))
            .replace("%", "%%")
            .encode()
            + b" from public.t where %s",
            [True],
        ).fetchall()
    found = read(source, relation)
    assert sorted(found, key=str) == sorted(expected, key=str)
    texts = {text for row in found for text in row if text is not None}
    assert {"t", "f", "ab    ", "192.168.0.1", "x   ", "$1,234,567.89", "10 mons 3 days -04:05:06.7"} <= texts


def _can(source: Source, statement: str) -> bool:
    try:
        source.sql(statement)
    except Exception:  # noqa: BLE001
        return False
    return True


@pytest.mark.matrix
def test_values_of_extensions(source_matrix: Source) -> None:
    source = source_matrix
    extensions = [
        name
        for name in ("citext", "hstore", "ltree", "vector")
        if source.sql("select 1 from pg_available_extensions where name = %s", name)
    ]
    if not extensions:
        pytest.skip("no extensions at hand")
    values = {"citext": "MiXed", "hstore": '"a"=>"1", "b"=>NULL', "ltree": "Top.Science", "vector": "[1,2.5,3]"}
    source.sql("create schema ext")
    for name in extensions:
        source.sql(f"create extension {name} schema ext")
    source.sql(f"create table t (id int primary key, {', '.join(f'{name} ext.{name}' for name in extensions)})")
    source.sql("insert into t (id) values (2)")
    source.sql(f"insert into t values (1, {', '.join(['%s'] * len(extensions))})", *(values[name] for name in extensions))
    assert read(source, relation_of(source)) == [("2", *(None for _ in extensions)), ("1", *(values[name] for name in extensions))]


# ---- chunks


def test_how_many_chunks(source: Source) -> None:
    source.sql("create table t (k int primary key, v text)")
    relation = relation_of(source)
    assert plan(source, relation, 1) == [WHOLE]  # empty
    source.sql("insert into t select i from generate_series(1, 10) i; analyze t")
    assert plan(source, relation, 11) == [WHOLE]
    assert plan(source, relation, 10) == [WHOLE]  # just one chunk, not one and an empty one
    assert plan(source, relation, 5) == [ChunkBounds(None, ("5",)), ChunkBounds(("5",), None)]
    assert plan(source, relation, 9) == [ChunkBounds(None, ("9",)), ChunkBounds(("9",), None)]
    assert len(plan(source, relation, 1)) == 10
    source.sql("delete from t where k > 2")
    assert plan(source, relation, 5) == [WHOLE]  # the estimate is too high
    source.sql("create table bag (v int); alter table bag replica identity full")
    source.sql("insert into bag select i from generate_series(1, 100) i; analyze bag")
    assert plan(source, relation_of(source, "bag"), 10) == [WHOLE]


def test_a_small_table_costs_one_estimate(source: Source) -> None:
    source.sql("create table t (k int primary key); insert into t values (1)")
    relation = relation_of(source)
    before = _scans(source)
    with dsn.connect(source.dsn) as conn:
        assert list(plan_chunks(conn, relation, 10_000)) == [WHOLE]  # the planner takes it for ten pages
        conn.execute("select pg_stat_force_next_flush()")
    assert _scans(source) == before


def _scans(source: Source) -> int:
    source.sql("select pg_stat_force_next_flush()")
    return source.value("select seq_scan + coalesce(idx_scan, 0) from pg_stat_user_tables where relname = 't'")


def test_planning_reads_each_key_about_once(source: Source) -> None:
    source.sql("create table t (k int primary key, v text)")
    source.sql("insert into t select i, repeat('x', 100) from generate_series(1, 20000) i")
    source.sql("vacuum analyze t")
    relation = relation_of(source)
    with dsn.connect(source.dsn) as conn:
        before = _index_reads(source)
        chunks = list(plan_chunks(conn, relation, 500))
    assert len(chunks) == 40
    wait_for(lambda: _index_reads(source) - before >= 19_000, what="the statistics")
    assert _index_reads(source) - before < 22_000


def _index_reads(source: Source) -> int:
    source.sql("select pg_stat_clear_snapshot()")
    return source.value("select idx_tup_read from pg_stat_user_indexes where indexrelname = 't_pkey'")


def test_rows_that_come_and_go_while_it_is_planned(source: Source) -> None:
    source.sql("create table t (k int primary key); insert into t select i * 10 from generate_series(1, 100) i; analyze t")
    relation = relation_of(source)
    with dsn.connect(source.dsn) as conn:
        chunks = []
        for number, chunk in enumerate(plan_chunks(conn, relation, 10)):
            chunks.append(chunk)
            source.sql("insert into t values (%s); ", number * 10 + 5)
            source.sql("delete from t where k = %s", number * 100 + 50)
        assert conn.info.transaction_status == 0
    rows = [int(row[0] or 0) for chunk in chunks for row in read(source, relation, chunk)]
    assert sorted(rows) == [row[0] for row in source.sql("select k from t order by k")]


# ---- what is read


def test_partitions_and_heirs(source: Source) -> None:
    source.sql("create table root (k int primary key, v int) partition by hash (k)")
    for part in range(4):
        source.sql(f"create table leaf{part} partition of root for values with (modulus 4, remainder {part})")
    source.sql("insert into root select i, i from generate_series(1, 1000) i; analyze root")
    relation = relation_of(source, "root", "with (publish_via_partition_root)")
    check_chunks(source, relation)
    source.sql("create table parent (k int primary key); create table heir (primary key (k)) inherits (parent)")
    source.sql("insert into parent values (1); insert into heir values (2)")
    assert read(source, relation_of(source, "parent")) == [("1",)]
    assert read(source, relation_of(source, "heir")) == [("2",)]


@pytest.mark.matrix
def test_column_lists_filters_and_generated_columns(source_matrix: Source) -> None:
    source = source_matrix
    version = source.value("show server_version_num")
    source.sql("create table t (id int primary key, secret text, v int, g int generated always as (v * 2) stored)")
    source.sql("insert into t select i, 'secret', nullif(i % 4, 0) from generate_series(1, 8) i")
    if version >= "150000":
        source.sql("create publication p for table t (v, id) where (id > 2 and (v < 3 or v is null))")
        with dsn.connect(source.dsn) as conn:
            (table,) = catalog.published_tables(conn, "p")
        assert table.row_filter is not None
        expected = [("4", None), ("5", "1"), ("6", "2"), ("8", None)]
        assert sorted(read(source, table.relation, row_filter=table.row_filter)) == expected
        assert sorted(read(source, table.relation, ChunkBounds(("4",), ("6",)), row_filter=table.row_filter)) == expected[1:3]
    generated = version >= "180000"
    relation = relation_of(source, "t", "with (publish_generated_columns = stored)" if generated else "")
    assert read(source, relation)[0] == ("1", "secret", "1", *(["2"] if generated else []))


def test_no_columns_no_rows(source: Source) -> None:
    source.sql("create table t (); insert into t default values; insert into t default values")
    assert read(source, relation_of(source)) == [(), ()]
    source.sql("create table empty (k int primary key)")
    assert read(source, relation_of(source, "empty")) == []


def test_a_message_is_a_row_and_some_megabytes_come_at_once(source: Source) -> None:
    source.sql("create table t (k int primary key, v text)")
    source.sql("insert into t select i, repeat(md5(i::text), 20) from generate_series(1, 30000) i")
    handed: list[tuple[bytearray, list[int]]] = []
    done = read_chunk(source.dsn, relation_of(source), WHOLE, lambda rows, lengths: handed.append((rows, lengths)))
    assert done.rows == 30_000
    assert done.bytes == sum(len(rows) for rows, _ in handed)
    assert len(handed) == pytest.approx(done.bytes / (4 << 20), abs=1.01)
    assert all(len(rows) == sum(lengths) < (4 << 20) + 1000 for rows, lengths in handed)
    assert sum(len(lengths) for _, lengths in handed) == done.rows + 1
    assert all(rows[:2] == b"\0\x02" for rows, lengths in handed[1:] if lengths[0] > 2)
    assert handed[-1][0][-2:] == b"\xff\xff"


def test_types_in_their_binary_form(source: Source) -> None:
    source.sql("create domain count as int4; create table t (k int8 primary key, c count, d date, v text)")
    source.sql("insert into t values (1, 2, '2000-01-02', 'x'), (2, null, null, null)")
    _, rows = copy_messages(source.dsn, relation_of(source), WHOLE, binary={20, 23})
    fields = struct.pack(">hiqii", 4, 8, 1, 4, 2) + struct.pack(">i", 10) + b"2000-01-02" + struct.pack(">i", 1) + b"x"
    assert rows[0][19:] == fields
    assert rows[1] == struct.pack(">hiqiii", 4, 8, 2, -1, -1, -1)


def test_what_a_read_sees(source: Source) -> None:
    source.sql("create table t (k int primary key); insert into t values (1)")
    relation = relation_of(source)
    open_one = source.connect(autocommit=False)
    open_one.execute("insert into t values (2)")
    xid = open_one.execute("select txid_current()").fetchone()
    assert xid is not None
    source.sql("create table later ()")
    before = source.value("select pg_current_wal_insert_lsn() - '0/0'")
    done, blocks = copy_messages(source.dsn, relation, WHOLE)
    assert fields_of(blocks) == [("1",)]
    xmin, xmax, running = done.snapshot.split(":")
    assert str(xid[0]) in running.split(",")
    assert int(xmin) <= xid[0] < int(xmax)
    assert done.insert_lsn >= before
    assert isinstance(done, ChunkRead)
    # Another one's snapshot, instead of its own.
    holder = source.connect(autocommit=False)
    holder.execute("set transaction isolation level repeatable read")
    exported = holder.execute("select pg_export_snapshot()").fetchone()
    open_one.commit()
    assert exported is not None
    assert read(source, relation, exported_snapshot=exported[0]) == [("1",)]
    assert len(read(source, relation)) == 2
    holder.rollback()
    with pytest.raises(SourceUnavailable, match="is gone, as the session"):
        read(source, relation, exported_snapshot=exported[0])


def test_the_lsn_is_of_after_the_read(source: Source) -> None:
    """TRUNCATE is seen whenever it is done: a table emptied after the snapshot, before the read, must be covered by the LSN."""
    source.sql("create table t (k int primary key, v text); insert into t select i, repeat('x', 1000) from generate_series(1, 5000) i")
    written: list[int] = []

    def write(*_: object) -> None:
        if not written:
            source.sql("create table other as select i from generate_series(1, 1000) i")
            written.append(int(source.value("select pg_current_wal_insert_lsn() - '0/0'")))

    done = read_chunk(source.dsn, relation_of(source), WHOLE, write)
    assert done.insert_lsn >= written[0]


# ---- what cannot be read


def test_rights(source: Source) -> None:
    source.sql("drop role if exists reader; create role reader login")
    source.sql(
        "create table t (k int primary key, v text, owner text); insert into t select i, 'v', 'x' from generate_series(1, 100) i; analyze t"
    )
    relation = relation_of(source)
    narrow = relation_of(source, "t")
    theirs = Source(source.server, source.database, source.dsn_of("reader"))
    try:
        for attempt in (lambda: read(theirs, relation), lambda: plan(theirs, relation, 10)):
            with pytest.raises(TableError, match=r"GRANT SELECT ON public\.t TO reader, then `pgwal resnapshot 'public\.t'`\.$") as caught:
                attempt()
            assert caught.value.table == "public.t"
            assert not isinstance(caught.value, TableChanged)
        source.sql("grant select on t to reader")
        assert len(read(theirs, relation)) == 100
        # A policy that would hide rows is found, even where it hides none of these.
        source.sql("alter table t enable row level security; create policy mine on t using (owner = 'x')")
        for attempt in (lambda: read(theirs, relation), lambda: plan(theirs, relation, 10)):
            with pytest.raises(TableError, match=r"ALTER ROLE reader BYPASSRLS, then `pgwal resnapshot 'public\.t'`\.$"):
                attempt()
        assert len(read(source, narrow)) == 100
        source.sql("alter role reader bypassrls")
        assert len(read(theirs, relation)) == 100
    finally:
        source.sql("drop owned by reader; drop role reader")


@pytest.mark.parametrize(
    "change",
    [
        "alter table t alter k type uuid using gen_random_uuid()",
        "alter table t alter p type date using null",
        "alter table t rename to u; create table t (k int, v text, p int)",
        "drop table t",
    ],
)
def test_a_table_that_changes_while_its_read_waits(source: Source, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the catalog says was asked before, and the statement meets the table as it is when it has got its lock."""
    source.sql("create domain price as numeric(5, 2); create table t (k int primary key, v varchar(5), p price); insert into t values (1)")
    relation = relation_of(source)
    fields, ends = copy._fields, []

    def changed(*asked: Any) -> list[str]:
        found = fields(*asked)
        other = source.connect(autocommit=False)
        other.execute(change.encode())
        ends.append(threading.Timer(0.3, other.commit))
        ends[0].start()
        return found

    monkeypatch.setattr(copy, "_fields", changed)
    with pytest.raises(TableChanged, match=r"public\.t"):
        read(source, relation)
    ends[0].join()


def test_a_table_that_changed(source: Source) -> None:
    source.sql("create domain price as numeric(5, 2)")
    source.sql("create table t (k int primary key, v varchar(5), p price, a int[])")
    relation = relation_of(source)
    for change in (
        "alter table t rename to u",
        "alter table t rename v to w",
        "alter table t drop v",
        "alter table t alter v type text",
        "alter table t alter v type varchar(6)",
        "alter table t alter p type numeric(6, 2)",
        "alter table t alter a type int8[]",
        "drop table t; create table t (k int primary key, v varchar(5), p price, a int[])",
    ):
        with dsn.connect(source.dsn) as conn:
            conn.execute("set search_path = public")
            conn.execute("begin")
            for statement in change.split(";"):
                conn.execute(statement.encode())
            conn.execute("commit")
        with pytest.raises(TableChanged, match=r"public\.t") as caught:
            read(source, relation)
        assert caught.value.transient
        source.sql("drop table if exists t, u; create table t (k int primary key, v varchar(5), p price, a int[])")
        relation = relation_of(source)
    # What says the same is the same.
    source.sql("alter table t alter p type numeric(5, 2); alter table t add w int; alter domain price rename to cost")
    assert read(source, relation) == []
    source.sql("alter table t drop constraint t_pkey")
    with pytest.raises(TableChanged, match="lost the index"):
        read(source, relation, ChunkBounds(None, ("1",)))


def test_a_read_that_breaks_off(source: Source) -> None:
    source.sql("create table t (k int primary key, v text); insert into t select i, repeat('x', 1000) from generate_series(1, 20000) i")
    relation = relation_of(source)

    def kill(*_: object) -> None:
        source.sql("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'pgwal snapshot'")

    with pytest.raises(SourceUnavailable, match=r"reading table public\.t"):
        read_chunk(source.dsn, relation, WHOLE, kill)

    def fail(*_: object) -> None:
        raise KeyError("the lake is full")

    with pytest.raises(KeyError):
        read_chunk(source.dsn, relation, WHOLE, fail)
    wait_for(
        lambda: source.value("select count(*) from pg_stat_activity where application_name = 'pgwal snapshot'") == 0,
        what="the session to end",
    )


def test_a_locked_table_does_not_hold_a_snapshot_for_ever(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copy, "_SETTINGS", copy._SETTINGS.replace("60s", "100ms"))
    source.sql("create table t (k int primary key)")
    relation = relation_of(source)
    holder = source.connect(autocommit=False)
    holder.execute("lock table t")
    with pytest.raises(TableLocked, match="another session"):
        read(source, relation)


def test_other_threads_run_while_rows_are_awaited(source: Source) -> None:
    source.sql("create table t (k int primary key); insert into t values (1)")
    source.sql("create function slow(int) returns bool language plpgsql as 'begin perform pg_sleep(0.5); return true; end'")
    relation = relation_of(source)
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    read(source, relation, row_filter="public.slow(k)")
    done.set()
    thread.join()
    assert ticks > 10
