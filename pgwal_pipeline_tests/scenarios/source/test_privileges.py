"""The rights that the guide asks for are enough, end to end; where one is missing, one sentence and `doctor` say which, with the SQL."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.messages.progress import Silent
from pgwal_pipeline.pipeline.doctor import Check, examine
from pgwal_pipeline.pipeline.drop import drop
from pgwal_pipeline.pipeline.status import status
from pgwal_pipeline.pipeline.verify import verify
from pgwal_pipeline.settings import Settings
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source

GUIDE = Path(__file__).parents[3] / "docs" / "source.md"


@contextmanager
def role(source: Source, name: str, options: str = "LOGIN") -> Iterator[str]:
    """A role of the server's with nothing but `options`; the public schema's rights are taken from all, as on a guarded database."""
    source.sql(f'REVOKE ALL ON DATABASE "{source.database}" FROM public; REVOKE ALL ON SCHEMA public FROM public')
    source.sql(f"CREATE ROLE {name} {options}")
    try:
        yield source.dsn_of(name)
    finally:
        source.sql(f"REASSIGN OWNED BY {name} TO CURRENT_USER; DROP OWNED BY {name}; DROP ROLE {name}")


def checks(pipeline: Pipeline, dsn: str) -> dict[str, Check]:
    environment = pipeline.environment(PGWAL_SOURCE_DSN=dsn, PGWAL_TABLES=pipeline.settings.tables)
    return {check.name: check for check in examine(environment)}


def failing(pipeline: Pipeline, dsn: str) -> dict[str, Check]:
    return {name: check for name, check in checks(pipeline, dsn).items() if not check.ok}


def guide_sql(database: str, publication: str) -> list[str]:
    """The statements of the guide's block for the DBA, for this database; what a server is set up with is left out."""
    text = GUIDE.read_text()
    block = text[text.index("## SQL for the DBA") :].split("```sql\n", 1)[1].split("```", 1)[0]
    lines = [line.split("--", 1)[0].strip() for line in block.splitlines()]
    statements = [statement.strip() for statement in " ".join(lines).split(";") if statement.strip()]
    kept = [statement for statement in statements if not statement.startswith("ALTER SYSTEM")]
    return [
        re.sub(r"\bshop\b", f'"{database}"', statement).replace("PUBLICATION pgwal", f"PUBLICATION {publication}") for statement in kept
    ]


def whole_way(pipeline: Pipeline, owner: Source, tables: tuple[str, ...]) -> None:
    """Everything that the pipeline does on a source, once with what stood there before and once with changes."""
    pipeline.sync()
    pipeline.assert_current(*tables)
    owner.sql("UPDATE app.orders SET note = 'changed' WHERE id = 2; DELETE FROM app.orders WHERE id = 3")
    owner.sql("INSERT INTO app.customers VALUES (9, 'new')")
    assert verify(pipeline.settings, pipeline.spark, progress=Silent()).equal
    pipeline.assert_current(*tables)
    shown = status(pipeline.settings)
    assert shown["slot"]["name"] == pipeline.settings.slot
    assert {name: table["state"] for name, table in shown["tables"].items()} == dict.fromkeys(tables, "ready")


@pytest.fixture
def shop(source: Source) -> Source:
    source.sql("CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, note text)")
    source.sql("CREATE TABLE app.customers (id int PRIMARY KEY, n text)")
    source.sql("INSERT INTO app.orders SELECT i, 'note ' || i FROM generate_series(1, 50) i; INSERT INTO app.customers VALUES (1, 'one')")
    return source


def test_what_the_guide_grants_is_enough(shop: Source, make_pipeline: Callable[..., Pipeline], spark: Any) -> None:
    statements = guide_sql(shop.database, "guide_pub")
    assert any(statement.startswith("CREATE ROLE pgwal ") for statement in statements)
    # The role's name is the server's, and its password is nobody's here.
    create = next(statement for statement in statements if statement.startswith("CREATE ROLE pgwal "))
    options = create.removeprefix("CREATE ROLE pgwal ").split("PASSWORD")[0]
    assert options.split() == ["LOGIN", "REPLICATION"]
    with role(shop, "pgwal_guide", options) as dsn:
        for statement in statements:
            if statement != create:
                shop.sql(statement.replace("TO pgwal", "TO pgwal_guide"))
        pipeline = make_pipeline(source_dsn=dsn, publication="guide_pub")
        pipeline.spark = lambda: spark
        assert failing(pipeline, dsn) == {}
        whole_way(pipeline, shop, ("app.orders", "app.customers"))
        assert failing(pipeline, dsn) == {}
        assert drop(pipeline.settings) == [f"slot {pipeline.settings.slot}"]
        assert shop.sql("SELECT 1 FROM pg_publication") == [(1,)]


def test_a_role_that_owns_the_tables_and_may_create_makes_its_own_publication(
    shop: Source, make_pipeline: Callable[..., Pipeline], spark: Any
) -> None:
    with role(shop, "pgwal_owner", "LOGIN REPLICATION") as dsn:
        shop.sql(f'GRANT CONNECT, CREATE ON DATABASE "{shop.database}" TO pgwal_owner; GRANT USAGE ON SCHEMA app TO pgwal_owner')
        shop.sql("ALTER TABLE app.orders OWNER TO pgwal_owner; ALTER TABLE app.customers OWNER TO pgwal_owner")
        pipeline = make_pipeline(source_dsn=dsn)
        pipeline.spark = lambda: spark
        assert failing(pipeline, dsn) == {}
        pipeline.sync()
        pipeline.assert_current("app.orders", "app.customers")
        assert sorted(drop(pipeline.settings)) == [f"publication {pipeline.settings.publication}", f"slot {pipeline.settings.slot}"]
        assert (
            shop.sql("SELECT 1 FROM pg_publication UNION ALL SELECT 1 FROM pg_replication_slots WHERE database = current_database()") == []
        )


def with_rights(source: Source, dsn: str, folder: Path) -> Pipeline:
    """A pipeline of the role that `dsn` names, on a server of the matrix."""
    names = {"slot": "rights_slot", "publication": "rights_pub"}
    settings = Settings.from_environment({}, source_dsn=dsn, lake=str(folder / "lake"), busy_timeout=20, blocked_timeout=20, **names)
    return Pipeline(source, settings, lambda: None)


def refused(work: Callable[[], object]) -> str:
    with pytest.raises(PgwalError) as caught:
        work()
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.matrix
def test_each_missing_right_is_named_with_the_sql_that_gives_it(source_matrix: Source, tmp_path: Path) -> None:
    """From nothing to enough, by running just what `doctor` or the error says, one right after the other."""
    source = source_matrix
    source.sql("CREATE SCHEMA app; CREATE TABLE app.orders (id int PRIMARY KEY, note text); INSERT INTO app.orders VALUES (1, 'a')")
    with role(source, "rights_role", "") as dsn:
        pipeline = with_rights(source, dsn, tmp_path)
        steps = [
            ("source", "ALTER ROLE rights_role LOGIN", "may not log in"),
            ("source", f"GRANT CONNECT ON DATABASE {source.database} TO rights_role", "may not connect"),
            ("replication", "ALTER ROLE rights_role REPLICATION", "no REPLICATION"),
        ]
        for check, statement, says in steps:
            found = failing(pipeline, dsn)[check]
            assert says in found.found
            assert statement in f"{found.found} {found.mend}"
            if check == "source":  # nothing at all is possible, and the error is the same sentence
                assert statement in refused(pipeline.drain)
            source.sql(statement)
        # What no publication is made for yet shows as tables left out; one that an owner makes then lacks SELECT.
        assert "GRANT USAGE ON SCHEMA app TO rights_role" in checks(pipeline, dsn)["tables"].found
        source.sql("CREATE PUBLICATION rights_pub FOR TABLE app.orders WITH (publish_via_partition_root = true)")
        found = failing(pipeline, dsn)
        assert list(found) == ["select"]
        assert found["select"].mend == "Run GRANT USAGE ON SCHEMA app TO rights_role and GRANT SELECT ON app.orders TO rights_role."
        pipeline.drain()
        pipeline.snapshot()
        (state,) = pipeline.ledger.tables().values()
        assert state.state == "error"
        assert "GRANT SELECT ON app.orders TO rights_role" in (state.reason or "")
        for statement in re.findall(r"GRANT USAGE ON SCHEMA app TO \w+|GRANT SELECT ON app\.orders TO \w+", found["select"].mend or ""):
            source.sql(statement)
        # It stays in error until the next run, which reads it by itself.
        assert list(failing(pipeline, dsn)) == ["followed"]
        pipeline.drain()
        pipeline.snapshot()
        assert failing(pipeline, dsn) == {}
        source.sql("REVOKE SELECT ON app.orders FROM rights_role")
        drop(pipeline.settings)


@pytest.mark.matrix
def test_a_right_that_is_missing_when_it_is_needed_is_one_sentence(source_matrix: Source, tmp_path: Path) -> None:
    source = source_matrix
    source.sql("CREATE TABLE item (id int PRIMARY KEY); INSERT INTO item VALUES (1)")
    with role(source, "rights_role", "LOGIN") as dsn:
        pipeline = with_rights(source, dsn, tmp_path)
        source.sql(f'GRANT CONNECT ON DATABASE "{source.database}" TO rights_role; GRANT USAGE ON SCHEMA public TO rights_role')
        source.sql("GRANT SELECT ON item TO rights_role")
        sentence = refused(pipeline.drain)
        assert "may not create a publication" in sentence
        assert "CREATE PUBLICATION rights_pub FOR TABLE ONLY public.item" in sentence
        source.sql("CREATE PUBLICATION rights_pub FOR TABLE item")
        sentence = refused(pipeline.drain)
        assert "ALTER ROLE rights_role REPLICATION" in sentence
        assert source.sql("SELECT 1 FROM pg_replication_slots WHERE slot_name = 'rights_slot'") == []
        source.sql("ALTER ROLE rights_role REPLICATION")
        pipeline.drain()
        # Taken away again in between: nothing of what is there is lost.
        source.sql("ALTER ROLE rights_role NOREPLICATION; INSERT INTO item VALUES (2)")
        sentence = refused(pipeline.drain)
        assert "ALTER ROLE rights_role REPLICATION" in sentence
        sentence = refused(lambda: drop(pipeline.settings))
        assert "ALTER ROLE rights_role REPLICATION" in sentence
        source.sql("ALTER ROLE rights_role REPLICATION")
        assert pipeline.drain().changes == 1
        drop(pipeline.settings)
