"""Read tables as they were before the oldest publish: from their histories, which have every version of every row."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pgwal_pipeline.lake.as_of import parse_when, with_offset
from pgwal_pipeline.messages.errors import LakeError, PgwalError, SettingError
from pgwal_pipeline.published.state import PublishedState, PublishedTable, open_state
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn
from pgwal_pipeline.values.own_columns import COMMIT_LSN, RESERVED, TEXT, VALID_FROM, VALID_FROM_LSN, VALID_TO, VALID_TO_LSN
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    from duckdb import DuckDBPyConnection
    from pyspark.sql import DataFrame, SparkSession

    from pgwal_pipeline.lake.records import KeptHistory
    from pgwal_pipeline.published.dataset import TableDataset


@dataclass(frozen=True)
class TableAsOf:
    """The rows of one table as they were at an LSN, with the columns of `current`, to be read by Spark, Polars, Arrow or pandas.

    `_pgwal_commit_lsn` is where a row's version began. `position` is the LSN as an integer.
    """

    table: str
    position: int
    settings: Settings = field(repr=False)
    at: PublishedTable = field(repr=False)
    is_history: bool = True

    @property
    def lsn(self) -> str:
        """The LSN, as Postgres writes it: a transaction whose commit is at it counts."""
        return format_lsn(self.position)

    def spark(self, session: "SparkSession | None" = None) -> "DataFrame":
        """Return the rows as a DataFrame of `session`, or of the session that the PGWAL_SPARK_* settings describe."""
        from pgwal_pipeline.lake.columns import quote
        from pgwal_pipeline.published import readers

        rows = readers.spark(session or readers.own_session(self.settings), self.at.path, self.at.version, text=False)
        if not self.is_history:
            return rows
        return rows.where(_valid_in_sql(self.position)).selectExpr(
            *(f"{VALID_FROM_LSN} AS {COMMIT_LSN}" if name == VALID_FROM_LSN else quote(name) for name in past_columns(self._dataset))
        )

    def polars(self) -> "pl.LazyFrame":
        """Return the rows as a LazyFrame."""
        import polars as pl

        from pgwal_pipeline.published import readers

        rows = readers.polars(self.at.path, self.at.version, text=False)
        if not self.is_history:
            return rows
        begun, ended = pl.col(VALID_FROM_LSN), pl.col(VALID_TO_LSN)
        valid = rows.filter((begun <= self.position) & (ended.is_null() | (ended > self.position)))
        return valid.select(past_columns(self._dataset)).rename({VALID_FROM_LSN: COMMIT_LSN})

    def arrow(self, columns: Sequence[str] | None = None) -> "pa.Table":
        """Return the rows, or those columns of them, as an Arrow table in memory."""
        from pgwal_pipeline.published import readers

        if not self.is_history:
            return readers.arrow(self._dataset, columns, text=False)
        there = past_columns(self._dataset)
        wanted = [VALID_FROM_LSN if name == COMMIT_LSN else name for name in (columns or there)]
        unknown = [name for name in wanted if name not in there]
        if unknown:
            raise LakeError(f"The table has no column {unknown[0]!r}; it has {', '.join(there)}.")
        rows = self._dataset.to_table(columns=wanted, filter=valid_at(self.position))
        return rows.rename_columns([COMMIT_LSN if name == VALID_FROM_LSN else name for name in rows.column_names])

    def pandas(self, columns: Sequence[str] | None = None) -> "pd.DataFrame":
        """Return the rows, or those columns of them, as a DataFrame of pandas in memory."""
        return self.arrow(columns).to_pandas(timestamp_as_object=True)

    @cached_property
    def _dataset(self) -> "TableDataset":
        from pgwal_pipeline.published.dataset import TableDataset

        return TableDataset(*self.at)


def past_columns(history: "TableDataset") -> list[str]:
    """Return the columns of a history that make the rows of `current`: the source's, and where a version began for the commit LSN."""
    return [name for name in history.schema.names if not name.startswith(RESERVED) or name in (VALID_FROM_LSN, TEXT)]


def valid_at(position: int) -> Any:
    """Return the condition of a history's rows that were valid at a position, as an expression of Arrow."""
    import pyarrow.dataset as pads

    ended = pads.field(VALID_TO_LSN)
    return (pads.field(VALID_FROM_LSN) <= position) & (ended.is_null() | (ended > position))


def _valid_in_sql(position: int) -> str:
    """The same in SQL."""
    return f"{VALID_FROM_LSN} <= {position} AND ({VALID_TO_LSN} IS NULL OR {VALID_TO_LSN} > {position})"


def table_as_of(state: PublishedState, name: str, when: str | datetime) -> TableAsOf:
    """Return a table as it was; see `PublishedState.as_of`."""
    try:
        table = TableName.parse(name)
    except ValueError as error:
        raise PgwalError(f"{error}.") from None
    at = _history_of(state, table)
    moment = _parsed(when)
    if at is None:
        found = open_state(state.settings, when if isinstance(when, str) else when.isoformat())
        if str(table) not in found.tables:
            raise LakeError(f"Table {table} is not in the publish at {found.lsn}, and no history of it is kept.")
        return TableAsOf(str(table), found.publish.lsn, state.settings, found.tables[str(table)], is_history=False)
    known = state.ledger.tables()[table].history
    assert known is not None
    position = moment if isinstance(moment, int) else _position(at, table, moment)
    _require_kept(state, table, known, position)
    state.on_read(str(table), at.version)
    return TableAsOf(str(table), position, state.settings, at)


def _history_of(state: PublishedState, table: TableName) -> PublishedTable | None:
    """The history of a table as this publish has it; where it is not kept any more, as it is now; None if there never was one."""
    found = state.publish.histories.get(table)
    if found is not None:
        return PublishedTable(found.path, found.version)
    known = state.ledger.tables().get(table)
    if known is None or known.history is None or known.history.stopped is None:
        return None
    from pgwal_pipeline.lake.standing import version

    path = state.ledger.lake.history(known.location)
    return PublishedTable(path, version(path))


def _require_kept(state: PublishedState, table: TableName, known: "KeptHistory", position: int) -> None:
    """Raise LakeError if the history does not say what the table was at a position."""
    at = format_lsn(position)
    if position < known.since:
        raise LakeError(f"The history of {table} begins at {format_lsn(known.since)}, after {at}.")
    last = state.publish.lsn if known.stopped is None else known.stopped
    if position > last:
        raise LakeError(f"The history of {table} goes up to {format_lsn(last)}, and not to {at}; read a newer publish.")
    for start, end in known.gaps:
        if start <= position < end:
            raise LakeError(f"The history of {table} was not kept from {format_lsn(start)} to {format_lsn(end)}, so not at {at}.")


def _parsed(when: str | datetime) -> int | datetime:
    """An LSN as an integer, or a time. Raises SettingError."""
    at = with_offset(when) if isinstance(when, datetime) else parse_when(when)
    if at is None:
        raise SettingError(f"{when!r} is no LSN such as 16/B374D848 and no time such as 2026-01-31T12:00:00Z.")
    return at


def _position(at: PublishedTable, table: TableName, moment: datetime) -> int:
    """The last position in a history at or before a time: of a commit that began or ended a version. Raises LakeError if it has none."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.dataset as pads

    from pgwal_pipeline.published.dataset import TableDataset

    dataset, found = TableDataset(*at), []
    for time, lsn in ((VALID_FROM, VALID_FROM_LSN), (VALID_TO, VALID_TO_LSN)):
        until = pads.field(time) <= pa.scalar(moment, dataset.schema.field(time).type)
        found.append(pc.call_function("max", [dataset.to_table(columns=[lsn], filter=until)[lsn]]).as_py())
    newest = max((lsn for lsn in found if lsn is not None), default=None)
    if newest is None:
        raise LakeError(f"The history of {table} begins after {moment.isoformat()}.")
    return newest


@dataclass(frozen=True)
class PastState:
    """All tables whose history is kept, as they were at an LSN before the oldest publish, for `query`."""

    position: int
    tables: dict[str, PublishedTable]

    @property
    def lsn(self) -> str:
        """The LSN, as Postgres writes it."""
        return format_lsn(self.position)

    def show(self, connection: "DuckDBPyConnection", name: TableName, dataset: Any, number: int) -> None:
        """Make a history a view of the connection, with the rows that were valid then."""
        from pgwal_pipeline.published import quoting, readers

        columns = ", ".join(
            f"{VALID_FROM_LSN} AS {COMMIT_LSN}" if column == VALID_FROM_LSN else quoting.name(column) for column in past_columns(dataset)
        )
        readers.show(connection, name, dataset, number, columns, _valid_in_sql(self.position))


def state_as_of(settings: Settings, when: str) -> "PublishedState | PastState":
    """Return the newest publish at or before `when`; if there is none, the tables whose histories go back as far.

    Raises SettingError if `when` is neither an LSN nor a time, LakeError if the lake has nothing from then.
    """
    newest = open_state(settings)
    try:
        return open_state(settings, when)
    except LakeError as error:
        found, positions = {}, []
        for table in newest.publish.histories:
            try:
                one = table_as_of(newest, str(table), when)
            except LakeError:
                continue
            found[str(table)] = one.at
            positions.append(one.position)
        if not found:
            raise error from None
        return PastState(max(positions), found)
