"""All assets: their keys, their groups, and what the UI shows of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import dagster as dg

from pgwal_pipeline.known_tables import KnownTable
from pgwal_pipeline.messages.printable import code_span, distinct, plain_markdown, printable
from pgwal_pipeline.values.catalog_name import CatalogPattern
from pgwal_pipeline.values.own_columns import (
    COMMIT_LSN,
    COMMITTED_AT,
    DELETED_AT,
    DELETED_LSN,
    END_OP,
    OLD_KEY,
    OP,
    OPEN,
    ORDINAL,
    TEXT,
    UNCHANGED,
    UNSEEN,
    VALID_FROM,
    VALID_FROM_LSN,
    VALID_TO,
    VALID_TO_LSN,
    WINDOW,
    XID,
)
from pgwal_pipeline.values.relation import TableName
from pgwal_pipeline.values.table_options import TableOptions

if TYPE_CHECKING:
    from pgwal_pipeline.lake.layout import Lake

Layer = Literal["source", "raw", "snapshot", "current", "history"]

SOURCE: Layer = "source"
RAW: Layer = "raw"
SNAPSHOT: Layer = "snapshot"
CURRENT: Layer = "current"
HISTORY: Layer = "history"
LAYERS = (SOURCE, RAW, SNAPSHOT, CURRENT)
"""The layers that every table has, each an asset. Some have HISTORY too."""

TABLE, LAYER = "pgwal/table", "pgwal/layer"
"""The metadata of each table's assets that say which table (schema.table) and layer it is, whatever its key."""

REPORT = "pgwal/report"
"""The metadata entry of the slot's observations that holds a step's report as JSON."""

LINEAGE = "dagster/column_lineage"
"""The metadata entry of Dagster's that says where columns come from."""

HEALTH_CHECK = "health"
FOLLOWED_CHECK = "followed"
EQUALS_SOURCE_CHECK = "equals_source"
SCHEMA_CHECK = "schema"

_RAW_COLUMNS = (
    (OP, "string", "I insert, U update, D delete, T truncate, K the old key of a key change"),
    (COMMIT_LSN, "long", "where the transaction's commit record starts"),
    (ORDINAL, "long", "the change's number in its transaction, from 0"),
    (XID, "long", "the transaction's id"),
    (COMMITTED_AT, "timestamp", "when the transaction was committed"),
    (WINDOW, "string", "the window's key: its end LSN as 16 hex digits"),
    (UNCHANGED, "array<string>", "columns whose large value did not change and was not sent"),
    (TEXT, "map<string,string>", "values that their columns cannot hold, as Postgres writes them"),
)
_CURRENT_COLUMNS = (
    (COMMIT_LSN, "long", "where the commit record of the row's newest change starts"),
    (TEXT, "map<string,string>", "values that their columns cannot hold, as Postgres writes them"),
)
_HISTORY_COLUMNS = (
    (VALID_FROM_LSN, "long", "the commit from which on the row was so"),
    (VALID_FROM, "timestamp", "when that was"),
    (VALID_TO_LSN, "long", "the commit from which on it was so no longer; null for the newest version"),
    (VALID_TO, "timestamp", "when that was"),
    (OP, "string", "what began the version: I insert, U update, S found by reading the table"),
    (END_OP, "string", "what ended it: U update, D delete, K change of its key, T truncate, S found by reading the table"),
    (OLD_KEY, "string", "the key that the row had before the change of its key that began the version, as JSON"),
    (UNSEEN, "boolean", "whether its beginning or end was found by reading the table again, not in the stream"),
    (TEXT, "map<string,string>", "values that their columns cannot hold, as Postgres writes them"),
    (OPEN, "boolean", "whether the version has not ended"),
)
_DELETED_COLUMNS = (
    (DELETED_AT, "timestamp", "when the row was deleted; null for rows that the source has"),
    (DELETED_LSN, "long", "where the commit record of its deletion starts"),
)


@dataclass(frozen=True)
class AssetNames:
    """The asset keys of one source: `<prefix…>/<layer>/<schema>/<table>`.

    Dagster prints keys on terminals, so characters that would act on one are written out.
    """

    slot_name: str
    prefix: tuple[str, ...] = ()

    @property
    def slot(self) -> dg.AssetKey:
        """The key of the replication slot, an external asset. Every step reports on it."""
        return dg.AssetKey([*self.prefix, "slot", self.slot_name])

    def source(self, table: TableName) -> dg.AssetKey:
        """Return the key of the table in Postgres, an external asset."""
        return self.of(SOURCE, table)

    def raw(self, table: TableName) -> dg.AssetKey:
        """Return the key of the raw table: every change, window by window."""
        return self.of(RAW, table)

    def snapshot(self, table: TableName) -> dg.AssetKey:
        """Return the key of the snapshot table: the rows from before the table's changes were followed."""
        return self.of(SNAPSHOT, table)

    def current(self, table: TableName) -> dg.AssetKey:
        """Return the key of the current table: the table as of the newest publish."""
        return self.of(CURRENT, table)

    def history(self, table: TableName) -> dg.AssetKey:
        """Return the key of the history: each version of each row, of a table with that option."""
        return self.of(HISTORY, table)

    def of(self, layer: Layer, table: TableName) -> dg.AssetKey:
        """Return the key of the table's asset in a layer."""
        return dg.AssetKey([*self.prefix, "postgres" if layer == SOURCE else layer, distinct(table.schema), distinct(table.name)])


@dataclass(frozen=True)
class AssetSpecs:
    """Builds the specs of one source's assets from the known tables."""

    names: AssetNames
    lake: "Lake"
    owners: Sequence[str] = ()
    slot_fails_after: timedelta = timedelta(minutes=30)
    catalog: CatalogPattern | None = None
    options: TableOptions = field(default_factory=TableOptions)

    def slot(self, publication: str) -> dg.AssetSpec:
        """Return the slot's spec. It is kept fresh while commits are read and published in time, also if there are none.

        Its policy stands for all current tables: Dagster measures freshness from the last materialization, and a table that does not change
        has none.
        """
        return dg.AssetSpec(
            self.names.slot,
            group_name=SOURCE,
            kinds={"postgres"},
            owners=self.owners,
            description=(
                f"The logical replication slot that feeds every raw table, on publication {code_span(publication)}. "
                "Its plots show the lag, and what each step read and wrote and how long it took. It is stale when commits are not read and "
                "published in time; on a quiet source it stays fresh."
            ),
            metadata={"pgwal/publication": publication},
            freshness_policy=dg.FreshnessPolicy.time_window(fail_window=self.slot_fails_after, warn_window=self.slot_fails_after / 2),
        )

    def of(self, layer: Layer, known: KnownTable) -> dg.AssetSpec:
        """Return the spec of the table's asset in a layer."""
        specs = {SOURCE: self.source, RAW: self.raw, SNAPSHOT: self.snapshot, CURRENT: self.current, HISTORY: self.history}
        return specs[layer](known)

    def layers_of(self, known: KnownTable) -> tuple[Layer, ...]:
        """Return the layers that the table has."""
        return (*LAYERS, HISTORY) if self.options.of(known.table).history else LAYERS

    def source(self, known: KnownTable) -> dg.AssetSpec:
        """Return the spec of the table in Postgres, which is observed and never written to."""
        return dg.AssetSpec(
            self.names.source(known.table),
            group_name=SOURCE,
            kinds={"postgres"},
            owners=self.owners,
            description=_described(known, f"Table {code_span(str(known.table))} in Postgres."),
            metadata={
                **_named(SOURCE, known),
                "dagster/table_name": f"{known.table.schema}.{known.table.name}",
                "dagster/column_schema": _source_schema(known),
                "pgwal/key": ", ".join(known.key) or "none",
            },
        )

    def raw(self, known: KnownTable) -> dg.AssetSpec:
        """Return the spec of the raw table."""
        return self._of_lake(
            RAW,
            known,
            f"Every committed change of {code_span(str(known.table))}, exactly once, in an append-only Delta table. "
            "A partition is a window of the write-ahead log; its key is the end LSN.",
            self.lake.raw(known.location),
            _lake_schema(known, _RAW_COLUMNS),
            [dg.AssetDep(self.names.source(known.table))],
        )

    def snapshot(self, known: KnownTable) -> dg.AssetSpec:
        """Return the spec of the snapshot table."""
        return self._of_lake(
            SNAPSHOT,
            known,
            f"The rows that {code_span(str(known.table))} had when the pipeline began to follow its changes, read in chunks while the "
            "stream goes on. Materialize it to read the table again.",
            self.lake.snapshot(known.location),
            _lake_schema(known, _CURRENT_COLUMNS[1:]),
            [dg.AssetDep(self.names.source(known.table))],
        )

    def current(self, known: KnownTable) -> dg.AssetSpec:
        """Return the spec of the current table."""
        spec = self._of_lake(
            CURRENT,
            known,
            f"{code_span(str(known.table))} as it was in Postgres at the newest publish. "
            "All current tables are at the same LSN: joining them shows one state of the source.",
            self.lake.current(known.location),
            current_schema(known, deleted=self.options.of(known.table).keeps_deleted),
            self._published_from(known),
        )
        return spec if self.catalog is None else spec.merge_attributes(metadata={"dagster/table_name": str(self.catalog.of(known.table))})

    def history(self, known: KnownTable) -> dg.AssetSpec:
        """Return the spec of the history, which is kept of tables with that option."""
        return self._of_lake(
            HISTORY,
            known,
            f"Every version of every row of {code_span(str(known.table))}, with the commits between which it was valid. "
            "It is at the LSN of the current tables.",
            self.lake.history(known.location),
            _lake_schema(known, _HISTORY_COLUMNS),
            self._published_from(known),
        )

    def _published_from(self, known: KnownTable) -> list[dg.AssetDep]:
        """What a publish makes its tables of.

        No partitions: the lag sensor decides when a publish is due. With partitions Dagster would show a table as out of sync for every
        window without a change of it.
        """
        raw = dg.AssetDep(self.names.raw(known.table), partition_mapping=dg.SpecificPartitionsPartitionMapping([]))
        return [raw, dg.AssetDep(self.names.snapshot(known.table))]

    def _of_lake(
        self, layer: Layer, known: KnownTable, description: str, path: str, schema: dg.TableSchema, deps: Sequence[dg.AssetDep]
    ) -> dg.AssetSpec:
        """The spec of a Delta table at `path`. Each of the source's columns comes from the same column of all `deps`."""
        upstream = [dep.asset_key for dep in deps]
        return dg.AssetSpec(
            self.names.of(layer, known.table),
            deps=deps,
            group_name=layer,
            kinds={"postgres" if layer in (RAW, SNAPSHOT) else "pyspark", "deltalake"},
            owners=self.owners,
            description=_described(known, description),
            metadata=_named(layer, known) | self._stored(known, path, schema, dict.fromkeys(_names(known), upstream)),
        )

    def _stored(self, known: KnownTable, path: str, schema: dg.TableSchema, lineage: Mapping[str, Sequence[dg.AssetKey]]) -> dict[str, Any]:
        options = self.options.of(known.table).to_json()
        return _stored(path, schema, lineage) | ({"pgwal/options": options} if options else {})


def current_schema(known: KnownTable, *, deleted: bool) -> dg.TableSchema:
    """Return the columns of a current table, as Dagster shows them; `deleted`: whether it keeps deleted rows."""
    return _lake_schema(known, (*_CURRENT_COLUMNS, *(_DELETED_COLUMNS if deleted else ())))


def _named(layer: Layer, known: KnownTable) -> dict[str, Any]:
    return {TABLE: str(known.table), LAYER: layer}


def _described(known: KnownTable, description: str) -> str:
    """Return an asset's description: the table's COMMENT, if it has one, and what the asset is."""
    return description if not known.comment else f"{plain_markdown(known.comment)}\n\n{description}"


def _names(known: KnownTable) -> list[str]:
    return [column.name for column in known.columns]


def _constraints(known: KnownTable, name: str, nullable: bool) -> dg.TableColumnConstraints:
    return dg.TableColumnConstraints(
        nullable=nullable,
        unique=known.key == (name,),
        other=["key"] if name in known.key else [],
    )


def _source_schema(known: KnownTable) -> dg.TableSchema:
    return dg.TableSchema(
        columns=[
            dg.TableColumn(
                column.name,
                column.type,
                description=None if column.comment is None else printable(column.comment),
                constraints=_constraints(known, column.name, column.nullable),
            )
            for column in known.columns
        ]
    )


def _lake_schema(known: KnownTable, ours: Iterable[tuple[str, str, str]]) -> dg.TableSchema:
    columns = [
        dg.TableColumn(
            column.name,
            column.lake_type,
            description=f"Postgres: {column.type}" if column.comment is None else f"{printable(column.comment)} (Postgres: {column.type})",
            constraints=dg.TableColumnConstraints(other=["key"] if column.name in known.key else []),
        )
        for column in known.columns
    ]
    return dg.TableSchema(columns=[*columns, *(dg.TableColumn(name, kind, description=text) for name, kind, text in ours)])


def _stored(path: str, schema: dg.TableSchema, lineage: Mapping[str, Sequence[dg.AssetKey]]) -> dict[str, Any]:
    """Return the metadata of a table in the lake: its path, its columns, and the upstream columns of the same name as their lineage."""
    return {
        "dagster/uri": path,
        "dagster/storage_kind": "deltalake",
        "dagster/column_schema": schema,
        LINEAGE: dg.TableColumnLineage(
            {name: [dg.TableColumnDep(asset_key=key, column_name=name) for key in upstream] for name, upstream in lineage.items()}
        ),
    }
