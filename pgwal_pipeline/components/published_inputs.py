"""Load the inputs of assets from the published lake: an input that is a `current` asset is its table, as the run's state has it."""

from typing import TYPE_CHECKING, Any, NoReturn

import dagster as dg
from pydantic import Field, PrivateAttr

from pgwal_pipeline.asset_specs import CURRENT, LAYER, TABLE
from pgwal_pipeline.components.published import PublishedLake
from pgwal_pipeline.messages.errors import PgwalError
from pgwal_pipeline.messages.printable import distinct
from pgwal_pipeline.values.relation import TableName

if TYPE_CHECKING:
    from pgwal_pipeline.published.state import PublishedState

_TAKEN = "pyspark.sql.DataFrame, polars.LazyFrame, polars.DataFrame, pyarrow.Table, duckdb.DuckDBPyRelation or pandas.DataFrame"


class PublishedTableIOManager(dg.ConfigurableIOManager):
    """Loads an input that is keyed to a `current` asset, as its annotation wants it. All inputs of a run stand at one LSN.

    Takes the annotations pyspark.sql.DataFrame, polars.LazyFrame, polars.DataFrame, pyarrow.Table, duckdb.DuckDBPyRelation and
    pandas.DataFrame. It stores no outputs.
    """

    lake: str | None = Field(default=None, description="Folder or s3://bucket/prefix of the lake; PGWAL_LAKE where it is left out.")
    _connections: dict[str, Any] = PrivateAttr(default_factory=dict)

    def load_input(self, context: dg.InputContext) -> Any:
        """Return the table of the run's state. Raises PgwalError for a key that is no current asset's, and for another annotation."""
        state = PublishedLake(lake=self.lake).state(context)
        table = _table_of(context, state)
        kind = context.dagster_type.typing_type
        package, name = getattr(kind, "__module__", "").split(".")[0], getattr(kind, "__name__", "")
        if (package, name) == ("pyspark", "DataFrame"):
            return state.spark(str(table))
        if package == "polars" and name in ("LazyFrame", "DataFrame"):
            frame = state.polars(str(table))
            return frame if name == "LazyFrame" else frame.collect()
        if (package, name) == ("pyarrow", "Table"):
            return state.arrow(str(table))
        if (package, name) == ("pandas", "DataFrame"):
            return state.pandas(str(table))
        if package in ("duckdb", "_duckdb") and name == "DuckDBPyRelation":
            return self._relation(state, table)
        raise PgwalError(f"Input {context.name} is annotated {name or repr(kind)}, and a published table is loaded as {_TAKEN}.")

    def handle_output(self, context: dg.OutputContext, obj: Any) -> NoReturn:  # noqa: ARG002 - Dagster's arguments
        """Refuse. Raises PgwalError: the published lake is only read."""
        raise PgwalError("The published lake is only read: give the asset an IO manager of its own for what it returns, or return None.")

    def _relation(self, state: "PublishedState", table: TableName) -> Any:
        """The table in the state's one connection, in which relations can be joined."""
        from pgwal_pipeline.published import readers

        connection = self._connections.get(state.lsn)
        if connection is None:
            self._connections.clear()
            connection = self._connections[state.lsn] = readers.empty_duckdb()
        known = {(row[0], row[1]) for row in connection.execute("SELECT schema_name, view_name FROM duckdb_views()").fetchall()}
        if (table.schema, table.name) not in known:
            readers.show(connection, table, state.dataset(str(table)), len(known))
        return connection.sql(f"FROM {readers.view_of(table)}")


def _table_of(context: dg.InputContext, state: "PublishedState") -> TableName:
    """The published table of a current asset: what its metadata says, or else its key. Raises PgwalError if it is another asset's."""
    key, said = context.asset_key, _metadata_of(context)
    if TABLE in said and said.get(LAYER, CURRENT) == CURRENT:
        try:
            return TableName.parse(str(said[TABLE]))
        except ValueError as error:
            raise PgwalError(f"The metadata {TABLE} of asset {key.to_user_string()} is no table's name: {error}.") from None
    layer, *of_table = key.path[-3:] if len(key.path) >= 3 else ("", "", "")
    if layer != CURRENT or said.get(LAYER, CURRENT) != CURRENT:
        raise PgwalError(
            f"Asset {key.to_user_string()} is no current table: its key does not end with current/<schema>/<table>, and its metadata "
            f"{TABLE} and {LAYER} do not say so either."
        )
    for table in state.publish.tables:
        if [distinct(table.schema), distinct(table.name)] == of_table:
            return table
    return TableName(*of_table)


def _metadata_of(context: dg.InputContext) -> dict[str, Any]:
    """The metadata of the asset that is loaded, and over it that of the input."""
    above = None if context.upstream_output is None else context.upstream_output.definition_metadata
    found = {**(above or {}), **(context.definition_metadata or {})}
    return {name: value.value if isinstance(value, dg.MetadataValue) else value for name, value in found.items()}
