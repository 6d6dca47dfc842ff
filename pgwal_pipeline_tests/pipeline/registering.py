"""A shop whose tables are registered in a catalog, a Hive metastore on embedded Derby, and what becomes of its entries."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.shared_spark import PARTS

LATER = datetime(2999, 1, 1, tzinfo=UTC)


def hive(folder: Path) -> dict[str, str]:
    """Settings of a Spark whose catalog is a Hive metastore in `folder`."""
    return {
        "spark.sql.catalogImplementation": "hive",
        "spark.hadoop.javax.jdo.option.ConnectionURL": f"jdbc:derby:;databaseName={folder}/metastore;create=true",
        "spark.hadoop.datanucleus.schema.autoCreateAll": "true",
        "spark.hadoop.hive.metastore.schema.verification": "false",
        "spark.sql.warehouse.dir": f"{folder}/warehouse",
        "spark.driver.extraJavaOptions": f"-Dderby.stream.error.file={folder}/derby.log",
        "spark.driver.memory": "1g",
        **PARTS,
    }


def tried_again(pipeline: Pipeline, moment: datetime, *tables: str, schema: str = "shop") -> None:
    """Let what failed for tables be tried again at that moment."""
    known = pipeline.ledger.registrations()
    found = [known[TableName(schema, table)] for table in tables]
    assert all(one.error for one in found)
    pipeline.ledger.record_registrations([replace(one, retry_at=moment, at=None) for one in found])


def no_spark() -> Any:
    raise AssertionError("nothing is to be done by Spark")


class Shop:
    """A source of four tables, of which a view in the catalog has the name of one, and what the catalog has of them."""

    def __init__(self, pipeline: Pipeline, session: Any) -> None:
        self.pipeline, self.session = pipeline, session
        self.source = pipeline.source
        self.source.sql(
            """CREATE SCHEMA shop; CREATE TABLE shop.orders (id int PRIMARY KEY, note text);
            CREATE TABLE shop."Order Lines" (id int PRIMARY KEY); CREATE TABLE shop.taken (id int PRIMARY KEY);
            CREATE TABLE shop.gone (id int PRIMARY KEY); COMMENT ON TABLE shop.orders IS 'what was ordered';
            COMMENT ON COLUMN shop.orders.note IS 'it''s free'; INSERT INTO shop.orders VALUES (1, 'a'), (2, 'b');
            INSERT INTO shop."Order Lines" VALUES (7); INSERT INTO shop.gone VALUES (9)"""
        )
        session.sql("CREATE SCHEMA spark_catalog.lake_shop").collect()
        session.sql("CREATE VIEW spark_catalog.lake_shop.taken AS SELECT 'theirs' AS whose").collect()

    def names(self) -> list[str]:
        return sorted(row["tableName"] for row in self.session.sql("SHOW TABLES IN spark_catalog.lake_shop").collect())

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        found = self.session.sql(f"SELECT * FROM spark_catalog.lake_shop.{table}").collect()
        return sorted(tuple(value for name, value in row.asDict().items() if not name.startswith("_pgwal")) for row in found)

    def comments(self, table: str) -> list[str]:
        rows = self.session.sql(f"DESCRIBE TABLE EXTENDED spark_catalog.lake_shop.{table}").collect()
        return [row["comment"] for row in rows if row["comment"]] + [row["data_type"] for row in rows if row["col_name"] == "Comment"]


def told(shop: Shop) -> None:
    """The course of a catalog: what comes, changes, moves and goes in the source, seen by SQL in the catalog."""
    pipeline, source = shop.pipeline, shop.source
    first = pipeline.sync()
    assert shop.names() == ["gone", "order_lines", "orders", "taken"]
    assert (shop.rows("orders"), shop.rows("order_lines")) == ([(1, "a"), (2, "b")], [(7,)])
    assert shop.comments("orders") == ["it's free", "what was ordered"]
    assert shop.rows("taken") == [("theirs",)]
    (warning,) = first.warnings
    told_so = "Table shop.taken: not registered in the catalog. spark_catalog.lake_shop.taken is a view already, and stays;"
    assert warning.startswith(told_so), warning

    # Only comments: no row of the WAL tells of them. The table that failed is tried once more.
    source.sql("COMMENT ON TABLE shop.orders IS NULL; COMMENT ON COLUMN shop.orders.id IS 'its number'")
    version = pipeline.publish().tables[TableName("shop", "orders")].version
    assert shop.comments("orders")[:2] == ["its number", "it's free"]
    # Nothing is new: the catalog is not asked, and no Spark is needed.
    asked, pipeline.spark = pipeline.spark, no_spark
    tried_again(pipeline, LATER, "taken")
    again = pipeline.publish()
    assert (again.warnings, list(again.unregistered)) == ((warning,), [TableName("shop", "taken")])
    pipeline.spark = asked
    commits = again.tables[TableName("shop", "orders")].version
    assert version is not None
    assert commits == version + 2  # the comments' own

    # Read again, the table is made anew; a new name moves the entry; what is gone stays.
    source.sql('ALTER TABLE shop."Order Lines" RENAME TO lines; DROP TABLE shop.gone; INSERT INTO shop.orders VALUES (3, NULL)')
    pipeline.resnapshot("shop.orders")
    assert shop.names() == ["gone", "lines", "orders", "taken"]
    assert (shop.rows("orders"), shop.rows("lines"), shop.rows("gone")) == ([(1, "a"), (2, "b"), (3, None)], [(7,)], [(9,)])
    assert shop.comments("orders")[:2] == ["its number", "it's free"]
    pipeline.assert_current("shop.orders", "shop.lines")

    # The name is free now.
    shop.session.sql("DROP VIEW spark_catalog.lake_shop.taken").collect()
    tried_again(pipeline, datetime.now(UTC), "taken")
    assert pipeline.publish().warnings == ()
    assert shop.rows("taken") == []
