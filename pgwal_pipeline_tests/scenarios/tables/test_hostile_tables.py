"""Tables that are as odd as Postgres lets them be, each beside a sound one that is written to all the time: nothing stops."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pgwal_pipeline.values.relation import TableName, quote_ident
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.scenarios.tables.mapped_columns import assert_equal_by_spark
from pgwal_pipeline_tests.support import Source

# Names of columns that may stand, though the lake's own statements, Delta, Spark, delta-rs, Arrow or Polars use them.
INNER_NAMES = (
    *(
        "row",
        "row_key",
        "expected",
        "wanted",
        "found",
        "least",
        "most",
        "texts",
        "c0",
        "k0",
        "v",
        "t",
        "s",
        "k",
        "e",
        "p0",
        "lsn",
        "ordinal",
    ),
    *("key", "value", "lower", "version", "path", "partition", "oid_", "cmin_", "_pgwal", "pgwal_changes", "_pgwaltext", "pgwal_op"),
    *("_change_type", "_commit_version", "_commit_timestamp", "_metadata", "_rescued_data", "_corrupt_record", "__op", "_delta_log"),
    *("_incr_metric_", "_source_row_index", "_target_row_id_"),
    *("filePath", "rowIndexCol", "deletionVectorId", "__delta_rs_path", "__delta_rs_operation"),
    *("__delta_rs_source", "__delta_rs_update_predicate", "__index_level_0__", "__fragment_index", "__filename", "literal", "len"),
    *(
        "select",
        "all",
        "struct",
        "map",
        "array",
        "null",
        "true",
        "current_date",
        "*",
        "?",
        "1",
        "a.b",
        "a/b",
        "..",
        "%41",
        "%s",
        "${x}",
        "$1",
    ),
    *(
        "`",
        "``",
        "'",
        '"',
        "\\",
        "\\n",
        "\n",
        "\t",
        " ",
        "  x ",
        "a b",
        ",;{}()=",
        "é",
        "e\u0301",
        "ß",
        "🐘",
        "x" * 63,
        "🐘" * 15,
        "\u200b",
        "--",
        "/*",
    ),
)
# The names of tables and schemas that clash with folders of the lake, with each other on some file system, or with what tools make of them.
TABLES = (
    *(("_pgwal", "windows"), ("raw", "raw"), ("raw", "_pgwal"), ("current", "public"), ("snapshot", "_delta_log"), ("public", "_pgwal")),
    *(("public", "Case"), ("public", "case"), ("public", "CASE"), ("Public", "case"), ("public", ".."), ("public", "."), ("public", "a/b")),
    *(("public", "%2e%2e"), ("public", "%s"), ("public", '"'), ("public", "'"), ("public", "`"), ("public", "\\"), ("public", "a\nb")),
    *(
        ("public", "🐘" * 15),
        ("public", "x" * 63),
        ("public", "-5fx"),
        ("public", "_x"),
        ("public", "*"),
        ("public", "a,b"),
        ("a.b", "c.d"),
    ),
    *(
        ("public", "con"),
        ("public", "select"),
        ("public", "_change_data"),
        ("public", "e\u0301"),
        ("public", "é"),
        (" ", " "),
        ("..", ".."),
    ),
)


def named(names: tuple[str, ...]) -> str:
    return ", ".join(f"{quote_ident(name)} text" for name in names)


def names_once() -> tuple[str, ...]:
    """Those of which no two differ only in case."""
    return tuple({name.lower(): name for name in INNER_NAMES}.values())


@contextmanager
def under_load(source: Source) -> Iterator[None]:
    """The table `sound`, written to by a thread of its own until the block ends."""
    source.sql("CREATE TABLE sound (id int PRIMARY KEY, v text, n int)")
    ended, failures = threading.Event(), list[BaseException]()
    writer = source.connect()

    def write() -> None:
        number = 0
        try:
            while not ended.wait(0.01):
                number += 1
                with writer.transaction():
                    writer.execute("INSERT INTO sound VALUES (%s, md5(%s::text), 0)", [number, number])
                    writer.execute("UPDATE sound SET n = n + 1 WHERE id %% 7 = %s %% 7", [number])
                    writer.execute("DELETE FROM sound WHERE id = %s - 50", [number])
        except BaseException as error:  # noqa: BLE001 - told by the test's thread
            failures.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not failures


def nothing_stuck(source: Source, pipeline: Pipeline) -> None:
    """The sound table is what it is in the source, and the slot keeps nothing that is drained."""
    pipeline.sync()
    pipeline.assert_current("public.sound")
    assert pipeline.ledger.tables()[TableName("public", "sound")].state == "ready"
    kept = "SELECT pg_wal_lsn_diff(pg_current_wal_flush_lsn(), confirmed_flush_lsn)::int8 FROM pg_replication_slots WHERE slot_name = %s"
    assert source.value(kept, pipeline.settings.slot) < 1 << 20


def rounds(short: int) -> list[object]:
    return [pytest.param(short, id="some"), pytest.param(20, id="twenty", marks=pytest.mark.soak)]


@pytest.mark.parametrize("count", rounds(1))
def test_columns_with_names_that_others_use_inside(count: int, source: Source, pipeline: Pipeline, spark: object) -> None:
    """Every name as a column, in a keyed table, in the keys of two, and in a bag; values that are not sent, and keys that change."""
    names = names_once()
    shapes = {
        "keyed": f"id int PRIMARY KEY, {named(names)}",
        "keys": f"id int, {named(names)}, PRIMARY KEY (id, {', '.join(map(quote_ident, names[::4][:31]))})",
        "others": f"id int, {named(names)}, PRIMARY KEY ({', '.join(map(quote_ident, names[2::4][:31]))}, id)",
        "bag": f"id int, {named(names)}",
    }
    if count < 20:
        shapes = {table: shapes[table] for table in ("keyed", "bag")}
    quoted = ", ".join(map(quote_ident, names))
    with under_load(source):
        for table, columns in shapes.items():
            source.sql(f"CREATE TABLE {table} ({columns})")
        source.sql("ALTER TABLE bag REPLICA IDENTITY FULL")
        # Values of the first of them are stored out of line, so that an update does not send them.
        source.sql(f"ALTER TABLE keyed ALTER {quote_ident(names[0])} SET STORAGE EXTERNAL")
        for number in range(count):
            for table in shapes:
                values = ", ".join(f"'{position} ' || i" for position in range(len(names)))
                source.sql(
                    f"INSERT INTO {table} (id, {quoted}) SELECT i, {values} FROM generate_series({number * 10}, {number * 10 + 9}) i"
                )
                for name in names[number :: count * 2]:
                    source.sql(f"UPDATE {table} SET {quote_ident(name)} = 'changed {number}' WHERE id % 3 = 0")
                source.sql(f"DELETE FROM {table} WHERE id % 7 = 1")
            source.sql(f"UPDATE keyed SET {quote_ident(names[0])} = repeat(id::text, 3000) WHERE id % 5 = 0")
            source.sql(f"UPDATE keyed SET {quote_ident(names[1])} = 'beside {number}'")
            source.sql(f"UPDATE keyed SET id = -id WHERE id % 5 = 0 AND id > {number * 5}")
            assert pipeline.sync().errors == {}
    nothing_stuck(source, pipeline)
    for table in shapes:
        assert pipeline.ledger.tables()[TableName("public", table)].state == "ready"
        assert_equal_by_spark(source, pipeline, spark, table)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(8))
def test_each_inner_name_by_itself(part: int, source: Source, pipeline: Pipeline, spark: object) -> None:
    """Each name in a table of its own, as a column beside the key and as the key."""
    names = INNER_NAMES[part::8]
    with under_load(source):
        for number, name in enumerate(names):
            source.sql(f"CREATE TABLE beside_{number} (id int PRIMARY KEY, {quote_ident(name)} text)")
            source.sql(f"CREATE TABLE key_{number} ({quote_ident(name)} text PRIMARY KEY, n int)")
        for _ in range(3):
            for number, name in enumerate(names):
                source.sql(f"INSERT INTO beside_{number} SELECT coalesce(max(id), 0) + 1, 'x' FROM beside_{number}")
                source.sql(f"UPDATE beside_{number} SET {quote_ident(name)} = id::text || 'y'")
                source.sql(f"INSERT INTO key_{number} SELECT 'k' || count(*), 1 FROM key_{number}")
                source.sql(f"UPDATE key_{number} SET {quote_ident(name)} = {quote_ident(name)} || 'k', n = n + 1")
            assert pipeline.sync().errors == {}
    nothing_stuck(source, pipeline)
    for number in range(len(names)):
        assert_equal_by_spark(source, pipeline, spark, f"beside_{number}")
        assert_equal_by_spark(source, pipeline, spark, f"key_{number}")


@pytest.mark.parametrize(
    ("tables", "count"), [pytest.param(TABLES[::8], 1, id="some"), pytest.param(TABLES, 20, id="all", marks=pytest.mark.soak)]
)
def test_tables_with_names_that_clash_with_folders_and_with_each_other(
    tables: tuple[tuple[str, str], ...], count: int, source: Source, pipeline: Pipeline
) -> None:
    known = [str(TableName(*table)) for table in tables]
    with under_load(source):
        for schema in {schema for schema, _ in tables}:
            source.sql(f"CREATE SCHEMA IF NOT EXISTS {quote_ident(schema)}")
        for table in known:
            source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY, v text)")
        for number in range(count):
            for place, table in enumerate(known):
                source.sql(f"INSERT INTO {table} VALUES ({number}, '{place}')")
                source.sql(f"UPDATE {table} SET v = v || {number} WHERE id % 2 = 0")
            assert pipeline.sync().errors == {}
    nothing_stuck(source, pipeline)
    pipeline.assert_current(*known)


@pytest.mark.parametrize(
    ("columns", "count"), [pytest.param(1600, 1, id="some"), pytest.param(1600, 20, id="twenty", marks=pytest.mark.soak)]
)
def test_a_table_of_1600_columns(columns: int, count: int, source: Source, pipeline: Pipeline) -> None:
    with under_load(source):
        kinds = ("int", "bool", "text", "int2", "date")
        defined = ", ".join(f"c{number} {kinds[number % len(kinds)]}" for number in range(1, columns))
        source.sql(f"CREATE TABLE wide (id int PRIMARY KEY, {defined})")
        for number in range(count):
            source.sql(
                f"INSERT INTO wide (id, c{1 + number}, c1599) SELECT i, NULL, NULL FROM generate_series({number * 5}, {number * 5 + 4}) i"
            )
            source.sql("UPDATE wide SET c5 = id, c1595 = id, c7 = 'x' || id, c1597 = 'y'")
            source.sql("DELETE FROM wide WHERE id % 5 = 1")
            assert pipeline.sync().errors == {}
    nothing_stuck(source, pipeline)
    pipeline.assert_current("public.wide")


def _added(number: int) -> list[str]:
    kind = ("int", "timestamp", "text", "numeric(10,2)", "bool")[number % 5]
    return [f"ALTER TABLE ddl ADD COLUMN a{number} {kind}", f"INSERT INTO ddl (id) VALUES ({number})"]


def _renamed(number: int) -> list[str]:
    return [
        f"INSERT INTO ddl (id) VALUES ({number})",
        f"ALTER TABLE ddl RENAME COLUMN a{number - 1} TO r{number}",
    ]


def _retyped(number: int) -> list[str]:
    return [f"ALTER TABLE ddl ALTER COLUMN n TYPE {('bigint', 'text', 'numeric')[number // 4 % 3]} USING 7", "UPDATE ddl SET v = 'x'"]


def _dropped(number: int) -> list[str]:
    return ["UPDATE ddl SET v = v || 'y'", f"ALTER TABLE ddl DROP COLUMN r{number - 2}", f"INSERT INTO ddl (id) VALUES ({number})"]


_DDL: tuple[Callable[[int], list[str]], ...] = (_added, _renamed, _retyped, _dropped)


@pytest.mark.parametrize("count", rounds(4))
def test_a_table_whose_definition_changes_in_every_transaction(count: int, source: Source, pipeline: Pipeline) -> None:
    """Added, renamed, retyped and dropped columns, a few transactions between two syncs and more while they run."""
    with under_load(source):
        source.sql("CREATE TABLE ddl (id int PRIMARY KEY, v text, n int)")
        source.sql("INSERT INTO ddl VALUES (-1, 'first', 0)")
        number, ended = 0, threading.Event()
        alterer = source.connect(autocommit=False)
        failures = list[BaseException]()

        def alter() -> None:
            nonlocal number
            try:
                while not ended.wait(0.15):
                    for statement in _DDL[number % len(_DDL)](number):
                        alterer.execute(statement.encode())
                    alterer.commit()
                    number += 1
            except BaseException as error:  # noqa: BLE001 - told by the test's thread
                failures.append(error)

        thread = threading.Thread(target=alter)
        thread.start()
        try:
            for _ in range(count):
                pipeline.sync()
        finally:
            ended.set()
            thread.join()
    assert not failures
    assert number > count
    nothing_stuck(source, pipeline)
    # Once it is left alone it is followed again, by itself or on demand.
    if pipeline.ledger.tables()[TableName("public", "ddl")].state == "error":
        pipeline.resnapshot("public.ddl")
    for _ in range(2):
        pipeline.sync()
    assert pipeline.sync().errors == {}
    pipeline.assert_current("public.ddl")
