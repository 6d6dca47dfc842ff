"""One publish of a lake, to be read: all its tables stand at one LSN, whatever is published meanwhile."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from pgwal_pipeline.lake.records import Publish, TablePointer
from pgwal_pipeline.messages.errors import LakeError, PgwalError
from pgwal_pipeline.settings import Settings
from pgwal_pipeline.values.lsn import format_lsn, parse_lsn
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    import duckdb
    import pandas as pd
    import polars as pl
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from pgwal_pipeline.lake.ledger import Ledger
    from pgwal_pipeline.published.changes import Changes
    from pgwal_pipeline.published.dataset import TableDataset
    from pgwal_pipeline.published.past import TableAsOf


class PublishedTable(NamedTuple):
    """Where a published table is, and the Delta version of it that belongs to the publish."""

    path: str
    version: int


def open_state(settings: Settings, when: str = "latest") -> "PublishedState":
    """Return the newest publish at or before `when`, as `pgwal as-of` takes it, to be read.

    Raises SettingError if `when` is neither an LSN nor a time, LakeError if nothing was published by then.
    """
    from pgwal_pipeline.lake.as_of import publish_as_of
    from pgwal_pipeline.lake.layout import Lake
    from pgwal_pipeline.lake.ledger import Ledger

    ledger = Ledger(Lake(settings.lake))
    return PublishedState(settings, ledger, publish_as_of(ledger, when))


def _ignore(*_: object) -> None:
    """Do nothing with a reading."""


def _not_known() -> int | None:
    """Return that there is no earlier reading."""
    return None


@dataclass(frozen=True)
class PublishedState:
    """All tables of one publish. They hold exactly the transactions with a commit LSN below `lsn`.

    Tables are named as `pgwal status` does: `shop.orders`, each part quoted where Postgres would. `on_read` is called with each table that
    is read, and its version. `last_read` returns the LSN that an earlier run of the same work read, None if there was none.
    """

    settings: Settings = field(repr=False)
    ledger: "Ledger" = field(repr=False)
    publish: Publish = field(repr=False)
    on_read: Callable[[str, int], None] = field(default=_ignore, repr=False)
    last_read: Callable[[], int | None] = field(default=_not_known, repr=False)

    @property
    def lsn(self) -> str:
        """The LSN of the publish, as Postgres writes it."""
        return format_lsn(self.publish.lsn)

    @property
    def published_at(self) -> datetime:
        """When it was published, in UTC."""
        return self.publish.published_at

    @cached_property
    def tables(self) -> dict[str, PublishedTable]:
        """The published tables by name."""
        return {str(name): PublishedTable(at.path, at.version) for name, at in sorted(self.publish.tables.items())}

    def spark(self, name: str, session: "SparkSession | None" = None, *, text: bool = False) -> "DataFrame":
        """Return a table as a DataFrame of `session`, or of the session that the PGWAL_SPARK_* settings describe.

        With `text` there is a column `_pgwal_text_<column>` for each column that cannot hold every value of Postgres: the value's text
        where the column is null for that. Raises PgwalError if the table is not published.
        """
        from pgwal_pipeline.published import readers

        at = self._read(name)
        return readers.spark(session or readers.own_session(self.settings), at.path, at.version, text)

    def polars(self, name: str, *, text: bool = False) -> "pl.LazyFrame":
        """Return a table as a LazyFrame. Only the columns and files that a query needs are read. Otherwise as `spark`."""
        from pgwal_pipeline.published import readers

        at = self._read(name)
        return readers.polars(at.path, at.version, text)

    def dataset(self, name: str) -> "TableDataset":
        """Return a table as an Arrow dataset, for readers that take one. Raises PgwalError if the table is not published."""
        from pgwal_pipeline.published.dataset import TableDataset

        return TableDataset(*self._read(name))

    def arrow(self, name: str, columns: Sequence[str] | None = None, *, text: bool = False) -> "pa.Table":
        """Return a table, or those columns of it, as an Arrow table in memory. Otherwise as `spark`."""
        from pgwal_pipeline.published import readers

        return readers.arrow(self.dataset(name), columns, text)

    def pandas(self, name: str, columns: Sequence[str] | None = None, *, text: bool = False) -> "pd.DataFrame":
        """Return a table, or those columns of it, as a DataFrame of pandas in memory. Otherwise as `spark`."""
        return self.arrow(name, columns, text=text).to_pandas(timestamp_as_object=True)

    def duckdb(self, names: Collection[str] | None = None) -> "duckdb.DuckDBPyConnection":
        """Return a connection to an empty database in memory, with each table (or those of `names`) as a view `"schema"."table"`.

        Raises PgwalError if one of `names` is not published.
        """
        from pgwal_pipeline.published import readers

        wanted = {name: self._read(name) for name in (self.tables if names is None else names)}
        return readers.duckdb({TableName.parse(name): (at.path, at.version) for name, at in wanted.items()})

    def as_of(self, name: str, when: "str | datetime") -> "TableAsOf":
        """Return a table as it was at an LSN or a time, however long ago, if its history is kept since then (the option `history`).

        At an LSN that includes a transaction whose commit is at it; a time is compared with commit times. For another table it is the
        newest publish at or before `when` that the lake still has. Raises SettingError if `when` is neither an LSN nor a time, LakeError
        if the lake does not know the table then.
        """
        from pgwal_pipeline.published.past import table_as_of

        return table_as_of(self, name, when)

    def changes(self, name: str, since: "str | PublishedState | None" = None, history: bool = False) -> "Changes":
        """Return what changed in a table between two publishes: net changes by key, or with `history` each change in its order.

        `since` is an LSN or a state; None is the LSN that the asset of the context read in its last successful materialization. Where the
        changes cannot be determined, the result is `complete`: the whole table. Raises PgwalError if the table is not published, or if
        `since` is no LSN or later than this state.
        """
        from pgwal_pipeline.published.finding import find_changes

        at = self._read(name)
        return find_changes(
            self.settings, self.ledger, self.publish, TableName.parse(name), TablePointer(*at), self._lsn_of(since), history
        )

    def _lsn_of(self, since: "str | PublishedState | None") -> int | None:
        if since is None:
            return self.last_read()
        if isinstance(since, PublishedState):
            return since.publish.lsn
        try:
            return parse_lsn(since)
        except ValueError:
            raise PgwalError(f"{since!r} is neither an LSN such as 16/B374D848 nor a state.") from None

    def _read(self, name: str) -> PublishedTable:
        """The table of that name, after `on_read` was called. Raises PgwalError if it is not published."""
        try:
            table = TableName.parse(name)
        except ValueError as error:
            raise PgwalError(f"{error}.") from None
        at = self.publish.tables.get(table)
        if at is None:
            raise self._unpublished(table)
        self.on_read(str(table), at.version)
        return PublishedTable(at.path, at.version)

    def _unpublished(self, table: TableName) -> LakeError:
        """Why a table is not in the publish, and since when."""
        missing = f"Table {table} is not in the publish at {self.lsn}"
        publishes = [found for found in self.ledger.publishes() if found.lsn < self.publish.lsn]
        last = max((found.lsn for found in publishes if table in found.tables), default=None)
        state = self.ledger.tables().get(table)
        if last is not None:
            without = next(found for found in [*publishes, self.publish] if found.lsn > last)
            since = f", nor in any since {format_lsn(without.lsn)} of {without.published_at.isoformat(timespec='seconds')}"
        else:
            since = "" if state is None or state.at is None else f"; this stands since {state.at.isoformat(timespec='seconds')}"
        if state is None:
            known = ", ".join(list(self.tables)[:5]) or "none"
            return LakeError(f"{missing}: the lake knows no such table. Published are {known}{', …' if len(self.tables) > 5 else ''}.")
        if state.published is not None and state.state == "ready" and state.held is None:
            return LakeError(f"{missing}{since}: it was published later; read a newer publish.")
        why = (
            state.held
            or state.reason
            or {
                "pending": "it has not been read yet",
                "snapshotting": "it is being read",
                "ready": "it has been read, and waits for the next publish",
                "gone": "it is in the publication no longer",
                "renamed": "it has another name now",
            }.get(state.state, "it is left out")
        )
        return LakeError(f"{missing}{since}: it is {state.state} ({why.rstrip('.')}). `pgwal status` says more.")
