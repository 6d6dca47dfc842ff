from collections.abc import Callable, Iterator

import pytest

from pgwal_pipeline.embedded.postgres import Postgres
from pgwal_pipeline.postgres import slot
from pgwal_pipeline.postgres.dsn import connect
from pgwal_pipeline.postgres.peek import has_changes
from pgwal_pipeline.postgres.stream import ReplicationStream
from pgwal_pipeline.values.xid import Snapshot
from pgwal_pipeline_tests.support import Source, fresh_source


class Slot:
    """A slot and a publication `ours` with one table, and a snapshot from when the slot had read everything."""

    def __init__(self, source: Source) -> None:
        self.source, self.name = source, f"s_{source.database}"
        source.sql("CREATE TABLE t (id int PRIMARY KEY, a int); INSERT INTO t VALUES (1, 1); CREATE TABLE other (id int)")
        source.sql('CREATE PUBLICATION "Our s" FOR TABLE t')
        slot.create(source.dsn, self.name, blocked_timeout=20, warn=lambda text: None)
        self.since = self.now()

    def now(self) -> Snapshot:
        return Snapshot.parse(self.source.value("SELECT pg_current_snapshot()::text"))

    @property
    def changed(self) -> bool:
        with connect(self.source.dsn) as conn:
            return has_changes(conn, self.name, "Our s", self.since)

    @property
    def confirmed(self) -> str:
        return self.source.value("SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", self.name)


@pytest.fixture
def ours(source_matrix: Source) -> Iterator[Slot]:
    made = Slot(source_matrix)
    yield made
    made.source.drop_slot(made.name)


@pytest.mark.matrix
def test_what_changes_no_table_of_the_publication_is_no_change(ours: Slot) -> None:
    source, confirmed = ours.source, ours.confirmed
    assert not ours.changed
    with fresh_source(source.server) as another:
        another.sql("CREATE TABLE t (id int); INSERT INTO t SELECT generate_series(1, 5000)")
    source.sql("CHECKPOINT")
    source.sql("VACUUM (ANALYZE)")
    source.sql("INSERT INTO other SELECT generate_series(1, 5000)")
    source.sql("CREATE TABLE late (id int)")
    source.sql("BEGIN; INSERT INTO t VALUES (7, 7); ROLLBACK")
    for _ in range(20):
        source.sql("SELECT txid_current()")
    source.sql(
        "SELECT pg_log_standby_snapshot()" if source.value("SELECT current_setting('server_version_num')::int") >= 160000 else "CHECKPOINT"
    )
    assert not ours.changed
    assert ours.confirmed == confirmed
    source.sql("INSERT INTO t VALUES (2, 2)")
    assert ours.changed
    assert ours.confirmed == confirmed


@pytest.mark.matrix
def test_a_locked_table_is_not_waited_for_and_is_no_change(ours: Slot) -> None:
    with connect(ours.source.dsn) as conn:
        conn.execute(b"BEGIN")
        conn.execute(b"LOCK public.t IN ACCESS EXCLUSIVE MODE")
        assert not ours.changed
        conn.execute(b"ROLLBACK")


@pytest.mark.matrix
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE t SET a = 2",
        "DELETE FROM t",
        "TRUNCATE t",
        "ALTER TABLE t ADD COLUMN b int",
        "ALTER TABLE t RENAME COLUMN a TO b",
        "ALTER TABLE t DROP COLUMN a",
        'ALTER PUBLICATION "Our s" ADD TABLE other; INSERT INTO other VALUES (1)',
    ],
)
def test_a_change_of_rows_or_definitions_is_one(ours: Slot, statement: str) -> None:
    ours.source.sql(statement)
    assert ours.changed


def test_a_definition_changed_by_a_transaction_that_was_open_then(source: Source) -> None:
    ours = Slot(source)
    with source.connect().transaction() as _, source.connect() as open_one:
        with open_one.transaction():
            open_one.execute(b"ALTER TABLE t ADD COLUMN b int")
            source.sql("SELECT txid_current()")
            ours.since = ours.now()
        assert ours.since.running
        assert ours.changed
    ours.since = ours.now()
    assert not ours.changed
    source.drop_slot(ours.name)


def test_what_cannot_be_told_may_be_a_change(source: Source) -> None:
    ours = Slot(source)
    with connect(source.dsn) as conn, ReplicationStream.open(source.dsn, ours.name, "Our s", 0, server_version=conn.info.server_version):
        assert ours.changed  # somebody reads the slot
    source.drop_slot(ours.name)
    assert ours.changed  # there is no slot


def test_a_source_that_writes_all_the_time_is_told_at_once(make_server: Callable[..., Postgres]) -> None:
    with fresh_source(make_server(autovacuum="off")) as source:
        ours = Slot(source)
        source.sql("INSERT INTO t SELECT g, g FROM generate_series(10, 200000) g")
        for number in range(20):
            source.sql(f"UPDATE t SET a = {number} WHERE id = 1")
        assert ours.changed
        source.drop_slot(ours.name)
