"""Check that windows that were read side by side, independently of each other, can be committed to raw one after the other."""

from collections.abc import Iterable, Sequence

from deltalake import Schema

from pgwal_pipeline.lake.delta import lake_errors, missing_fields, open_table, side_by_side
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.records import TableWrite
from pgwal_pipeline.lake.schema import fits


def first_misfit(lake: Lake, windows: Sequence[Iterable[TableWrite]]) -> tuple[int, dict[str, Schema]] | None:
    """Return the index of the first window whose files do not fit the raw tables as the windows before it will leave them.

    That happens if a column is new in one window and has another type in a later one. With the index come the tables' schemas by then, by
    their paths, with which that window has to be read again. None if all windows fit.
    """
    paths = list({write.path for writes in windows for write in writes})
    standing = side_by_side(lambda path: _schema(lake, path), paths, 8 if lake.is_local else 16)
    schemas = {path: schema for path, schema in zip(paths, standing, strict=True) if schema is not None}
    for number, writes in enumerate(windows):
        fields = {write.path: Schema.from_json(write.schema_json) for write in writes}
        if not all(fits(schemas.get(path, Schema([])), wanted) for path, wanted in fields.items()):
            return number, schemas
        for path, wanted in fields.items():
            has = schemas.get(path, Schema([]))
            schemas[path] = Schema([*has.fields, *missing_fields(has, wanted)])
    return None


def _schema(lake: Lake, path: str) -> Schema | None:
    with lake_errors(path):
        table = open_table(lake, path)
    return None if table is None else table.schema()
