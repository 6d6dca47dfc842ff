"""Write rows as text: a table for people, CSV, or one JSON object. Rows are written as they come, so there may be any number."""

import csv
import io
import json
from collections.abc import Iterator, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from pgwal_pipeline.messages.printable import printable

if TYPE_CHECKING:
    import pyarrow as pa

Style = Literal["table", "csv", "json"]

_WIDEST = 60  # characters of a value in a table


def rows(reader: "pa.RecordBatchReader", lsn: str, style: Style) -> Iterator[str]:
    """Yield the text of the rows of `reader`, piece by piece; `lsn` is where they stand.

    As JSON the pieces make one object. In a table each piece has columns as wide as its values need.
    """
    names = list(reader.schema.names)
    if style == "json":
        yield f'{{"lsn": {json.dumps(lsn)}, "columns": {json.dumps(names, ensure_ascii=False)}, "rows": ['
    elif style == "csv":
        yield _csv([names])
    count = 0
    for batch in reader:
        columns = [column.to_pylist() for column in batch.columns]
        found = list(zip(*columns, strict=True))
        if style == "json":
            objects = (json.dumps(dict(zip(names, map(_as_json, row), strict=True)), ensure_ascii=False) for row in found)
            yield ("," if count and found else "") + ",".join("\n" + one for one in objects)
        elif style == "csv":
            yield _csv([["" if value is None else _as_text(value) for value in row] for row in found])
        elif found:
            yield _aligned(None if count else names, names, [["" if value is None else _as_text(value) for value in row] for row in found])
        count += len(found)
    if style == "json":
        yield "\n]}\n"
    elif style == "table":
        yield ("" if count else _aligned(names, names, [])) + f"({count:,} row{'' if count == 1 else 's'} at {lsn})\n"


def tables(found: Mapping[str, Mapping[str, Any]], lsn: str, style: Style) -> Iterator[str]:
    """Yield the lines of a listing of tables with their columns, as `published.query.table_columns` has them."""
    if style == "json":
        yield json.dumps({"lsn": lsn, "tables": found}, ensure_ascii=False)
        return
    listed = [(name, column["name"], column["type"]) for name, table in found.items() for column in table["columns"]]
    if style == "csv":
        yield _csv([("table", "column", "type"), *listed]).rstrip("\n")
        return
    for name, table in found.items():
        yield printable(name)
        widest = max((len(column["name"]) for column in table["columns"]), default=0)
        for column in table["columns"]:
            yield f"  {printable(column['name']):<{widest}}  {column['type']}"
    yield f"({len(found):,} table{'' if len(found) == 1 else 's'} at {lsn})"


def _csv(lines: Any) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _aligned(head: list[str] | None, names: list[str], values: list[list[str]]) -> str:
    cells = [[_short(printable(value)) for value in row] for row in values]
    widths = [max([len(printable(name)), *(len(row[number]) for row in cells)]) for number, name in enumerate(names)]
    lines = [] if head is None else [[printable(name) for name in head], ["-" * width for width in widths]]
    return "".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in lines + cells)


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _as_text(value: Any) -> str:
    """A value as Postgres writes it, for those that JSON has not."""
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, datetime):
        return _moment(value)
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, list | dict | tuple):
        return json.dumps(_as_json(value), ensure_ascii=False)
    return str(value)


def _as_json(value: Any) -> Any:
    """A value as JSON can hold it: exact numbers beyond its own, and times, are text."""
    if isinstance(value, dict):
        return {str(name): _as_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        pairs = bool(value) and all(isinstance(item, tuple) and len(item) == 2 for item in value)  # a map
        return {str(name): _as_json(item) for name, item in value} if pairs else [_as_json(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, datetime):
        return _moment(value)
    if isinstance(value, date | Decimal):
        return str(value)
    return (
        "\\x" + value.hex() if isinstance(value, bytes) else value if value is None or isinstance(value, str | int | float) else str(value)
    )


def _moment(value: datetime) -> str:
    """A time as Postgres writes it with TimeZone UTC."""
    if value.tzinfo is None:
        return value.isoformat(" ")
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(" ") + "+00"
