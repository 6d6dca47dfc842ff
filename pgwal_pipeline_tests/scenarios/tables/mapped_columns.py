"""Tables whose columns Delta maps, read by Spark."""

from typing import Any

from pgwal_pipeline.values.relation import TableName, quote_ident
from pgwal_pipeline_tests.pipelines import Pipeline
from pgwal_pipeline_tests.support import Source


def assert_equal_by_spark(source: Source, pipeline: Pipeline, spark: Any, name: str) -> None:
    """The rows of a table whose columns may be mapped, which Polars does not read."""
    publish = pipeline.ledger.publish()
    assert publish is not None
    pointer = publish.tables[TableName("public", name)]
    frame = spark.read.format("delta").option("versionAsOf", pointer.version).load(pointer.path)
    dropped = pipeline.ledger.tables()[TableName("public", name)].dropped
    columns = [column for column in frame.columns if not column.startswith("_pgwal_") and column not in dropped]
    wanted = [
        row[0]
        for row in source.sql(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 AND NOT attisdropped ORDER BY attnum", name
        )
    ]
    assert columns == wanted
    quoted = ", ".join(map(quote_ident, wanted))
    rows = frame.select(*("`" + column.replace("`", "``") + "`" for column in columns)).collect()
    assert sorted(map(repr, map(tuple, rows))) == sorted(map(repr, map(tuple, source.sql(f"SELECT {quoted} FROM {name}"))))
