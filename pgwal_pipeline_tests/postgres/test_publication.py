"""The publication: how it is kept in step, and what is said where rights are missing. On every server at hand."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pgwal_pipeline.messages.errors import SourceRefused
from pgwal_pipeline.postgres import catalog, dsn, publication
from pgwal_pipeline.postgres.catalog import Connection
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.support import Source

pytestmark = pytest.mark.matrix


def name(text: str) -> TableName:
    return TableName.parse(text)


def published(source: Source, publication_name: str = "pgwal") -> set[str]:
    return {
        row[0]
        for row in source.sql("select schemaname || '.' || tablename from pg_publication_tables where pubname = %s", publication_name)
    }


def test_made_then_kept_in_step(conn: Connection, source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table a (id int primary key); create table b (id int primary key); create table keyless (id int)")
    source.sql("create table parent (id int primary key); create table child (primary key (id)) inherits (parent)")
    made = publication.ensure(conn, "pgwal", "public.*")
    assert made.ours
    assert made.oid == source.value("select oid from pg_publication where pubname = 'pgwal'")
    assert made.tables == made.added == tuple(name(f"public.{table}") for table in ("a", "b", "child", "parent"))
    assert list(made.skipped) == [name("public.keyless")]
    assert published(source) == {"public.a", "public.b", "public.child", "public.parent"}
    assert made.joined_xid is not None and made.joined_xid > source.value("select txid_snapshot_xmin(txid_current_snapshot())") - 1000
    assert publication.ensure(conn, "pgwal", "public.*") == publication.Publication("pgwal", made.oid, True, made.tables, (), made.skipped)

    source.sql("create table c (id int primary key); alter table keyless add primary key (id); alter table a drop constraint a_pkey")
    source.sql("drop table b; alter table child rename to kid")
    again = publication.ensure(conn, "pgwal", "public.*")
    assert again.oid == made.oid
    assert again.added == (name("public.c"), name("public.keyless"))
    assert list(again.skipped) == [name("public.a")]
    assert published(source) == {"public.c", "public.keyless", "public.kid", "public.parent"} == {str(table) for table in again.tables}

    fewer = publication.ensure(conn, "pgwal", "public.parent")
    assert published(source) == {"public.parent"}
    assert (fewer.added, fewer.skipped, fewer.joined_xid) == ((), {}, None)
    # ONLY: what inherits is a table of its own.
    assert fewer.tables == (name("public.parent"),)


def test_no_tables_at_all(conn: Connection, source_matrix: Source) -> None:
    made = publication.ensure(conn, "pgwal", "*.*")
    assert (made.tables, made.added, made.skipped) == ((), (), {})
    source_matrix.sql("create table a (id int primary key)")
    assert publication.ensure(conn, "pgwal", "*.*").added == (name("public.a"),)
    source_matrix.sql("drop table a")
    assert publication.ensure(conn, "pgwal", "*.*").tables == ()


def test_options(conn: Connection, source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table root (id int primary key, g int generated always as (id + 1) stored) partition by range (id)")
    source.sql("create table leaf partition of root for values from (0) to (10)")
    publication.ensure(conn, "pgwal", "*.*")
    generated = source.value("show server_version_num") >= "180000"
    columns = ("id", "g") if generated else ("id",)
    assert [(str(relation.table), relation.column_names) for relation in catalog.tables_of(conn, "pgwal")] == [("public.root", columns)]
    source.sql("alter publication pgwal set (publish_via_partition_root = false, publish = 'insert')")
    if generated:
        source.sql("alter publication pgwal set (publish_generated_columns = none)")
    publication.ensure(conn, "pgwal", "*.*")
    assert source.sql("select pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot from pg_publication") == [(True,) * 5]
    assert [(str(relation.table), relation.column_names) for relation in catalog.tables_of(conn, "pgwal")] == [("public.root", columns)]


def test_odd_names(conn: Connection, source_matrix: Source) -> None:
    source_matrix.sql('create schema "S p;a""ce"; create table "S p;a""ce"."drop table x; --" ("Key" int primary key)')
    made = publication.ensure(conn, 'we"ird name', "*.*")
    assert made.tables == (TableName('S p;a"ce', "drop table x; --"),)
    assert publication.drop(conn, 'we"ird name')
    assert source_matrix.sql("select 1 from pg_publication") == []


def test_not_ours_is_used_as_it_is(conn: Connection, source_matrix: Source) -> None:
    source = source_matrix
    source.sql("create table a (id int primary key); create table keyless (id int); create table other (id int primary key)")
    source.sql("create publication pgwal for table a, keyless with (publish = 'insert')")
    found = publication.ensure(conn, "pgwal", "*.other")
    assert not found.ours
    assert found.tables == (name("public.a"), name("public.keyless"))
    assert (found.added, found.skipped) == ((), {})
    assert published(source) == {"public.a", "public.keyless"}
    assert not publication.drop(conn, "pgwal")
    assert not publication.drop(conn, "nosuch")
    assert published(source) == {"public.a", "public.keyless"}


def test_rights_to_make_it(source_matrix: Source, plain_role: str) -> None:
    source = source_matrix
    source.sql("create table theirs (id int primary key); grant select on theirs to plain_role")
    with dsn.connect(source.dsn_of(plain_role)) as conn:
        with pytest.raises(SourceRefused) as caught:
            publication.ensure(conn, "pgwal", "*.*")
        message = str(caught.value)
        assert f"Role plain_role may not create a publication in database {source.database} and does not own public.theirs" in message
        statement = publication.creation_sql(conn, "pgwal", "*.*")
        assert statement in message
        assert source.sql("select 1 from pg_publication") == []
        source.sql(f'grant create on database "{source.database}" to plain_role')
        with pytest.raises(SourceRefused, match=r"Role plain_role does not own public\.theirs, so"):
            publication.ensure(conn, "pgwal", "*.*")
        # The owner runs what the message says, and the role goes on with it.
        source.sql(statement)
        assert publication.ensure(conn, "pgwal", "*.*").tables == (name("public.theirs"),)
        source.sql("drop publication pgwal")
        source.sql("alter table theirs owner to plain_role")
        made = publication.ensure(conn, "pgwal", "*.*")
        assert made.ours and made.tables == (name("public.theirs"),)
        # Somebody else's new table does not stop the others.
        source.sql("create table new (id int primary key); grant select on new to plain_role")
        again = publication.ensure(conn, "pgwal", "*.*")
        assert again.tables == (name("public.theirs"),)
        assert "role plain_role does not own it" in again.skipped[name("public.new")]
        source.sql("grant postgres to plain_role")
        assert publication.ensure(conn, "pgwal", "*.*").added == (name("public.new"),)
        source.sql("revoke postgres from plain_role")
        source.sql("alter publication pgwal owner to postgres; alter table new drop constraint new_pkey")
        with pytest.raises(
            SourceRefused, match=r"have postgres run ALTER PUBLICATION pgwal DROP TABLE ONLY public\.new, or GRANT postgres"
        ):
            publication.ensure(conn, "pgwal", "*.*")
        with pytest.raises(SourceRefused, match="must be owner of publication"):
            publication.drop(conn, "pgwal")
        source.sql("alter publication pgwal owner to plain_role")
        publication.ensure(conn, "pgwal", "*.*")
        assert publication.drop(conn, "pgwal")


def test_a_long_list_is_cut_in_the_message_only(source_matrix: Source, plain_role: str) -> None:
    source_matrix.sql("do $$ begin for i in 1..50 loop execute format('create table t%s (id int primary key)', i); end loop; end $$")
    source_matrix.sql("grant select on all tables in schema public to plain_role")
    with dsn.connect(source_matrix.dsn_of(plain_role)) as conn:
        with pytest.raises(SourceRefused, match=r"and 49 more of the tables.*pgwal doctor"):
            publication.ensure(conn, "pgwal", "*.*")
        assert publication.creation_sql(conn, "pgwal", "*.*").count("ONLY") == 50


def test_never_half_made(conn: Connection, source_matrix: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server refuses one of several statements: none of them was."""
    source = source_matrix
    source.sql("create table a (id int primary key); create table b (id int primary key)")
    with monkeypatch.context() as patch:
        patch.setattr(publication, "COMMENT", "no text' ends here")
        with pytest.raises(SourceRefused, match="syntax error"):
            publication.ensure(conn, "pgwal", "*.*")
    assert source.sql("select 1 from pg_publication") == []
    publication.ensure(conn, "pgwal", "*.a")
    run = publication._run

    def refusing(conn: Connection, statement: str) -> None:
        run(conn, statement.replace("ADD TABLE", "ADD NO TABLE"))

    with monkeypatch.context() as patch:
        patch.setattr(publication, "_run", refusing)
        with pytest.raises(SourceRefused):
            publication.ensure(conn, "pgwal", "*.b")
    assert published(source) == {"public.a"}


def test_two_at_once_make_one(source_matrix: Source) -> None:

    source_matrix.sql("create table a (id int primary key); create table b (id int primary key)")

    def one(globs: str) -> publication.Publication:
        with dsn.connect(source_matrix.dsn) as conn:
            return publication.ensure(conn, "pgwal", globs)

    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(one, ["*.*", "*.a", "*.*", "*.b", "*.*", "*.*"]))
    assert len({result.oid for result in results}) == 1


@pytest.mark.parametrize("when", ["made", "later"])
def test_a_table_that_somebody_locks_is_put_in_later(when: str, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """One new table is locked by a migration that takes long: the others join, it is skipped with who holds it, and joins next time."""
    monkeypatch.setattr(publication, "_LOCK_TIMEOUT", "500ms")
    monkeypatch.setattr(publication, "_LOCK_TIMEOUT_EACH", "300ms")
    conn = source.connect()
    if when == "later":
        source.sql("CREATE TABLE first (id int PRIMARY KEY)")
        publication.ensure(conn, "pub", "*.*")
        source.sql("DROP TABLE first")
    for table in "abc":
        source.sql(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    with source.connect(autocommit=False) as migration:
        migration.execute("LOCK TABLE b IN ACCESS EXCLUSIVE MODE")
        pid = migration.info.backend_pid
        found = publication.ensure(conn, "pub", "*.*")
        assert [str(table) for table in found.tables] == ["public.a", "public.c"]
        ((table, reason),) = found.skipped.items()
        assert str(table) == "public.b"
        assert f"pid {pid} holds a lock on it" in reason
        assert found.joined_xid is not None
        migration.rollback()
    found = publication.ensure(conn, "pub", "*.*")
    assert [str(table) for table in found.tables] == ["public.a", "public.b", "public.c"]
    assert found.skipped == {}
