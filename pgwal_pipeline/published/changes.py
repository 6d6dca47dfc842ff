"""What changed in a table between two publishes: net changes by key, or each change in its order. `finding` says where that is known."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from pgwal_pipeline.lake.records import TablePointer
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.own_columns import CHANGE, COMMIT_LSN, DELETED_LSN, FIRST_LSN, LAST_LSN, OP, ORDINAL

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa
    import pyarrow.dataset as pads
    from pyspark.sql import DataFrame, SparkSession

    from pgwal_pipeline.published import net
    from pgwal_pipeline.published.dataset import TableDataset


@dataclass(frozen=True)
class Changes:
    """The changes of one table from LSN `since` up to `until`, to be read by Spark, Polars or Arrow.

    Each row has the columns of `current`, `_pgwal_change` (`insert`, `update` or `delete`), and the LSNs of its first and its last commit
    in between, `_pgwal_first_lsn` and `_pgwal_last_lsn`. Of a row that was deleted only the key's columns are set. With `history` they are
    the rows of raw instead, as they are there, in their order.

    `complete`: the changes cannot be determined, for the `reason` given. The rows are the whole table then, each an `insert`.

    Of a table that keeps deleted rows, a row that was deleted is a `delete`, and one that came back an `insert`, as of any other.
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
    span: "net.Span | None" = field(default=None, repr=False)

    def spark(self, session: "SparkSession | None" = None) -> "DataFrame":
        """Return the changes as a DataFrame of `session`, or of the session that the PGWAL_SPARK_* settings describe."""
        from pgwal_pipeline.published import net, readers

        session = session or readers.own_session(self.settings)
        if self.raw is None or self.span is None:
            rows = readers.spark(session, self.newer.path, self.newer.version, text=False)
            whole = rows.where(net.living(self._newer.schema)).selectExpr(
                "*", f"'insert' AS {CHANGE}", f"{COMMIT_LSN} AS {FIRST_LSN}", f"{COMMIT_LSN} AS {LAST_LSN}"
            )
            return whole if self.complete else whole.limit(0)
        raw = readers.spark(session, self.raw.path, self.raw.version, text=False)
        if self.history:
            return raw.where(self.span.rows).orderBy(COMMIT_LSN, ORDINAL, OP)
        tables = {"raw": raw, "newer": readers.spark(session, self.newer.path, self.newer.version, text=False)}
        if self.older is not None:
            tables["older"] = readers.spark(session, self.older.path, self.older.version, text=False)
        return session.sql(self._query(net.SPARK), **tables)  # pyright: ignore[reportArgumentType] (the tables that the query names)

    def arrow(self) -> "pa.Table":
        """Return the changes as an Arrow table in memory."""
        import pyarrow as pa

        from pgwal_pipeline.published import net, readers
        from pgwal_pipeline.published.dataset import TableDataset
        from pgwal_pipeline.published.finding import rows_of_span

        if self.raw is None or self.span is None:
            rows = self._newer.to_table(filter=self._living) if self.complete else self._newer.schema.empty_table()
            rows = rows.append_column(CHANGE, pa.array(["insert"] * rows.num_rows, pa.string()))
            return rows.append_column(FIRST_LSN, rows[COMMIT_LSN]).append_column(LAST_LSN, rows[COMMIT_LSN])
        if self.history:
            rows = TableDataset(self.raw.path, self.raw.version).to_table(filter=rows_of_span(self.span))
            at = rows.select([COMMIT_LSN, ORDINAL, OP]).append_column("at", pa.array(range(rows.num_rows), pa.int64()))
            order = at.sort_by([(COMMIT_LSN, "ascending"), (ORDINAL, "ascending"), (OP, "ascending")])["at"]
            return rows.take(order)
        with readers.empty_duckdb() as connection:
            places = {"raw": self.raw, "newer": self.newer, **({} if self.older is None else {"older": self.older})}
            for name, at in places.items():
                connection.register(name, TableDataset(at.path, at.version))
            query = self._query(net.DUCKDB).format(**{name: name for name in places})
            found = connection.sql(query).to_arrow_table()
        own = [(CHANGE, pa.string()), (FIRST_LSN, pa.int64()), (LAST_LSN, pa.int64())]
        return found.cast(pa.schema([*self._newer.schema, *(pa.field(*column) for column in own)]))

    def polars(self) -> "pl.LazyFrame":
        """Return the changes as a LazyFrame."""
        import polars as pl

        from pgwal_pipeline.published import readers

        if self.complete:
            whole = readers.polars(self.newer.path, self.newer.version, text=False)
            lsn = pl.col(COMMIT_LSN)
            if DELETED_LSN in self._newer.schema.names:
                whole = whole.filter(pl.col(DELETED_LSN).is_null())
            return whole.with_columns(pl.lit("insert").alias(CHANGE), lsn.alias(FIRST_LSN), lsn.alias(LAST_LSN))
        frame = pl.from_arrow(self.arrow())
        assert isinstance(frame, pl.DataFrame)
        return frame.lazy()

    @cached_property
    def _newer(self) -> "TableDataset":
        from pgwal_pipeline.published.dataset import TableDataset

        return TableDataset(self.newer.path, self.newer.version)

    @property
    def _living(self) -> "pads.Expression | None":
        """The condition of the rows that the source has, None if they all are such."""
        import pyarrow.dataset as pads

        return pads.field(DELETED_LSN).is_null() if DELETED_LSN in self._newer.schema.names else None

    def _query(self, dialect: "net.Dialect") -> str:
        from pgwal_pipeline.published import net
        from pgwal_pipeline.published.dataset import TableDataset
        from pgwal_pipeline.published.finding import held_in_raw

        assert self.raw is not None
        assert self.span is not None
        held = held_in_raw(TableDataset(self.raw.path, self.raw.version).schema, self._newer, self.key)
        older = None if self.older is None else TableDataset(self.older.path, self.older.version).schema
        return net.net_changes(dialect, self._newer.schema, self.key, held, self.span, older)
