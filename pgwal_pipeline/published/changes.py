"""What changed in a table between two publishes: net changes by key, or each change in its order.

Net changes come from two places. `current` has the newest values: each row there says at which LSN it last changed. Raw says which keys had
a row before and have none now. Where either lacks what is needed the answer is the whole table, with the reason: never a hole.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as pads

from pgwal_pipeline.lake.delta import open_table
from pgwal_pipeline.lake.layout import Lake
from pgwal_pipeline.lake.ledger import Ledger
from pgwal_pipeline.lake.records import Publish, TablePointer, TableState
from pgwal_pipeline.lake.schema import names_in_raw
from pgwal_pipeline.lake.standing import GENERATION, open_current
from pgwal_pipeline.messages.errors import LakeError, PgwalError
from pgwal_pipeline.published import net, readers
from pgwal_pipeline.published.dataset import TableDataset
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn, window_key
from pgwal_pipeline.values.own_columns import COMMIT_LSN, OP, ORDINAL, WINDOW
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    import polars as pl
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True)
class Changes:
    """The changes of one table from LSN `since` up to `until`, to be read by Spark, Polars or Arrow.

    Each row has the columns of `current`, `_pgwal_change` (`insert`, `update` or `delete`), and the LSNs of its first and its last commit
    in between, `_pgwal_first_lsn` and `_pgwal_last_lsn`. Of a row that was deleted only the key's columns are set. With `history` they are
    the rows of raw instead, as they are there, in their order.

    `complete`: the changes cannot be determined, for the `reason` given. The rows are the whole table then, each an `insert`.
    """

    table: str
    since: str | None
    until: str
    complete: bool
    reason: str | None
    history: bool
    key: tuple[str, ...]
    until_lsn: int = field(repr=False)
    since_lsn: int | None = field(repr=False)
    settings: Settings = field(repr=False)
    newer: TablePointer = field(repr=False)
    older: TablePointer | None = field(default=None, repr=False)
    raw: TablePointer | None = field(default=None, repr=False)
    span: net.Span | None = field(default=None, repr=False)

    def spark(self, session: "SparkSession | None" = None) -> "DataFrame":
        """Return the changes as a DataFrame of `session`, or of the session that the PGWAL_SPARK_* settings describe."""
        session = session or readers.own_session(self.settings)
        if self.raw is None or self.span is None:
            whole = readers.spark(session, self.newer.path, self.newer.version, text=False).selectExpr(
                "*", f"'insert' AS {net.CHANGE}", f"{COMMIT_LSN} AS {net.FIRST_LSN}", f"{COMMIT_LSN} AS {net.LAST_LSN}"
            )
            return whole if self.complete else whole.limit(0)
        raw = readers.spark(session, self.raw.path, self.raw.version, text=False)
        if self.history:
            return raw.where(self.span.rows).orderBy(COMMIT_LSN, ORDINAL, OP)
        tables = {"raw": raw, "newer": readers.spark(session, self.newer.path, self.newer.version, text=False)}
        if self.older is not None:
            tables["older"] = readers.spark(session, self.older.path, self.older.version, text=False)
        return session.sql(self._query(net.SPARK), **tables)  # pyright: ignore[reportArgumentType] (the tables that the query names)

    def arrow(self) -> pa.Table:
        """Return the changes as an Arrow table in memory."""
        if self.raw is None or self.span is None:
            rows = self._newer.to_table() if self.complete else self._newer.schema.empty_table()
            rows = rows.append_column(net.CHANGE, pa.array(["insert"] * rows.num_rows, pa.string()))
            return rows.append_column(net.FIRST_LSN, rows[COMMIT_LSN]).append_column(net.LAST_LSN, rows[COMMIT_LSN])
        if self.history:
            rows = TableDataset(self.raw.path, self.raw.version).to_table(filter=_of_span(self.span))
            at = rows.select([COMMIT_LSN, ORDINAL, OP]).append_column("at", pa.array(range(rows.num_rows), pa.int64()))
            order = at.sort_by([(COMMIT_LSN, "ascending"), (ORDINAL, "ascending"), (OP, "ascending")])["at"]
            return rows.take(order)
        with readers.empty_duckdb() as connection:
            places = {"raw": self.raw, "newer": self.newer, **({} if self.older is None else {"older": self.older})}
            for name, at in places.items():
                connection.register(name, TableDataset(at.path, at.version))
            query = self._query(net.DUCKDB).format(**{name: name for name in places})
            found = connection.sql(query).to_arrow_table()
        own = [(net.CHANGE, pa.string()), (net.FIRST_LSN, pa.int64()), (net.LAST_LSN, pa.int64())]
        return found.cast(pa.schema([*self._newer.schema, *(pa.field(*column) for column in own)]))

    def polars(self) -> "pl.LazyFrame":
        """Return the changes as a LazyFrame."""
        import polars as pl

        if self.complete:
            whole = readers.polars(self.newer.path, self.newer.version, text=False)
            lsn = pl.col(COMMIT_LSN)
            return whole.with_columns(pl.lit("insert").alias(net.CHANGE), lsn.alias(net.FIRST_LSN), lsn.alias(net.LAST_LSN))
        frame = pl.from_arrow(self.arrow())
        assert isinstance(frame, pl.DataFrame)
        return frame.lazy()

    @cached_property
    def _newer(self) -> TableDataset:
        return TableDataset(self.newer.path, self.newer.version)

    def _query(self, dialect: net.Dialect) -> str:
        assert self.raw is not None
        assert self.span is not None
        held = _held_in_raw(TableDataset(self.raw.path, self.raw.version).schema, self._newer, self.key)
        return net.net_changes(dialect, self._newer.schema, self.key, held, self.span)


def find_changes(
    settings: Settings, ledger: Ledger, until: Publish, name: TableName, newer: TablePointer, since: int | None, history: bool
) -> Changes:
    """Find out what is needed to read the changes of a table, of which `until` has the version `newer`.

    Raises PgwalError if `since` is past `until`.
    """
    lake, state = ledger.lake, ledger.tables().get(name)
    key = () if state is None or state.relation is None else state.relation.key

    def changes(from_lsn: int | None, reason: str | None = None, **found: Any) -> Changes:
        return Changes(
            table=str(name),
            since=None if from_lsn is None else format_lsn(from_lsn),
            until=format_lsn(until.lsn),
            complete=reason is not None,
            reason=reason,
            history=history and reason is None,
            key=key,
            until_lsn=until.lsn,
            since_lsn=from_lsn,
            settings=settings,
            newer=newer,
            **found,
        )

    if since is None:
        return changes(None, "nothing of this table was read before")
    if since > until.lsn:
        raise PgwalError(f"Changes since {format_lsn(since)} cannot be read from the publish at {format_lsn(until.lsn)}, which is older.")
    before = ledger.publish_before(since)
    if before is None:
        return changes(since, f"the lake has no publish at or before {format_lsn(since)} any more (PGWAL_AS_OF_RETENTION)")
    since = before.lsn
    if since == until.lsn and not history:
        return changes(since)
    older = next((at for at in before.tables.values() if at.path == newer.path), None)
    reason = _why_unknown(ledger, state, key, before, older, newer, until, history)
    raw = None if state is None else _raw_as_it_is(lake, lake.raw(state.location))
    if reason is None and raw is None:
        reason = "it has no raw table"
    if reason is not None:
        return changes(since, reason)
    assert raw is not None
    span = net.Span(since, until.lsn, window_key(since), _last_window(ledger, until.lsn))
    truncates = _truncates(raw, span)
    return changes(
        since,
        raw=raw,
        older=older if truncates is not None and not history else None,
        span=net.Span(span.since, span.until, span.first_window, span.last_window, truncates),
    )


def _why_unknown(
    ledger: Ledger,
    state: TableState | None,
    key: tuple[str, ...],
    before: Publish,
    older: TablePointer | None,
    newer: TablePointer,
    until: Publish,
    history: bool,
) -> str | None:
    """Why the changes of a table between two publishes cannot be determined; None if they can."""
    at = format_lsn(before.lsn)
    if state is None or older is None:
        return f"it was not published at {at}"
    if not key and not history:
        return "it has no key"
    if state.raw_from > before.lsn:
        return f"its changes were not followed from {at} on"
    pruned = any(window.state == "pruned" and window.start_lsn < until.lsn for window in ledger.windows(before.lsn))
    if pruned:
        return f"its changes since {at} have been pruned from raw (PGWAL_RAW_RETENTION)"
    try:
        built_on = _generation(older)
    except LakeError:
        return f"its rows at {at} cannot be read any more"
    return None if built_on == _generation(newer) else f"it has been read again since {at}"


def _generation(at: TablePointer) -> str | None:
    """The reading that a version of a `current` table is built on."""
    table = open_current(at.path, at.version)
    return None if table is None else table.metadata().configuration.get(GENERATION)


def _raw_as_it_is(lake: Lake, path: str) -> TablePointer | None:
    """The raw table as it is now: pruning it meanwhile does no harm."""
    table = open_table(lake, path)
    return None if table is None else TablePointer(path, table.version())


def _last_window(ledger: Ledger, until: int) -> str:
    """The key of the last window with changes below `until`."""
    return max((window.key for window in ledger.windows(until - 1) if window.start_lsn < until), default=window_key(until))


def _truncates(raw: TablePointer, span: net.Span) -> tuple[int, int] | None:
    found = TableDataset(raw.path, raw.version).to_table(columns=[COMMIT_LSN], filter=_of_span(span) & (pads.field(OP) == "T"))
    at = found[COMMIT_LSN].to_pylist()
    return (min(at), max(at)) if at else None


def _of_span(span: net.Span) -> pads.Expression:
    window, lsn = pads.field(WINDOW), pads.field(COMMIT_LSN)
    return (window > span.first_window) & (window <= span.last_window) & (lsn >= span.since) & (lsn < span.until)


def _held_in_raw(raw: pa.Schema, newer: TableDataset, key: tuple[str, ...]) -> dict[str, str]:
    """The names that the key's columns have in raw: another one where raw has a column of that name with another type."""
    kinds = newer.delta_types
    held = {}
    for column in key:
        wanted = newer.schema.field(column).type
        names = [name for name in names_in_raw(column, kinds[column]) if name in raw.names and raw.field(name).type == wanted]
        if not names:
            raise LakeError(f"Raw has no column for {column!r} of the key, although it has the table's changes.")
        held[column] = names[0]
    return held
