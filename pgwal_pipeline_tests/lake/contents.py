"""A Delta table with versions that change its content, and some that do not."""

import pyarrow as pa
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType

from pgwal_pipeline.lake.layout import storage_options
from pgwal_pipeline.lake.standing import content_version


def versions_of(path: str) -> list[str]:
    """Make a table with a history at `path`, and return what tells its content at each version."""
    options = storage_options(path)
    for number in (1, 2):
        write_deltalake(path, pa.table({"id": [number]}), mode="append", storage_options=options)
    table = DeltaTable(path, storage_options=options)
    table.optimize.compact()
    table.alter.set_table_properties({"delta.appendOnly": "false"})
    table.alter.add_columns([Field("more", PrimitiveType("integer"))])
    write_deltalake(path, pa.table({"id": pa.array([3], pa.int64())}), mode="append", schema_mode="merge", storage_options=options)
    table.update_incremental()
    table.delete("id = 77")
    last = DeltaTable(path, storage_options=options).version()
    return [content_version(path, version) for version in range(last + 1)]
