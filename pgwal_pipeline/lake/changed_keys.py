"""Find the keys that raw has changes of between two LSNs."""

import json
from typing import TYPE_CHECKING

from pyspark.sql.types import StructType

from pgwal_pipeline.lake import files, fold
from pgwal_pipeline.lake.columns import key_parts, quote, source_text
from pgwal_pipeline.lake.fold import Shape
from pgwal_pipeline.lake.isolation import conf_for, failures, isolated
from pgwal_pipeline.lake.standing import open_current
from pgwal_pipeline.values.own_columns import OP, TEXT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def changed_keys(
    spark: "SparkSession", raw: str, current: str, shape: Shape, from_lsn: int, to_lsn: int, most: int, path: str
) -> list[tuple[str, ...]] | None:
    """Return the keys with changes from `from_lsn` on and below `to_lsn`, as Postgres reads them, and write them to a table at `path`.

    None if there are more than `most`, if the table was truncated, or if a key cannot be written as text: nothing is written then. An empty
    list writes nothing either.
    """
    changes, table = files.changes(raw, from_lsn, to_lsn), open_current(current)
    if changes is None or table is None or not changes.paths:
        return []
    types = StructType.fromJson(json.loads(table.schema().to_json()))
    with isolated(spark, conf_for(changes.rows or 0)) as session, failures(str(shape.table)):
        rows = fold.between(changes.read(session), from_lsn, to_lsn)
        if not rows.where(f"{OP} = 'T'").isEmpty():
            return None
        steps = fold.steps(rows, changes.schema, Shape(shape.table, shape.key, shape.key), types)
        numbers = fold.numbered(key_parts(types, shape.key))
        names = [number.rsplit(" AS ", 1)[1] for number in numbers]
        keys = steps.selectExpr(*map(quote, shape.key), TEXT, *numbers).dropDuplicates(names).drop(*names)
        keys = keys.limit(most + 1).localCheckpoint()
        texts = [source_text(types, name) for name in shape.key]
        if None in texts:
            return None
        found = [tuple(row) for row in keys.selectExpr(*(f"{text} AS _pgwal_{number}" for number, text in enumerate(texts))).collect()]
        if len(found) > most or any(part is None for key in found for part in key):
            return None
        if found:
            keys.write.format("delta").save(path)
    return found
