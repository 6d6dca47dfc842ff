from pathlib import Path

import pytest

from pgwal_pipeline import known_tables
from pgwal_pipeline.known_tables import KnownColumn, KnownTable
from pgwal_pipeline.messages.errors import SettingError, SourceUnavailable
from pgwal_pipeline.postgres.publication import ensure
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.support import Source

NOBODY = "postgresql://me:secret@127.0.0.1:1/nowhere"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def settings(source: Source, **values: str) -> Settings:
    return Settings.from_environment({}, source_dsn=source.dsn, **values)


def names(tables: tuple[KnownTable, ...]) -> list[str]:
    return [str(known.table) for known in tables]


def test_text_and_back() -> None:
    tables = (
        KnownTable(TableName("Shop", 'or"der'), (KnownColumn("id", "bigint", "long", False), KnownColumn("ü", "text", "string")), ("id",)),
        KnownTable(TableName("public", "bag"), (), (), TableName("public", "sack")),
    )
    assert known_tables.load(known_tables.dump(tables)) == tables


def test_before_there_is_a_publication_the_tables_are_those_it_will_hold(source: Source) -> None:
    source.sql("CREATE SCHEMA shop")
    source.sql("CREATE TABLE shop.orders (id bigint PRIMARY KEY, total numeric(10,2) NOT NULL, tags text[], doc jsonb, at timestamptz)")
    source.sql("CREATE TABLE shop.log (line text)")
    source.sql("CREATE TABLE public.other (id int PRIMARY KEY)")
    (orders,) = known_tables.fetch(settings(source, tables="shop.*"))
    assert orders.table == TableName("shop", "orders")
    assert orders.key == ("id",)
    assert [(column.name, column.type, column.lake_type, column.nullable) for column in orders.columns] == [
        ("id", "bigint", "long", False),
        ("total", "numeric(10,2)", "decimal(10,2)", False),
        ("tags", "text[]", "array<string>", True),
        ("doc", "jsonb", "string", True),
        ("at", "timestamp with time zone", "timestamp", True),
    ]


def test_a_folder_that_cannot_be_written_hinders_nothing(source: Source, home: Path) -> None:
    """As DAGSTER_HOME is in a container with a read-only root file system."""
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    home.write_text("not a folder")
    assert names(known_tables.refresh(settings(source))) == ["public.a"]
    assert known_tables.remembered(settings(source)) == ()


def test_a_publication_of_ours_and_what_will_join_it(source: Source) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    with source.connect() as conn:
        ensure(conn, "pgwal", "*.*")
    source.sql("CREATE TABLE b (id int PRIMARY KEY)")
    assert names(known_tables.fetch(settings(source))) == ["public.a", "public.b"]


def test_a_publication_of_somebody_else_is_taken_as_it_is(source: Source) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    source.sql("CREATE TABLE b (id int PRIMARY KEY)")
    source.sql("CREATE PUBLICATION theirs FOR TABLE a")
    assert names(known_tables.fetch(settings(source, publication="theirs"))) == ["public.a"]


def test_remembered_when_the_source_is_down(source: Source, home: Path) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY)")
    here = settings(source)
    assert known_tables.remembered(here) == ()
    tables = known_tables.refresh(here)
    assert names(tables) == ["public.a"]
    assert known_tables.remembered(here) == tables
    # Where they stand in the lake, which the source does not know.
    (moved,) = known_tables.refresh(here, {tables[0].oid: TableName("public", "z")})
    assert moved.location == TableName("public", "z")
    assert known_tables.refresh(here) == known_tables.remembered(here) == (moved,)
    source.sql("ALTER TABLE a RENAME TO b; CREATE TABLE z (id int PRIMARY KEY)")
    b, z = known_tables.refresh(here)
    assert (b.table.name, b.location.name, z.table.name, z.location.name) == ("b", "z", "z", f"z_{z.oid}")
    source.sql("DROP TABLE z; ALTER TABLE b RENAME TO a")
    (kept,) = (home / "pgwal").iterdir()
    assert kept == known_tables.state_path(here)
    kept.write_text('{"format": 0, "tables": []}')
    assert known_tables.remembered(here) == ()


def test_each_source_and_publication_has_a_file_of_its_own(source: Source) -> None:
    paths = {
        known_tables.state_path(settings(source)),
        known_tables.state_path(settings(source, publication="other")),
        known_tables.state_path(Settings(source_dsn=NOBODY)),  # pyright: ignore[reportArgumentType]
    }
    assert len(paths) == 3
    assert "secret" not in " ".join(map(str, paths))


def test_without_a_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGSERVICE", "PGDATABASE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SettingError, match="PGWAL_SOURCE_DSN is not set"):
        known_tables.refresh(Settings())
    with pytest.raises(SourceUnavailable, match="cannot be reached"):
        known_tables.refresh(Settings(source_dsn=NOBODY))  # pyright: ignore[reportArgumentType]


def test_the_default_home_is_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DAGSTER_HOME")
    monkeypatch.chdir(tmp_path)
    path = known_tables.state_path(Settings(source_dsn=NOBODY))  # pyright: ignore[reportArgumentType]
    assert path.parent == tmp_path / ".dagster" / "pgwal"


def test_comments_are_kept_and_follow_the_source(source: Source) -> None:
    source.sql("CREATE TABLE a (id int PRIMARY KEY, dropped int, total int, long int)")
    source.sql("COMMENT ON TABLE a IS 'All of a; postgres://me:secret@host/db'; COMMENT ON COLUMN a.total IS 'in cents'")
    source.sql("COMMENT ON COLUMN a.dropped IS 'gone'; ALTER TABLE a DROP COLUMN dropped")
    source.sql("CREATE TABLE b (id int PRIMARY KEY); CREATE INDEX a_total ON a (total); COMMENT ON INDEX a_total IS 'no table'")
    source.sql(f"COMMENT ON COLUMN a.long IS '{'ü' * 5000}'")
    here = settings(source)
    a, b = known_tables.refresh(here)
    assert a.comment == "All of a; postgres://me:secret@host/db"
    assert {column.name: column.comment for column in a.columns} == {"id": None, "total": "in cents", "long": "ü" * 999 + "…"}
    assert (b.comment, b.columns[0].comment) == (None, None)
    assert known_tables.remembered(here) == (a, b)
    source.sql("COMMENT ON TABLE a IS NULL; COMMENT ON COLUMN a.total IS 'in francs'")
    a, _ = known_tables.refresh(here)
    assert (a.comment, {column.name: column.comment for column in a.columns}["total"]) == (None, "in francs")


def test_state_without_comments_still_loads() -> None:
    column = '{"name": "id", "type": "int", "lake_type": "integer"}'
    text = f'{{"format": 1, "tables": [{{"schema": "public", "name": "a", "key": [], "columns": [{column}]}}]}}'
    (table,) = known_tables.load(text)
    assert (table.comment, table.columns[0].comment) == (None, None)
